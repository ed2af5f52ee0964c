"""Reload of a configuration: permitted changes apply, others are logged, and an invalid file changes nothing."""

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest

from forebay.cluster.agent.service import RESTARTED as RESTARTED_OF_AGENTS
from forebay.cluster.client.client import Client
from forebay.cluster.config.config import Config
from forebay.cluster.config.reloading import AGREED, Reloader
from forebay.cluster.config.toml import ConfigError
from forebay.cluster.schemas import operations as ops
from forebay.cluster.serve import APPLIED, RESTARTED
from forebay.cluster.system.processes import descendants
from tests.cluster.harness import PATIENCE_S, story
from tests.cluster.test_serve import make, ready, request, running, start


def reloader(config: Config, name: str = "r1") -> tuple[Reloader[Config], list[Config]]:
    used: list[Config] = []
    how = {"applies": APPLIED, "restarts": RESTARTED, "agreed": AGREED}
    if name == "n1":
        how = {"applies": ("replicas",), "restarts": RESTARTED_OF_AGENTS, "agreed": ()}
    return Reloader(config, name, read=Config.load, use=used.append, **how), used  # type: ignore[arg-type]


def changed(config: Config, *pairs: tuple[str, str]) -> None:
    text = config.file.read_text()
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after)
    config.file.write_text(text)


def test_a_reload_updates_other_replicas_and_keeps_own_row_and_storage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = make(tmp_path, 3)
    own, other = config.replica("r1"), config.replica("r2")
    reload, used = reloader(config)
    asyncio.run(reload.reload())
    assert not used and "nothing to apply" in caplog.text
    changed(
        config,
        (f'"{other.peer}"', '"10.0.0.2:7401"'),
        (f'"{own.api}"', '"10.0.0.1:7411"'),
        ("[storage]", "[limits]\ncommands_per_minute = 7\n\n[storage]"),
        ("snapshots_kept = 2", "snapshots_kept = 3"),
        ('granularity = "8MiB"', 'granularity = "4MiB"'),
    )
    asyncio.run(reload.reload())
    (found,) = used
    assert (found.members["r2"], found.replica("r1")) == ("10.0.0.2:7401", own)
    assert (found.limits.commands_per_minute, found.storage) == (7, config.storage)
    assert "changes of [[replica]], [storage] take effect when r1 restarts" in caplog.text
    assert "changes of [[pool]] have no effect" in caplog.text
    assert "[[replica]], [limits] apply from now on" in caplog.text
    # Most of these fields do not concern an agent.
    caplog.clear()
    reload, used = reloader(config, "n1")
    asyncio.run(reload.reload())
    assert len(used) == 1 and "next start" not in caplog.text


def test_a_rejected_file_changes_nothing_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make(tmp_path, 3)
    reload, used = reloader(config)
    for wrong in ("[limits]\njobs = 0\n", "[mail]\nprogramm = 1\n", "[", 'x = "'):
        caplog.clear()
        text = config.file.read_text()
        config.file.write_text(text + "\n" + wrong)
        with pytest.raises(ConfigError) as refused:
            Config.load(config.file)
        asyncio.run(reload.reload())
        assert not used and f"stays in force: {refused.value}" in caplog.text
        config.file.write_text(text)
    config.file.unlink()
    asyncio.run(reload.reload())
    assert not used and f"{config.file}" in caplog.text


def test_a_request_during_a_reload_causes_another_reload(tmp_path: Path) -> None:
    config, reads = make(tmp_path, 1), []

    def read(file: Path) -> Config:
        reads.append(file)
        return config

    async def asked() -> None:
        reload = Reloader(config, "r1", read=read, applies=APPLIED, restarts=RESTARTED, use=lambda _: None)
        for _ in range(5):
            reload.ask()
        async with asyncio.timeout(PATIENCE_S):
            while reload._task is not None:
                await reload._task
                await asyncio.sleep(0)

    asyncio.run(asked())
    assert len(reads) == 2


@story
async def test_sighup_applies_changes_reports_errors_and_ends_nothing(tmp_path: Path) -> None:
    config = make(tmp_path, 1)
    process = await start(config.file, "r1")
    assert process.stderr is not None

    async def said(words: str) -> str:
        async with asyncio.timeout(PATIENCE_S):
            assert process.stderr is not None
            async for line in process.stderr:
                if words.encode() in line:
                    return line.decode()
        raise AssertionError(f"it ended, and never said {words!r}")

    try:
        async with Client.from_config(config, "alice") as alice:
            await ready(alice)
            text = config.file.read_text()
            config.file.write_text(text + "\n[limits]\njobs = 0\n")
            process.send_signal(signal.SIGHUP)
            assert "jobs" in await said("stays in force")
            config.file.write_text(text + "\n[limits]\ncommands_per_minute = 1\n")
            process.send_signal(signal.SIGHUP)
            await said("[limits] apply from now on")
            await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))
            with pytest.raises(Exception, match="commands"):
                await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path), deadline_s=1)
        assert process.returncode is None
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@story
async def test_sighup_ends_no_process_of_a_replica(tmp_path: Path) -> None:
    """`systemctl kill -s HUP` signals all processes of a unit: API workers, history service and replica."""
    config = make(tmp_path, 1)
    changed(config, (f'api = "{config.replica("r1").api}"', f'api = "{config.replica("r1").api}"\napi_workers = 1'))
    async with running(config, "r1") as processes, Client.from_config(config, "alice") as alice:
        await ready(alice)
        replica = processes["r1"].pid
        async with asyncio.timeout(PATIENCE_S):
            while len(tree := descendants(replica)) < 2 or not all(_outlives_hangup(pid, replica) for pid in tree):
                await asyncio.sleep(0.02)
        for pid in (replica, *tree):
            os.kill(pid, signal.SIGHUP)
        await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))
        assert sorted(descendants(replica)) == sorted(tree)
        assert processes["r1"].returncode is None


def _outlives_hangup(pid: int, parent: int) -> bool:
    """Return whether a process ignores or handles SIGHUP.

    A fork has the parent's handler until its exec.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        if Path(f"/proc/{pid}/cmdline").read_bytes() == Path(f"/proc/{parent}/cmdline").read_bytes():
            return False
    except OSError:
        return False
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return bool((int(status["SigIgn"], 16) | int(status["SigCgt"], 16)) >> signal.SIGHUP - 1 & 1)
