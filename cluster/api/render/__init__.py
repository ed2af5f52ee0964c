"""cluster/api/render."""
