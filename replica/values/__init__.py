"""replica/values."""
