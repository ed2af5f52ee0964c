"""replica/views."""
