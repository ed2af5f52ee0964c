"""cluster/system."""
