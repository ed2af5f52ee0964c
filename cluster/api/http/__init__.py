"""cluster/api/http."""
