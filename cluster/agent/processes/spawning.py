"""Starting this package's own modules as processes, with nothing inherited that they do not need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

_TREE = str(Path(__file__).resolve().parents[3])
"""What the package was imported from: its own modules are started from there too."""

_PASSED_ON = ("LANG", "LC_ALL", "TMPDIR", "PYTHONHASHSEED")


def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    descriptors: Sequence[int],
    stdin: int,
    stdout: int | None,
    stderr: int | None,
    new_session: bool,
    variables: Mapping[str, str] = MappingProxyType({}),
    new_group: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `python -m module` with the given open descriptors; OSError if it cannot be started.

    `variables` are added to its environment. In a group of its own (`new_group`) it is signalled with its helpers.
    """
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment["PATH"] = os.environ.get("PATH", os.defpath)
    environment["PYTHONPATH"] = _TREE
    environment.update(variables)
    return subprocess.Popen(
        # -P: the working directory is no place to import from.
        [sys.executable, "-P", "-m", module, *arguments],
        env=environment,
        cwd="/",
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=tuple(descriptors),
        start_new_session=new_session,
        process_group=0 if new_group else None,
    )
