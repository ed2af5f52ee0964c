"""replica/messages."""
