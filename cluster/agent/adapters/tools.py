"""Execution of a filesystem's tools: found in fixed directories, without a shell, with bounded time and output.

A tool receives PATH and LC_ALL, and nothing else of the agent's environment or descriptors. It must be a program that
only root or the agent's account can change. All processes of a tool that hangs are killed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.cluster.agent.adapters.interface import (
    BAD_OUTPUT,
    EXIT_CODE,
    NOT_INSTALLED,
    TIMED_OUT,
    UNTRUSTED,
    AdapterFailed,
)
from forebay.cluster.system import SystemClock, UntrustedFile, become_subreaper, open_trusted
from forebay.replica.values import plain

if TYPE_CHECKING:
    from forebay.cluster.config import AgentConfig

DIRECTORIES: Final = (
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
    "/usr/lpp/mmfs/bin",
    "/opt/beegfs/sbin",
)
"""Directories of tools: Debian's and Red Hat's, those of GPFS, and those of BeeGFS."""

TOOL_S: Final = 60.0
"""Seconds a tool may take: `mmcrfileset` waits for all nodes of a GPFS cluster, and `lfs` for a server that fails over,
both for some tens of seconds. An operation may take longer (stage times are minutes).
"""

OUTPUT_BYTES_MAX: Final = 64 * 1024
"""Size of a tool's output, bytes: the quota of one directory has some hundred."""

SHOWN_CHARACTERS_MAX: Final = 300
"""Characters of a tool's output in a message, which has at most 1,024."""


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of this machine for the tools of shared filesystems (JSON object)."""

    directories: tuple[str, ...] = DIRECTORIES
    """Directories to search, absolute."""
    command: str = ""
    """Path of the site's program for `quota = "command"` and `layout = "command"`; empty: none."""
    quota_groups: tuple[int, int] = (0, 0)
    """First and last group ID for buffers on BeeGFS; (0, 0): none."""
    timeout_s: float = TOOL_S


def tools_of(own: AgentConfig) -> Tools:
    """Return an agent's settings for the tools of shared filesystems."""
    return Tools(
        directories=own.tool_directories or DIRECTORIES,
        command=own.filesystem_command,
        quota_groups=own.group_range(),
    )


def find_tool(tools: Tools, name: str) -> str:
    """Return the path of a tool without links.

    Raises:
        AdapterFailed: It is not installed, or others may change it.
    """
    for directory in tools.directories:
        path = os.path.join(directory, name)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return _trusted(path)
    places = ", ".join(tools.directories)
    raise AdapterFailed(f"{name} is not installed in {places}; install it on this machine", NOT_INSTALLED)


def run_tool(tools: Tools, name: str, *arguments: str) -> str:
    """Run a tool and return its standard output.

    Raises:
        AdapterFailed: It is missing or untrusted, fails, hangs, or prints too much or something that is not text.
    """
    path = find_tool(tools, name)
    code, printed, complained = execute(path, arguments, tools)
    if code != 0:
        said = plain((complained.strip() or printed.strip())[-SHOWN_CHARACTERS_MAX:])
        raise AdapterFailed(f"{_shown(name, arguments)} {_ending(code)}: {said or 'it printed nothing'}", EXIT_CODE)
    return printed


def execute(path: str, arguments: tuple[str, ...], tools: Tools, *, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run a program; return its exit code, standard output and standard error.

    Raises:
        AdapterFailed: It hangs, cannot be started, or prints too much or something that is not text.
    """
    # Loaded here because few workers run tools, and workers must start fast.
    from forebay.cluster.providers import guard

    # The processes of a tool that hangs are found among the descendants of this one.
    become_subreaper()
    environment = {"PATH": ":".join(tools.directories), "LC_ALL": "C"}
    shown = _shown(os.path.basename(path), arguments)
    try:
        done = guard.execute(
            (path, *arguments), environment, timeout_s=tools.timeout_s, clock=SystemClock(), stdin=stdin
        )
    except OSError as error:
        raise AdapterFailed(f"{shown} cannot be run: {error.strerror}", EXIT_CODE) from error
    if done.timed_out:
        left = f"; processes {', '.join(map(str, done.unkillable))} cannot be killed" if done.unkillable else ""
        raise AdapterFailed(
            f"{shown} did not end within {tools.timeout_s:g} s and was killed{left}; check the filesystem's servers",
            TIMED_OUT,
        )
    if len(done.printed) > OUTPUT_BYTES_MAX:
        raise AdapterFailed(f"{shown} printed more than {OUTPUT_BYTES_MAX} bytes; correct the program", BAD_OUTPUT)
    try:
        return done.code, done.printed.decode(), done.complained[-OUTPUT_BYTES_MAX:].decode("utf-8", "replace")
    except UnicodeDecodeError as error:
        raise AdapterFailed(f"{shown} printed something that is not UTF-8; correct the program", BAD_OUTPUT) from error


def trusted_program(path: str) -> str:
    """Return the path of a program without links, after checking that only root or this account may change it.

    Raises:
        AdapterFailed: The program is missing or cannot be trusted.
    """
    if not os.path.isfile(path):
        raise AdapterFailed(f"{path} does not exist; install it on this machine, or correct its path", NOT_INSTALLED)
    if not os.access(path, os.X_OK):
        raise AdapterFailed(f"{path} is not executable; run chmod +x on it", UNTRUSTED)
    return _trusted(path)


def bad_output(name: str, printed: str) -> AdapterFailed:
    """Return the failure of a tool whose output is not as documented."""
    said = plain(printed.strip()[:SHOWN_CHARACTERS_MAX])
    return AdapterFailed(
        f"{name} printed something else than documented: {said or 'nothing'}; check its version", BAD_OUTPUT
    )


def _trusted(path: str) -> str:
    found = os.path.realpath(path)
    try:
        os.close(open_trusted(found))
    except UntrustedFile as error:
        raise AdapterFailed(f"{path} is not run: {error}; {error.remedy}", UNTRUSTED) from error
    except OSError as error:
        raise AdapterFailed(f"{path} cannot be opened: {error.strerror}; install it again", UNTRUSTED) from error
    return found


def _shown(name: str, arguments: tuple[str, ...]) -> str:
    return plain(" ".join((name, *arguments[:2])))


def _ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
