"""The image of packaging/container: built, a cluster founded with it and run, as the head of its definition says.

The base image is a Debian 12 from Debian's own archive, so no registry is asked.
"""

import contextlib
import itertools
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.packages.build import build, committed_at
from tests.packages.campaign import Clock, run
from tests.packages.machine import StepFailed, debian
from tests.ports import free_ports
from tests.repo.tree import ROOT, text_of

DEFINITION: Final = Path("packaging/container/Containerfile")
BASE: Final = "docker.io/library/debian:bookworm-slim"
REPLICAS: Final = ("r1", "r2", "r3")
PORTS: Final = 14
"""Ports of three replicas from the first peer's to the last API's, and one to spare."""

SERVES_S: Final = 120.0
"""Seconds until replicas have founded a cluster, or another one leads."""

HOLDING: Final = "mount -t cgroup2 none /sys/fs/cgroup; echo; exec sleep infinity"
"""What holds a mount namespace: with cgroups of version 2 alone, which crun insists on, whatever the machine has."""

PLAIN: Final = ("--cgroups", "disabled", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024")
"""Options of `podman run` on a machine that may be a container itself, and give out no limit above its own."""


def documented() -> list[list[str]]:
    """Return the commands at the head of the definition, as words: build, found, run a replica r1, and ask it."""
    head = itertools.takewhile(lambda line: line.startswith("#"), text_of(DEFINITION).splitlines())
    text = "\n".join(line.lstrip("# ") for line in head).replace("\\\n", "")
    return [shlex.split(line[line.index("podman ") :]) for line in text.splitlines() if "podman " in line]


@contextlib.contextmanager
def namespace() -> Iterator[int]:
    """Yield the process that holds a mount namespace: each command has to see what another one mounted."""
    with subprocess.Popen(("unshare", "-m", "sh", "-ec", HOLDING), stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            if not holder.stdout.readline():
                raise StepFailed("cgroups of version 2 cannot be mounted here")
            yield holder.pid
        finally:
            holder.kill()


class Podman:
    """podman with storage of its own."""

    def __init__(self, work: Path, holder: int) -> None:
        """Keep everything below `work`, and mounts in the namespace of `holder`."""
        self._work = work
        inside = ("nsenter", "-t", str(holder), "-m", "--", "env", "-C", str(work / "context"))
        store = ("--root", str(work / "root"), "--runroot", str(work / "run"))
        self._words = (*inside, "podman", *store, "--cgroup-manager", "cgroupfs", "--runtime", "crun")

    def words(self, documented: Sequence[str], *more: str) -> list[str]:
        """Return a documented command for this storage and directories here; `more` are further options of its verb."""
        program, verb, *rest = documented
        assert program == "podman", documented
        here = [
            f"{self._work}{word}" if word.startswith(("/etc/forebay:", "/var/lib/forebay:")) else word for word in rest
        ]
        return [*self._words, "--events-backend", "file", verb, *(PLAIN if verb == "run" else ()), *more, *here]

    def run(self, documented: Sequence[str], *more: str) -> str:
        """Run it and return what it printed; StepFailed."""
        words = self.words(documented, *more)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StepFailed(f"{' '.join(documented)}: {done.returncode}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
        return done.stdout

    @contextlib.contextmanager
    def replica(self, documented: Sequence[str], name: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a replica until the end of the block."""
        words = self.words(of_replica(documented, name))
        with (self._work / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            with contextlib.suppress(StepFailed):
                self.run(("podman", "rm", "--force", name))
            process.wait()


def check(work: Path, base: Path, clock: Clock) -> None:
    """Do all of it; StepFailed or AssertionError where something is not as it should be."""
    context = work / "context"
    for directory in (context, work / "etc/forebay", work / "var/lib/forebay"):
        directory.mkdir(parents=True)
    with clock.step("build the package of the application"):
        build(context, work / "tree", version="1.0.0", at=committed_at(), only=("forebay-client",))
        shutil.copy2(ROOT / DEFINITION, context)
    if not base.exists():
        with clock.step("a bare Debian 12 (mmdebstrap)"):
            debian(base)
    with namespace() as holder:
        exercise(Podman(work, holder), work, base, clock)


def exercise(podman: Podman, work: Path, base: Path, clock: Clock) -> None:
    """Build the image, and run a cluster of it."""
    podman.run(("podman", "import", str(base), BASE))
    image, founding, serving, asking = documented()
    with clock.step(shlex.join(image)):
        podman.run(image, "--pull=never", "--isolation=chroot")
    with clock.step(shlex.join(founding)):
        podman.run([*founding, "--base-port", str(free_ports(PORTS)[0])])
    with contextlib.ExitStack() as stack:
        with clock.step(shlex.join(serving)):
            running = {name: stack.enter_context(podman.replica(serving, name)) for name in REPLICAS}
            leader = leading(podman, asking, set(REPLICAS))
        with clock.step("podman stop has the leader hand over and end as it should"):
            podman.run(("podman", "stop", leader))
            assert running[leader].wait() == 0, (work / f"{leader}.log").read_text()[-2000:]
            assert "transfers leadership" in (work / f"{leader}.log").read_text()
            leading(podman, asking, set(REPLICAS) - {leader})


def of_replica(documented: Sequence[str], name: str) -> list[str]:
    """Return a command that the definition has for the replica r1 for another one."""
    return [name if word == "r1" else word for word in documented]


def leading(podman: Podman, asking: Sequence[str], present: set[str]) -> str:
    """Return who leads once exactly these replicas are reached; StepFailed."""
    end_s, found = time.monotonic() + SERVES_S, dict[str, Any]()
    question = [*of_replica(asking, min(present)), "--json"]
    while time.monotonic() < end_s:
        with contextlib.suppress(StepFailed):
            found = json.loads(podman.run(question))
            if found["leader"] in present and {one["name"] for one in found["members"] if one["reachable"]} == present:
                return str(found["leader"])
    raise StepFailed(f"no leader of {sorted(present)}: {found}")


if __name__ == "__main__":
    programs = ("podman", "crun", "unshare")
    sys.exit(run("--check-image", "Build the image of packaging/container, and run a cluster of it.", check, programs))
