"""Paths of transfers (outside: absolute; inside: below a variable of a buffer) and of shared filesystems."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from forebay.replica.grammar.lexer import DirectiveWord, quoted_text
from forebay.replica.model import (
    LAYOUT_NONE,
    LAYOUTS,
    NO_LAYOUT,
    PERSISTENT_PREFIX,
    QUOTAS,
    STRIPE_BYTES_MAX,
    STRIPE_UNIT_BYTES,
    STRIPES_ALL,
    STRIPES_MAX,
    WHOLE_BUFFER,
    Access,
    SharedFilesystem,
    are_nested,
    persistent_variable,
)
from forebay.replica.values import (
    FILESYSTEMS_MAX,
    MESSAGE_CHARACTERS_MAX,
    PATH_BYTES_MAX,
    Rejection,
    RejectionCode,
    has_control_character,
    name_fault,
)

INSIDE_VARIABLES = {
    "DW_JOB_STRIPED": Access.STRIPED,
    "DW_JOB_PRIVATE": Access.PRIVATE,
    "DW_JOB_LDBALANCE": Access.LDBALANCE,
    WHOLE_BUFFER: None,
}
"""Variables that may start a path on the buffer, with the access mode that each requires."""

PATH_CHARACTERS_ANY = PATH_BYTES_MAX // 4
"""Number of characters that never exceed PATH_BYTES_MAX bytes."""


def split_inside(path: str) -> tuple[str, str]:
    """Split a path on a buffer into variable and relative rest: `$DW_JOB_STRIPED/a/b` gives (`DW_JOB_STRIPED`, `a/b`).

    Raises:
        ValueError: the path starts neither with one of INSIDE_VARIABLES nor with that of a persistent buffer.
    """
    head, _, rest = path.partition("/")
    variable = head[2:-1] if head.startswith("${") and head.endswith("}") else head[1:]
    if not head.startswith("$") or (variable not in INSIDE_VARIABLES and not _persistent_suffix(variable)):
        raise ValueError(path)
    return variable, rest


def _persistent_suffix(variable: str) -> str:
    """Return the part of a persistent buffer's variable that names the buffer; empty for any other variable."""
    return variable[len(PERSISTENT_PREFIX) :] if variable.startswith(PERSISTENT_PREFIX) else ""


def path_fault(path: str) -> str | None:
    """Return the fault of an absolute path, to follow `the path `, or None if it is valid."""
    if not path.startswith("/"):
        return f"{quoted_text(path)} is not absolute"
    if len(path) > PATH_CHARACTERS_ANY and len(path.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX:
        return f"is longer than {PATH_BYTES_MAX} bytes"
    if has_control_character(path):
        return f"{quoted_text(path)} has a control character"
    if ".." in path and ".." in path.split("/"):
        return f"{quoted_text(path)} goes up with .."
    return None


def check_outside(word: DirectiveWord, path: str, offset: int) -> None:
    """Check that a path, which is absolute or begins with `%d` (the working directory), has no `..`.

    Raises:
        DirectiveRejected: the path is too long, or contains `..` or a control character.
    """
    path = path.removeprefix("\\\\")
    fault = path_fault("/" + path if path == "%d" or path.startswith("%d/") else path)
    if fault is not None:
        raise word.rejection(
            f"the path {fault}", "write an absolute path, or one in the working directory, without ..", offset
        )


def check_inside(word: DirectiveWord, path: str, offset: int, *, is_file: bool = False) -> None:
    """Check that the path lies in a buffer.

    The root of a buffer stands for its contents, so it cannot be the source of a transfer of one file (`is_file`).

    Raises:
        DirectiveRejected: the path is not on a buffer.
    """
    try:
        variable, rest = split_inside(path.removeprefix("\\\\"))
    except ValueError:
        listed = ", ".join("$" + name for name in (*INSIDE_VARIABLES, PERSISTENT_PREFIX + "NAME"))
        raise word.rejection(
            f"{quoted_text(path)} is not on the buffer", f"start it with one of {listed}", offset
        ) from None
    fault = path_fault("/" + rest)
    if fault is not None:
        raise word.rejection(f"the path {fault}", "write a path below the variable, without ..", offset)
    if rest.strip("/"):
        return
    if is_file:
        raise word.rejection(
            f"{quoted_text(path)} is the root of the buffer, not a file",
            "add the file's name, or write type=directory",
            offset,
        )
    if variable == WHOLE_BUFFER:
        raise word.rejection(
            f"{quoted_text(path)} also contains directories of Forebay",
            "write $DW_JOB_STRIPED for the root of the buffer",
            offset,
        )


def check_access(
    word: DirectiveWord,
    path: str,
    access: tuple[Access, ...],
    uses: Iterable[str],
    directive: str = "#DW",
    *,
    has_space: bool = True,
) -> None:
    """Check that the job requested what the path's variable requires.

    That is an access mode, a buffer of the job's own (`has_space`), or a persistent buffer (`uses` has their names).

    Raises:
        DirectiveRejected: the job did not request it.
    """
    variable, _ = split_inside(path.removeprefix("\\\\"))
    name = _persistent_suffix(variable)
    if name:
        if persistent_variable(name) not in map(persistent_variable, uses):
            raise word.rejection(
                f"the job does not use the persistent buffer {quoted_text(name)}",
                f"add {directive} persistentdw name={name[:48]}",
            )
        return
    needed = INSIDE_VARIABLES[variable]
    if needed is not None and needed not in access:
        raise word.rejection(
            f"${variable} needs access_mode={needed.name.lower()}",
            f"add {needed.name.lower()} to access_mode= of {directive} jobdw",
        )
    if not has_space:
        # Space outside any pool would not be charged to any capacity.
        raise word.rejection(f"the job has no buffer for ${variable}", f"add {directive} jobdw capacity=10GiB")


def check_adapters(filesystem: SharedFilesystem) -> Rejection | None:
    """Return a rejection if the quota or layout of a shared filesystem is invalid, or None."""
    layout = filesystem.layout
    place, fault, remedy = "", "", ""
    if filesystem.quota not in QUOTAS:
        place, fault = "quota", f"found {filesystem.quota!r:.60}"
        remedy = f"use one of: {', '.join(QUOTAS)}"
    elif layout.adapter not in LAYOUTS:
        place, fault = "layout", f"found {layout.adapter!r:.60}"
        remedy = f"use one of: {', '.join(LAYOUTS)}"
    elif layout.adapter == LAYOUT_NONE and layout != NO_LAYOUT:
        place, fault = "layout", "stripes need a layout"
        remedy = f"use one of: {', '.join(word for word in LAYOUTS if word != LAYOUT_NONE)}"
    elif not STRIPES_ALL <= layout.stripe_count <= STRIPES_MAX:
        place, fault = "stripe_count", f"found {layout.stripe_count}"
        remedy = f"use 1 to {STRIPES_MAX}, {STRIPES_ALL} for all, or 0 for the filesystem's default"
    elif layout.stripe_count == STRIPES_ALL and layout.adapter in _COUNTED:
        place, fault = "stripe_count", f"{layout.adapter} cannot stripe over all targets"
        remedy = f"use 1 to {STRIPES_MAX}"
    elif not 0 <= layout.stripe_bytes <= STRIPE_BYTES_MAX or layout.stripe_bytes % STRIPE_UNIT_BYTES:
        place, fault = "stripe_size", f"found {layout.stripe_bytes} bytes"
        remedy = f"use a multiple of 64KiB, at most {STRIPE_BYTES_MAX} bytes, or 0 for the filesystem's default"
    elif layout.pool and (_STORAGE_POOL.fullmatch(layout.pool) is None):
        place, fault = "stripe_pool", f"found {layout.pool!r:.60}"
        remedy = "use letters, digits, _, - and ., beginning with a letter or digit, at most 64"
    if not place:
        return None
    sentence = f"the {place} of shared filesystem {filesystem.name} is invalid: {fault}"
    return Rejection(RejectionCode.INVALID_FIELD, sentence, remedy, f"filesystem.{place}")


_COUNTED: Final = ("cephfs", "beegfs")
"""Layouts that cannot stripe over all targets."""

_STORAGE_POOL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""Storage pool of Lustre (at most 15 characters), CephFS or BeeGFS; never an option of a tool."""


def check_filesystem(filesystems: Mapping[str, SharedFilesystem], name: str, path: str) -> Rejection | None:
    """Return a rejection if a shared filesystem of this name and path cannot be added, or None."""
    fault = name_fault(name)
    if fault is not None:
        return Rejection(
            RejectionCode.INVALID_FIELD,
            f"the name of the shared filesystem {fault}",
            "choose another name",
            "filesystem.name",
        )
    if name in filesystems:
        sentence = f"shared filesystem {name!r} already exists, at {filesystems[name].path}"
        return Rejection(
            RejectionCode.WRONG_STATE, sentence, "choose another name, or remove that one first", "filesystem.name"
        )
    fault = path_fault(path)
    if fault is None and (path == "/" or any(part in ("", ".") for part in path[1:].split("/"))):
        fault = f"{path!r:.200} is not in its shortest form"
    if fault is not None:
        remedy = "write an absolute path such as /bb/fast, without `..`, `.`, or a slash too many"
        return Rejection(
            RejectionCode.INVALID_FIELD, f"the path of shared filesystem {name} {fault}", remedy, "filesystem.path"
        )
    for other in sorted(filesystems):
        if are_nested(path, filesystems[other].path):
            sentence = f"paths {path} of shared filesystem {name} and {filesystems[other].path} of {other} are nested"
            remedy = "give each shared filesystem a directory of its own, not below that of another"
            return Rejection(RejectionCode.INVALID_FIELD, sentence[:MESSAGE_CHARACTERS_MAX], remedy, "filesystem.path")
    if len(filesystems) >= FILESYSTEMS_MAX:
        return Rejection(
            RejectionCode.LIMIT_EXCEEDED,
            f"the limit of {FILESYSTEMS_MAX} shared filesystems is reached",
            "use an existing one",
            "filesystem.name",
        )
    return None
