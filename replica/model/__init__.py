"""replica/model."""
