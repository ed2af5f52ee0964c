"""Answers made of a state: jobs, events, reasons, and what is private."""
