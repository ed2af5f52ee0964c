"""The state as a whole: its tables, its builder, its digest, what is always true of it."""
