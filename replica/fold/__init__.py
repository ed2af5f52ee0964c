"""replica/fold."""
