"""Processes of jobs: accounts, starting, waiting, ending."""
