"""cluster/config."""
