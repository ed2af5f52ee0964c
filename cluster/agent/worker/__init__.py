"""cluster/agent/worker."""
