"""What the cluster asks of the machine it runs on: clock, addresses, processes, users, listeners."""
