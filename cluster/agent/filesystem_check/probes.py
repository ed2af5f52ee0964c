"""Probes of names, files and locks.

Each does what a mover or a job does: rename(2) and unlink(2) as `transfer/fence` and the staging directories, fsync(2),
sparse files, O_DIRECT and fallocate(2) as `transfer/large_file`, link(2) as the records of transfers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator
from typing import Final

from forebay.cluster.agent.filesystem_check.probe import UNSUPPORTED, FilesystemProbe, ProbeFailed, ProbeMissing
from forebay.cluster.system import SystemClock, closing, names_in, open_directory, sync_file_system, write_all

_MIB: Final = 1024**2
_PRIVATE: Final = 0o600
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

RENAMES: Final = 200
RENAME_S: Final = 2.0
"""Renames over an existing name while another process reads it, count, and seconds after which fewer are enough: some
10 ms locally, much longer on a busy server.
"""

LARGE_BYTES: Final = 1 << 40
"""Offset tried, bytes: files of a TiB exist on any machine with a burst buffer."""

SPARSE_BYTES: Final = 64 * _MIB

USER: Final = 65_533
"""User and group that own a buffer during a probe. It is not nobody (65,534), to whom servers that squash root map it.
"""

PROBE_S: Final = 10.0
"""Seconds a probe may take. Locally each takes milliseconds."""

_NAMES: Final = (b"x" * 255, b"\xff\xfe", b"\xc3\xa9", b"e\xcc\x81", b"a\nb", b"trailing. ", b'q"*?:<>|\\')
"""A long name, one that is not UTF-8, a letter in two forms that some filesystems equate, and unusual characters."""

_ACL: Final = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, bits, owner)
    for tag, bits, owner in ((1, 6, 2**32 - 1), (2, 4, 1), (4, 4, 2**32 - 1), (16, 4, 2**32 - 1), (32, 0, 2**32 - 1))
)
"""Access list u::rw-,u:1:r--,g::r--,m::r--,o::--- as in <linux/posix_acl_xattr.h>."""


def _create(directory: int, name: str, data: bytes = b"") -> int:
    file = os.open(name, _NEW, _PRIVATE, dir_fd=directory)
    write_all(file, data)
    return file


def _rename(directory: int) -> None:
    """Replace a name from another directory while a process reads it: the reader finds it complete, always."""
    os.mkdir("staging", 0o700, dir_fd=directory)
    size = 64 * 1024
    with closing(_create(directory, "name", b"0" * size)):
        pass
    with contextlib.ExitStack() as opened:
        staging = open_directory("staging", dir_fd=directory)
        opened.callback(os.close, staging)
        stop, stopped = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        reader = os.fork()
        if reader == 0:
            os.close(stopped)
            os._exit(_read_until_closed(directory, stop, size))
        os.close(stop)
        clock = SystemClock()
        end_s = clock.monotonic_s() + RENAME_S
        try:
            for number in range(RENAMES):
                if clock.monotonic_s() > end_s:
                    break
                with closing(_create(staging, "partial", b"%d" % (number % 10) * size)):
                    pass
                os.rename("partial", "name", src_dir_fd=staging, dst_dir_fd=directory)
        finally:
            os.close(stopped)
            code = os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    if code:
        seen = {1: "a reader found no file of that name", 2: "a reader found a file that was not complete"}
        raise ProbeFailed(seen.get(code, "the reader failed"))


def _read_until_closed(directory: int, stop: int, size: int) -> int:
    """Read a name until the pipe is closed; return 0, or 1 if it was missing, or 2 if it was incomplete."""
    while True:
        try:
            with closing(os.open("name", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)) as file:
                data = os.read(file, size + 1)
        except FileNotFoundError:
            return 1
        except OSError as error:
            # On NFS a replaced file cannot be read any more (ESTALE); it was never incomplete.
            if error.errno != errno.ESTALE:
                return 3
            continue
        if len(data) != size or data.count(data[:1]) != size:
            return 2
        with contextlib.suppress(BlockingIOError):
            if not os.read(stop, 1):
                return 0


def _exclusive(directory: int) -> None:
    """Create a name once only."""
    os.mkdir("claim", 0o700, dir_fd=directory)
    with closing(_create(directory, "file")):
        pass
    with contextlib.suppress(FileExistsError):
        os.mkdir("claim", 0o700, dir_fd=directory)
        raise ProbeFailed("a directory was created twice")
    with contextlib.suppress(FileExistsError):
        os.close(_create(directory, "file"))
        raise ProbeFailed("a file was created twice with O_EXCL")


def _fence(directory: int) -> None:
    """Create a file in an open directory that was removed: this must fail."""
    os.mkdir("claim", 0o700, dir_fd=directory)
    with closing(open_directory("claim", dir_fd=directory)) as claim:
        with closing(_create(claim, "partial", b"late")):
            pass
        os.unlink("claim/partial", dir_fd=directory)
        os.rmdir("claim", dir_fd=directory)
        try:
            os.close(_create(claim, "late"))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise ProbeFailed(f"a removed directory gives {error.strerror}, not ENOENT") from error
        else:
            raise ProbeFailed("files can still be created in a removed directory")


def _fsync(directory: int) -> None:
    with closing(_create(directory, "file", b"x" * _MIB)) as file:
        os.fdatasync(file)
        os.fsync(file)
        os.fsync(directory)
        sync_file_system(file)


def _hard_links(directory: int) -> None:
    with closing(_create(directory, "file", b"x")) as file:
        os.link("file", "link", src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
        if os.fstat(file).st_nlink != 2:
            raise ProbeFailed(f"a file with two names has a link count of {os.fstat(file).st_nlink}")
    os.unlink("file", dir_fd=directory)
    with closing(os.open("link", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)) as file:
        if os.read(file, 2) != b"x":
            raise ProbeFailed("the second name leads to other data")


def _case(directory: int) -> None:
    with closing(_create(directory, "name")):
        pass
    try:
        os.close(_create(directory, "NAME"))
    except FileExistsError:
        raise ProbeFailed("`name` and `NAME` are one file") from None
    if sorted(names_in(directory)) != ["NAME", "name"]:
        raise ProbeFailed("names are changed when files are created")


def _names(directory: int) -> None:
    for name in _NAMES:
        os.close(os.open(name, _NEW, _PRIVATE, dir_fd=directory))
    found = len(names_in(directory))
    if found != len(_NAMES):
        raise ProbeFailed(f"{len(_NAMES)} names gave {found} files")


def _symbolic_links(directory: int) -> None:
    os.symlink("x" * 1000, "link", dir_fd=directory)
    if os.readlink("link", dir_fd=directory) != "x" * 1000:
        raise ProbeFailed("a symbolic link leads elsewhere")


def _permissions(directory: int) -> None:
    with closing(_create(directory, "file")) as file:
        for mode in (0o640, 0o755, 0o000):
            os.fchmod(file, mode)
            if stat.S_IMODE(os.fstat(file).st_mode) != mode:
                raise ProbeFailed(f"mode {mode:04o} became {stat.S_IMODE(os.fstat(file).st_mode):04o}")


def _ownership(directory: int) -> None:
    """Give a directory to a user, and remove what it holds, as an agent with accounts = "switch"."""
    if os.geteuid():
        raise ProbeMissing("tried as root only")
    os.mkdir("buffer", 0o700, dir_fd=directory)
    if owner := os.stat("buffer", dir_fd=directory).st_uid:
        raise ProbeFailed(f"what root creates belongs to user {owner}: the server squashes root")
    try:
        os.chown("buffer", USER, USER, dir_fd=directory)
    except PermissionError:
        raise ProbeFailed("root may not give a directory to a user: the server squashes root") from None
    if os.stat("buffer", dir_fd=directory).st_uid != USER:
        raise ProbeFailed("a directory given to a user still belongs to another")
    try:
        with closing(open_directory("buffer", dir_fd=directory)) as buffer, closing(_create(buffer, "file")):
            os.unlink("file", dir_fd=buffer)
    except PermissionError:
        raise ProbeFailed("root may not enter the private directory of a user: the server squashes root") from None


def _timestamps(directory: int) -> None:
    with closing(_create(directory, "file")) as file:
        wanted_ns = 1_234_567_890_123_456_789
        os.utime(file, ns=(wanted_ns, wanted_ns))
        found_ns = os.fstat(file).st_mtime_ns
    if found_ns // 10**9 != wanted_ns // 10**9:
        raise ProbeFailed(f"a time of modification is off by {abs(found_ns - wanted_ns) / 1e9:.3f} s")
    if found_ns != wanted_ns:
        raise ProbeMissing(f"times of modification are {abs(found_ns - wanted_ns)} ns coarse")


def _large_offset(directory: int) -> None:
    with closing(_create(directory, "file")) as file:
        try:
            os.pwrite(file, b"end", LARGE_BYTES)
        except OSError as error:
            if error.errno in (errno.EFBIG, errno.EINVAL):
                raise ProbeMissing("a file cannot have 1 TiB") from None
            raise
        if os.fstat(file).st_size != LARGE_BYTES + 3 or os.pread(file, 3, LARGE_BYTES) != b"end":
            raise ProbeFailed("what was written at 1 TiB is not there")


def _sparse(directory: int) -> None:
    with closing(_create(directory, "file")) as file:
        os.pwrite(file, b"x" * 4096, SPARSE_BYTES)
        os.fsync(file)
        held = os.fstat(file).st_blocks * 512
        if held > SPARSE_BYTES // 2:
            raise ProbeMissing(f"a hole of {SPARSE_BYTES // _MIB} MiB takes {held // _MIB} MiB")
        if os.pread(file, 4096, 0) != bytes(4096):
            raise ProbeFailed("a hole does not read as zeros")
        if os.lseek(file, 0, os.SEEK_DATA) == 0:
            raise ProbeMissing("holes are not shown (SEEK_DATA)")


def _allocation(directory: int) -> None:
    with closing(_create(directory, "file")) as file:
        os.posix_fallocate(file, 0, 4 * _MIB)
        if os.fstat(file).st_blocks * 512 < 4 * _MIB:
            raise ProbeMissing("allocated files take no blocks")


def _direct(directory: int) -> None:
    with contextlib.ExitStack() as held:
        file = os.open("file", _NEW | os.O_DIRECT, _PRIVATE, dir_fd=directory)
        held.callback(os.close, file)
        # Anonymous memory is aligned to pages.
        block = mmap.mmap(-1, _MIB)
        held.callback(block.close)
        block.write(b"d" * _MIB)
        if os.pwritev(file, [block], 0) != _MIB:
            raise ProbeFailed("a write of 1 MiB was cut off")
        with closing(os.open("file", os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)) as again:
            if os.read(again, _MIB) != b"d" * _MIB:
                raise ProbeFailed("direct writes are not visible to other readers")


def _attributes(directory: int) -> None:
    with closing(_create(directory, "file")) as file:
        value = os.urandom(1024)
        os.setxattr(file, "user.forebay", value)
        if os.getxattr(file, "user.forebay") != value or "user.forebay" not in os.listxattr(file):
            raise ProbeFailed("an extended attribute has another value")


def _access_lists(directory: int) -> None:
    with closing(_create(directory, "file")) as file:
        os.setxattr(file, "system.posix_acl_access", _ACL)
        if os.getxattr(file, "system.posix_acl_access") != _ACL:
            raise ProbeFailed("an access list has another value")


def _silly_rename(directory: int) -> None:
    """Remove an open file: NFS renames it until it is closed."""
    os.mkdir("below", 0o700, dir_fd=directory)
    with closing(open_directory("below", dir_fd=directory)) as below, closing(_create(below, "file", b"x")) as file:
        os.unlink("file", dir_fd=below)
        left = names_in(below)
        try:
            if os.pread(file, 1, 0) != b"x":
                raise ProbeFailed("a removed file that is open has other data")
        except OSError as error:
            raise ProbeFailed(f"a removed file cannot be read while it is open: {error.strerror}") from error
    if left:
        raise ProbeMissing(f"a removed file stays as {left[0][:40]!r} while it is open")


def _lock_with(lock: Callable[[int, int], None]) -> Callable[[int], None]:
    def probe(directory: int) -> None:
        with closing(_create(directory, "file", b"x")) as file:
            try:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in UNSUPPORTED:
                    raise ProbeMissing(f"locks are not supported: {error.strerror}") from None
                raise
            if _other_process_locks(directory, lock):
                raise ProbeFailed("two processes hold an exclusive lock")
            lock(file, fcntl.LOCK_UN)
            if not _other_process_locks(directory, lock):
                raise ProbeFailed("a released lock stays held")

    return probe


def _other_process_locks(directory: int, lock: Callable[[int, int], None]) -> bool:
    other = os.fork()
    if other == 0:
        try:
            lock(os.open("file", os.O_RDWR | os.O_CLOEXEC, dir_fd=directory), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os._exit(0)
        except BlockingIOError:
            os._exit(1)
        except BaseException:
            os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
    if code not in (0, 1):
        raise ProbeFailed("another process cannot try the lock")
    return code == 0


def basic_probes() -> Iterator[FilesystemProbe]:
    """Yield the probes that need no configuration. Those that movers need come first."""
    torn = "files that users see may be incomplete: do not use this filesystem"
    for name, run, needed, consequence in (
        ("rename", _rename, True, torn),
        ("exclusive create", _exclusive, True, "two movers may work on one transfer: do not use this filesystem"),
        ("fence", _fence, True, "a mover that was replaced may still write: do not use this filesystem"),
        ("fsync", _fsync, True, "staged data may be lost in a power failure"),
        ("hard links", _hard_links, True, "transfers fail: their records are links"),
        ("ownership", _ownership, not os.geteuid(), 'accounts = "switch" fails: export it with no_root_squash'),
        ("permissions", _permissions, True, "buffers may be open to other users"),
        ("case", _case, True, "files whose names differ in case replace each other"),
        ("large offset", _large_offset, True, "large files cannot be staged"),
        ("names", _names, False, "files with long or unusual names cannot be staged"),
        ("symbolic links", _symbolic_links, False, "symbolic links cannot be staged"),
        ("sparse", _sparse, False, "files with holes take their whole length"),
        ("timestamps", _timestamps, False, "times of staged files are rounded"),
        ("fallocate", _allocation, False, "a full filesystem is noticed during a copy, not before"),
        ("O_DIRECT", _direct, False, "large files are copied through the page cache"),
        ("xattr", _attributes, False, "extended attributes of staged files are lost"),
        ("acl", _access_lists, False, "jobs cannot use access lists in their buffers"),
        (
            "flock",
            _lock_with(fcntl.flock),
            False,
            "jobs that use flock(2) fail (Lustre: mount with -o flock)",
        ),
        ("fcntl lock", _lock_with(fcntl.lockf), False, "jobs that use fcntl(2) locks, such as MPI-IO, fail"),
        ("open removed file", _silly_rename, False, "a buffer can be removed only after its files are closed"),
    ):
        yield FilesystemProbe(name, run, needed, consequence, PROBE_S)
