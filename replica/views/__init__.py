"""What agents and people ask of a state."""
