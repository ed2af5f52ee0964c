"""Three machines of a cluster under systemd, an operator's machine, and a user whose jobs come all the time."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.packages.document import USER
from tests.packages.machine import Machine

PREFIX: Final = "10"
DESK: Final = 4
"""The number of the operator's machine, and of the replica that may be added."""

REPLICAS: Final = ("r1", "r2", "r3")
UNITS: Final = {
    **{f"forebay-controller@{name}": number for number, name in enumerate(REPLICAS, 1)},
    "forebay-agent@n1": 1,
    "forebay-gateway@login1": 1,
}
"""What runs where."""

SITE: Final = "/var/tmp/site"
OPERATOR: Final = f"FOREBAY_CONFIG={SITE}/forebay.toml FOREBAY_IDENTITY=operator"
DISK: Final = "256M"
MAP_SIZE: Final = "64MiB"
SNAPSHOT_EVERY: Final = 500
PATIENCE_S: Final = 120.0
JOURNAL_LINES: Final = 25

JOB: Final = """\
cd; echo 41 > in; rm -f out
printf '%s\\n' '#!/bin/sh' '#DW jobdw capacity=16MiB access_mode=striped type=scratch' \
  "#DW stage_in type=file source=$HOME/in destination=\\$DW_JOB_STRIPED/in" \
  "#DW stage_out type=file source=\\$DW_JOB_STRIPED/out destination=$HOME/out" \
  'expr $(cat $DW_JOB_STRIPED/in) + 1 > $DW_JOB_STRIPED/out' > job.sh
printf '#!/bin/sh\\ntrue\\n' > held.sh
"""
"""The job of "Install", and one that only stands in the state."""

WHOLE: Final = """\
import json, subprocess, sys
def shown(*words):
    return json.loads(subprocess.run(["forebay", *words, "--json"], capture_output=True, check=True).stdout)
found = shown("cluster", "members")
names = sorted(one["name"] for one in found["members"])
sound = all(one["votes"] and one["reachable"] and not one["lag_entries"] for one in found["members"])
status = [one["status"] for name in names for one in shown("cluster", "probe", name)["replicas"]]
ready = all(one and one["ready"] for one in status)
up = [one["name"] for one in shown("node", "list")["nodes"] if one["state"] == "UP"]
assert names == sys.argv[1:] and sound and ready and found["leader"] and up == ["n1"], (found, up)
"""
"""A program that succeeds when the members are those named and the cluster is whole."""

SUBMITTING: Final = (
    "while [ ! -e /tmp/end ]; do forebay submit --hold ~/held.sh >> told 2>> refused || true; sleep 0.2; done"
)
"""What the user does: each answer is a line that names a job."""


class UnitSite:
    """The machines, and what an operator types there."""

    def __init__(self, machines: dict[int, Machine], newer: str) -> None:
        """Take over machines that run; `newer`: the version of the packages to upgrade to."""
        self.machines = machines
        self.newer = newer
        self.members = list(REPLICAS)
        self.settled = ""
        self.forgets = False
        """Whether the present row may lose what was acknowledged, as it announces."""

    # ---- machines

    def at(self, name: str) -> Machine:
        """Return the machine of a replica."""
        return self.machines[int(name[1:])]

    def address(self, name: str) -> str:
        """Return the address that a replica had at the beginning."""
        return f"10.0.0.{name[1:]}"

    def sh(self, name: str, line: str) -> str:
        """Type a line as root on a replica's machine; StepFailed."""
        return self.at(name).shell(line)

    def typed(self, words: str) -> str:
        """Type a command of forebay as the operator, and return what it prints, errors too; StepFailed."""
        return self.machines[DESK].shell(f"cd {SITE}; {OPERATOR} forebay {words} 2>&1")

    def shown(self, words: str) -> Any:
        """Return what a command prints as JSON."""
        return json.loads(self.machines[DESK].shell(f"cd {SITE}; {OPERATOR} forebay {words} --json"))

    def until(self, line: str, *, at: str = "", within_s: float = PATIENCE_S) -> str:
        """Type a line until it succeeds, as the operator, or as root at a replica's machine."""
        machine = self.at(at) if at else self.machines[DESK]
        return machine.until(line if at else f"cd {SITE}; {OPERATOR} {line}", within_s=within_s)

    def unit(self, name: str) -> str:
        """Return the unit of a replica."""
        return f"forebay-controller@{name}"

    def pid(self, name: str) -> int:
        """Return the main process of a replica's unit; 0 if none runs."""
        return int(self.sh(name, f"systemctl show -P MainPID {self.unit(name)}"))

    def found(self) -> None:
        """Found the cluster as "Three machines, step by step" says."""
        for name in REPLICAS:
            self.mount(name)
        hosts = ",".join(f"{name}={self.address(name)}" for name in REPLICAS)
        self.machines[DESK].shell(
            f"forebay cluster init {SITE} --host {hosts} --node n1=10.0.0.1 --data-directory /var/lib/forebay "
            "--replica-account forebay --pool fast=1GiB/16MiB,default "
            "--source-root /home/%u --destination-root /home/%u"
        )
        self.typed(f"cert issue login1 --role gateway --into {SITE}/hosts/10.0.0.1/tls")
        self.machines[DESK].shell(
            f'sed -i \'s/map_size = "16GiB"/map_size = "{MAP_SIZE}"/; '
            f"s/snapshot_every_entries = 10000/snapshot_every_entries = {SNAPSHOT_EVERY}/' "
            f"{SITE}/forebay.toml {SITE}/hosts/*/forebay.toml"
        )
        bundles = self.machines[DESK].root / SITE[1:] / "hosts"
        for name in REPLICAS:
            shutil.copytree(bundles / self.address(name), self.at(name).root / "etc/forebay", dirs_exist_ok=True)
        for name in REPLICAS:
            self.sh(name, "sh /etc/forebay/NEXT")
        (self.machines[DESK].root / "var/tmp/whole").write_text(WHOLE)
        self.sh("r1", "systemctl enable --now forebay-gateway@login1")
        self.machines[1].run("adduser", "--disabled-password", "--gecos", "", USER)
        self.machines[1].shell(JOB, user=USER)
        self.whole()

    def mount(self, name: str) -> None:
        """Give a replica a disk of its own."""
        place = f"/var/lib/forebay/{name}"
        options = f"size={DISK},mode=0700,uid=$(id -u forebay),gid=$(id -g forebay)"
        self.sh(name, f"mkdir -p {place}; mount -t tmpfs -o {options} forebay {place}")

    def lose_disk(self, name: str) -> None:
        """Kill a replica and put an empty disk in the place of its own."""
        self.sh(name, f"systemctl kill -s KILL {self.unit(name)} || true; systemctl stop {self.unit(name)}")
        self.sh(name, f"umount /var/lib/forebay/{name}")
        self.mount(name)

    def copy(self, name: str, *files: str) -> None:
        """Copy files of the operator's `tls` to a machine as scp does: over a file that exists; a new one is root's."""
        source = self.machines[DESK].root / SITE[1:] / "tls"
        target = self.at(name).root / "etc/forebay/tls"
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            if not (target / file).exists():
                (target / file).touch((source / file).stat().st_mode & 0o777)
            (target / file).write_bytes((source / file).read_bytes())

    def copy_configuration(self, name: str) -> None:
        """Copy the operator's forebay.toml to a machine."""
        text = (self.machines[DESK].root / SITE[1:] / "forebay.toml").read_text()
        (self.at(name).root / "etc/forebay/forebay.toml").write_text(text)

    def edit(self, old: str, new: str) -> None:
        """Change the forebay.toml of the operator and of each machine."""
        files = [self.machines[DESK].root / SITE[1:] / "forebay.toml"]
        files += [self.at(name).root / "etc/forebay/forebay.toml" for name in self.members]
        for file in files:
            file.write_text(file.read_text().replace(old, new))

    # ---- members

    def votes(self, name: str) -> str:
        """Wait until a replica votes, and return its id."""
        if name not in self.members:
            self.members.append(name)
        self.whole()
        return str(next(one["id"] for one in self.shown("cluster members")["members"] if one["name"] == name))

    def starts(self, name: str) -> str:
        """Start the unit of a replica that was added or replaced; it votes, and a restart changes nothing."""
        self.sh(name, f"systemctl start {self.unit(name)}")
        found = self.votes(name)
        self.sh(name, f"systemctl restart {self.unit(name)}")
        self.whole()
        return found

    def whole(self) -> None:
        """Wait until all members vote and are ready, and the node is up; StepFailed."""
        self.until(f"python3 /var/tmp/whole {' '.join(sorted(self.members))}")

    def journals(self) -> str:
        """Return the last lines of the journal of each unit."""
        ends = {unit: f"journalctl -n {JOURNAL_LINES} --no-pager -o cat -u {unit}" for unit in UNITS}
        return "\n".join(f"{unit}:\n{self.machines[UNITS[unit]].shell(line)}" for unit, line in ends.items())

    # ---- the fourth machine

    def prepare_fourth(self) -> None:
        """Do what comes before `cluster add r4`: its certificate, and its copy of forebay.toml."""
        toml = self.machines[DESK].root / SITE[1:] / "forebay.toml"
        if 'name = "r4"' not in toml.read_text():
            row = '\n[[replica]]\nname = "r4"\npeer = "10.0.0.4:7401"\napi = "10.0.0.4:7411"\njoins = true\n'
            toml.write_text(toml.read_text() + row)
        self.typed("cert issue r4 --role replica --host 10.0.0.4 --replace")
        (self.machines[DESK].root / "etc/forebay").mkdir(parents=True, exist_ok=True)
        self.copy_configuration("r4")
        self.copy("r4", "ca.pem", "r4.pem", "r4.key")
        self.sh("r4", "chown forebay: /etc/forebay/tls/r4.key")
        if "/var/lib/forebay/r4" not in self.sh("r4", "cat /proc/mounts"):
            self.mount("r4")

    def retire_fourth(self) -> None:
        """Put the fourth replica away."""
        self.members = [name for name in self.members if name != "r4"]
        self.sh("r4", "systemctl reset-failed || true; umount /var/lib/forebay/r4; rm -rf /etc/forebay/*")
        toml = self.machines[DESK].root / SITE[1:] / "forebay.toml"
        toml.write_text(toml.read_text().partition('\n[[replica]]\nname = "r4"')[0])

    # ---- a user

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Have a user submit jobs; at the end what was acknowledged is there, and a job that stages has its result."""
        first, self.forgets = self.machines[1], False
        first.shell(f"rm -f /tmp/end ~{USER}/told ~{USER}/refused")
        process = first.started("sh", "-c", f"'{SUBMITTING}'", user=USER)
        try:
            yield
        finally:
            first.shell("touch /tmp/end")
            process.communicate()
        told = Path(first.root / "home" / USER / "told")
        acknowledged = [int(word) for word in told.read_text().replace(".", " ").split() if word.isdigit()]
        assert acknowledged, "the user's jobs were not accepted at all"
        held = {
            int(job["job_id"])
            for job in json.loads(first.shell("forebay queue --limit 1000000 --json", user=USER))["jobs"]
        }
        lost = [job for job in acknowledged if job not in held]
        assert not lost or self.forgets, f"jobs {lost[:10]} were acknowledged, and are not there"
        first.shell("rm -f out; forebay submit --wait job.sh", user=USER)
        first.until("grep -q 42 out", user=USER)
        self.settled = f"{len(acknowledged) - len(lost)} acknowledged jobs kept, a job staged and ran"
