"""One replica: storage, applied log, proposals, membership, and what a leader does by itself."""
