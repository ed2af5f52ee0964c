"""Images: a buffer that is a file system of its own, in a file beside the buffers that is mounted where the buffer is.

It is ext4, since an xfs of less than 300 MiB cannot be made. The file has all its blocks from the beginning: in one
that had not, what a job writes into room that was promised to it would fail with EIO when the disk is full, and spoil
the file system. A loop device is let go by the kernel when nobody has it mounted or open any more (LO_FLAGS_AUTOCLEAR),
so none is ever left over, whenever a process dies. Where an image and a directory of its name are, the one is mounted
on the other, now or as soon as anybody looks.
Sources: mount(2), umount(2), loop(4), <linux/loop.h>, mke2fs(8)."""

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

from cluster.agent.files.durable import is_no_room
from cluster.system import closing, names_in, open_directory

IMAGES: Final = ".images"
"""Directory of the files, in the one of the buffers; only the agent's account may look in."""

_SUFFIX: Final = ".ext4"
_UNFINISHED: Final = ".new"
"""Ends of the names of an image, and of one that is being made."""

_PRIVATE: Final = 0o700
_MIB: Final = 1024**2
_BLOCK_BYTES: Final = 4096

_INODES_LEAST: Final = 10_000
_INODE_BYTES: Final = 256
"""One inode for each block, and these: so what fits by its blocks does not fail for want of one."""

_JOURNAL_PART: Final = 64
_JOURNAL_BYTES_MIN: Final = 4 * _MIB
_JOURNAL_BYTES_MAX: Final = 128 * _MIB
"""What ext4 logs its own changes in: the least it can do with, and what more than that no longer helps."""

_TABLES_PART: Final = 128
_TABLES_BYTES: Final = 2 * _MIB
"""What bitmaps, group descriptors and copies of the superblock take, with room to spare."""

_PROGRAMS: Final = "/usr/sbin:/sbin:/usr/bin:/bin"
"""Where mkfs.ext4 may be: a path of the machine, whatever the agent was started with."""

MAKE_S_MAX: Final = 300.0
"""Seconds that mkfs.ext4 may take."""

_LOOP_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LOOP_STATUS: Final = 0x4C05
_LOOP_INFORMATION: Final = struct.Struct("=QQQQQIIII64s64s32s16s")
"""struct loop_info64: device, inode, device of the device, offset, bound; number, two of encryption, flags; names,
key."""

_LOOP_CONFIGURATION: Final = struct.Struct(f"=II{_LOOP_INFORMATION.size}s64s")
"""struct loop_config: file, block size, information, reserved."""

_AUTOCLEAR: Final = 4
_DIRECT: Final = 16
"""LO_FLAGS_DIRECT_IO: no second copy in memory, where the file system can."""

_ATTEMPTS_MAX: Final = 64
"""Free devices that somebody else may take before we do, count."""

_NOSUID_NODEV: Final = 2 | 4
_OPTIONS: Final = b"errors=remount-ro,noinit_itable"
"""The second: what ext4 would write as zeros in the background, the loop device punches out of the file."""

_ZEROED_MOST: Final = "/sys/fs/ext4/{}/extent_max_zeroout_kb"
"""How much reserved room ext4 may zero rather than to note that it is not written; that is punched out, too."""

_DETACH: Final = 2

_MOUNTS_MAX: Final = 8
"""Mounts upon each other that are taken away, count: one is ours, others an administrator's slip."""

PROBE: Final = ".probe"
"""Name of the image that an agent makes, mounts and removes at its start."""

_LOST_AND_FOUND: Final = 11
"""Inode of lost+found where mkfs.ext4 has made it."""

_libc = ctypes.CDLL(None, use_errno=True)


class ImageRefused(Exception):
    """No image can be made, or mounted, here; the message says why."""


def is_there(parent: int, name: str) -> bool:
    """Return whether the buffer of this name in an open directory is an image."""
    try:
        os.stat(f"{IMAGES}/{name}{_SUFFIX}", dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def names(parent: int) -> list[str]:
    """Return the buffers in an open directory that are images; images that nobody finished are removed. OSError."""
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
    """Make a buffer that takes so many bytes of blocks in an open directory, and mount it. Repeating it does no harm.

    FileExistsError if there is a directory of the name. ImageRefused, OSError.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(IMAGES, _PRIVATE, dir_fd=parent)
        os.fsync(parent)
    with _images(parent) as images:
        if not is_there(parent, name):
            if _is_directory(parent, name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            _make_file(images, name, most_bytes)
    # The directory beneath is the agent's: nobody else writes there if the image is not mounted.
    os.mkdir(name, _PRIVATE, dir_fd=parent)
    os.fsync(parent)
    see_mounted(parent, name)


def see_mounted(parent: int, name: str) -> None:
    """Mount the image of a buffer in an open directory, if it is one and is not mounted. ImageRefused."""
    try:
        with closing(
            os.open(f"{IMAGES}/{name}{_SUFFIX}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        ) as file:
            if not _is_mounted(parent, name):
                with closing(_loop_of(file)) as loop:
                    _mount(loop, parent, name)
        _forget_lost_and_found(parent, name)
    except FileNotFoundError:
        # It is no image, or the directory is not made yet, or has been removed.
        return
    except OSError as error:
        raise ImageRefused(f"the image of the buffer {name} cannot be mounted: {error.strerror}") from error


def move(parent: int, name: str, new: str) -> None:
    """Give a buffer that is an image another name in its directory. OSError."""
    _unmount(parent, name)
    # In this order whoever is killed leaves no image that has no directory.
    os.mkdir(new, _PRIVATE, dir_fd=parent)
    os.fsync(parent)
    with _images(parent) as images:
        os.rename(f"{name}{_SUFFIX}", f"{new}{_SUFFIX}", src_dir_fd=images, dst_dir_fd=images)
        os.fsync(images)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent)


def remove(parent: int, name: str) -> None:
    """Unmount a buffer that is an image and remove it, with all that is in it. OSError."""
    _unmount(parent, name)
    with _images(parent) as images:
        os.unlink(f"{name}{_SUFFIX}", dir_fd=images)
        os.fsync(images)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent)


def probe(parent: int) -> None:
    """Make an image in an open directory, mount it and remove it: what an agent must be able to. ImageRefused.

    OSError if there is no room for it.
    """
    if os.geteuid():
        raise ImageRefused("only root mounts images; run the agent as root")
    try:
        if is_there(parent, PROBE):
            remove(parent, PROBE)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(PROBE, dir_fd=parent)
        make(parent, PROBE, _MIB)
        if not _is_mounted(parent, PROBE):
            raise ImageRefused("an image that was mounted is not seen")
        remove(parent, PROBE)
    except OSError as error:
        if is_no_room(error):
            # Which whoever starts an agent waits for.
            raise
        raise ImageRefused(f"no image can be made in the agent's directory: {error.strerror}") from error


def image_bytes(most_bytes: int) -> int:
    """Return how long the file of an image is that holds so many bytes of blocks."""
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
    """Make an image with an empty file system, whole or not at all."""
    program = shutil.which("mkfs.ext4", path=_PROGRAMS)
    if program is None:
        raise ImageRefused(f"there is no mkfs.ext4 in {_PROGRAMS}; install e2fsprogs")
    unfinished = name + _SUFFIX + _UNFINISHED
    with contextlib.suppress(FileNotFoundError):
        os.unlink(unfinished, dir_fd=images)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with closing(os.open(unfinished, flags, 0o600, dir_fd=images)) as file:
            # It fails, rather than to write each block, where the file system cannot: so glibc is not asked.
            _check(_libc.fallocate(file, 0, ctypes.c_longlong(0), ctypes.c_longlong(image_bytes(most_bytes))))
            # Without discarding: that would give the blocks back. What they hold reads as zeros already.
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
                raise ImageRefused(f"mkfs.ext4 made no file system of the image {name}: {said or made.returncode}")
            os.fsync(file)
        os.rename(unfinished, name + _SUFFIX, src_dir_fd=images, dst_dir_fd=images)
        os.fsync(images)
    except subprocess.TimeoutExpired:
        raise ImageRefused(f"mkfs.ext4 made no file system of the image {name} within {MAKE_S_MAX:g} s") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=images)


def _is_mounted(parent: int, name: str) -> bool:
    """Return whether something is mounted on a directory in an open one, which only root can do there. OSError."""
    return os.stat(name, dir_fd=parent, follow_symlinks=False).st_dev != os.fstat(parent).st_dev


def _loop_of(file: int) -> int:
    """Return a loop device of an open image: the one that it has, since two would not know of each other. OSError."""
    status = os.fstat(file)
    major, minor = os.major(status.st_dev), os.minor(status.st_dev)
    device = minor & 0xFF | major << 8 | (minor & ~0xFF) << 12
    for entry in os.listdir("/sys/block"):
        if os.path.exists(f"/sys/block/{entry}/loop"):
            with contextlib.suppress(OSError):
                loop = os.open(f"/dev/{entry}", os.O_RDWR | os.O_CLOEXEC)
                if _backing(loop) == (device, status.st_ino):
                    # While it is open it stays what it is.
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
    raise OSError(errno.EBUSY, "others take every free loop device")


def _backing(loop: int) -> tuple[int, int]:
    """Return device and inode of the file behind an open loop device; zeros if there is none."""
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
    # Where it is not let in there, some 32 KiB of the file may have to be found again.
    with contextlib.suppress(OSError), open(_ZEROED_MOST.format(os.path.basename(source.decode())), "w") as most:
        most.write("0")


def _forget_lost_and_found(parent: int, name: str) -> None:
    with closing(open_directory(name, dir_fd=parent)) as top, contextlib.suppress(FileNotFoundError):
        found = os.stat("lost+found", dir_fd=top, follow_symlinks=False)
        if (found.st_uid, found.st_ino) == (0, _LOST_AND_FOUND):
            # e2fsck makes it too, if need be; to a job's user it would be something that he may not remove.
            with contextlib.suppress(OSError):
                os.rmdir("lost+found", dir_fd=top)


def _unmount(parent: int, name: str) -> None:
    """Take away what is mounted on the directory of a buffer. What is still open there stays until it is closed."""
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
