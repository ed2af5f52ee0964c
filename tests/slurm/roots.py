"""Root directories that hold the Slurm of a Debian suite, and commands run in them in namespaces of their own.

A root is built once by mmdebstrap, in one to four minutes, and cached; its Slurm stays at the version
that the suite had on that day.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from tests.repo.tree import ROOT


class Release(NamedTuple):
    """A release of Slurm: the Debian suite that has it, and the packages that a root needs beside `PACKAGES`."""

    suite: str
    more: tuple[str, ...] = ()


RELEASES: Final = {
    "22.05": Release("bookworm"),
    "24.11": Release("trixie"),
    # Not every package of requirements.lock has a wheel for the newest Python.
    "26.05": Release("sid", ("gcc", "libc6-dev", "python3-dev")),
}
"""Releases that exercises run with, oldest first."""

PACKAGES: Final = (
    "slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "python3", "python3-venv",
    "ca-certificates", "procps", "iproute2", "util-linux",
)  # fmt: skip

NEEDED: Final = ("mmdebstrap", "unshare", "chroot", "ip")
"""Programs of this machine that build a root and enter it."""

TREE: Final = "/forebay"
"""Where a root has this tree."""

ADDRESS: Final = "192.0.2.1"
"""Address of the loopback device in a root without a network (RFC 5737, for documentation): slurmctld exits where the
resolver finds only addresses of 127.0.0.0/8.
"""

LOOK_S: Final = 86_400
"""Seconds between two looks at whether a suite has a newer Slurm: once a day."""

UNUSED_S: Final = 14 * 86_400
"""Seconds after which the Python packages of a tree that nobody used are removed from the cache."""

_ENTER: Final = """
set -e
root=$1; tree=$2; venv=$3; scratch=$4; address=$5; shift 5
mount --make-rprivate /
mount --bind "$root" "$root"
mkdir -p "$root/forebay"
mount --bind "$tree" "$root/forebay"
mount --bind "$venv" "$root/forebay/.venv"
mount --bind "$scratch" "$root/tmp"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=755 run "$root/run"
hostname localhost
[ -e "$root/etc/hosts" ] || printf '127.0.0.1 localhost\\n' >"$root/etc/hosts"
if [ -n "$address" ]; then
  ip link set lo up
  ip address add "$address/32" dev lo
fi
exec chroot "$root" "$@"
"""
"""Shell script that mounts what a root needs in a new mount namespace, and goes on as the command in the root.

The root is a mount of its own: `unshare --mount` inside it, which each host of the exercise `takeover` needs, changes
the propagation of `/` and fails where `/` is none.
"""

_FROM_HOST: Final = ("etc/resolv.conf", "etc/ssl/certs/ca-certificates.crt")
"""Files that a root has from this machine, so that its pip reaches the package index as this machine's does."""

_APT: Final = ('APT::Install-Recommends "false"', 'Acquire::Check-Valid-Until "false"')
"""Options of apt. A mirror that stands still is fine: the lists are signed, and their version is what counts."""

_VERSION: Final = re.compile(r"^(\d+:)?(\d+\.\d+)\.")


class RootError(Exception):
    """A root cannot be built or entered; the message names the release, the cause and the remedy."""


class Root:
    """The cached root of one release."""

    def __init__(self, release: str, cache: Path | None = None) -> None:
        """`cache`: the directory of all roots, by default below XDG_CACHE_HOME."""
        self.release: Final = release
        self.suite: Final = RELEASES[release].suite
        self._cache = (cache or cache_directory()) / release
        self.directory: Final = self._cache / "root"
        self._moved = self._cache / "moved"

    @property
    def version(self) -> str:
        """Debian's version of the Slurm in this root; empty while the root is not built."""
        file = self._cache / "version"
        return file.read_text().strip() if file.exists() else ""

    def build(self, *, renew: bool = False) -> None:
        """Build the root unless it is there; RootError where that fails. `renew`: replace it."""
        self._cache.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if self.version and not renew:
                return
            new = self._cache / "root.new"
            _remove(new)
            print(f"scripts/slurm: building a Debian {self.suite} with Slurm {self.release}", file=sys.stderr)
            packages = ",".join((*PACKAGES, *RELEASES[self.release].more))
            options = ("--quiet", "--variant=minbase", *(f"--aptopt={option}" for option in _APT))
            done = subprocess.run(
                ("mmdebstrap", *options, f"--include={packages}", self.suite, str(new)),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                _remove(new)
                said = next((line for line in done.stderr.splitlines() if line.startswith("E: ")), "mmdebstrap failed")
                raise RootError(
                    f"Slurm {self.release}: the Debian {self.suite} could not be built ({said}); "
                    "this needs root and a network that reaches a Debian mirror"
                )
            version = _installed(new)
            if release_of(version) != self.release:
                _remove(new)
                raise RootError(
                    f"Slurm {self.release}: Debian {self.suite} now has Slurm {version}; "
                    f"add its release to RELEASES in tests/slurm/roots.py"
                )
            (self._cache / "version").unlink(missing_ok=True)
            _remove(self.directory)
            new.rename(self.directory)
            (self._cache / "version").write_text(f"{version}\n")
            self._moved.write_text(f"{version}\n")

    def moved(self) -> str:
        """Return the version that the suite has now if that is not the root's, else an empty string.

        Looks once a day, and trusts its last look where there is no network.
        """
        looked_s = self._moved.stat().st_mtime if self._moved.exists() else 0.0
        if time.time() - looked_s > LOOK_S:
            with self._alone():
                newest = self._newest() or (self._moved.read_text().strip() if self._moved.exists() else "")
                self._moved.write_text(f"{newest}\n")
        newest = self._moved.read_text().strip()
        return "" if newest in ("", self.version) else newest

    def _newest(self) -> str:
        if self.ask("apt-get", "-qq", "update").returncode != 0:
            return ""
        shown = self.ask("apt-cache", "policy", "slurmctld").stdout
        found = re.search(r"Candidate: (\S+)", shown)
        return "" if found is None else found[1]

    def set_up(self) -> None:
        """Install the Python packages of this tree for the root's Python; RootError where that fails."""
        venvs = self._cache / "venvs"
        for other in venvs.iterdir() if venvs.exists() else ():
            if time.time() - other.stat().st_mtime > UNUSED_S:
                _remove(other)
        venv = self._venv()
        venv.mkdir(parents=True, exist_ok=True)
        os.utime(venv)
        done = self.ask(f"{TREE}/scripts/setup", "--quiet")
        if done.returncode != 0:
            said = " / ".join(done.stderr.strip().splitlines()[-2:])
            raise RootError(
                f"Slurm {self.release}: the Python packages could not be installed in {self.directory} ({said}); "
                "this needs a network that reaches the Python package index"
            )

    def words(self, command: Sequence[str], scratch: Path, *, network: bool = False) -> list[str]:
        """Return the command line that runs a command in the root, as root and in namespaces of its own.

        `scratch`: its /tmp; `network`: with this machine's network instead of a loopback device of its own.
        """
        for name in _FROM_HOST:
            source, target = Path("/") / name, self.directory / name
            if source.exists():
                # Two runs in one root may be two threads of one process.
                new = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}")
                shutil.copyfile(source, new)
                new.rename(target)
        venv = self._venv()
        venv.mkdir(parents=True, exist_ok=True)
        spaces = ("--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc", *(() if network else ("--net",)))
        paths = (str(self.directory), str(ROOT), str(venv), str(scratch))
        return ["unshare", *spaces, "sh", "-c", _ENTER, "sh", *paths, "" if network else ADDRESS, *command]

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a directory for the /tmp of a command, and remove it afterwards if the command left nothing there."""
        (self._cache / "tmp").mkdir(exist_ok=True)
        directory = Path(tempfile.mkdtemp(dir=self._cache / "tmp"))
        directory.chmod(0o1777)
        try:
            yield directory
        finally:
            with suppress(OSError):
                directory.rmdir()

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the root with this machine's network, and return it with its output."""
        with self.scratch() as scratch:
            line = self.words(command, scratch, network=True)
            done = subprocess.run(
                line, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            for path in scratch.iterdir():
                path.unlink() if not path.is_dir() else shutil.rmtree(path)
            return done

    def _venv(self) -> Path:
        """Return the directory of this tree's Python packages: trees that need others have their own."""
        digest = hashlib.sha256()
        for name in ("requirements.lock", "pyproject.toml", "scripts/setup"):
            digest.update((ROOT / name).read_bytes())
        return self._cache / "venvs" / digest.hexdigest()[:12]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from building the same root."""
        with (self._cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def cache_directory() -> Path:
    """Return the directory that roots are cached in."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay" / "slurm"


def release_of(version: str) -> str:
    """Return the release of a Debian version, for example 24.11 of 24.11.5-4; empty if it is none of Slurm's."""
    found = _VERSION.match(version)
    return "" if found is None else found[2]


def unable() -> str:
    """Return why this machine can neither build nor enter a root, as a sentence; empty if it can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if absent := [name for name in NEEDED if shutil.which(name, path=path) is None]:
        return f"missing: {', '.join(absent)}; as root: apt-get install mmdebstrap util-linux coreutils iproute2"
    if os.geteuid() != 0:
        return "a root directory with another Slurm is built and entered by root only"
    return ""


def environment() -> dict[str, str]:
    """Return the environment in a root: this machine's settings of pip and proxies, and nothing else of it."""
    kept = {key: value for key, value in os.environ.items() if key.startswith("PIP_") or key.lower().endswith("_proxy")}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {**kept, "HOME": "/root", "LANG": "C.UTF-8", "PATH": path, "TERM": "dumb"}


def _installed(root: Path) -> str:
    command = ("dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f", "${Version}", "slurmctld")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _remove(directory: Path) -> None:
    """Remove a directory if it is there."""
    if directory.exists():
        shutil.rmtree(directory)
