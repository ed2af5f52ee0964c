"""cluster/schemas."""
