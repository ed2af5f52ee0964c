"""Failover drills of the running cluster: preconditions, faults, measurements, checks and reports."""
