"""A clean Debian 12 with its own systemd, in a container of systemd-nspawn: what a package is tried on."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

BOOT_S: Final = 60.0
"""Seconds until the container's systemd answers: it takes three."""

OPTIONS: Final = ("--quiet", "--register=no", "--keep-unit", "--settings=no", "--resolv-conf=copy-host")


class StepFailed(Exception):
    """A command failed; with its output."""


def debian(tarball: Path, *more: str) -> None:
    """Write a Debian 12 with systemd and without Python, and `more` packages, from Debian's own archive."""
    packages = ",".join(("systemd-sysv", "dbus", "ca-certificates", "adduser", *more))
    words = ("mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}")
    subprocess.run((*words, "bookworm", str(tarball)), check=True)


class Machine:
    """One container whose root is a directory."""

    def __init__(self, root: Path, base: Path) -> None:
        """Unpack the Debian of a tar there, or copy the one of a directory."""
        self.root: Final = root
        if base.is_dir():
            subprocess.run(("cp", "-a", "--reflink=auto", str(base), str(root)), check=True)
        else:
            root.mkdir(parents=True)
            subprocess.run(("tar", "-C", str(root), "-xf", str(base)), check=True)
        (root / "etc/machine-id").write_text("")
        self._leader = 0

    def prepare(self, *words: str) -> str:
        """Run a command before the machine boots, with this machine's network: to fetch what Debian's archive has."""
        return _run(("systemd-nspawn", *OPTIONS, "--pipe", "-D", str(self.root), "--", *words))

    def fetch(self, packages: str) -> None:
        """Fetch what packages, a pattern of this machine, depend on: once it is booted no archive is reached."""
        # What is only recommended would be asked of an archive, too.
        (self.root / "etc/apt/apt.conf.d/no-recommends").write_text('APT::Install-Recommends "false";\n')
        fetch = f"apt-get update -q && apt-get install -y -q --download-only {packages}"
        self.prepare("sh", "-ec", fetch)

    @contextlib.contextmanager
    def booted(self, network: str = "") -> Iterator[None]:
        """Have systemd run until the end of the block, in a network namespace, or in its own that leads nowhere."""
        where = f"--network-namespace-path=/run/netns/{network}" if network else "--private-network"
        words = ("systemd-nspawn", *OPTIONS, where, "--boot", "--console=pipe", "-D", str(self.root))
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._leader = _until_running(process)
            yield
        finally:
            if self._leader:
                with contextlib.suppress(StepFailed):
                    self.run("systemctl", "--no-block", "poweroff")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(BOOT_S)
            process.kill()
            process.wait()
            self._leader = 0

    def run(self, *words: str, user: str = "") -> str:
        """Run a command in it, as root or as at a login of `user`; StepFailed. Returns what it printed."""
        return _run(self._words(words, user))

    def started(self, *words: str, user: str = "") -> "subprocess.Popen[str]":
        """Start a command in it as `run` does, with pipes for what it reads and prints."""
        pipe = subprocess.PIPE
        return subprocess.Popen(self._words(words, user), stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def shell(self, line: str, user: str = "") -> str:
        """Run a line of a shell in it."""
        return self.run(line, user=user) if user else self.run("sh", "-ec", line)

    def until(self, line: str, *, within_s: float = 60.0, user: str = "") -> str:
        """Run a line of a shell again and again until it succeeds; StepFailed after `within_s`."""
        end_s = time.monotonic() + within_s
        while True:
            try:
                return self.shell(line, user)
            except StepFailed:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.2)

    def _words(self, words: Sequence[str], user: str) -> Sequence[str]:
        inside = ("nsenter", "-t", str(self._leader), "-a", "--")
        login = ("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8")
        return (*inside, *login, *(("runuser", "-l", user, "-c", " ".join(words)) if user else words))


def _until_running(process: "subprocess.Popen[bytes]") -> int:
    end_s = time.monotonic() + BOOT_S
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while time.monotonic() < end_s and process.poll() is None:
        for leader in map(int, children.read_text().split()):
            with contextlib.suppress(StepFailed):
                if _run(("nsenter", "-t", str(leader), "-a", "--", "systemctl", "is-system-running", "--wait")).strip():
                    return leader
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    raise StepFailed(f"systemd does not run in a container here (exit {process.poll()})")


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode:
        raise StepFailed(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout
