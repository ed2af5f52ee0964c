"""Commands, one module for each resource; `cluster.cli.app` imports a module on its first use."""
