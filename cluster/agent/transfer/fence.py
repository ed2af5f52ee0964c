"""Who may write to a destination: the newest attempt, decided by the file system itself and not by anybody's clock.

In a destination directory a transfer makes its temporary files in `.forebay-FAMILY/ATTEMPT.OWNER/`, a directory of its
own, and renames them from there when they are complete. A newer attempt first makes its own such directory, then
removes those of older attempts. From then on an older one can neither make a file in what it still has open, nor find
the one that it wants to rename: both are ENOENT, however late it comes and whatever machine it runs on. An older one
that comes so late that it makes its directory afterwards finds the newer one's beside it. Of two agents that were given
the same attempt, the one that comes second gives way; where they come at once, perhaps both, never neither. If both do,
an older attempt that is there goes on until a newer one comes.

An attempt takes over the partial files of the same owner's last one, in order to go on with them. Batch directories
hold small files that nobody goes on with: they are removed, and first of all lose the name by which they could get
their place all at once.

Where other accounts may write to the destination, as to /scratch of mode 1777, they could block a name that they can
guess. There each attempt makes its directory in one of an unpredictable name, `.forebay-FAMILY-TOKEN`. Every look is at
all directories of these names that are the user's own and nobody else's; others are passed over.

All helpers of a transfer have one staging directory, and a directory takes one name at a time. So each group of small
files is written in a batch directory of its own in there, which only its helper writes to. One that has all files of a
directory that this transfer has made, and that is still empty, takes that directory's place by one rename, instead of
one for each file.
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

from cluster.agent.files import RemovalFailed, empty_directory, remove_tree
from cluster.system import closing, names_in, open_directory

_PRIVATE: Final = 0o700

BATCH_SUFFIX: Final = ".shelf"
"""How the names of directories in a staging directory end that may be renamed as a whole."""

_GONE_SUFFIX: Final = ".gone"

REMOVALS_MAX: Final = 1000
"""How often an older attempt's directory is emptied before it is given up, count: its owner may still be making files
in it, and loses as soon as one look finds it empty."""

CLAIMS_MAX: Final = 100
"""How often the directory for all attempts may vanish under an attempt that makes its own in it, count: each time an
older one was just being cleaned up."""

_PLACE: Final = re.compile(r"([0-9]{1,19})\.([0-9a-z]{1,64})", re.ASCII)

_HOME: Final = re.compile(rb"\.forebay-(?:[0-9a-f]{8}|alone)-[0-9]{1,19}(?:-[0-9a-f]{16})?")

_TOKEN: Final = re.compile(r"-[0-9a-f]{16}", re.ASCII)
_TOKEN_BYTES: Final = 8

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

_STAGING: Final = re.compile(r"[0-9]{1,19}\.[0-9a-f]{32}", re.ASCII)
"""As _PLACE, but with the ID of an agent's storage: users' directories may have names that only look alike."""


def is_home(parent: int, name: bytes, status: os.stat_result) -> bool:
    """Return whether a directory in the open one is that for all attempts of a transfer: files in it are half copied.

    The directory of another user, which cannot be read, is judged by its name and mode. OSError.
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


class Fenced(Exception):
    """Another attempt, or another agent, has the destination: this one may not write to it any more."""


class FenceFailed(Exception):
    """The destination cannot be claimed; the message is a sentence that names it and says what would be right."""


class Claimant(NamedTuple):
    """Who wants to write."""

    family: str
    """Of which only one may write: cluster and job."""
    attempt: int
    owner: str
    """The agent, by its storage: digits and small letters."""

    @property
    def home(self) -> str:
        """The name of the directory for all attempts, in a destination directory that is the user's alone."""
        return f".forebay-{self.family}"

    def may_own(self, name: str) -> bool:
        """Return whether a directory of this name in a destination may have attempts of the family in it."""
        return name == self.home or (name.startswith(self.home) and _TOKEN.fullmatch(name, len(self.home)) is not None)

    @property
    def place(self) -> str:
        """The name of the directory of this attempt, in that one."""
        return f"{self.attempt}.{self.owner}"


class _Place(NamedTuple):
    """The directory of an attempt, and the name of the one for all attempts that it is in."""

    attempt: int
    owner: str
    home: str

    @property
    def name(self) -> str:
        return f"{self.attempt}.{self.owner}"


def claim(directory: int, shown: str, claimant: Claimant) -> int:
    """Return a descriptor of the staging directory of `claimant` in the open directory, whose older ones are gone then.

    Fenced if a newer one is there, or another agent's of the same attempt; FenceFailed or OSError if it cannot be made.
    """
    for _ in range(CLAIMS_MAX):
        name = _home_for(directory, shown, claimant)
        with closing(_open_home(directory, name, shown)) as home:
            if _make(directory, home, name, shown, claimant):
                return _defend(directory, home, name, shown, claimant)
    raise FenceFailed(f"{shown}/{claimant.home} is removed as soon as it is made; end whoever does that")


def _home_for(directory: int, shown: str, claimant: Claimant) -> str:
    """Return the name of the directory for all attempts that a staging directory is to be made in."""
    if not _is_shared(directory):
        return claimant.home
    own = (claimant.attempt, claimant.owner)
    same = [place.home for place in _present(directory, shown, claimant) if (place.attempt, place.owner) == own]
    return same[0] if same else f"{claimant.home}-{secrets.token_hex(_TOKEN_BYTES)}"


def _is_shared(directory: int) -> bool:
    """Return whether others may make names in an open directory."""
    return bool(os.fstat(directory).st_mode & _OTHERS_WRITE)


def _make(directory: int, home: int, name: str, shown: str, claimant: Claimant) -> bool:
    """Make the staging directory, or take over that of an older attempt; False if `home` was removed just now."""
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
            raise Fenced(_lost(shown)) from None
        return False
    return True


def _take_over(former: int, place: str, home: int, own: str) -> None:
    """Move what an earlier attempt left half done: the files and not their directory, which that one may have open."""
    with (
        closing(open_directory(place, dir_fd=former)) as source,
        closing(open_directory(own, dir_fd=home)) as destination,
    ):
        for name in names_in(source):
            if not name.endswith((BATCH_SUFFIX, _GONE_SUFFIX)):
                os.rename(name, name, src_dir_fd=source, dst_dir_fd=destination)


def _defend(directory: int, home: int, name: str, shown: str, claimant: Claimant) -> int:
    """See who came meanwhile: whoever is not seen sees this one. Then take away what older attempts have."""
    present = _present(directory, shown, claimant)
    try:
        _give_way(present, claimant, shown)
    except Fenced:
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
        raise Fenced(_lost(shown)) from None


def is_removed(staging: int) -> bool:
    """Return whether an open directory is in no other one any more."""
    try:
        return os.fstat(staging).st_nlink == 0
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        # A file server's way to say so.
        return True


def sweep(directory: int, shown: str, claimant: Claimant) -> int:
    """Remove what the owner's attempts up to this one left in the open directory; return how many files that were.

    FenceFailed or OSError if that is not possible. Other owners' are left: they may be newer than is known here.
    """
    removed = 0
    swept = False
    for name, home in _homes(directory, shown, claimant):
        for attempt, owner in _places(home):
            if owner == claimant.owner and attempt <= claimant.attempt:
                removed += _remove(home, f"{attempt}.{owner}", shown, lasting=False)
        # Or a power cut brings it back when nobody looks for it any more.
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
    """Yield each directory for all attempts of a family, with a descriptor that is closed afterwards.

    What has such a name and could be changed by others is passed over where others may make names, and otherwise
    FenceFailed. OSError.
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
    """Open one of our directories; FenceFailed if somebody else could change what is in it."""
    try:
        descriptor = open_directory(name, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise FenceFailed(f"{shown}/{name} is no directory; remove it, the name is Forebay's") from error
        raise
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        os.close(descriptor)
        raise FenceFailed(
            f"{shown}/{name} belongs to somebody else, or others may write in it; remove it, the name is Forebay's"
        )
    return descriptor


def _present(directory: int, shown: str, claimant: Claimant) -> list[_Place]:
    """Return all attempts of a family that have a directory in an open destination."""
    return sorted(
        _Place(attempt, owner, name)
        for name, home in _homes(directory, shown, claimant)
        for attempt, owner in _places(home)
    )


def _places(home: int) -> list[tuple[int, str]]:
    found = (_PLACE.fullmatch(name) for name in names_in(home))
    return sorted((int(match.group(1)), match.group(2)) for match in found if match is not None)


def _give_way(present: list[_Place], claimant: Claimant, shown: str) -> None:
    """Raise Fenced if somebody else goes first: a newer attempt, or whoever else is there with the same.

    No order of names decides between two with the same attempt: one of them may have looked for the last time before
    the other made its directory, and writes.
    """
    for attempt, owner, _ in present:
        if attempt > claimant.attempt:
            raise Fenced(f"attempt {attempt} writes to {shown}; attempt {claimant.attempt} is not the newest any more")
        if attempt == claimant.attempt and owner != claimant.owner:
            raise Fenced(f"another agent carries out the same attempt {attempt} and writes to {shown}; this one stops")


def _remove(home: int, place: str, shown: str, *, lasting: bool = True) -> int:
    """Remove a staging directory, whoever still makes files in it; return how many files there were.

    A removal that is not `lasting` is for the caller to sync.
    """
    removed = 0
    for _ in range(REMOVALS_MAX):
        try:
            with closing(open_directory(place, dir_fd=home)) as descriptor:
                removed += _take_names(descriptor)
                # What was in it is gone with it.
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
    raise FenceFailed(f"an older attempt goes on making files in {shown}; end it, and try again")


def _take_names(staging: int) -> int:
    """See that no directory in a staging directory is renamed from there while it is being emptied; count the files."""
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
            # A file, mostly; or its owner was quicker.
            found += 1
    return found


def tidy(directory: int, claimant: Claimant) -> None:
    """Remove the staging directory if nothing is in it that the next attempt goes on with. FenceFailed, OSError."""
    for name, home in _homes(directory, claimant.home, claimant):
        _remove_empty(home, claimant.place)
        _remove_empty(directory, name)


def _remove_empty(directory: int, name: str) -> bool:
    """Remove a directory that is empty; return whether it is gone."""
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _lost(shown: str) -> str:
    return f"a newer attempt has taken over {shown}: this one may not write there any more"


BATCH_DIRECTORY_FILES_MIN: Final = 16
"""Files of one directory from which on they have a batch directory of their own, count: it costs about two files."""


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
"""What says that a directory does not take the place of another, while its files may still get their names."""


class BatchDirectory:
    """Batch directory, while it is used. `staging` stays the caller's. Every method may raise OSError."""

    def __init__(self, staging: int, tag: str, item: int, first: int, *, whole: bool) -> None:
        """Make it, empty: `first` is the index of the first record of the group.

        `whole`: it gets all files of a directory, under their own names.
        """
        self._staging = staging
        self._name = os.fsencode(f"{tag}.{item}.{first}{BATCH_SUFFIX}")
        self._descriptor = -1
        self.whole = whole
        self.files = 0
        try:
            os.mkdir(self._name, _PRIVATE, dir_fd=staging)
        except FileExistsError:
            # This same attempt was begun before.
            empty_directory(self.opened(), shown=os.fsdecode(self._name))

    def opened(self) -> int:
        """Return a descriptor of it, which is closed by `close`."""
        if self._descriptor < 0:
            self._descriptor = open_directory(self._name, dir_fd=self._staging)
        return self._descriptor

    def close(self) -> None:
        """Close it, until it is asked for again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def takes_place(self, above: int, name: bytes, replaced: int) -> bool:
        """Give it the place of an empty directory, which `replaced` is open of: at once or not at all.

        False if that is not possible, or would change more than what is in there: then files get their names one by
        one.
        """
        if _likeness(self.opened()) != _likeness(replaced):
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
        """Remove it; nothing is on it any more."""
        self.close()
        os.rmdir(self._name, dir_fd=self._staging)

    def discard(self) -> None:
        """Remove it, and what is on it, as far as that goes: the rest is swept."""
        self.close()
        _discard(self._staging, os.fsdecode(self._name))


def _likeness(directory: int) -> tuple[object, ...]:
    """Return what a directory has besides what is in it: owner, permissions, and access lists that it passes on."""
    status = os.fstat(directory)
    try:
        attributes = {name: os.getxattr(directory, name) for name in os.listxattr(directory)}
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.ENOSYS):
            raise
        attributes = {}
    return status.st_dev, status.st_uid, status.st_gid, status.st_mode, attributes


def discard_all(staging: int) -> None:
    """Remove the batch directories in a staging directory that nobody writes to any more, as far as that goes."""
    with contextlib.suppress(OSError):
        for name in names_in(staging):
            if name.endswith(BATCH_SUFFIX):
                _discard(staging, name)


def _discard(staging: int, name: str) -> None:
    with contextlib.suppress(OSError, RemovalFailed):
        remove_tree(staging, name, shown=name)
