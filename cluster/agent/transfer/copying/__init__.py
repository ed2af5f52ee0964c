"""Copying the contents of files: streams and helper processes, small and large files, the rate limit."""
