"""Drills on a copy of the cluster: real replicas of its state on this machine, which nobody else reaches."""
