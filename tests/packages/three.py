"""Three bare machines, from the packages to a staged job and a first drill, as docs/install/three-machines.md says.

It types the lines of the document on a fourth machine, which has what an operator keeps, and says how long each took.
"""

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Final

from tests.packages.build import build, committed_at
from tests.packages.campaign import Clock, run
from tests.packages.document import USER, Terminal, documented
from tests.packages.drill import DRILL_S, first_drill
from tests.packages.machine import Machine, debian
from tests.packages.network import NETWORK, key_pair, let_in, networks

VERSION: Final = "1.0.0"
THREE_S: Final = 1200.0
"""Seconds from three bare machines to the result of a staged job, at most."""

OPERATOR: Final = 4
"""The number of the machine at which the operator sits; 1 to 3 are those of the document."""


def check(work: Path, base: Path, clock: Clock) -> None:
    """Do all of it; StepFailed or AssertionError where something is not as it should be."""
    with clock.step("build the packages"):
        (work / "debs").mkdir()
        build(work / "debs", work / "tree", version=VERSION, at=committed_at())
    if not base.exists():
        with clock.step("a bare Debian 12 with sshd (mmdebstrap)"):
            debian(base, "openssh-server")
    key_pair(work / "key")
    machines = []
    for number in range(1, OPERATOR + 1):
        machine = Machine(work / f"m{number}", base)
        shutil.copytree(work / "debs", machine.root / "var/tmp/debs")
        let_in(machine, work / "key.pub")
        machines.append(machine)
    operator, first = machines[-1], machines[0]
    shutil.copy2(work / "key", operator.root / "root/.ssh/id_ed25519")
    # Somebody who sits there says yes.
    (operator.root / "etc/ssh/ssh_config.d/first.conf").write_text("StrictHostKeyChecking accept-new\n")
    with contextlib.ExitStack() as stack:
        with clock.within(THREE_S, "from bare Debians to the result of a staged job, on three machines"):
            with clock.step("apt-get fetches what the packages depend on, on four machines"):
                for machine in machines:
                    machine.fetch("/var/tmp/debs/*.deb")
                    if machine is not operator:
                        shutil.rmtree(machine.root / "var/tmp/debs")
            with clock.step("boot"):
                name = f"fb{os.getpid()}-"
                stack.enter_context(networks(name, OPERATOR))
                for number, machine in enumerate(machines, 1):
                    stack.enter_context(machine.booted(f"{name}{number}"))
                    machine.until("systemctl is-active ssh")
            first.run("adduser", "--disabled-password", "--gecos", "", USER)
            desk = Terminal(operator)
            desk.type("cd /var/tmp/debs")
            for _, text in documented("three machines"):
                with clock.step(text):
                    desk.type(text)
            user, printed = Terminal(first, USER), ""
            for _, text in (typed for typed in documented("one machine") if typed.user == USER):
                with clock.step(text):
                    printed = user.type(text)
            assert printed.strip() == "42", printed
        with clock.within(DRILL_S, "a first switchover drill, with what it means"):
            first_drill(desk, clock)
        with clock.step("each has its own keys, and the authority's is on none"):
            for number, machine in enumerate(machines[:-1], 1):
                agents = ["n1.key"] if machine is first else []
                gateways = ["login1.key"] if machine is first else []
                there = machine.shell("cd /etc/forebay/tls; ls *.key").split()
                assert there == sorted([*agents, *gateways, f"r{number}.key"]), there
        desk.close()
        user.close()


if __name__ == "__main__":
    sys.exit(run("--check-three", "Try the packages on three clean Debian 12 machines.", check, NETWORK))
