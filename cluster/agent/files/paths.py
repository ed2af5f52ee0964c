"""Path resolution by directory descriptors, which never leaves what the order permits, whatever is moved meanwhile.

A path is walked one component at a time with O_NOFOLLOW: no link beneath a root is followed, and replacing a directory
by a link between check and use has no effect. The root itself is configured by the administrator and may be a link.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from forebay.cluster.system import open_directory
from forebay.replica.model import PERSISTENT_PREFIX, VARIABLE_DIRECTORIES, WHOLE_BUFFER, persistent_variable
from forebay.replica.values import PATH_BYTES_MAX

VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    **{name: (directory,) for name, directory in VARIABLE_DIRECTORIES.items()},
    WHOLE_BUFFER: (),
}
"""Path in a job's buffer for each variable in directives and in the job's environment."""


NEW_DIRECTORY_MODE: Final = 0o755
"""Mode of directories created on the way to a destination, before the umask."""


class PathRefused(Exception):
    """A path is not permitted; the message names it and the remedy."""


class FileIdentity(NamedTuple):
    """Device and inode of a directory."""

    device: int
    inode: int


class Target(NamedTuple):
    """Path as an open directory, which the caller closes, and the components below it."""

    anchor: int
    shown: str
    """Name of the anchor in messages."""
    parts: tuple[str, ...]

    @property
    def path(self) -> str:
        """Whole path for messages."""
        return join(self.shown, self.parts)


def join(shown: str, parts: Sequence[str]) -> str:
    """Join a path for a message."""
    return "/".join((shown.rstrip("/"), *parts)) or "/"


def split(path: str, shown: str) -> tuple[str, ...]:
    """Return the components of a path.

    Raises:
        PathRefused: The path contains `..` or a zero byte, or is too long.
    """
    if "\0" in path:
        raise PathRefused(f"{shown!r} contains a zero byte")
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise PathRefused(f"{shown[:80]!r}… is longer than {PATH_BYTES_MAX} bytes")
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise PathRefused(f"{shown} contains '..'; write the path without it")
    return parts


def outside_target(roots: Sequence[str], path: str, what: str) -> Target:
    """Resolve an absolute path beneath one of `roots`, which `what` describes in messages.

    Raises:
        PathRefused: The path lies beneath none of them.
    """
    if not path.startswith("/"):
        raise PathRefused(f"{path!r} is not an absolute path; start it with /")
    parts = split(path, path)
    fitting = [root for root in roots if root.startswith("/") and parts[: len(split(root, root))] == split(root, root)]
    if not fitting:
        allowed = ", ".join(roots) if roots else "none is configured"
        raise PathRefused(
            f"{path} lies outside the directories that {what} may use ({allowed}); "
            "use one of them, or have the administrator add it to [staging]"
        )
    root = max(fitting, key=lambda candidate: len(split(candidate, candidate)))
    try:
        anchor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PathRefused(
            f"{path}: the directory {root} that {what} may use cannot be opened on this node: {error.strerror}"
        ) from error
    return Target(anchor, root, parts[len(split(root, root)) :])


def variable_of(path: str) -> str:
    """Return the variable at the start of a path in a buffer, as scripts spell it, or ""."""
    head = path.partition("/")[0]
    name = head[2:-1] if head.startswith("${") and head.endswith("}") else head[1:] if head.startswith("$") else ""
    # Directives may contain the buffer's own name, which may not be a valid shell name.
    return persistent_variable(name.removeprefix(PERSISTENT_PREFIX)) if name.startswith(PERSISTENT_PREFIX) else name


def inside_target(buffer: int, path: str, persistent: Mapping[str, str] = MappingProxyType({})) -> Target:
    """Resolve a path such as `$DW_JOB_STRIPED/data` in the open directory `buffer`, which is duplicated.

    `persistent` maps variables to the directories of the job's persistent buffers.

    Raises:
        PathRefused: The path is in none of the buffers.
    """
    head, _, rest = path.partition("/")
    name = variable_of(path)
    if name in persistent:
        return _persistent(persistent[name], head, split(rest, path))
    if name not in VARIABLES:
        known = ", ".join(f"${known}/…" for known in (*VARIABLES, *persistent))
        raise PathRefused(f"{path!r} is not a path in the buffer; write {known}")
    parts = split(rest, path)
    return Target(os.dup(buffer), head, parts) if not VARIABLES[name] else _inside(buffer, head, VARIABLES[name], parts)


def _inside(buffer: int, head: str, place: tuple[str, ...], parts: tuple[str, ...]) -> Target:
    try:
        return Target(open_directory(place[0], dir_fd=buffer), head, parts)
    except OSError as error:
        raise PathRefused(f"{head} does not exist in the buffer: {error.strerror}") from error


def _persistent(directory: str, head: str, parts: tuple[str, ...]) -> Target:
    try:
        with contextlib.ExitStack() as unused:
            opened_directory = open_directory(directory)
            unused.callback(os.close, opened_directory)
            # Reading entries and entering a directory are separate permissions.
            os.stat(".", dir_fd=opened_directory)
            unused.pop_all()
        return Target(opened_directory, head, parts)
    except PermissionError as error:
        raise PathRefused(
            f"{head} is a persistent buffer that this user may not use; ask its owner for permission"
        ) from error
    except OSError as error:
        raise PathRefused(f"{head}: the persistent buffer is not on this node: {error.strerror}") from error


@contextlib.contextmanager
def open_target(target: Target, *, forbidden: FileIdentity | None = None, create: bool = False) -> Iterator[int]:
    """Yield a descriptor of the target's directory, creating missing ones if `create`; closes the anchor.

    Raises:
        PathRefused: A component is missing, a link, not a directory, or `forbidden`; the message names it.
    """
    current = target.anchor
    try:
        _refuse_forbidden(current, target.shown, forbidden)
        for count, part in enumerate(target.parts, start=1):
            following = _enter(current, part, join(target.shown, target.parts[:count]), create=create)
            os.close(current)
            current = following
            _refuse_forbidden(current, join(target.shown, target.parts[:count]), forbidden)
        yield current
    finally:
        os.close(current)


def open_as_user(path: str, *, forbidden: FileIdentity) -> int:
    """Return a descriptor (O_PATH) of a directory that this process, running as the job's user, may enter.

    The kernel checks permissions as it does for the script, so links are followed.

    Raises:
        PathRefused: The directory is missing, or is or lies in `forbidden`, the agent's own directory.
    """
    if not path.startswith("/"):
        raise PathRefused(f"{path!r} is not an absolute path; start it with /")
    split(path, path)
    try:
        directory = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PathRefused(f"{path} cannot be entered on this node: {error.strerror}") from error
    above = os.dup(directory)
    try:
        while True:
            _refuse_forbidden(above, path, forbidden)
            below, above = above, os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=above)
            at_top = identity_of(below) == identity_of(above)
            os.close(below)
            if at_top:
                return directory
    except BaseException as error:
        os.close(directory)
        if isinstance(error, OSError):
            raise PathRefused(f"{path} cannot be entered on this node: {error.strerror}") from error
        raise
    finally:
        os.close(above)


@contextlib.contextmanager
def open_target_parent(
    target: Target, *, forbidden: FileIdentity | None = None, create: bool = False
) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the target's parent and the target's name in it; otherwise like `open_target`."""
    if not target.parts:
        os.close(target.anchor)
        raise PathRefused(
            f"{target.path} names a directory; a file needs a name, such as {join(target.shown, ('name',))}"
        )
    with open_target(target._replace(parts=target.parts[:-1]), forbidden=forbidden, create=create) as directory:
        yield directory, target.parts[-1]


def _enter(directory: int, name: str, shown: str, *, create: bool) -> int:
    for made in (False, True):
        try:
            return open_directory(name, dir_fd=directory)
        except FileNotFoundError as error:
            if not create or made:
                raise PathRefused(f"{shown} does not exist") from error
        except OSError as error:
            raise PathRefused(_why_not_a_directory(directory, name, shown, error)) from error
        try:
            os.mkdir(name, NEW_DIRECTORY_MODE, dir_fd=directory)
            os.fsync(directory)
        except FileExistsError:
            continue
        except OSError as error:
            raise PathRefused(f"the directory {shown} cannot be created: {error.strerror}") from error
    raise AssertionError("the second round returns or raises")


def _why_not_a_directory(directory: int, name: str, shown: str, error: OSError) -> str:
    with contextlib.suppress(OSError):
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        kind = kind_of(status.st_mode)
        if kind != "directory":
            remedy = "; name the directory that it points to" if kind == "symbolic link" else ""
            return f"{shown} is a {kind}, not a directory{remedy}"
    return f"{shown} cannot be opened: {error.strerror}"


_KINDS: Final = {
    0o040000: "directory",
    0o100000: "regular file",
    0o120000: "symbolic link",
    0o010000: "named pipe",
    0o140000: "socket",
    0o020000: "character device",
    0o060000: "block device",
}


def kind_of(mode: int) -> str:
    """Return the file type of a mode in words."""
    return _KINDS.get(mode & 0o170000, "file of unknown kind")


def identity_of(descriptor: int) -> FileIdentity:
    """Return device and inode of an open directory."""
    status = os.fstat(descriptor)
    return FileIdentity(status.st_dev, status.st_ino)


def _refuse_forbidden(descriptor: int, shown: str, forbidden: FileIdentity | None) -> None:
    if forbidden is not None and identity_of(descriptor) == forbidden:
        raise PathRefused(f"{shown} is the agent's own directory; jobs may not name files in it")
