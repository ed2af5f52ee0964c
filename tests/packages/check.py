"""The packages in a clean Debian 12: installed and used as docs/install/one-machine.md says, upgraded, removed, purged.

It types the lines of the document, and says how long each took. Everything happens in a container with a network of
its own.
"""

import contextlib
import re
import shutil
import sys
from pathlib import Path
from typing import Final

from forebay.cluster.system import EXIT_CONFIGURATION
from tests.packages.build import SUMMARIES, build, committed_at
from tests.packages.campaign import Clock, run
from tests.packages.document import USER, Terminal, documented
from tests.packages.drill import DRILL_S, first_drill
from tests.packages.machine import Machine, StepFailed, debian

REPLICAS: Final = ("forebay-controller@r1", "forebay-controller@r2", "forebay-controller@r3")
SERVICES: Final = (*REPLICAS, "forebay-agent@n1", "forebay-gateway@local")
NEWCOMER_S: Final = 300.0
"""Seconds from a bare Debian to the result of a staged job, at most."""


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
    with contextlib.ExitStack() as stack:
        with clock.within(NEWCOMER_S, "from a bare Debian to the result of a staged job, on one machine"):
            with clock.step("apt-get fetches what the packages depend on"):
                machine.fetch("/var/tmp/0.9.0/*.deb")
            with clock.step("boot"):
                stack.enter_context(machine.booted())
            machine.run("adduser", "--disabled-password", "--gecos", "", USER)
            terminals = {"": Terminal(machine), USER: Terminal(machine, USER)}
            terminals[""].type("cd /var/tmp/0.9.0")
            printed = ""
            for user, text in documented("one machine"):
                with clock.step(text):
                    printed = terminals[user].type(text)
            assert printed.strip() == "42", printed
        with clock.within(DRILL_S, "a first switchover drill, with what it means"):
            first_drill(terminals[""], clock)
        for terminal in terminals.values():
            terminal.close()
        with clock.step("units, accounts, modes"):
            installed(machine)
        with clock.step("a script outlives its agent; who is refused is not started again; who is killed is"):
            restarts(machine)
        with clock.step("upgrade"):
            machine.shell("cd /var/tmp/1.0.0 && apt-get install -y ./forebay-*.deb")
            for name in SERVICES:
                machine.until(f"systemctl is-active {name}")
            assert "1.0.0" in machine.run("dpkg-query", "-W", "forebay-controller")
            machine.until("forebay submit --wait job.sh", user="alan")
            # What was before is there: the job of the newcomer was the first.
            assert "COMPLETED" in machine.run("forebay", "job", "show", "1")
        with clock.step("remove"):
            machine.shell("apt-get remove -y " + " ".join(SUMMARIES))
            assert not machine.shell("systemctl list-units --plain --no-legend --state=active 'forebay-*'").strip()
            assert not (machine.root / "usr/bin/forebay").is_symlink()
            assert (machine.root / "var/lib/forebay/r1/wal").is_dir()
        with clock.step("purge"):
            machine.shell("apt-get purge -y " + " ".join(SUMMARIES))
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
        assert re.search("in term|registered at revision|listens at", status), status
    assert machine.shell("stat -c %U:%a /var/lib/forebay/r1 /etc/forebay/tls/r1.key").split() == [
        "forebay:700",
        "forebay:600",
    ]
    assert machine.shell("stat -c %U /proc/$(systemctl show -P MainPID forebay-controller@r1)").strip() == "forebay"
    machine.run("systemd-analyze", "verify", "--man=no", *(f"{name}.service" for name in SERVICES))
    isolated = "import sys; print([p for p in sys.path if 'dist-packages' in p])"
    assert machine.run("/usr/lib/forebay/bin/python", "-I", "-c", isolated).strip() == "[]"


def restarts(machine: Machine) -> None:
    """See what systemd starts again, and what it leaves."""
    machine.shell(
        r"printf '#!/bin/sh\ntouch began\nuntil [ -e go ]; do sleep 0.1; done\ntouch ended\n' > long.sh", "alan"
    )
    machine.shell("forebay submit long.sh", "alan")
    machine.until("test -e began", user="alan")
    machine.run("systemctl", "restart", "forebay-agent@n1")
    machine.shell("touch go", "alan")
    machine.until("test -e ended && ! forebay queue | grep -q long.sh", user="alan")
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


if __name__ == "__main__":
    sys.exit(run("--check", "Try the packages in a clean Debian 12.", check))
