"""Where the configuration is found, and how much of it is read: what a client needs, or all of it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cluster.config.access import Access
from cluster.config.toml import ConfigError
from cluster.system import UntrustedFile, open_trusted

CONFIG_NAME: Final = "forebay.toml"
"""Name of the file wherever it is looked for."""

_NAME_IT: Final = "name it with --config if you trust its owner"

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
    """Return the first of these that is there; ConfigError where none is, or another account could have put it there.

    Who changes into a directory of another account has not named what lies in it: a configuration says whom a command
    trusts, and sends what it is given to. A link is no such file: its target would be trusted for the owner that it
    has, whatever the author of the link wants read. Since only root and this account can change what leads to the
    file, it is the same one when it is read.
    """
    places = list(config_places(environment, system))
    for place in places:
        try:
            os.lstat(place)
        except OSError:
            continue
        directory = os.path.realpath(place.parent)

        def refuse_shared(status: os.stat_result, shown: str, directory: str = directory) -> None:
            # Anybody may put a hard link there to a file of root.
            if shown == directory and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UntrustedFile(f"others may write to {shown}", "take that from them with chmod go-w")

        try:
            os.close(open_trusted(os.path.join(directory, place.name), refuse_shared))
        except UntrustedFile as error:
            raise ConfigError(place.absolute(), "", str(error), f"{error.remedy}, or {_NAME_IT}") from error
        except OSError as error:
            sentence = f"it cannot be opened ({error.strerror})"
            if error.errno == errno.ELOOP:
                sentence = "it is a symbolic link, which may lead to any file"
            raise ConfigError(place.absolute(), "", sentence, _NAME_IT) from error
        return place if place.parent == Path() else Path(directory, place.name)
    looked = ", ".join(str(place) for place in places[1:])
    raise ConfigError(
        places[0].absolute(),
        "",
        f"there is no configuration here, and none at {looked}",
        "make one with `forebay cluster init`, or name it with --config or $FOREBAY_CONFIG",
    )


def read_access(path: Path) -> Access:
    """Return where the cluster is; ConfigError names file, key, what was found and what would be right."""
    access = Access.glance(path)
    if access is None:
        from cluster.config.config import Config

        # Whatever is wrong is said there.
        return Config.load(path)
    return access
