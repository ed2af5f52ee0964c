"""Fixtures of the client's tests."""
