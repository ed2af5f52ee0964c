"""replica/scheduler."""
