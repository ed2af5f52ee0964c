"""replica/decide."""
