"""Private filesystems on loop devices, whose power can be cut."""

import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.faults.kernel import Unable, shut_down_file_system, tool

IMAGE_BYTES = {"ext4": 64 << 20, "xfs": 320 << 20, "btrfs": 192 << 20}
"""Size of an image: mkfs.xfs refuses less than 300 MB, mkfs.btrfs 109 MiB. Sparse: what is not used takes no space."""

MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=1"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
    "btrfs": ("mkfs.btrfs", "-q", "-f", "-K"),
}
PACKAGES = {
    "ext4": {"mkfs.ext4": "e2fsprogs"}, "xfs": {"mkfs.xfs": "xfsprogs"}, "btrfs": {"mkfs.btrfs": "btrfs-progs"}
}  # fmt: skip
TOOLS = {"mount": "mount", "umount": "mount", "losetup": "mount"}

BUSY_S = 60.0
"""How long a file system may stay busy after its last user was killed, seconds."""


def probe(directory: Path, kind: str) -> None:
    """Try once whether a file system can be made, mounted and shut down here; Unable says what cannot be done."""
    disk = Disk(directory / "probe.img", directory / "probe", kind)
    try:
        disk.format()
        disk.mount()
        disk.cut()
        disk.unmount()
    except OSError as error:
        raise Unable(f"cannot make, mount on a loop device and shut down {kind}: {error.strerror}") from error
    finally:
        disk.discard()
    disk.mount_point.rmdir()


class Disk:
    """One file system in a file, mounted at a directory. Its loop device is released with the mount."""

    def __init__(self, image: Path, mount_point: Path, kind: str, *, size_bytes: int | None = None) -> None:
        self.image = image
        self.mount_point = mount_point
        self.kind = kind
        self.size_bytes = IMAGE_BYTES[kind] if size_bytes is None else size_bytes
        self._directory: int | None = None

    @property
    def mounted(self) -> bool:
        """Whether it is mounted now."""
        return self._directory is not None

    def format(self) -> None:
        """Make a new, empty file system."""
        with self.image.open("wb") as file:
            file.truncate(self.size_bytes)
        tool(*MAKE[self.kind], str(self.image))

    def mount(self) -> None:
        """Mount it; the kernel replays its journal if it was not unmounted in peace."""
        self.mount_point.mkdir(parents=True, exist_ok=True)
        tool("mount", "-t", self.kind, "-o", "loop", str(self.image), str(self.mount_point))
        self._directory = os.open(self.mount_point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def mount_with_contents(self) -> None:
        """Mount it where files are already, and let them be durable on it."""
        with tempfile.TemporaryDirectory(dir=self.image.parent) as aside:
            if self.mount_point.is_dir():
                shutil.copytree(self.mount_point, aside, dirs_exist_ok=True)
            self.mount()
            shutil.copytree(aside, self.mount_point, dirs_exist_ok=True)
        tool("sync", "--file-system", str(self.mount_point))

    def fill(self) -> Path:
        """Use up all of its space and return the file that holds it."""
        ballast = self.mount_point / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            # Smaller and smaller pieces: until not even a block is left.
            for piece_bytes in (1 << 20, 1 << 12, 1 << 10):
                with suppress(OSError):
                    while True:
                        file.write(b"\0" * piece_bytes)
                        os.fsync(file.fileno())
        return ballast

    def cut(self) -> None:
        """Take its power away: what was not synced is lost, and every later write fails."""
        assert self._directory is not None
        shut_down_file_system(self._directory)

    def unmount(self) -> None:
        """Unmount it and release its loop device; OSError if somebody keeps using it."""
        if self._directory is None:
            return
        os.close(self._directory)
        self._directory = None
        until = time.monotonic() + BUSY_S
        while True:
            try:
                tool("umount", str(self.mount_point))
                return
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def discard(self) -> None:
        """Unmount it whatever happened and remove the image."""
        with suppress(OSError):
            self.unmount()
        self.image.unlink(missing_ok=True)
