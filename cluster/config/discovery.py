"""Discovery of the configuration file, and reading the client's part."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from forebay.cluster.config.access import AccessConfig
from forebay.cluster.config.toml import ConfigError
from forebay.cluster.system import UntrustedFile, open_trusted

CONFIG_NAME: Final = "forebay.toml"
"""File name in every location searched."""

_NAME_IT: Final = "name it with --config if you trust its owner"

SYSTEM_DIRECTORY: Final = Path("/etc/forebay")
"""Machine-wide directory of the configuration."""


def config_places(environment: Mapping[str, str], system: Path = SYSTEM_DIRECTORY) -> Iterator[Path]:
    """Yield the default locations: the working directory, the user's own, then the machine's."""
    yield Path(CONFIG_NAME)
    home = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", ""), ".config")
    if os.path.isabs(home):
        yield Path(home, "forebay", CONFIG_NAME)
    yield system / CONFIG_NAME


def find_config(environment: Mapping[str, str], system: Path = SYSTEM_DIRECTORY) -> Path:
    """Return the first default location with a file.

    A configuration determines which servers a command trusts, so a file that another account placed in the working
    directory must not be used. Links are rejected, because any account could link to a trusted file. Only root and this
    account can change the resolved path, so the file cannot be replaced before it is read.

    Raises:
        ConfigError: There is no file, or another account could have put it there.
    """
    places = list(config_places(environment, system))
    for place in places:
        try:
            os.lstat(place)
        except OSError:
            continue
        directory = os.path.realpath(place.parent)

        def refuse_shared(status: os.stat_result, shown: str, directory: str = directory) -> None:
            # In a shared directory, any user may create a hard link to a file of root.
            if shown == directory and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise UntrustedFile(f"others may write to {shown}", "run chmod go-w on it")

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


def read_access(path: Path) -> AccessConfig:
    """Return the client's part of a configuration.

    Raises:
        ConfigError: The file is invalid; the message names file, key, value and remedy.
    """
    access = AccessConfig.read_if_valid(path)
    if access is None:
        from forebay.cluster.config.config import Config

        # The complete check reports the error.
        return Config.load(path)
    return access
