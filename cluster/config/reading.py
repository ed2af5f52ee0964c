"""Where the configuration is found, and how much of it is read: what a client needs, or all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cluster.config.access import Access
from cluster.config.toml import ConfigError

CONFIG_NAME: Final = "forebay.toml"
"""Name of the file wherever it is looked for."""

SYSTEM_DIRECTORY: Final = Path("/etc/forebay")
"""Where a machine has it for all of its users."""


def config_places(environment: Mapping[str, str], system: Path = SYSTEM_DIRECTORY) -> Iterator[Path]:
    """Yield where a configuration is looked for that nobody names: here, then the user's own, then the machine's."""
    yield Path(CONFIG_NAME)
    home = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", ""), ".config")
    if os.path.isabs(home):
        yield Path(home, "forebay", CONFIG_NAME)
    yield system / CONFIG_NAME


def find_config(environment: Mapping[str, str], system: Path = SYSTEM_DIRECTORY) -> Path:
    """Return the first of these that is there; ConfigError where none is, or somebody else put it there.

    Who changes into a directory of somebody else's has not named what lies in it: a configuration says whom a command
    trusts, and sends what it is given to.
    """
    places = list(config_places(environment, system))
    for place in places:
        try:
            owner = place.stat().st_uid
        except OSError:
            continue
        if owner not in (0, os.geteuid()):
            sentence = f"it belongs to the account {owner}, neither to root nor to you"
            raise ConfigError(place.absolute(), "", sentence, "name it with --config if you trust its owner")
        return place
    looked = ", ".join(str(place) for place in places[1:])
    raise ConfigError(
        places[0].absolute(),
        "",
        f"there is no configuration here, and none at {looked}",
        "make one with `forebay init`, or name it with --config or $FOREBAY_CONFIG",
    )


def read_access(path: Path) -> Access:
    """Return where the cluster is; ConfigError names file, key, what was found and what would be right."""
    access = Access.glance(path)
    if access is None:
        from cluster.config.config import Config

        # Whatever is wrong is said there.
        return Config.load(path)
    return access
