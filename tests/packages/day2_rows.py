"""An exercise for each row of "Day 2: what to type", through systemctl. Each leaves a whole cluster and returns a
sentence about what was checked."""

import json
import re
import shlex
import time
from collections.abc import Callable
from typing import Final

from tests.faults.day2.exercises import EXERCISES as TASKS
from tests.faults.day2.table import ROWS
from tests.packages.day2_site import DESK, PATIENCE_S, REPLICAS, SITE, UNITS, UnitSite
from tests.packages.document import USER
from tests.packages.machine import StepFailed

COMMANDS: Final = {name: next(row.command for row in ROWS if row.task == one.task) for name, one in TASKS.items()}
"""By the name of the exercise, what the document has people type."""

FILL: Final = """\
import asyncio, sys, time
from pathlib import Path
from forebay.cluster.client import Client
from forebay.cluster.config import Config
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.requests import UpdateCommand
async def fill():
    async with Client.from_config(Config.load(Path(sys.argv[1])), "operator") as client:
        job = (await client.call(ops.LIST_JOBS, limit=1)).jobs[0].job_id
        for _ in range(200):
            comments = [f"{time.monotonic()} {at} {1000 * 'x'}" for at in range(12)]
            ids = [client.new_command_id() for _ in comments]
            changes = [UpdateCommand(command_id=i, job_id=job, comment=c) for i, c in zip(ids, comments)]
            assert {one.status for one in (await client.commands(changes)).results} == {200}
asyncio.run(fill())
"""
"""A program of an operator that changes a job's comment over and over: 2 MiB and more of the journal."""

FILLS_MAX: Final = 60
RETAINED_S: Final = 240.0
"""How long it may take until a snapshot, a state's digest and a checkpoint allow to prune, seconds."""

RETENTION: Final = """
[retention]
archives = ["/archive/a", "/mnt/b/forebay"]
keys = "ledger.keys"
keep = "1MiB"
"""

LONG: Final = (
    r"#!/bin/sh\n#DW jobdw capacity=16MiB access_mode=striped type=scratch\ntouch $DW_JOB_STRIPED/kept\nsleep 600\n"
)
"""A script that runs until it is ended, as printf(1) has it."""

OWNED: Final = "stat -c '%U:%G %a' /etc/forebay/tls/r2.*"

SHOWN: Final = (
    "import ssl, sys, hashlib; "
    "print(hashlib.sha256(ssl.get_server_certificate((sys.argv[1], 7411)).encode()).hexdigest())"
)


def command(name: str) -> str:
    """Return what the row says, without `forebay`, and with the answer of somebody at a terminal where one is asked."""
    return COMMANDS[name].removeprefix("forebay ")


def check(site: UnitSite) -> str:
    """A machine that is prepared passes, and one that runs, as the account of its replica and as root."""
    site.prepare_fourth()
    said = site.sh("r4", f"runuser -u forebay -- {COMMANDS['check']}")
    site.retire_fourth()
    said += site.sh("r1", f"runuser -u forebay -- {COMMANDS['check']}")
    said += site.sh("r1", COMMANDS["check"])
    return f"{len(said.splitlines())} lines without a FAIL"


def replace(site: UnitSite) -> str:
    """A replica lost its disk: replaced, and started by systemctl, with nothing else."""
    site.lose_disk("r2")
    said = site.typed(f"{command('replace')} --yes")
    assert f"systemctl enable --now {site.unit('r2')}" in said, said
    new = site.starts("r2")
    assert new.startswith("r2#"), new
    site.sh("r2", "mkdir -p /run/systemd/system/forebay-controller@r2.service.d; printf '[Service]\\nEnvironment="
            "CONTROLLER_OPTIONS=--join\\n' > /run/systemd/system/forebay-controller@r2.service.d/j.conf; "
            "systemctl daemon-reload; systemctl restart forebay-controller@r2")  # fmt: skip
    site.whole()
    site.sh("r2", "rm -r /run/systemd/system/forebay-controller@r2.service.d; systemctl daemon-reload")
    return f"r2 lost its disk and votes again as {new}, also when it is restarted with --join"


def add(site: UnitSite) -> str:
    """A machine more."""
    site.prepare_fourth()
    said = site.typed(command("add"))
    assert f"systemctl enable --now {site.unit('r4')}" in said, said
    return f"four vote, {site.starts('r4')} among them"


def remove(site: UnitSite) -> str:
    """A replica that is removed ends, and systemd does not start it again."""
    if "r4" not in site.members:
        add(site)
    site.typed(f"{command('remove')} --yes")
    site.until(f"systemctl show -P ExecMainStatus {site.unit('r4')} | grep -qx 77", at="r4")
    assert site.sh("r4", f"systemctl show -P SubState {site.unit('r4')}").strip() == "failed"
    site.retire_fourth()
    return "three vote, the unit of r4 has failed with 77"


def transfer(site: UnitSite) -> str:
    """The one that is named leads."""
    if site.shown("cluster members")["leader"] == "r2":
        site.typed("cluster transfer r3")
    site.typed(command("transfer"))
    assert site.shown("cluster members")["leader"] == "r2"
    return "r2 leads"


def upgrade(site: UnitSite) -> str:
    """Each machine's packages are upgraded, the leader's last; the replica, agent and gateway there are restarted."""
    leader = site.shown("cluster members")["leader"]
    for name in [*(one for one in REPLICAS if one != leader), leader]:
        if site.shown("cluster members")["leader"] == name:
            site.typed(command("upgrade"))
        before = site.pid(name)
        install = f"dpkg -i /var/tmp/debs/*_{site.newer}_*.deb"
        if name == leader:
            # A replica that does not come back fails the upgrade; mended, `dpkg --configure -a` goes on with it.
            key = f"/etc/forebay/tls/{name}.key"
            site.sh(name, f"mv {key} {key}.kept; ! {install}; mv {key}.kept {key}")
            install = f"systemctl start {site.unit(name)}; dpkg --configure -a"
        site.sh(name, install)
        site.whole()
        assert site.pid(name) not in (0, before), f"{name} was not restarted"
    for unit, number in UNITS.items():
        site.machines[number].shell(f"systemctl is-active {unit}")
    return f"all machines have {site.newer}, {leader}'s the last one, and their units run"


def renumber_one(site: UnitSite) -> str:
    """One replica moves to the address of the document."""
    _certified(site, "r2")
    site.typed(command("renumber-one"))
    site.edit('"10.0.0.2:', '"10.1.0.2:')
    site.sh("r2", "systemctl restart forebay-controller@r2")
    for name in ("r1", "r3"):
        site.sh(name, f"systemctl reload {site.unit(name)}")
    site.sh("r1", "systemctl reload forebay-agent@n1 forebay-gateway@login1")
    site.whole()
    assert "10.1.0.2" in site.typed("cluster members")
    return "r2 moved to 10.1.0.2"


def renumber_all(site: UnitSite) -> str:
    """All move at once, and `cluster members` names what is left to write down."""
    for name in REPLICAS:
        _certified(site, name)
    for name in REPLICAS:
        site.sh(name, "systemctl stop 'forebay-*'")
    for number in (1, 2, 3):
        site.edit(f'"10.0.0.{number}:', f'"10.1.0.{number}:')
    for name in REPLICAS:
        site.sh(name, f"systemctl start --no-block {site.unit(name)}")
    site.sh("r1", "systemctl start --no-block forebay-agent@n1 forebay-gateway@login1")
    site.whole()
    left = re.findall(r"`forebay (cluster update [^`]+)`", site.typed(command("renumber-all")))
    for words in left:
        site.typed(words)
    said = site.typed(command("renumber-all"))
    assert left and "cluster update" not in said, said
    return f"all replicas have other addresses, {len(left)} updates that `cluster members` named were typed"


def certificate(site: UnitSite) -> str:
    """A certificate is renewed and read by `systemctl reload`, without a restart; a restart uses it, too."""
    before, pid = _shown(site, "r2"), site.pid("r2")
    owned = site.sh("r2", OWNED)
    site.typed(command("certificate"))
    site.copy("r2", "r2.key", "r2.pem")
    site.sh("r2", "systemctl reload forebay-controller@r2")
    _shows_another(site, "r2", before)
    assert site.pid("r2") == pid
    new = _shown(site, "r2")
    site.sh("r2", "systemctl restart forebay-controller@r2")
    site.whole()
    assert _shown(site, "r2") == new and site.sh("r2", OWNED) == owned
    return "r2 shows its new certificate, without a restart and after one"


def authority(site: UnitSite) -> str:
    """The authority is renewed in three steps; nothing is restarted."""
    pids = [site.pid(name) for name in REPLICAS]
    before = {name: _shown(site, name) for name in REPLICAS}
    site.typed(command("authority"))
    _read_authority(site)
    for name, role in (*((name, "replica") for name in REPLICAS), ("n1", "agent"), ("login1", "gateway")):
        site.typed(f"cert issue {name} --role {role} --replace")
        site.copy(name if role == "replica" else "r1", f"{name}.key", f"{name}.pem")
    site.typed("cert issue operator --role operator --replace")
    _reload(site)
    for name in REPLICAS:
        _shows_another(site, name, before[name])
    site.typed("cert retire-authority --yes")
    _read_authority(site)
    site.whole()
    assert [site.pid(name) for name in REPLICAS] == pids
    return "all have certificates of the new authority, no replica was restarted"


def revoke(site: UnitSite) -> str:
    """A user whose key was stolen is rejected."""
    site.typed("cert issue alan --role user --replace")
    site.typed("--identity alan queue")
    site.typed(command("revoke"))
    site.until("sh -c '! forebay --identity alan queue'")
    site.typed("cert unrevoke user:alan")
    return "alan was rejected"


def resize(site: UnitSite) -> str:
    """A pool grows and shrinks."""
    site.typed(command("resize"))
    assert "2TiB" in site.typed("pool list")
    site.typed("pool set fast --quantity 1GiB")
    return "fast had 1GiB, 2TiB and 1GiB"


def drain(site: UnitSite) -> str:
    """A node is emptied, its agent stopped for the repair and started again."""
    site.typed(command("drain"))
    site.until("forebay node list --json | grep -q '\"DRAINED\"'")
    site.sh("r1", "systemctl restart forebay-agent@n1")
    site.typed("node resume n1")
    return "n1 was DRAINED, its agent was restarted, and it is UP"


def lost(site: UnitSite) -> str:
    """A job on a node that does not answer is given up, and its agent ends and removes it when it returns."""
    first, directive = site.machines[1], "#DW jobdw capacity=16MiB access_mode=striped type=scratch"
    script = f"printf '%s\\n' '#!/bin/sh' '{directive}' 'sleep 98765' > long.sh"
    job = first.shell(f"cd; {script}; forebay submit long.sh | grep -o '[0-9]*' | head -n 1", user=USER).strip()
    site.until(f"forebay job show {job} --json | grep -q '\"RUNNING\"'")
    # The brackets keep the shell that runs this from finding itself.
    runs = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -q 'slee[p] 98765'"
    site.until(runs, at="r1")
    site.sh("r1", f"systemctl stop forebay-agent@n1; {runs}")
    site.until("forebay node show n1 --json | grep -q '\"DOWN\"'")
    site.typed(f"cancel {job} && exit 1 || test $? = 1")
    site.typed(f"{command('lost').replace('n2', 'n1')} --yes")
    site.until(f"forebay job show {job} --json | grep -q '\"CANCELLED\"'")
    site.sh("r1", "systemctl start forebay-agent@n1")
    site.until("forebay node show n1 --json | grep -Eq '\"abandoned\": ?\\[\\]'")
    site.until(f"! {{ {runs}; }}", at="r1")
    site.whole()
    return f"job {job} was given up, and ended and removed by the agent when it returned"


def debug(site: UnitSite) -> str:
    """What is written for a helper has the units' journal and no private key."""
    site.typed(command("debug"))
    site.sh("r1", f"cd /tmp; forebay {command('debug')}")
    parts = site.sh("r1", "cd /tmp; tar -xzOf forebay-debug-*.tar.gz | grep -c 'PRIVATE KEY' || true").split()
    listed = site.sh("r1", "cd /tmp; tar -tzf forebay-debug-*.tar.gz; rm forebay-debug-*")
    assert parts == ["0"] and "journal" in listed, (parts, listed)
    return f"{len(listed.split())} parts, the units' journal among them, no private key in them"


def archive(site: UnitSite) -> str:
    """A replica that runs is archived by its account, and the archive is verified."""
    site.sh("r1", "install -d -o forebay /archive")
    site.until("test -e /var/lib/forebay/r1/log/checkpoint || ls /var/lib/forebay/r1/*/checkpoint", at="r1")
    site.sh("r1", f"runuser -u forebay -- {COMMANDS['archive']}")
    keys = site.machines[1].root / "var/tmp/ledger.keys"
    keys.write_text(site.typed("audit keys"))
    site.sh("r1", "forebay audit verify --archive /archive/a --keys /var/tmp/ledger.keys")
    return "the archive was verified"


def disk_full(site: UnitSite) -> str:
    """A full disk stops a replica; with space again systemd has it start, or `systemctl start` does."""
    site.sh("r1", "dd if=/dev/zero of=/var/lib/forebay/r1/filling bs=1M 2>/dev/null || true")
    site.until("systemctl show -P NRestarts forebay-controller@r1 | grep -qvx 0 || "
               "systemctl is-failed forebay-controller@r1", at="r1")  # fmt: skip
    site.sh("r1", "rm /var/lib/forebay/r1/filling; systemctl start forebay-controller@r1")
    return "r1 ended while its disk was full, and is back"


def journal_full(site: UnitSite) -> str:
    """Journals are filled until the user is rejected; each is archived and pruned, and the user is not rejected."""
    desk = site.machines[DESK]
    (desk.root / "var/tmp/fill").write_text(FILL)
    for _ in range(FILLS_MAX):
        if _is_rejected(site):
            break
        desk.shell(f"/usr/lib/forebay/bin/python -I /var/tmp/fill {SITE}/forebay.toml")
    full, said = {name: _fill(site, name) for name in REPLICAS}, dict[str, str]()
    for name in REPLICAS:
        site.sh(name, "install -d -o forebay /archive /mnt/b")
        keys, toml = (site.at(name).root / "etc/forebay" / file for file in ("ledger.keys", "forebay.toml"))
        keys.write_text(site.typed("audit keys"))
        toml.write_text(toml.read_text() + RETENTION)
        retain = COMMANDS["journal-full"].replace("r1", name)
        said[name] = site.until(f"runuser -u forebay -- {retain} 2>&1", at=name, within_s=RETAINED_S)
    end_s = time.monotonic() + PATIENCE_S
    while any(_fill(site, name) > full[name] / 2 for name in REPLICAS):
        assert time.monotonic() < end_s, (full, {name: _fill(site, name) for name in REPLICAS}, said)
        time.sleep(1)
    assert not _is_rejected(site)
    return f"journals were {max(full.values()):.0%} full and the user was rejected; pruned, they are not"


def _is_rejected(site: UnitSite) -> bool:
    """Return whether a user's job is rejected since a journal is full; StepFailed for another error."""
    try:
        site.machines[1].shell("forebay submit --hold held.sh --json", user=USER)
    except StepFailed as error:
        if "journal_full" not in str(error):
            raise
        return True
    return False


def _fill(site: UnitSite, name: str) -> float:
    [found] = site.shown(f"cluster probe {name}")["replicas"]
    return float(found["status"]["journal_fill"])


def clock(site: UnitSite) -> str:
    """No clock is off: one kernel has them all."""
    said = site.typed(command("clock"))
    assert all(name not in said.partition("off")[2] for name in REPLICAS), said
    return "no clock is off"


def recover(site: UnitSite) -> str:
    """Two machines have lost their disks; the third goes on, and the others are added."""
    site.forgets = True
    for name in ("r2", "r3"):
        site.lose_disk(name)
    site.sh("r1", "systemctl stop forebay-controller@r1")
    _confirmed(site, COMMANDS["recover"])
    return _again_three(site)


def restore(site: UnitSite) -> str:
    """All disks are lost; a snapshot that was fetched before is restored on r1."""
    site.forgets = True
    site.typed("backup create --into /var/tmp/backups --save --keep 9")
    site.sh("r1", "systemctl restart forebay-agent@n1")
    job = site.machines[1].shell(f"printf '{LONG}' > long.sh; forebay submit --parsable long.sh", user=USER).strip()
    kept = f"find /var/lib/forebay/n1/buffers/{job} -name kept | grep -q ."
    site.until(kept, at="r1")
    [file] = (site.machines[4].root / "var/tmp/backups").iterdir()
    (site.machines[1].root / "var/tmp/backup").write_bytes(file.read_bytes())
    for name in REPLICAS:
        site.lose_disk(name)
    _confirmed(site, COMMANDS["restore"].replace("FILE", "/var/tmp/backup"))
    said = _again_three(site)
    first = site.shown("audit history")["rows"][0]["event"]
    assert first == "cluster_recovered", f"history begins with {first}"
    buffers = json.loads(site.sh("r1", f"{kept}; forebay node buffers --json"))["buffers"]
    assert [one["state"] for one in buffers if one["job_id"] == int(job)] == ["UNKNOWN"], buffers
    return f"{said}, the agent that restarted after the backup registered again and lists the lost job's buffer"


def _confirmed(site: UnitSite, words: str) -> None:
    """Type a command as the account of r1, and type it again with the plan that it asks to confirm."""
    plan = site.sh("r1", f"runuser -u forebay -- {words} 2>&1 || true")
    ids = re.findall(r"--confirm (\w+)", plan)
    assert ids, plan
    site.sh("r1", f"runuser -u forebay -- {words} --confirm {ids[-1]}")


def _again_three(site: UnitSite) -> str:
    site.members = ["r1"]
    site.sh("r1", "systemctl start forebay-controller@r1")
    for name in ("r2", "r3"):
        host = site.address(name)
        site.until(f"forebay cluster add {name} --peer {host}:7401 --api {host}:7411")
        site.starts(name)
    site.whole()
    return "r1 went on alone, r2 and r3 joined by systemctl start"


def _certified(site: UnitSite, name: str) -> None:
    hosts = f"--host {site.address(name)} --host 10.1.0.{name[1:]}"
    site.typed(f"cert issue {name} --role replica {hosts} --replace")
    site.copy(name, f"{name}.key", f"{name}.pem")


def _shown(site: UnitSite, name: str) -> str:
    """Return a digest of the certificate that a replica shows."""
    return site.sh("r4", f"python3 -c {shlex.quote(SHOWN)} 10.0.0.{name[1:]}")


def _shows_another(site: UnitSite, name: str, before: str) -> None:
    line = f"test $(python3 -c {shlex.quote(SHOWN)} 10.0.0.{name[1:]}) != {before.strip()}"
    try:
        site.until(line, at="r4", within_s=30)
    except StepFailed as error:
        raise StepFailed(f"{name} shows the certificate of before") from error


def _read_authority(site: UnitSite) -> None:
    for name in REPLICAS:
        site.copy(name, "ca.pem")
    _reload(site)
    site.whole()


def _reload(site: UnitSite) -> None:
    for unit, number in UNITS.items():
        site.machines[number].shell(f"systemctl reload {unit}")


EXERCISES: Final[dict[str, Callable[[UnitSite], str]]] = {
    "check": check,
    "replace": replace,
    "add": add,
    "remove": remove,
    "transfer": transfer,
    "upgrade": upgrade,
    "certificate": certificate,
    "authority": authority,
    "revoke": revoke,
    "resize": resize,
    "drain": drain,
    "lost": lost,
    "debug": debug,
    "archive": archive,
    "disk-full": disk_full,
    "journal-full": journal_full,
    "clock": clock,
    "recover": recover,
    "restore": restore,
    "renumber-one": renumber_one,
    "renumber-all": renumber_all,
}
"""By name, in the order in which they are done."""
