"""Replicated state machine. Pure: no clock, disk, network, randomness, threads or logging."""
