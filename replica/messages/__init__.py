"""What can be asked and what has happened: commands, events, what an entry holds, feature levels."""
