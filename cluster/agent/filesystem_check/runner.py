"""Run of all probes, each in a process of its own with a time limit, in a private directory that is always removed.

The directory is `.forebay-check.MACHINE.PID.START` in the filesystem. A run that was killed leaves it, and the next run
removes it: on the same machine if its process has ended, elsewhere after an hour.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from forebay.cluster.agent.adapters import Tools
from forebay.cluster.agent.files import FilesystemRefused, RemovalFailed, identity_at, remove_tree
from forebay.cluster.agent.filesystem_check.capacity_probes import layout_probe, quota_probe, remove_buffer
from forebay.cluster.agent.filesystem_check.probe import (
    UNSUPPORTED,
    FilesystemProbe,
    ProbeFailed,
    ProbeMissing,
    ProbeResult,
    ProbeStatus,
)
from forebay.cluster.agent.filesystem_check.probes import basic_probes
from forebay.cluster.providers import guard
from forebay.cluster.system import Clock, become_subreaper, closing, names_in, open_directory, start_time
from forebay.replica.model import FilesystemLayout
from forebay.replica.values import MICROSECONDS_PER_SECOND, plain

CHECK_S_MAX: Final = 55.0
"""Seconds for all probes; those that would begin later are reported as failed."""

LEFTOVER_S: Final = 3_600.0
"""Age at which the directory of another machine is removed, seconds: a check takes less than a minute."""

FOUND_CHARACTERS_MAX: Final = 400
"""Characters of an observation."""

_PREFIX: Final = ".forebay-check"
_PRIVATE: Final = 0o700
_QUOTA: Final = "quota"
"""Directory of the quota probe, whose buffer has limits to remove."""


class CheckTarget(NamedTuple):
    """Filesystem to check."""

    path: str
    identity: str
    """Identity that the cluster knows; empty: none yet, or not part of a cluster."""
    quota: str
    layout: FilesystemLayout


class FilesystemReport(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `pool filesystem check --json`."""

    path: str
    quota: str
    layout: str
    usable: bool
    """True if everything that movers need works."""
    took_ms: int
    checks: tuple[ProbeResult, ...]


def check_filesystem(target: CheckTarget, tools: Tools, clock: Clock) -> FilesystemReport:
    """Run all probes and return their results.

    Raises:
        FilesystemRefused: The filesystem is not mounted, or another one is.
        RemovalFailed: Something of this or an earlier check cannot be removed.
        OSError: No directory can be created there.
    """
    if target.identity and identity_at(target.path) != target.identity:
        raise FilesystemRefused(f"another filesystem is mounted at {target.path}; mount the one that the cluster knows")
    # The processes of a probe that hangs are found among the descendants of this one.
    become_subreaper()
    begun_s = clock.monotonic_s()
    with closing(open_directory(target.path)) as top:
        _remove_leftovers(top, target, tools, clock)
        name = f"{_PREFIX}.{_machine()}.{os.getpid()}.{start_time(os.getpid()) or 0}"
        os.mkdir(name, _PRIVATE, dir_fd=top)
        try:
            with closing(open_directory(name, dir_fd=top)) as own:
                results = tuple(_run(probe, own, begun_s, clock) for probe in _probes(target, tools))
        finally:
            _remove(top, name, target, tools)
    return FilesystemReport(
        path=target.path,
        quota=target.quota,
        layout=target.layout.adapter,
        usable=all(one.status is ProbeStatus.OK or not one.needed for one in results),
        took_ms=round((clock.monotonic_s() - begun_s) * 1000),
        checks=results,
    )


def _probes(target: CheckTarget, tools: Tools) -> Iterator[FilesystemProbe]:
    yield quota_probe(target.quota, tools)
    layout = layout_probe(target.layout, tools)
    if layout is not None:
        yield layout
    yield from basic_probes()


def _run(probe: FilesystemProbe, own: int, begun_s: float, clock: Clock) -> ProbeResult:
    """Run one probe in a process of its own, in a directory of its own."""
    started_s = clock.monotonic_s()
    limit_s = min(probe.limit_s, begun_s + CHECK_S_MAX - started_s)
    if limit_s <= 0:
        status, found = ProbeStatus.FAILED, "not tried: the checks before it took too long"
    else:
        os.mkdir(probe.name, _PRIVATE, dir_fd=own)
        with closing(open_directory(probe.name, dir_fd=own)) as directory:
            status, found = _outcome(probe, directory, limit_s, clock)
    is_ok = status is ProbeStatus.OK
    return ProbeResult(
        name=probe.name,
        status=status,
        needed=probe.needed,
        found=plain(found)[:FOUND_CHARACTERS_MAX],
        consequence="" if is_ok else probe.consequence,
        took_ms=round((clock.monotonic_s() - started_s) * 1000),
    )


def _outcome(probe: FilesystemProbe, directory: int, limit_s: float, clock: Clock) -> tuple[ProbeStatus, str]:
    def call(returned: int) -> None:
        status, found = _try(probe, directory)
        os.write(returned, f"{status}\n{found}".encode("utf-8", "replace")[: 4 * FOUND_CHARACTERS_MAX])
        os._exit(0)

    done = guard.run(call, timeout_s=limit_s, clock=clock, keep=(directory,))
    if done.timed_out:
        left = f"; processes {', '.join(map(str, done.unkillable))} cannot be killed" if done.unkillable else ""
        return ProbeStatus.FAILED, f"did not end within {limit_s:.0f} s{left}"
    status, separator, found = done.returned.decode("utf-8", "replace").partition("\n")
    if not separator:
        said = done.complained.decode("utf-8", "replace").strip()
        return ProbeStatus.FAILED, f"the probe {guard.describe_exit(done.code)}: {said}"
    return ProbeStatus(status), found


def _try(probe: FilesystemProbe, directory: int) -> tuple[ProbeStatus, str]:
    try:
        probe.run(directory)
    except ProbeMissing as error:
        return ProbeStatus.MISSING, str(error)
    except ProbeFailed as error:
        return ProbeStatus.FAILED, str(error)
    except OSError as error:
        status = ProbeStatus.MISSING if error.errno in UNSUPPORTED else ProbeStatus.FAILED
        return status, error.strerror or str(error)
    return ProbeStatus.OK, ""


def _remove_leftovers(top: int, target: CheckTarget, tools: Tools, clock: Clock) -> None:
    """Remove the directories of checks that were killed."""
    for name in names_in(top):
        prefix, _, rest = name.partition(f"{_PREFIX}.")
        if prefix or not rest:
            continue
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=top, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                continue
            if _is_over(rest.split("."), clock.now() / MICROSECONDS_PER_SECOND - status.st_mtime):
                _remove(top, name, target, tools)


def _is_over(parts: Sequence[str], age_s: float) -> bool:
    """Return whether the check that left a directory has ended."""
    if len(parts) == 3 and parts[0] == _machine() and parts[1].isdecimal():
        return str(start_time(int(parts[1])) or 0) != parts[2]
    return age_s > LEFTOVER_S


def _machine() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]


def _remove(top: int, name: str, target: CheckTarget, tools: Tools) -> None:
    """Remove the directory of a check, and the limits of its buffer first.

    Raises:
        RemovalFailed: Something cannot be removed.
    """
    try:
        with closing(open_directory(name, dir_fd=top)) as own, closing(open_directory(_QUOTA, dir_fd=own)) as directory:
            remove_buffer(directory, target.quota, tools)
    except FileNotFoundError:
        pass
    except ProbeFailed as error:
        raise RemovalFailed(str(error)) from error
    remove_tree(top, name, shown=os.path.join(target.path, name))
