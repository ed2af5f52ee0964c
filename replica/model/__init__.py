"""What there is: jobs, buffers, pools, nodes, accounts, configuration, transfers, one noun a module."""
