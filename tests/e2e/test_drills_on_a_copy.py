"""Drills on copies of a real cluster, which leave no traces after any kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.config.mail import NO_MAIL
from forebay.cluster.drills.copies.directory import PREFIX
from forebay.cluster.drills.copies.replicas import NAMES
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import client_context
from forebay.cluster.system import Address
from tests.faults.local_cluster import LocalCluster

TREE = Path(__file__).parents[2]
PATIENT = ("--goal-ms", "120000")
LEASE = ("--abort-after-s", "30")
"""Longest lease, so that a drill stopped by a test keeps it."""


class Site:
    """Cluster of one replica with a job, and its operator with a directory for copies."""

    def __init__(self, directory: Path) -> None:
        self.cluster = LocalCluster(directory / "c")
        self.scratch = directory / "copies"
        self.scratch.mkdir()

    def command(self, *words: str) -> list[str]:
        return self.cluster.command(*words)

    def json(self, *words: str) -> dict[str, Any]:
        done = subprocess.run(self.command(*words, "--json"), capture_output=True, text=True, check=False, timeout=300)
        assert done.stdout, done
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def words(self, scenario: str, *more: str) -> list[str]:
        """Return the command that runs the current plan."""
        words = (scenario, "--scratch", str(self.scratch), *more)
        made = self.json("drill", "plan", *words)
        assert all(one["holds"] for one in made["preconditions"]), made
        return ["drill", "run", *words, "--target", made["target"], *PATIENT, "--confirm", made["id"]]

    def run(self, scenario: str, *more: str) -> dict[str, int]:
        """Run a drill; return its figures."""
        ended = self.json(*self.words(scenario, *more))
        figures: dict[str, int] = ended["figures"]
        assert ended["verdict"] == "passed", ended["sentence"]
        assert (figures["writes_lost"], figures["states_agree"], figures["states_compared"]) == (0, 1, 1)
        assert figures["writes_acknowledged"] > 0 < figures["write_stop_us"] and figures["read_stop_us"] > 0
        self.nothing_is_left()
        return figures

    def begun(self, scenario: str, lease: tuple[str, ...] = LEASE) -> subprocess.Popen[str]:
        """Start a drill; return it stopped by SIGSTOP once its first replica runs, so that it cannot finish."""
        running = subprocess.Popen(
            self.command(*self.words(scenario), *lease),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

        def is_held() -> bool:
            running.send_signal(signal.SIGSTOP)
            if any("forebay.cluster.serve" in line and NAMES[0] in line for line in self.processes()):
                return True
            running.send_signal(signal.SIGCONT)
            return False

        until(lambda: running.poll() is not None or is_held())
        assert running.poll() is None, running.communicate()
        return running

    def backup(self) -> Path:
        """Return a snapshot that was fetched as a backup."""
        return Path(self.json("backup", "create", "--into", str(self.scratch.parent / "backups"), "--save")["path"])

    def nothing_is_left(self) -> None:
        """Wait until directory and processes are gone; the kernel kills the last processes."""
        assert self.left() == []
        until(lambda: not self.processes())

    def left(self) -> list[str]:
        return [one.name for one in self.scratch.iterdir()]

    def processes(self) -> list[str]:
        """Return the command lines of processes of copies here."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if str(self.scratch / PREFIX) in line:
                    found.append(line)
        return found


def until(holds: Callable[[], bool]) -> None:
    while not holds():
        threading.Event().wait(0.02)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("copies"))
    made.cluster.found({"fast": "64MiB/1MiB,default"}, "1GiB", replicas=1)
    made.cluster.start("r1")
    script = made.cluster.work / "job"
    script.write_text("#!/bin/sh\ntrue\n")

    async def ready() -> None:
        async with made.cluster.client(deadline_s=60) as client:
            await client.call(ops.LIST_MEMBERS)

    asyncio.run(ready())
    for _ in range(3):
        made.cluster.forebay("submit", "--hold", "--mail-user=ada@x.org", "--mail-type=ALL", str(script))
    yield made
    made.cluster.stop_all()


@pytest.mark.campaign(4)
def test_a_killed_copy_leaves_no_process_and_is_cleaned_up_later(
    site: Site,
) -> None:
    killed = site.begun("restore", lease=("--abort-after-s", "0.1"))
    killed.kill()
    killed.wait()
    until(lambda: not site.processes())
    assert len(site.left()) == 1
    # A vanished coordinator sends nothing, so the drill ends with its lease.
    until(lambda: all(one["holds"] for one in site.json("drill", "plan", "restore")["preconditions"]))

    figures = site.run("restore")
    assert figures["held_revision"] > 0 and figures["folds_agree"] == 1
    assert figures["restored_us"] < figures["write_stop_us"] < figures["stands_loss_us"]

    damaged = bytearray(site.backup().read_bytes())
    damaged[len(damaged) // 2] ^= 1
    bad = site.scratch.parent / "damaged.fbs"
    bad.write_bytes(damaged)
    ended = site.json(*site.words("restore", "--backup", str(bad)))
    assert ended["verdict"] == "failed" and "backup inspect" in ended["sentence"], ended
    assert site.left() == []


@pytest.mark.campaign(4)
def test_a_copy_that_loses_its_majority_loses_only_announced_writes(site: Site) -> None:
    figures = site.run("majority-lost")
    assert figures["writes_said_lost"] > 0, "who is left was behind"
    assert figures["said_kept_revision"] >= figures["said_lost_after_revision"] > figures["held_revision"]
    assert figures["recovered_us"] < figures["write_stop_us"] < figures["stands_loss_us"]
    page = site.scratch.parent / "page.html"
    number = site.json("drill", "list")["drills"][0]["drill"]
    site.cluster.forebay("drill", "show", str(number), "--html", str(page))
    assert f">{figures['writes_said_lost']}</td>" in page.read_text()


async def strangers(site: Site) -> None:
    """Check that the cluster and its copy reject each other's certificates."""
    (directory,) = site.scratch.iterdir()
    copy, original = Config.load(directory / "forebay.toml"), site.cluster.config
    assert original is not None and copy.cluster == original.cluster
    assert (copy.agents, copy.witnesses, copy.helpers, copy.mail, copy.drill.allow) == ((), (), (), NO_MAIL, ())
    assert not (copy.tls.certificates / "ca.key").exists()
    assert {one.peer.host for one in copy.replicas} == {"127.0.0.1"}
    for here, there in ((copy, original), (original, copy)):
        mine, theirs = here.tls_files("operator"), there.tls_files("operator")
        at = here.replicas[0].api
        # Who listens is not believed; and where he is, he does not believe who comes.
        with pytest.raises(ssl.SSLCertVerificationError):
            await connected(at, client_context(theirs))
        context = ssl.create_default_context(cafile=str(mine.authority))
        context.load_cert_chain(theirs.certificate, theirs.key)
        reader, writer = await connected(at, context)
        with contextlib.suppress(ssl.SSLError, ConnectionResetError):
            writer.write(b"GET /v1/drills HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await reader.read(1) == b""
        writer.transport.abort()


async def connected(at: Address, context: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return await asyncio.open_connection(at.host, at.port, ssl=context)
        await asyncio.sleep(0.02)


@pytest.mark.campaign(4)
@pytest.mark.usefixtures("interruptible")
def test_a_copy_is_upgraded_under_load_and_always_removed(site: Site) -> None:
    backup = site.backup()
    site.cluster.forebay("submit", "--hold", str(site.cluster.work / "job"))
    figures = site.run("upgrade", "--release", str(TREE), "--backup", str(backup))
    assert figures["folds_agree"] == 1 and figures["upgraded_us"] > 0
    assert figures["behind_revisions"] > 0 and "fetched_us" not in figures

    stopped = site.begun("upgrade")
    os.killpg(stopped.pid, signal.SIGINT)
    stopped.send_signal(signal.SIGCONT)
    _, said = stopped.communicate()
    assert stopped.returncode == 130, said
    site.nothing_is_left()
    aborted = site.begun("upgrade")
    asyncio.run(strangers(site))
    number = site.json("drill", "list")["drills"][0]["drill"]
    site.json("drill", "abort", str(number), "--reason", "the phone rings")
    aborted.send_signal(signal.SIGCONT)
    _, said = aborted.communicate()
    assert aborted.returncode == 7 and "operator: the phone rings" in said
    site.nothing_is_left()
    shown = site.json("drill", "list")["drills"]
    assert [one["sentence"] for one in shown[:2]] == ["operator: the phone rings", "interrupted by Ctrl-C or SIGTERM"]
