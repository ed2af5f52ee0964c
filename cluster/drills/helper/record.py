"""Undo record of this machine: durable before a fault is caused, and kept until the fault is undone."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

import msgspec

from forebay.cluster.drills.helper.faults import Machine, Undo, do, undo_fault
from forebay.cluster.system import closing, make_private_directory, open_directory, write_all

RECORD: Final = "undo.json"
_NEW: Final = "undo.json.new"

RECORD_BYTES_MAX: Final = 256 * 1024
"""Limit of the record, bytes: nft rules for sixteen replicas take some kilobytes."""


class Busy(Exception):
    """Another process holds the record, because it is causing or undoing a fault."""


class UndoRecord:
    """Undo record of one helper, locked so that only one process at a time causes or undoes the helper's fault."""

    def __init__(self, directory: Path, *, wait: bool = False) -> None:
        """Acquire the record; with `wait`, wait while another process holds it.

        Raises:
            Busy: Another process holds the record.
            OSError: The directory cannot be used.
        """
        make_private_directory(directory)
        self._directory = open_directory(directory)
        try:
            fcntl.flock(self._directory, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(self._directory)
            raise Busy(f"another process holds the undo record in {directory}") from None
        except BaseException:
            os.close(self._directory)
            raise

    def close(self) -> None:
        """Release the record."""
        os.close(self._directory)

    def read(self) -> Undo | None:
        """Return the fault to undo, None if there is none.

        Raises:
            OSError: The record cannot be read.
            ValueError: The record is malformed; the message names the file.
        """
        try:
            descriptor = os.open(RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory)
        except FileNotFoundError:
            return None
        with closing(descriptor):
            data = os.read(descriptor, RECORD_BYTES_MAX)
        try:
            return msgspec.json.decode(data, type=Undo)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"{RECORD} cannot be read ({error}); undo the fault that it describes, and remove it"
            ) from error

    def write(self, undo: Undo) -> None:
        """Write the fault to undo; durable on return.

        Raises:
            OSError: The record cannot be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(os.open(_NEW, flags, 0o600, dir_fd=self._directory)) as descriptor:
            write_all(descriptor, msgspec.json.encode(undo))
            os.fsync(descriptor)
        os.rename(_NEW, RECORD, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        os.fsync(self._directory)

    def remove(self) -> None:
        """Remove the record after the fault is undone; durable on return.

        Raises:
            OSError: The record cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(RECORD, dir_fd=self._directory)
            os.fsync(self._directory)

    # ---- operations on the record

    def begin(self, undo: Undo, machine: Machine) -> None:
        """Write the undo record, then cause the fault; undo the fault if this fails. Exceptions as `faults.do`."""
        self.write(undo)
        try:
            do(undo, machine)
        except BaseException:
            self.settle(machine)
            raise

    def settle(self, machine: Machine) -> Undo | None:
        """Undo the recorded fault and return it. Exceptions of `read` and `faults.undo_fault` propagate."""
        undo = self.read()
        if undo is not None:
            undo_fault(undo, machine)
            self.remove()
        return undo
