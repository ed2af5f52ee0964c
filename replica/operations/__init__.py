"""replica/operations."""
