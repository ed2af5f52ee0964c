"""Probes of quota and layout: a buffer is created with the configured adapters, and written past its limit."""

from __future__ import annotations

import errno
import os
from typing import Final

from forebay.cluster.agent.adapters import AdapterFailed, Stripes, Tools, layout_adapter
from forebay.cluster.agent.files import RemovalFailed, capacity
from forebay.cluster.agent.filesystem_check.probe import FilesystemProbe, ProbeFailed, ProbeMissing
from forebay.cluster.agent.filesystem_check.probes import USER
from forebay.cluster.system import SystemClock, closing, open_directory
from forebay.replica.model import LAYOUT_NONE, QUOTA_AUTO, QUOTA_NONE, FilesystemLayout

BUFFER: Final = "buffer"
"""Name of the buffer in the directory of the probe."""

LIMIT_BYTES: Final = 8 * 1024**2
EXCESS_BYTES: Final = 256 * 1024**2
"""Limit of the buffer, and bytes written at most. Quotas that are distributed over servers permit more than the limit,
Lustre some MiB for each OST.
"""

WRITE_S: Final = 15.0
"""Seconds of writing past the limit: a client of CephFS is stopped up to ten seconds late."""

QUOTA_S: Final = 30.0
"""Seconds of the whole probe."""

_CHUNK: Final = b"q" * 1024**2
_STOPS: Final = frozenset({errno.EDQUOT, errno.ENOSPC})


def quota_probe(quota: str, tools: Tools) -> FilesystemProbe:
    """Return the probe that writes past the limit of a buffer."""

    def run(directory: int) -> None:
        try:
            control = capacity.find_control(directory, quota, tools)
        except AdapterFailed as error:
            raise ProbeFailed(str(error)) from error
        if control.word == capacity.WATCH:
            raise ProbeMissing(control.why_watch)
        try:
            _write_past_limit(directory, control.word, tools)
        except AdapterFailed as error:
            raise ProbeFailed(str(error)) from error
        finally:
            remove_buffer(directory, quota, tools)

    needed = quota not in (QUOTA_AUTO, QUOTA_NONE)
    return FilesystemProbe("quota", run, needed, "a job may fill the filesystem for all others", QUOTA_S)


def layout_probe(layout: FilesystemLayout, tools: Tools) -> FilesystemProbe | None:
    """Return the probe that sets the layout, or None without a layout."""
    if layout.adapter == LAYOUT_NONE:
        return None

    def run(directory: int) -> None:
        try:
            adapter = layout_adapter(layout.adapter, tools)
            why = adapter.check(directory)
            if why:
                raise ProbeFailed(why)
            adapter.apply(directory, Stripes(layout.stripe_count, layout.stripe_bytes, layout.pool))
        except AdapterFailed as error:
            raise ProbeFailed(str(error)) from error

    return FilesystemProbe("layout", run, True, "stage-in fails until the layout can be set", QUOTA_S)


def remove_buffer(directory: int, quota: str, tools: Tools) -> None:
    """Remove the buffer of a quota probe with its limits.

    Raises:
        ProbeFailed: It cannot be removed.
    """
    try:
        capacity.remove(directory, BUFFER, shown="the buffer of the check", quota=quota, tools=tools)
    except RemovalFailed as error:
        raise ProbeFailed(str(error)) from error


def _write_past_limit(directory: int, control: str, tools: Tools) -> None:
    capacity.make(directory, BUFFER, control, LIMIT_BYTES, tools)
    with closing(open_directory(BUFFER, dir_fd=directory)) as buffer:
        capacity.hold(buffer, control, f"check.{os.getpid()}", LIMIT_BYTES, tools)
        if not os.geteuid():
            os.fchown(buffer, USER, -1 if capacity.keeps_group(control, tools) else USER)
        writer = os.fork()
        if writer == 0:
            os._exit(_write(buffer))
        code = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
    if code == 1:
        raise ProbeFailed(
            f"{EXCESS_BYTES // 1024**2} MiB were written into a buffer of {LIMIT_BYTES // 1024**2} MiB: "
            "quotas are not enforced"
        )
    if code:
        raise ProbeFailed("a user cannot write into the buffer")


def _write(buffer: int) -> int:
    """Write as a user, whom limits bind; return 0 if the filesystem stopped it, 1 if not, 2 if no file can be made."""
    clock = SystemClock()
    if not os.geteuid():
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    try:
        file = os.open("file", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=buffer)
    except OSError:
        return 2
    end_s = clock.monotonic_s() + WRITE_S
    written = 0
    try:
        while written < EXCESS_BYTES or clock.monotonic_s() < end_s - WRITE_S / 2:
            # Beyond the excess the file is written again, which gives a late limit time without filling the disk.
            os.pwrite(file, _CHUNK, written % EXCESS_BYTES)
            written += len(_CHUNK)
            os.fsync(file)
            if clock.monotonic_s() > end_s:
                break
        os.close(file)
    except OSError as error:
        return 0 if error.errno in _STOPS else 2
    return 1
