"""cluster/agent/scripts."""
