"""The commands, one module a noun; each is imported when it is used first (`cluster.cli.app`)."""
