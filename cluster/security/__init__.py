"""cluster/security."""
