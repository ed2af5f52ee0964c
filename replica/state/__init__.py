"""replica/state."""
