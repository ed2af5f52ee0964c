"""System requirements of fault injection: root, tools, private mounts, networks, and death with the parent.

Everything is done in a mount namespace of our own, so that whatever happens to us, SIGKILL included, mounts, loop
devices and network namespaces go when our last process goes.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_CLONE_NEWNS = 0x0002_0000
_CLONE_NEWNET = 0x4000_0000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_PR_SET_PDEATHSIG = 1

EXT4_SHUTDOWN_NO_FLUSH = 2
"""EXT4_GOING_FLAGS_NOLOGFLUSH, which is XFS_FSOP_GOING_FLAGS_NOLOGFLUSH too: not even the journal is written."""

SHUTDOWN_REQUEST = (2 << 30) | (4 << 16) | (ord("X") << 8) | 125
"""EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: both are _IOR('X', 125, __u32)."""

EXIT_UNABLE = 77
"""Exit code where the machine lacks something, with a sentence on standard error: nothing was tested."""

NETWORKS = Path("/run/netns")
"""Where iproute2 keeps the names of network namespaces."""

_libc = ctypes.CDLL(None, use_errno=True)


class Unable(Exception):
    """This machine lacks something that the run needs; the sentence says what exactly, and how to get it."""


def require_root(what: str) -> None:
    """Refuse to go on without root: `what` says what it is needed for."""
    if os.geteuid() != 0:
        raise Unable(f"needs root to {what}: run it as root, or with sudo")


def require_tools(tools: dict[str, str]) -> None:
    """Have every tool of `tools` (name -> Debian package), installing what is missing; Unable if that fails."""
    missing = {tool: package for tool, package in tools.items() if shutil.which(tool, path=_path()) is None}
    if not missing:
        return
    packages = sorted(set(missing.values()))
    wanted = f"needs {', '.join(sorted(missing))} (Debian: {' '.join(packages)})"
    if shutil.which("apt-get") is None:
        raise Unable(f"{wanted}, and there is no apt-get here: install them yourself")
    print(f"installing Debian packages: {' '.join(packages)}", file=sys.stderr, flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "-o", "Dpkg::Lock::Timeout=120", *packages]
    complaint = ""
    for line in (install, ["apt-get", "update", "-q"], install):
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        complaint = " ".join(done.stderr.split()[-30:])
        if all(shutil.which(tool, path=_path()) for tool in missing):
            return
    raise Unable(f"{wanted}, and they could not be installed: {complaint}")


def enter_private_mounts() -> None:
    """Move this process into a mount namespace of its own, from which nothing spreads; Unable if not allowed."""
    try:
        _check(_libc.unshare(_CLONE_NEWNS))
        _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    except OSError as error:
        raise Unable(
            f"cannot have a mount namespace of its own ({error.strerror}): CAP_SYS_ADMIN is missing"
        ) from error


def enter_private_networks() -> None:
    """Have an empty list of network namespaces that nobody else sees. After enter_private_mounts."""
    NETWORKS.mkdir(exist_ok=True)
    try:
        _check(_libc.mount(b"forebay", os.fsencode(NETWORKS), b"tmpfs", ctypes.c_ulong(0), None))
    except OSError as error:
        raise Unable(f"cannot mount over {NETWORKS} ({error.strerror})") from error


def enter_network(name: str) -> None:
    """Move this thread into the network namespace `name`."""
    descriptor = os.open(NETWORKS / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(descriptor, _CLONE_NEWNET))
    finally:
        os.close(descriptor)


ENDED_S = 10.0
"""How long processes that are killed may take to be gone, seconds: a disk may be slow."""


def cgroups_with_disks(place: Path, names: Iterable[str]) -> dict[str, Path]:
    """Mount cgroup v2 at a new directory, and make a cgroup for each name whose disks can be bounded; Unable."""
    place.mkdir()
    tool("mount", "-t", "cgroup2", "none", str(place))
    if "io" not in (place / "cgroup.controllers").read_text().split():
        tool("umount", str(place))
        raise Unable("cgroup v2 does not have the controller io here: an earlier version has it")
    above = place / f"forebay-{os.getpid()}"
    above.mkdir()
    for parent in (place, above):
        (parent / "cgroup.subtree_control").write_text("+io")
    found = {name: above / name for name in names}
    for group in found.values():
        group.mkdir()
    return found


def remove_cgroups(place: Path, groups: Iterable[Path]) -> None:
    """End what still runs in cgroups, and remove them, the one above them, and the mount."""
    for group in groups:
        (group / "cgroup.kill").write_text("1")
        until_s = time.monotonic() + ENDED_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < until_s:
            time.sleep(0.01)
        group.rmdir()
        if not any(one.is_dir() for one in group.parent.iterdir()):
            group.parent.rmdir()
            tool("umount", str(place))


def shut_down_file_system(directory: int) -> None:
    """Stop the file system of an open directory as a power cut would: nothing more reaches its device, not even what
    its own journal was about to write. OSError where the file system or the kernel cannot do it."""
    fcntl.ioctl(directory, SHUTDOWN_REQUEST, struct.pack("I", EXT4_SHUTDOWN_NO_FLUSH))


def die_with_parent(also: Callable[[], None] | None = None) -> Callable[[], None]:
    """Return a preexec function: the child gets SIGKILL when the thread that started it ends. `also` runs after it."""
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        if also is not None:
            also()

    return in_child


def tool(*line: str, stdin: str | None = None) -> str:
    """Run a tool of the system to its end and return what it printed; OSError with its complaint if it failed."""
    done = subprocess.run(
        line, input=stdin, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _path()}
    )
    if done.returncode != 0:
        raise OSError(done.returncode, f"`{' '.join(line)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does: through every `finally`."""

    def interrupt(number: int, frame: object) -> None:
        # An exception raised here may fall into a callback that ignores it; asyncio.run cancels its task at SIGINT.
        signal.raise_signal(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def _path() -> str:
    # Debian's users do not have the sbin directories, where mkfs, ip and nft are.
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
