"""Image buffers: a filesystem of its own in a file, mounted on the buffer's directory.

The filesystem is ext4, because xfs needs at least 300 MiB. All blocks of the file are allocated in advance: otherwise
writes into promised space would fail with EIO on a full disk and damage the filesystem. The kernel releases a loop
device when it is neither mounted nor open (LO_FLAGS_AUTOCLEAR), so none is left over when a process dies. If an image
and a directory of its name exist, the image is mounted on the directory, at the latest on the next access. Sources:
mount(2), umount(2), loop(4), <linux/loop.h>, mke2fs(8).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from typing import Final

from forebay.cluster.agent.files.durable import is_resource_exhausted
from forebay.cluster.system import closing, names_in, open_directory

IMAGES: Final = ".images"
"""Directory of the image files, among the buffers; accessible only to the agent."""

_SUFFIX: Final = ".ext4"
_UNFINISHED: Final = ".new"
"""Suffixes of an image, and of one being created."""

_PRIVATE: Final = 0o700
_MIB: Final = 1024**2
_BLOCK_BYTES: Final = 4096

_INODES_LEAST: Final = 10_000
_INODE_BYTES: Final = 256
"""One inode for each block plus these, so that files that fit by blocks never lack an inode."""

_JOURNAL_PART: Final = 64
_JOURNAL_BYTES_MIN: Final = 4 * _MIB
_JOURNAL_BYTES_MAX: Final = 128 * _MIB
"""Size of the ext4 journal: the minimum it needs, and the size beyond which more does not help."""

_TABLES_PART: Final = 128
_TABLES_BYTES: Final = 2 * _MIB
"""Space for bitmaps, group descriptors and superblock copies, with a margin."""

_PROGRAMS: Final = "/usr/sbin:/sbin:/usr/bin:/bin"
"""Search path for mkfs.ext4, independent of the agent's environment."""

MAKE_S_MAX: Final = 300.0
"""Time limit of mkfs.ext4, seconds."""

_LOOP_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_STATUS: Final = 0x4C05
_LOOP_INFORMATION: Final = struct.Struct("=QQQQQIIII64s64s32s16s")
"""struct loop_info64: device, inode, device of the device, offset, size limit; number, two encryption fields, flags;
names, key.
"""

_LOOP_CONFIGURATION: Final = struct.Struct(f"=II{_LOOP_INFORMATION.size}s64s")
"""struct loop_config: file, block size, information, reserved."""

_AUTOCLEAR: Final = 4
_DIRECT: Final = 16
"""LO_FLAGS_DIRECT_IO: avoid a second copy in memory, where the filesystem can."""

_ATTEMPTS_MAX: Final = 64
"""Free devices that other processes may take first, count."""

_NOSUID_NODEV: Final = 2 | 4
_OPTIONS: Final = b"errors=remount-ro,noinit_itable"
"""noinit_itable: ext4 would write zeros in the background, which the loop device turns into holes."""

_ZEROED_MOST: Final = "/sys/fs/ext4/{}/extent_max_zeroout_kb"
"""Size up to which ext4 zeroes reserved blocks instead of marking them unwritten; these become holes, too."""

_DETACH: Final = 2

_MOUNTS_MAX: Final = 8
"""Stacked mounts to remove, count: one is the agent's, others an administrator's mistake."""

PROBE: Final = ".probe"
"""Name of the image that an agent creates, mounts and removes at start as a test."""

_LOST_AND_FOUND: Final = 11
"""Inode of lost+found as created by mkfs.ext4."""

_libc = ctypes.CDLL(None, use_errno=True)


class ImageFailed(Exception):
    """An image cannot be created or mounted; the message gives the reason."""


def is_there(parent: int, name: str) -> bool:
    """Return whether the named buffer in an open directory is an image."""
    try:
        os.stat(f"{IMAGES}/{name}{_SUFFIX}", dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def names(parent: int) -> list[str]:
    """Return the image buffers in an open directory, and remove unfinished images.

    Raises:
        OSError: The directory cannot be read.
    """
    found: list[str] = []
    try:
        opened = open_directory(IMAGES, dir_fd=parent)
    except FileNotFoundError:
        return found
    with closing(opened) as images:
        for name in names_in(images):
            if name.endswith(_UNFINISHED):
                os.unlink(name, dir_fd=images)
            elif name.endswith(_SUFFIX):
                found.append(name.removesuffix(_SUFFIX))
    return found


def make(parent: int, name: str, most_bytes: int) -> None:
    """Create a buffer of this many bytes in an open directory and mount it. Idempotent.

    Raises:
        FileExistsError: There is an ordinary directory of the name.
        ImageFailed: The image cannot be created or mounted.
        OSError: The disk is full or fails.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(IMAGES, _PRIVATE, dir_fd=parent)  # on the disk with the buffer's own directory, below
    with _images(parent) as images:
        if not is_there(parent, name):
            if _is_directory(parent, name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            _make_file(images, name, most_bytes)
    # The directory belongs to the agent, so no user can write there while the image is not mounted.
    os.mkdir(name, _PRIVATE, dir_fd=parent)
    os.fsync(parent)
    see_mounted(parent, name)


def see_mounted(parent: int, name: str) -> None:
    """Mount the image of a buffer in an open directory if it is not mounted; ignore other buffers.

    Raises:
        ImageFailed: The image cannot be mounted.
    """
    try:
        with closing(
            os.open(f"{IMAGES}/{name}{_SUFFIX}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        ) as file:
            if not _is_mounted(parent, name):
                with closing(_loop_of(file)) as loop:
                    _mount(loop, parent, name)
        _forget_lost_and_found(parent, name)
    except FileNotFoundError:
        # There is no image, or its directory is missing.
        return
    except OSError as error:
        raise ImageFailed(f"the image of the buffer {name} cannot be mounted: {error.strerror}") from error


def move(parent: int, name: str, new: str) -> None:
    """Rename an image buffer in its directory.

    Raises:
        OSError: The image cannot be unmounted or renamed.
    """
    _unmount(parent, name)
    # In this order an interruption never leaves an image without a directory.
    os.mkdir(new, _PRIVATE, dir_fd=parent)
    os.fsync(parent)
    with _images(parent) as images:
        os.rename(f"{name}{_SUFFIX}", f"{new}{_SUFFIX}", src_dir_fd=images, dst_dir_fd=images)
        os.fsync(images)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent)


def remove(parent: int, name: str) -> None:
    """Unmount and remove an image buffer with its content.

    Raises:
        OSError: The image cannot be unmounted or removed.
    """
    _unmount(parent, name)
    with _images(parent) as images:
        os.unlink(f"{name}{_SUFFIX}", dir_fd=images)
        os.fsync(images)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent)


def probe(parent: int) -> None:
    """Create, mount and remove a test image in an open directory.

    Raises:
        ImageFailed: The agent cannot use images here.
        OSError: There is no space.
    """
    if os.geteuid():
        raise ImageFailed("only root mounts images; run the agent as root")
    try:
        if is_there(parent, PROBE):
            remove(parent, PROBE)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(PROBE, dir_fd=parent)
        make(parent, PROBE, _MIB)
        if not _is_mounted(parent, PROBE):
            raise ImageFailed("a mounted image is not visible")
        remove(parent, PROBE)
    except OSError as error:
        if is_resource_exhausted(error):
            # The caller waits for space.
            raise
        raise ImageFailed(f"no image can be created in the agent's directory: {error.strerror}") from error


def image_bytes(most_bytes: int) -> int:
    """Return the file size of an image with this capacity in bytes."""
    tables = most_bytes // _TABLES_PART + _TABLES_BYTES
    total = most_bytes + _inodes(most_bytes) * _INODE_BYTES + _journal_bytes(most_bytes) + tables
    return -(-total // _MIB) * _MIB


def _inodes(most_bytes: int) -> int:
    return _INODES_LEAST + most_bytes // _BLOCK_BYTES


def _journal_bytes(most_bytes: int) -> int:
    return max(_JOURNAL_BYTES_MIN, min(_JOURNAL_BYTES_MAX, most_bytes // _JOURNAL_PART))


@contextlib.contextmanager
def _images(parent: int) -> Iterator[int]:
    with closing(open_directory(IMAGES, dir_fd=parent)) as images:
        yield images


def _is_directory(parent: int, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=parent, follow_symlinks=False)
        return True
    return False


def _make_file(images: int, name: str, most_bytes: int) -> None:
    """Create an image with an empty filesystem, complete or not at all."""
    program = shutil.which("mkfs.ext4", path=_PROGRAMS)
    if program is None:
        raise ImageFailed(f"mkfs.ext4 is not installed in {_PROGRAMS}; install e2fsprogs")
    unfinished = name + _SUFFIX + _UNFINISHED
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished, dir_fd=images)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with closing(os.open(unfinished, flags, 0o600, dir_fd=images)) as file:
            # Call fallocate directly: glibc's posix_fallocate would write each block where the filesystem cannot
            # allocate.
            _check(_libc.fallocate(file, 0, ctypes.c_longlong(0), ctypes.c_longlong(image_bytes(most_bytes))))
            # Do not discard, which would release the blocks. Their content already reads as zeros.
            options: tuple[str, ...] = ("-q", "-F", "-m", "0", "-b", str(_BLOCK_BYTES), "-I", str(_INODE_BYTES))
            options += ("-N", str(_inodes(most_bytes)), "-J", f"size={_journal_bytes(most_bytes) // _MIB}")
            options += ("-O", "^resize_inode", "-E", "nodiscard,lazy_itable_init=1")
            made = subprocess.run(
                [program, *options, f"/proc/self/fd/{file}"],
                pass_fds=(file,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={"PATH": _PROGRAMS, "LC_ALL": "C"},
                timeout=MAKE_S_MAX,
            )
            if made.returncode:
                said = made.stdout.decode(errors="replace").strip()[-200:]
                raise ImageFailed(f"mkfs.ext4 failed for the image {name}: {said or made.returncode}")
            os.fsync(file)
        os.rename(unfinished, name + _SUFFIX, src_dir_fd=images, dst_dir_fd=images)
        os.fsync(images)
    except subprocess.TimeoutExpired:
        raise ImageFailed(f"mkfs.ext4 did not finish the image {name} within {MAKE_S_MAX:g} s") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=images)


def _is_mounted(parent: int, name: str) -> bool:
    """Return whether a filesystem is mounted on a directory in an open one, which only root can do there.

    Raises:
        OSError: The directory does not exist.
    """
    return os.stat(name, dir_fd=parent, follow_symlinks=False).st_dev != os.fstat(parent).st_dev


def _loop_of(file: int) -> int:
    """Return a loop device of an open image, reusing an existing one: two would not be coherent.

    Raises:
        OSError: No device is available.
    """
    status = os.fstat(file)
    major, minor = os.major(status.st_dev), os.minor(status.st_dev)
    device = minor & 0xFF | major << 8 | (minor & ~0xFF) << 12
    for entry in os.listdir("/sys/block"):
        if os.path.exists(f"/sys/block/{entry}/loop"):
            with contextlib.suppress(OSError):
                loop = os.open(f"/dev/{entry}", os.O_RDWR | os.O_CLOEXEC)
                if _backing(loop) == (device, status.st_ino):
                    # An open device keeps its configuration.
                    return loop
                os.close(loop)
    with closing(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)) as control:
        for _ in range(_ATTEMPTS_MAX):
            loop = os.open(f"/dev/loop{fcntl.ioctl(control, _LOOP_FREE)}", os.O_RDWR | os.O_CLOEXEC)
            information = bytearray(
                _LOOP_INFORMATION.pack(0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR | _DIRECT, b"forebay", b"", b"", b"")
            )
            wanted = bytearray(_LOOP_CONFIGURATION.pack(file, 0, bytes(information), b""))
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, wanted)
                return loop
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:
                    raise
    raise OSError(errno.EBUSY, "other processes take every free loop device")


def _backing(loop: int) -> tuple[int, int]:
    """Return device and inode of the file behind an open loop device, or zeros."""
    information = bytearray(_LOOP_INFORMATION.size)
    try:
        fcntl.ioctl(loop, _LOOP_STATUS, information)
    except OSError:
        return 0, 0
    device, inode = _LOOP_INFORMATION.unpack(information)[:2]
    return device, inode


def _mount(loop: int, parent: int, name: str) -> None:
    source = os.readlink(f"/proc/self/fd/{loop}").encode()
    handle_flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing(os.open(name, handle_flags, dir_fd=parent)) as handle:
        target = f"/proc/self/fd/{handle}".encode()
        _check(_libc.mount(source, target, b"ext4", ctypes.c_ulong(_NOSUID_NODEV), _OPTIONS))
    # Without permission for this, about 32 KiB of the file may have to be allocated again.
    with contextlib.suppress(OSError), open(_ZEROED_MOST.format(os.path.basename(source.decode())), "w") as most:
        most.write("0")


def _forget_lost_and_found(parent: int, name: str) -> None:
    with closing(open_directory(name, dir_fd=parent)) as top, contextlib.suppress(FileNotFoundError):
        found = os.stat("lost+found", dir_fd=top, follow_symlinks=False)
        if (found.st_uid, found.st_ino) == (0, _LOST_AND_FOUND):
            # e2fsck recreates it if needed; a job's user could not remove it.
            with contextlib.suppress(OSError):
                os.rmdir("lost+found", dir_fd=top)


def _unmount(parent: int, name: str) -> None:
    """Unmount everything from a buffer's directory. Open files stay accessible until they are closed."""
    with contextlib.suppress(FileNotFoundError):
        for _ in range(_MOUNTS_MAX):
            if not _is_mounted(parent, name):
                return
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            with closing(os.open(name, flags, dir_fd=parent)) as handle:
                _check(_libc.umount2(f"/proc/self/fd/{handle}".encode(), _DETACH))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
