"""What a transfer is asked to do, and what is kept of it: options, failures, manifest, status table, receipts."""
