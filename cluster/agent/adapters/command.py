"""Adapter `command`: a program of the site sets, reads and removes quotas and layouts.

Contract, version 1. The program is called as `PROGRAM OPERATION PATH` with one JSON object on standard input. It prints
one JSON object, at most 64 KiB, on standard output, and ends within the time limit with one of these codes:

- 0: done.
- 3: the operation is not supported for this path. The reason is on standard error.
- other: failed. The reason is on standard error. The operation is retried.

| operation | PATH | input, besides `version` and `seed` | output |
|---|---|---|---|
| `check` | parent of buffers | | `{}`, or `{"reason": "…"}` if it cannot be used |
| `apply` | buffer | `size_bytes`, `inodes`: new limits, null keeps one, 0 removes it | `{}` |
| `usage` | buffer | | `size_bytes`, `inodes`, `size_limit_bytes` |
| `remove` | buffer, already removed | | `{}` |
| `layout` | buffer | `stripe_count`, `stripe_bytes`, `pool` | `{}` |

All operations may be repeated. After `apply`, `usage` must report the limit that was requested.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar, Final, Literal

import msgspec

from forebay.cluster.agent.adapters.interface import (
    BAD_OUTPUT,
    EXIT_CODE,
    NOT_APPLIED,
    NOT_INSTALLED,
    UNUSABLE,
    AdapterFailed,
    BufferLimit,
    LayoutAdapter,
    QuotaAdapter,
    QuotaUsage,
    Stripes,
    path_of,
)
from forebay.cluster.agent.adapters.tools import SHOWN_CHARACTERS_MAX, Tools, bad_output, execute, trusted_program
from forebay.replica.values import plain

VERSION: Final = 1
EXIT_UNSUPPORTED: Final = 3

_Operation = Literal["check", "apply", "usage", "remove", "layout"]


class CommandReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Output of the program; each operation uses some of the fields."""

    reason: str = ""
    size_bytes: int = -1
    inodes: int = -1
    size_limit_bytes: int = -1


class CommandAdapter(QuotaAdapter):
    """Quotas set by the site's program."""

    word: ClassVar[str] = "command"

    def __init__(self, tools: Tools) -> None:
        """Use the program that the settings name."""
        self._tools = tools

    def _find_fault(self, parent: int) -> str:
        """Return the reason why the program cannot limit buffers, or ""."""
        return _call(self._tools, "check", path_of(parent)).reason

    def apply(self, directory: int, seed: str, limit: BufferLimit) -> None:
        """Have the program limit a buffer, and compare the limit it then reports.

        Raises:
            AdapterFailed: The program failed, or reports another limit.
        """
        path = path_of(directory)
        _call(self._tools, "apply", path, seed=seed, size_bytes=limit.size_bytes, inodes=limit.inodes)
        if limit.size_bytes is None:
            return
        reported = self._usage(path).size_limit_bytes
        if reported != limit.size_bytes:
            raise AdapterFailed(
                f"{self._tools.command} reports a limit of {reported} bytes for {path} after it set "
                f"{limit.size_bytes}; correct the program",
                NOT_APPLIED,
            )

    def usage(self, directory: int) -> QuotaUsage:
        """Return the usage that the program reports.

        Raises:
            AdapterFailed: The program failed.
        """
        reply = self._usage(path_of(directory))
        return QuotaUsage(reply.size_bytes, reply.inodes)

    def find(self, parent: int, name: str) -> str:
        """Return the path of a buffer, whether it exists or not: the program may repeat a removal."""
        return os.path.join(path_of(parent), name)

    def release(self, parent: int, name: str, handle: str) -> None:
        """Have the program remove a quota.

        Raises:
            AdapterFailed: The program failed.
        """
        _call(self._tools, "remove", handle)

    def _usage(self, path: str) -> CommandReply:
        reply = _call(self._tools, "usage", path)
        if min(reply.size_bytes, reply.inodes, reply.size_limit_bytes) < 0:
            sentence = "must print size_bytes, inodes and size_limit_bytes, none below 0; correct the program"
            raise AdapterFailed(f"{self._tools.command} usage {sentence}", BAD_OUTPUT)
        return reply


class CommandLayout(LayoutAdapter):
    """Layouts set by the site's program."""

    word: ClassVar[str] = "command"

    def __init__(self, tools: Tools) -> None:
        """Use the program that the settings name."""
        self._tools = tools

    def _find_fault(self, parent: int) -> str:
        """Return the reason why the program cannot set layouts, or ""."""
        return _call(self._tools, "check", path_of(parent)).reason

    def apply(self, directory: int, stripes: Stripes) -> None:
        """Have the program set a layout.

        Raises:
            AdapterFailed: The program failed.
        """
        _call(
            self._tools,
            "layout",
            path_of(directory),
            stripe_count=stripes.targets,
            stripe_bytes=stripes.size_bytes,
            pool=stripes.pool,
        )


def _call(tools: Tools, operation: _Operation, path: str, *, seed: str = "", **fields: Any) -> CommandReply:
    """Call the program for one operation.

    Raises:
        AdapterFailed: The program is missing, failed, hung, or printed something else than documented.
    """
    if not tools.command:
        raise AdapterFailed(
            "no program is configured on this machine; set `filesystem_command` in [[agent]]", NOT_INSTALLED
        )
    program = trusted_program(tools.command)
    request = msgspec.json.encode({"version": VERSION, "seed": seed, **fields})
    code, printed, complained = execute(program, (operation, path), tools, stdin=request)
    shown = f"{tools.command} {operation}"
    said = plain(complained.strip()[-SHOWN_CHARACTERS_MAX:]) or "it printed no reason"
    if code == EXIT_UNSUPPORTED:
        raise AdapterFailed(f"{shown} is not supported for {path}: {said}", UNUSABLE)
    if code != 0:
        ending = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        raise AdapterFailed(f"{shown} {ending}: {said}", EXIT_CODE)
    try:
        return msgspec.json.decode(printed, type=CommandReply)
    except msgspec.MsgspecError as error:
        raise bad_output(shown, f"{error}: {printed}") from error
