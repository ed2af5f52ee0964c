"""A job's script: its supervisor, its record, its step."""
