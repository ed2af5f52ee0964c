"""Reading what a client needs of forebay.toml, and all of it only where that is not what it should be."""

from pathlib import Path

from cluster.config.access import Access


def read_access(path: Path) -> Access:
    """Return where the cluster is; ConfigError names file, key, what was found and what would be right."""
    access = Access.glance(path)
    if access is None:
        from cluster.config.config import Config

        # Whatever is wrong is said there.
        return Config.load(path)
    return access
