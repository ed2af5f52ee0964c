"""cluster/agent/processes."""
