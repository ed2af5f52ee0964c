"""Backups: a copy of the newest snapshot is complete and verified or absent, and can begin a new cluster."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.client import Client
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import operations as ops
from forebay.cluster.server.recovery import restore_snapshot
from forebay.cluster.server.storage import StorageRefused, open_storage
from forebay.cluster.system.clock import SystemClock
from tests.cluster.harness import story
from tests.cluster.test_serve import ROOT, make, ready, request, running


async def forebay(config: Config, *words: str, code: int = 0) -> Any:
    """Run the command line; return its JSON, or its message on failure."""
    found = await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-m", "forebay.cluster.cli", "--config", str(config.file), *words),
            *([] if code else ["--json"]),
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == code, found.stdout + found.stderr
    return found.stderr if code else json.loads(found.stdout)


def dying_at(name: str) -> Callable[[Path, Path], Path]:
    """Return a rename that fails for a file of this name."""
    real = Path.rename

    def rename(source: Path, target: Path) -> Path:
        if source.name == name:
            raise OSError("died")
        return real(source, target)

    return rename


@pytest.mark.campaign(3)
@story
async def test_backup_is_complete_or_absent_and_begins_a_new_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, backups = make(tmp_path / "site", 1), tmp_path / "backups"
    into = ("backup", "create", "--into", str(backups))
    async with running(config, "r1"):
        async with Client(config.endpoints, config.tls_files("alice")) as alice:
            await ready(alice)
            assert "--save" in await forebay(config, *into, code=3)
            jobs = [(await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path / "site"))).job_id for _ in range(2)]
            first = await forebay(config, *into, "--save")
            assert (first["fetched"], Path(first["path"]).stat().st_size) == (True, first["size_bytes"])
            again = await forebay(config, *into)
            assert (again["path"], again["fetched"]) == (first["path"], False)
            jobs.append((await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path / "site"))).job_id)
            second = await forebay(config, *into, "--save", "--keep", "1")
            assert (second["removed"], [one.name for one in backups.iterdir()]) == (
                [Path(first["path"]).name],
                [Path(second["path"]).name],
            )
            # An invalid file never gets the name of a backup, and replaces none.
            stored = config.snapshot_directory("r1") / Path(second["path"]).name
            stored.write_bytes(bytes([*stored.read_bytes()[:-1], stored.read_bytes()[-1] ^ 1]))
            other = ("backup", "create", "--into", str(tmp_path / "other"), "--keep", "1")
            assert "no sound snapshot" in await forebay(config, *other, code=7)
            assert [*(tmp_path / "other").iterdir()] == []
            last = (await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path / "site"))).job_id
        restore = ("backup", "restore", second["path"], "--name", "r1")
        assert "r1 has no data" in await forebay(config, *restore, code=1)

    # Restore on another host, with only the cluster's configuration and certificates.
    shutil.rmtree(config.storage.directory / "r1")
    plan = await forebay(config, *restore)
    assert (plan["done"], plan["jobs"], plan["kept_index"]) == (False, {"PENDING": 3}, second["index"])
    assert not (config.storage.directory / "r1").exists()
    assert "the plan changed" in await forebay(config, *restore, "--confirm", "0" * 8, code=1)
    # The directory may be a mount point: it stays, and is filled. A failed restore begins again.
    home = config.storage.directory / "r1"
    (home / "lost+found").mkdir(parents=True)
    mounted = home.stat().st_ino
    for died in ("snapshots", "signing", "member", "wal"):
        with monkeypatch.context() as patched, pytest.raises(OSError, match="died"):
            patched.setattr(Path, "rename", dying_at(died))
            await restore_snapshot(config, "r1", Path(second["path"]), plan["plan"], by="ops", clock=SystemClock())
        with pytest.raises(StorageRefused):
            open_storage(config, "r1", first_start=False)
    done = await forebay(config, *restore, "--confirm", plan["plan"], "--by", "ops")
    assert (home.stat().st_ino, sorted(one.name for one in home.iterdir())) == (
        mounted,
        ["lost+found", "member", "signing", "snapshots", "wal"],
    )
    assert "r1 has no data" in await forebay(config, *restore, code=1)
    async with running(config, "r1"):
        async with Client(config.endpoints, config.tls_files("alice"), clock=SystemClock()) as alice:
            await ready(alice)
            listed = [job.job_id for job in (await alice.call(ops.LIST_JOBS)).jobs]
            assert (listed, last) == (jobs, 4), "entries after the backup are lost"
            answer = await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path / "site"))
            assert answer.job_id == done["first_job"] > last
            members = await alice.call(ops.LIST_MEMBERS)
            assert (members.incarnation, [one.id for one in members.members]) == (done["begun"], ["r1#2"])
        for words in (["audit", "history"], ["audit", "history", "--kind", "cluster_recovered"]):
            told = (await forebay(config, *words))["rows"][0]
            assert (told["revision"], told["event"]) == (plan["kept_revision"] + 1, "cluster_recovered")
        verified = await forebay(config, "audit", "verify", "--name", "r1")
        missing = {"first_index": 1, "last_index": second["index"], "revision_after": plan["kept_revision"]}
        assert verified["missing"] == [missing]
