"""Drills of the running cluster: what must hold before, what is done and measured, and what is said of it."""
