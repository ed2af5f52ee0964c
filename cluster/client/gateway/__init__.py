"""A login node's gateway: a service that speaks to the replicas for the accounts of the people on its machine."""
