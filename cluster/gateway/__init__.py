"""Gateway of a login node: forwards requests of its local accounts to the replicas."""
