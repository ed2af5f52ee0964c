"""cluster/agent/home."""
