"""The Ansible role at three machines: founded, run twice, upgraded one after the other while jobs are submitted."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.packages.build import build, committed_at
from tests.packages.campaign import Clock, run
from tests.packages.machine import Machine, StepFailed, debian
from tests.packages.network import ADDRESS, NETWORK, key_pair, let_in, networks
from tests.repo.tree import ROOT

VERSIONS: Final = ("1.0.0~1", "1.0.0")
LONGEST_PAUSE_S: Final = 10.0
"""Seconds that one command may take while a replica is upgraded: an election or a hand-over, and much room."""


SUBMITTING: Final = """\
while [ ! -e /tmp/end ]; do
  began=$(date +%s%N)
  runuser -u alan -- env FOREBAY_CONFIG=$(echo ~alan)/.config/forebay/forebay.toml \
    forebay --identity alan submit --hold ~alan/job.sh >> /tmp/told 2>&1 || echo FAILED >> /tmp/told
  echo $(( ($(date +%s%N) - began) / 1000000 )) >> /tmp/took
done
"""
"""What a user does meanwhile: each call's answer is in /tmp/told, and how long it took, milliseconds, in /tmp/took."""


class Playbook:
    """packaging/ansible/site.yml at the machines."""

    def __init__(self, work: Path, hub: str, count: int) -> None:
        """Write the inventory."""
        self._work, self._hub = work, hub
        machines = {
            f"m{n}": {"ansible_host": f"{ADDRESS}{n}", "forebay_address": f"{ADDRESS}{n}"} for n in range(1, count + 1)
        }
        variables = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(work / "key"),
            "ansible_python_interpreter": "/usr/bin/python3",
            "forebay_pools": ["fast=1GiB/16MiB,default"],
            "forebay_source_roots": ["/home/%u"],
            "forebay_destination_roots": ["/home/%u"],
        }
        groups = {
            "forebay_controllers": {"hosts": machines},
            "forebay_agents": {"hosts": dict.fromkeys(machines, {})},
            "forebay_logins": {"hosts": {"m1": {}, "m2": {}}},
        }
        # YAML has JSON in it.
        (work / "inventory.yml").write_text(json.dumps({"all": {"vars": variables, "children": groups}}))

    def run(self, version: str) -> dict[str, int]:
        """Run it; return how many tasks changed something, by machine. StepFailed."""
        words = [
            "ip", "netns", "exec", self._hub, "ansible-playbook", "-i", str(self._work / "inventory.yml"), "site.yml",
            "-e", f"forebay_version={version}", "-e", f"forebay_packages={self._work / 'debs'}",
        ]  # fmt: skip
        environment = {**os.environ, "ANSIBLE_HOST_KEY_CHECKING": "False", "ANSIBLE_NOCOLOR": "1"}
        where = ROOT / "packaging" / "ansible"
        done = subprocess.run(words, cwd=where, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StepFailed(done.stdout[-4000:] + done.stderr[-2000:])
        return {
            name: int(count)
            for name, count in re.findall(r"^(\w+) +: ok=\d+ +changed=(\d+)", done.stdout, re.MULTILINE)
        }


def exercise(work: Path, base: Path, clock: Clock) -> None:
    """Do all of it."""
    (work / "debs").mkdir()
    with clock.step("build two versions of the packages"):
        for version in VERSIONS:
            build(work / "debs", work / "tree", version=version, at=committed_at())
    if not base.exists():
        with clock.step("a Debian 12 with sshd and python3 (mmdebstrap)"):
            debian(base, "openssh-server", "python3")
    key_pair(work / "key")
    machines = []
    with clock.step("three machines"):
        for number in (1, 2, 3):
            machine = Machine(work / f"m{number}", base)
            shutil.copytree(work / "debs", machine.root / "var/tmp/debs")
            machine.fetch(f"/var/tmp/debs/*_{VERSIONS[0]}_*.deb")
            let_in(machine, work / "key.pub")
            machines.append(machine)
    with contextlib.ExitStack() as stack:
        name = f"fb{os.getpid()}-"
        hub = stack.enter_context(networks(name, 3))
        for number, machine in enumerate(machines, 1):
            stack.enter_context(machine.booted(f"{name}{number}"))
            machine.until("systemctl is-active ssh")
            machine.run("adduser", "--disabled-password", "--gecos", "", "alan")
        playbook = Playbook(work, hub, 3)
        with clock.step("found the cluster"):
            assert all(playbook.run(VERSIONS[0]).values())
        first = machines[0]
        with clock.step("a job, with a certificate and by the gateway of another machine"):
            first.shell(
                "forebay cert issue alan --role user --into ~alan/.config/forebay/tls; "
                "cp /etc/forebay/forebay.toml ~alan/.config/forebay/; chown -R alan: ~alan/.config"
            )
            first.shell("printf '#!/bin/sh\\ntrue\\n' > job.sh", user="alan")
            first.until("forebay --identity alan submit --wait job.sh", user="alan")
            machines[1].shell("printf '#!/bin/sh\\ntrue\\n' > job.sh", user="alan")
            machines[1].shell("forebay submit --wait job.sh", user="alan")
        for number, machine in enumerate(machines, 1):
            keys_there = machine.shell("cd /etc/forebay/tls; ls *.key").split()
            own = [*([f"login{number}.key"] if number < 3 else []), f"n{number}.key", f"r{number}.key"]
            assert keys_there == own or number == 1, keys_there
        with clock.step("run again"):
            changed = playbook.run(VERSIONS[0])
            assert changed == {"m1": 0, "m2": 0, "m3": 0}, changed
        with clock.step("upgrade, with jobs submitted meanwhile"):
            # Each answer within a few seconds, none refused: never is more than one replica away.
            first.run("sh", "-c", f"({SUBMITTING}) >/dev/null 2>&1 &")
            changed = playbook.run(VERSIONS[1])
            assert all(changed.values()), changed
            first.shell("touch /tmp/end")
        told, took = first.shell("cat /tmp/told"), first.shell("cat /tmp/took").split()
        assert "FAILED" not in told, told[-2000:]
        longest_s = max(map(int, took)) / 1000
        print(f"{len(took)} jobs submitted meanwhile, the longest call {longest_s:.1f} s")
        assert longest_s < LONGEST_PAUSE_S
        for machine in machines:
            assert VERSIONS[1] in machine.run("dpkg-query", "-W", "-f", "${Version} ", "forebay-controller").split()
        with clock.step("run again"):
            changed = playbook.run(VERSIONS[1])
            assert changed == {"m1": 0, "m2": 0, "m3": 0}, changed


if __name__ == "__main__":
    sys.exit(run("--check-ansible", "Try the role at three machines.", exercise, ("ansible-playbook", *NETWORK)))
