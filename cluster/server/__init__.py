"""cluster/server."""
