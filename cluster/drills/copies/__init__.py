"""Drills on a copy of the cluster: real replicas with its state on this machine, isolated from the cluster."""
