"""The packages in a clean Debian 12: installed and used as docs/operations.md says, upgraded, removed, purged.

It types the lines of the document, and says how long each took. Everything happens in a container with a network of
its own. Its last line is JSON; exit 77: this machine cannot, and why.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cluster.system import EXIT_CONFIGURATION
from tests.packages.build import build, committed_at
from tests.packages.machine import Machine, StepFailed, debian
from tests.repo.tree import text_of

EXIT_IMPOSSIBLE: Final = 77
NEEDED: Final = ("mmdebstrap", "systemd-nspawn", "nsenter", "dpkg-deb")
SERVICES: Final = ("forebay-controller@r1", "forebay-controller@r2", "forebay-controller@r3", "forebay-agent@n1")
NEWCOMER_S: Final = 300.0
"""Seconds from a bare Debian to the result of a staged job, at most."""


class Clock:
    """Steps with how long they took."""

    def __init__(self) -> None:
        """Begin with none."""
        self.steps: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Time a step, and print it."""
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
        self.steps.append((what, round(took_s, 1)))
        print(f"{took_s:7.1f} s  {what[:110]}", flush=True)


def documented() -> Iterator[tuple[str, str]]:
    """Yield (user, line) for each line that the document has a newcomer type."""
    text = text_of(Path("docs/operations.md"))
    block = text.partition("<!-- begin: install")[2].partition("<!-- end -->")[0]
    user = ""
    for line in block.splitlines():
        if re.match(r"And as alan", line):
            user = "alan"
        if line.startswith("    "):
            yield user, line.strip()


def check(work: Path, base: Path, clock: Clock) -> None:
    """Do all of it; StepFailed or AssertionError where something is not as it should be."""
    with clock.step("build two versions of the packages"):
        for version in ("0.9.0", "1.0.0"):
            (work / version).mkdir()
            build(work / version, work / "tree", version=version, at=committed_at())
    if not base.exists():
        with clock.step("a bare Debian 12 (mmdebstrap)"):
            debian(base)
    machine = Machine(work / "root", base)
    home = machine.root / "var/tmp"
    for version in ("0.9.0", "1.0.0"):
        shutil.copytree(work / version, home / version)
    began = len(clock.steps)
    with clock.step("apt-get fetches what the packages depend on"):
        machine.prepare(
            "sh",
            "-ec",
            "apt-get update -q && apt-get install -y -q --no-install-recommends --download-only /var/tmp/0.9.0/*.deb",
        )
    with clock.step("boot"):
        stack = contextlib.ExitStack()
        stack.enter_context(machine.booted())
    with stack:
        machine.run("adduser", "--disabled-password", "--gecos", "", "alan")
        for user, line in documented():
            line = line.replace("apt-get install", "cd /var/tmp/0.9.0 && apt-get install --no-install-recommends")
            with clock.step(line):
                printed = machine.shell("cd; " + line, user)
        assert printed.strip() == "42", printed
        newcomer_s = sum(took_s for _, took_s in clock.steps[began:])
        print(f"{newcomer_s:7.1f} s  from a bare Debian to the result of a staged job")
        assert newcomer_s < NEWCOMER_S
        with clock.step("units, accounts, modes"):
            installed(machine)
        with clock.step("a script outlives its agent; who is refused is not started again; who is killed is"):
            restarts(machine)
        with clock.step("upgrade"):
            machine.shell("cd /var/tmp/1.0.0 && apt-get install -y ./forebay-*.deb")
            for name in SERVICES:
                machine.until(f"systemctl is-active {name}")
            assert "1.0.0" in machine.run("dpkg-query", "-W", "forebay-controller")
            machine.until("forebay --identity alan submit --wait job.sh", user="alan")
            # What was before is there: the job of the newcomer was the first.
            assert "COMPLETED" in machine.run("forebay", "job", "show", "1")
        with clock.step("remove"):
            machine.shell("apt-get remove -y forebay-controller forebay-agent forebay-client")
            assert not machine.shell("systemctl list-units --plain --no-legend --state=active 'forebay-*'").strip()
            assert not (machine.root / "usr/bin/forebay").is_symlink()
            assert (machine.root / "var/lib/forebay/r1/wal").is_dir()
        with clock.step("purge"):
            machine.shell("apt-get purge -y forebay-controller forebay-agent forebay-client")
            left = machine.shell(
                "find / -xdev -iname '*forebay*' -not -path '/var/tmp/*' -not -path '/home/*' -not -path '/proc/*' "
                "-not -path '/sys/*' -not -path '/var/cache/*' -not -path '/var/log/*' -not -path '/tmp/*'"
            ).split()
            left = [path for path in left if not path.startswith(("/etc/forebay", "/var/lib/forebay"))]
            assert left == [], left
            assert (machine.root / "etc/forebay/tls/ca.key").exists()


def installed(machine: Machine) -> None:
    """See what runs, as whom, and what systemd thinks of the units."""
    for name in SERVICES:
        assert machine.run("systemctl", "is-active", name).strip() == "active"
        status = machine.run("systemctl", "show", "-P", "StatusText", name)
        assert "in term" in status or "registered at revision" in status, status
    assert machine.shell("stat -c %U:%a /var/lib/forebay/r1 /etc/forebay/tls/r1.key").split() == [
        "forebay:700",
        "forebay:600",
    ]
    assert machine.shell("stat -c %U /proc/$(systemctl show -P MainPID forebay-controller@r1)").strip() == "forebay"
    machine.run("systemd-analyze", "verify", "--man=no", "forebay-controller@r1.service", "forebay-agent@n1.service")
    isolated = "import sys; print([p for p in sys.path if 'dist-packages' in p])"
    assert machine.run("/usr/lib/forebay/bin/python", "-I", "-c", isolated).strip() == "[]"


def restarts(machine: Machine) -> None:
    """See what systemd starts again, and what it leaves."""
    machine.shell(
        r"printf '#!/bin/sh\ntouch began\nuntil [ -e go ]; do sleep 0.1; done\ntouch ended\n' > long.sh", "alan"
    )
    machine.shell("forebay --identity alan submit long.sh", "alan")
    machine.until("test -e began", user="alan")
    machine.run("systemctl", "restart", "forebay-agent@n1")
    machine.shell("touch go", "alan")
    machine.until("test -e ended && ! forebay --identity alan queue | grep -q long.sh", user="alan")
    main = "systemctl show -P MainPID forebay-controller@"
    killed = machine.shell(f"{main}r2").strip()
    machine.shell(f"kill -KILL {killed}")
    machine.until(f"p=$({main}r2); [ $p -gt 0 ] && [ $p != {killed} ] && systemctl is-active forebay-controller@r2")
    # One that stands still says nothing: its own watchdog, but sooner.
    machine.shell(
        "mkdir -p /run/systemd/system/forebay-controller@r3.service.d; cd /run/systemd/system; "
        "printf '[Service]\\nWatchdogSec=3\\n' > forebay-controller@r3.service.d/soon.conf; "
        "systemctl daemon-reload; systemctl restart forebay-controller@r3"
    )
    still = machine.shell(f"{main}r3").strip()
    machine.shell(f"sleep 7; [ $({main}r3) = {still} ]")  # one that is idle is left alone
    machine.shell(f"kill -STOP {still}")
    machine.until(f"p=$({main}r3); [ $p -gt 0 ] && [ $p != {still} ] && systemctl is-active forebay-controller@r3")
    # The same for a majority that is away: no start would help.
    machine.run("systemctl", "stop", "forebay-controller@r1", "forebay-controller@r2")
    alone = machine.shell(f"{main}r3").strip()
    machine.shell(f"sleep 7; [ $({main}r3) = {alone} ]")
    machine.run("systemctl", "start", "forebay-controller@r1", "forebay-controller@r2")
    # A replica that no file names: refused, and not started again.
    with contextlib.suppress(StepFailed):
        machine.run("systemctl", "start", "forebay-controller@r9")
    shown = machine.run("systemctl", "show", "-P", "ExecMainStatus", "-P", "NRestarts", "forebay-controller@r9").split()
    assert shown in ([str(EXIT_CONFIGURATION), "0"], ["0", str(EXIT_CONFIGURATION)]), shown


def main() -> int:
    """Check what this tree builds."""
    parser = argparse.ArgumentParser(
        prog="scripts/package --check", description="Try the packages in a clean Debian 12."
    )
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help="a tar of a bare Debian 12, made if it is not there")
    chosen = parser.parse_args()
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        print(
            f"scripts/package --check: {'missing: ' + ', '.join(missing) if missing else 'it needs root'}",
            file=sys.stderr,
        )
        return EXIT_IMPOSSIBLE
    work, clock = Path(tempfile.mkdtemp(prefix="forebay-packages-")), Clock()
    failed = ""
    try:
        check(work, (chosen.base or work / "base.tar").resolve(), clock)
    except (StepFailed, AssertionError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        failed = f"{type(error).__name__} at line {place.lineno} ({place.line}): {error}"
        print(f"scripts/package --check: after {clock.steps[-1:]}: {failed}", file=sys.stderr)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({"ok": not failed, "steps": clock.steps}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
