"""cluster/agent/files."""
