"""Fencing of writers: only the newest attempt may write to a destination, decided by the filesystem, not by clocks.

In a destination directory, a transfer creates its temporary files in its own staging directory
`.forebay-FAMILY/ATTEMPT.OWNER/` and renames them when they are complete. A newer attempt first creates its staging
directory, then removes those of older attempts. From then on an older attempt can neither create a file in the
directory it has open nor find the file it wants to rename: both fail with ENOENT, however late it is and on whichever
machine it runs. An older attempt that creates its directory afterwards finds the newer one beside it. If two agents
have the same attempt, the second gives way; if they arrive simultaneously both may, but at least one does. If both do,
an existing older attempt continues until a newer one arrives.

An attempt takes over partial files of the same owner's previous attempt and resumes them. Batch directories hold small
files that are never resumed: they are removed, after first losing the name under which they could be put in place.

Where other accounts may write to the destination, for example /scratch with mode 1777, they could block a predictable
name. There each attempt uses a parent with an unpredictable name, `.forebay-FAMILY-TOKEN`. Every check covers all
directories of such names that belong to the user alone; others are ignored.

All helpers of a transfer share one staging directory, and a directory handles one rename at a time. Each group of small
files is therefore written to its own batch directory, used by one helper. If it holds all files of a directory that
this transfer created and that is still empty, it replaces that directory by a single rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.cluster.agent.files import RemovalFailed, empty_directory, remove_tree
from forebay.cluster.system import closing, names_in, open_directory

_PRIVATE: Final = 0o700

BATCH_SUFFIX: Final = ".shelf"
"""Suffix of directories in a staging directory that may be renamed as a whole."""

_GONE_SUFFIX: Final = ".gone"

REMOVALS_MAX: Final = 1000
"""Attempts to empty an older attempt's directory, count: its owner may still create files, but loses as soon as it is
found empty once.
"""

CLAIMS_MAX: Final = 100
"""Times the parent of the staging directories may disappear while an attempt creates its own, count: each time an older
attempt was just being cleaned up.
"""

_PLACE: Final = re.compile(r"([0-9]{1,19})\.([0-9a-z]{1,64})", re.ASCII)

_HOME: Final = re.compile(rb"\.forebay-(?:[0-9a-f]{8}|alone)-[0-9]{1,19}(?:-[0-9a-f]{16})?")

_TOKEN: Final = re.compile(r"-[0-9a-f]{16}", re.ASCII)
_TOKEN_BYTES: Final = 8

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

_STAGING: Final = re.compile(r"[0-9]{1,19}\.[0-9a-f]{32}", re.ASCII)
"""Like _PLACE, but with an agent's storage ID: directories of users may have similar names."""


def is_home(parent: int, name: bytes, status: os.stat_result) -> bool:
    """Return whether a directory in the open one is a staging parent, whose files are incomplete copies.

    A directory of another user, which cannot be read, is judged by its name and mode.

    Raises:
        OSError: The directory cannot be read.
    """
    if _HOME.fullmatch(name) is None or stat.S_IMODE(status.st_mode) & 0o077:
        return False
    try:
        with closing(open_directory(os.fsdecode(name), dir_fd=parent)) as home:
            names = names_in(home)
    except FileNotFoundError:
        return True
    except PermissionError:
        return status.st_uid != os.geteuid()
    return bool(names) and all(_STAGING.fullmatch(each) for each in names)


class WriterFenced(Exception):
    """Another attempt or agent owns the destination; this one may no longer write to it."""


class FenceFailed(Exception):
    """The destination cannot be claimed; the message names it and the remedy."""


class Claimant(NamedTuple):
    """Attempt that claims a destination."""

    family: str
    """Cluster and job; only one attempt of a family may write."""
    attempt: int
    owner: str
    """Agent, identified by its storage ID: digits and lower-case letters."""

    @property
    def home(self) -> str:
        """Name of the staging parent in a destination directory that only the user can write to."""
        return f".forebay-{self.family}"

    def may_own(self, name: str) -> bool:
        """Return whether a directory of this name in a destination may be a staging parent of this family."""
        return name == self.home or (name.startswith(self.home) and _TOKEN.fullmatch(name, len(self.home)) is not None)

    @property
    def place(self) -> str:
        """Name of this attempt's staging directory in the staging parent."""
        return f"{self.attempt}.{self.owner}"


class _Place(NamedTuple):
    """Staging directory of an attempt, with the name of its parent."""

    attempt: int
    owner: str
    home: str

    @property
    def name(self) -> str:
        return f"{self.attempt}.{self.owner}"


def claim(directory: int, shown: str, claimant: Claimant) -> int:
    """Claim an open directory: remove the staging directories of older attempts and return a descriptor of the new one.

    Raises:
        WriterFenced: A newer attempt, or another agent's same attempt, owns the destination.
        FenceFailed: The staging directory cannot be created.
        OSError: The directory cannot be read or written.
    """
    for _ in range(CLAIMS_MAX):
        name = _home_for(directory, shown, claimant)
        with closing(_open_home(directory, name, shown)) as home:
            if _make(directory, home, name, shown, claimant):
                return _defend(directory, home, name, shown, claimant)
    raise FenceFailed(
        f"{shown}/{claimant.home} is repeatedly removed after its creation; end the process that removes it"
    )


def _home_for(directory: int, shown: str, claimant: Claimant) -> str:
    """Return the name of the staging parent to use."""
    if not _is_shared(directory):
        return claimant.home
    own = (claimant.attempt, claimant.owner)
    same = [place.home for place in _present(directory, shown, claimant) if (place.attempt, place.owner) == own]
    return same[0] if same else f"{claimant.home}-{secrets.token_hex(_TOKEN_BYTES)}"


def _is_shared(directory: int) -> bool:
    """Return whether other users may create names in an open directory."""
    return bool(os.fstat(directory).st_mode & _OTHERS_WRITE)


def _make(directory: int, home: int, name: str, shown: str, claimant: Claimant) -> bool:
    """Create the staging directory with an older attempt's files; return False if `home` was removed meanwhile."""
    present = _present(directory, shown, claimant)
    _give_way(present, claimant, shown)
    own = sorted(place for place in present if place.owner == claimant.owner)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(claimant.place, _PRIVATE, dir_fd=home)
        if own and own[-1].attempt != claimant.attempt:
            with closing(_open_private(directory, own[-1].home, shown)) as former:
                _take_over(former, own[-1].name, home, claimant.place)
        os.fsync(home)
    except FileNotFoundError:
        if not is_removed(home):
            raise WriterFenced(_fenced_message(shown)) from None
        return False
    return True


def _take_over(former: int, place: str, home: int, own: str) -> None:
    """Move partial files of an earlier attempt; not their directory, which that attempt may have open."""
    with (
        closing(open_directory(place, dir_fd=former)) as source,
        closing(open_directory(own, dir_fd=home)) as destination,
    ):
        for name in names_in(source):
            if not name.endswith((BATCH_SUFFIX, _GONE_SUFFIX)):
                os.rename(name, name, src_dir_fd=source, dst_dir_fd=destination)


def _defend(directory: int, home: int, name: str, shown: str, claimant: Claimant) -> int:
    """Check for attempts that arrived meanwhile (of two, at least one sees the other), then remove older ones."""
    present = _present(directory, shown, claimant)
    try:
        _give_way(present, claimant, shown)
    except WriterFenced:
        _remove(home, claimant.place, shown)
        if name != claimant.home:
            _remove_empty(directory, name)
        raise
    for place in present:
        if place.attempt < claimant.attempt:
            with contextlib.suppress(FileNotFoundError):
                with closing(_open_private(directory, place.home, shown)) as former:
                    _remove(former, place.name, shown)
                if place.home not in (name, claimant.home):
                    _remove_empty(directory, place.home)
    try:
        return _open_private(home, claimant.place, shown)
    except FileNotFoundError:
        raise WriterFenced(_fenced_message(shown)) from None


def is_removed(staging: int) -> bool:
    """Return whether an open directory has been removed."""
    try:
        return os.fstat(staging).st_nlink == 0
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        # File servers report it this way.
        return True


def sweep(directory: int, shown: str, claimant: Claimant) -> int:
    """Remove staging directories of this owner up to this attempt; return the number of files in them.

    Those of other owners are kept, because they may be newer than known here.

    Raises:
        FenceFailed: A staging directory cannot be entered or emptied.
        OSError: A directory cannot be read.
    """
    removed = 0
    swept = False
    for name, home in _homes(directory, shown, claimant):
        for attempt, owner in _places(home):
            if owner == claimant.owner and attempt <= claimant.attempt:
                removed += _remove(home, f"{attempt}.{owner}", shown, lasting=False)
        # Otherwise a power failure could bring it back when it is no longer looked for.
        if not _remove_empty(directory, name):
            os.fsync(home)
        swept = True
    if swept:
        os.fsync(directory)
    return removed


def _open_home(directory: int, name: str, shown: str) -> int:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, _PRIVATE, dir_fd=directory)
    return _open_private(directory, name, shown)


def _homes(directory: int, shown: str, claimant: Claimant) -> Iterator[tuple[str, int]]:
    """Yield the name and descriptor of each staging parent of a family; the descriptor is closed afterwards.

    Directories that other users could change are ignored if other users may create names here.

    Raises:
        FenceFailed: Another user could change a staging parent in an unshared directory.
        OSError: A directory cannot be read.
    """
    is_shared = _is_shared(directory)
    for name in sorted(filter(claimant.may_own, names_in(directory))):
        try:
            home = _open_private(directory, name, shown)
        except FileNotFoundError:
            continue
        except (FenceFailed, PermissionError):
            if not is_shared:
                raise
            continue
        with closing(home):
            yield name, home


def _open_private(directory: int, name: str, shown: str) -> int:
    """Open a private directory of this module.

    Raises:
        FenceFailed: Another user could change its content.
    """
    try:
        descriptor = open_directory(name, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise FenceFailed(
                f"{shown}/{name} is not a directory; remove it, because Forebay reserves the name"
            ) from error
        raise
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        os.close(descriptor)
        raise FenceFailed(
            f"{shown}/{name} belongs to another user or is writable by others; "
            "remove it, because Forebay reserves the name"
        )
    return descriptor


def _present(directory: int, shown: str, claimant: Claimant) -> list[_Place]:
    """Return all attempts of a family with a staging directory in an open destination."""
    return sorted(
        _Place(attempt, owner, name)
        for name, home in _homes(directory, shown, claimant)
        for attempt, owner in _places(home)
    )


def _places(home: int) -> list[tuple[int, str]]:
    found = (_PLACE.fullmatch(name) for name in names_in(home))
    return sorted((int(match.group(1)), match.group(2)) for match in found if match is not None)


def _give_way(present: list[_Place], claimant: Claimant, shown: str) -> None:
    """Raise WriterFenced for a newer attempt, or for another owner with the same attempt.

    Names cannot decide between two owners of the same attempt: one may have made its last check before the other
    created its directory, and be writing.
    """
    for attempt, owner, _ in present:
        if attempt > claimant.attempt:
            raise WriterFenced(
                f"attempt {attempt} writes to {shown}; attempt {claimant.attempt} is no longer the newest"
            )
        if attempt == claimant.attempt and owner != claimant.owner:
            raise WriterFenced(
                f"another agent carries out the same attempt {attempt} and writes to {shown}; this one stops"
            )


def _remove(home: int, place: str, shown: str, *, lasting: bool = True) -> int:
    """Remove a staging directory even while files are created in it; return the number of files.

    Unless `lasting`, the caller has to sync.
    """
    removed = 0
    for _ in range(REMOVALS_MAX):
        try:
            with closing(open_directory(place, dir_fd=home)) as descriptor:
                removed += _take_names(descriptor)
                # Its content goes with it, so no sync is needed.
                empty_directory(descriptor, shown=f"{shown}/{place}", lasting=False)
            os.rmdir(place, dir_fd=home)
            if lasting:
                os.fsync(home)
        except FileNotFoundError:
            return removed
        except RemovalFailed as error:
            raise FenceFailed(str(error)) from error
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return removed
    raise FenceFailed(f"an older attempt keeps creating files in {shown}; end it and retry")


def _take_names(staging: int) -> int:
    """Rename batch directories so that none is put in place while the staging directory is emptied; count the files."""
    found = 0
    for name in names_in(staging):
        gone = name
        if name.endswith(BATCH_SUFFIX):
            gone = name + _GONE_SUFFIX
            with contextlib.suppress(FileNotFoundError):
                os.rename(name, gone, src_dir_fd=staging, dst_dir_fd=staging)
        try:
            with closing(open_directory(gone, dir_fd=staging)) as inner:
                found += len(names_in(inner))
        except OSError:
            # Usually an ordinary file; otherwise its owner was faster.
            found += 1
    return found


def tidy(directory: int, claimant: Claimant) -> None:
    """Remove the staging directory if it holds nothing to resume.

    Raises:
        FenceFailed: A staging directory cannot be entered.
        OSError: A directory cannot be read.
    """
    for name, home in _homes(directory, claimant.home, claimant):
        _remove_empty(home, claimant.place)
        _remove_empty(directory, name)


def _remove_empty(directory: int, name: str) -> bool:
    """Remove a directory if it is empty; return whether it no longer exists."""
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _fenced_message(shown: str) -> str:
    return f"a newer attempt has taken over {shown}; this one may no longer write there"


BATCH_DIRECTORY_FILES_MIN: Final = 16
"""Files of one directory that justify a batch directory of their own, count: it costs about as much as two files."""


_NOT_AT_ONCE: Final = frozenset(
    {
        errno.ENOTEMPTY,
        errno.EEXIST,
        errno.ENOTDIR,
        errno.EXDEV,
        errno.EBUSY,
        errno.EPERM,
        errno.EACCES,
        errno.EINVAL,
        errno.EMLINK,
    }
)
"""Errors of renaming onto a directory after which files can still be renamed individually."""


class BatchDirectory:
    """Batch directory in use. `staging` stays the caller's. Every method may raise OSError."""

    def __init__(self, staging: int, tag: str, item: int, first: int, *, whole: bool) -> None:
        """Create the directory; `first` is the index of the group's first record.

        If `whole`, it receives all files of a directory under their own names.
        """
        self._staging = staging
        self._name = os.fsencode(f"{tag}.{item}.{first}{BATCH_SUFFIX}")
        self._descriptor = -1
        self.whole = whole
        self.files = 0
        try:
            os.mkdir(self._name, _PRIVATE, dir_fd=staging)
        except FileExistsError:
            # An interrupted run of the same attempt created it.
            empty_directory(self.descriptor(), shown=os.fsdecode(self._name))

    def descriptor(self) -> int:
        """Return its descriptor, which `close` closes."""
        if self._descriptor < 0:
            self._descriptor = open_directory(self._name, dir_fd=self._staging)
        return self._descriptor

    def close(self) -> None:
        """Close the directory until it is needed again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def takes_place(self, above: int, name: bytes, replaced: int) -> bool:
        """Replace the empty directory open as `replaced` in one rename.

        Returns False if that is impossible or would change more than the directory's content; the files are then
        renamed individually.
        """
        if _likeness(self.descriptor()) != _likeness(replaced):
            return False
        try:
            os.rename(self._name, name, src_dir_fd=self._staging, dst_dir_fd=above)
        except OSError as error:
            if error.errno not in _NOT_AT_ONCE:
                raise
            return False
        self.close()
        return True

    def remove(self) -> None:
        """Remove the empty batch directory."""
        self.close()
        os.rmdir(self._name, dir_fd=self._staging)

    def discard(self) -> None:
        """Remove it with its content as far as possible; the rest is swept later."""
        self.close()
        _discard(self._staging, os.fsdecode(self._name))


def _likeness(directory: int) -> tuple[object, ...]:
    """Return the properties of a directory other than its content: owner, permissions and access lists."""
    status = os.fstat(directory)
    try:
        attributes = {name: os.getxattr(directory, name) for name in os.listxattr(directory)}
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS):
            raise
        attributes = {}
    return status.st_dev, status.st_uid, status.st_gid, status.st_mode, attributes


def discard_all(staging: int) -> None:
    """Remove unused batch directories in a staging directory as far as possible."""
    with contextlib.suppress(OSError):
        for name in names_in(staging):
            if name.endswith(BATCH_SUFFIX):
                _discard(staging, name)


def _discard(staging: int, name: str) -> None:
    with contextlib.suppress(OSError, RemovalFailed):
        remove_tree(staging, name, shown=name)
