"""Three replicas sign their ledgers, an auditor reads the log with only a certificate, and an altered replica stops."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.client import ApiError, Client
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.requests import PoolRequest, TransferRequest
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.security.proofs import (
    Checkpoint,
    Tile,
    leaf_hash,
    leaves_in,
    nodes_in_tiles,
    parse_checkpoint,
    parse_key,
    parse_leaf,
    parse_note,
    root_of,
    sign,
    verify_note,
    write_note,
)
from forebay.cluster.serve import Replica
from forebay.cluster.server.divergence import Checkpoints
from forebay.cluster.server.tlog import LedgerAltered, origin_of, publish
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages.commands import Actor, ActorRole
from tests.cluster.audit.ledgers import real
from tests.cluster.harness import PATIENCE_S, story
from tests.cluster.test_serve import make, request
from tests.faults.rewritten import blamed, rewrite
from tests.repo.tree import ROOT

SOMEBODY_ELSE = Actor(ActorRole.OPERATOR, "mallory")


class Three:
    """Replicas of a cluster in one process, and the names of those that have stopped."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.stopped: dict[str, BaseException] = {}
        self.replicas = {
            one.name: Replica(config, one.name, clock=SystemClock(), fail=self._failing(one.name))  # type: ignore[arg-type]
            for one in config.replicas
        }

    def _failing(self, name: str) -> object:
        def fail(error: BaseException) -> NoReturn:
            self.stopped.setdefault(name, error)
            raise asyncio.CancelledError

        return fail

    def leader(self) -> Replica | None:
        return next((one for one in self.replicas.values() if one.controller.leads), None)

    async def until_they_have(self, revision: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while any(one.controller.state.revision < revision for one in self.replicas.values()):
                await asyncio.sleep(0.01)

    def published(self) -> set[str]:
        return {one.publisher.note for one in self.replicas.values()}


@contextlib.asynccontextmanager
async def three(config: Config) -> AsyncIterator[Three]:
    them = Three(config)
    for one in them.replicas.values():
        await one.start()
    try:
        yield them
    finally:
        for name, one in them.replicas.items():
            if name in them.stopped:
                # A real process would have ended, and could sign nothing more.
                one.publisher.publish = nothing  # type: ignore[method-assign]
            await one.stop()


async def nothing(*, whole: bool) -> bool:
    """Publish nothing, like a process that has ended."""
    return whole


async def pools_set(config: Config, count: int) -> int:
    """Change a pool as an operator; return the last revision."""
    async with Client.from_config(config, "operator") as client:
        for number in range(count):
            wanted = PoolRequest(command_id=client.new_command_id(), quantity=f"{100 + number}MiB", granularity="1MiB")
            revision = (await client.call(ops.SET_POOL, wanted, name="fast")).revision
    return revision


async def signed_by_all(them: Three) -> str:
    """Wait until all replicas have a checkpoint of all applied entries; return it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            (note, *others) = them.published()
            size = next(iter(them.replicas.values())).publisher.size
            if note and not others and size >= max(one.controller.applied_index for one in them.replicas.values()):
                return note
            await asyncio.sleep(0.05)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "PERIOD_S", 0.3)
    monkeypatch.setattr(publish, "POLL_S", 0.05)


@story
async def test_auditor_verifies_a_checkpoint_of_all_replicas_from_tiles_alone(tmp_path: Path) -> None:
    config = make(tmp_path / "site", 3)
    issue(
        load_authority(config.tls.authority.parent),
        config.tls.certificates,
        role=Role.AUDITOR,
        name="eve",
        at=SystemClock().now(),
    )
    async with three(config) as them:
        await them.until_they_have(await pools_set(config, 20))
        await signed_by_all(them)
        async with Client.from_config(config, "eve") as eve:
            listed = await eve.call(ops.LIST_LOG_KEYS)
            assert [one.replica for one in listed.keys] == ["r1", "r2", "r3"]
            keys = [parse_key(one.key) for one in listed.keys]
            for replica in config.replicas:
                note = await eve.call(ops.READ_CHECKPOINT, replica=replica.api)
                text, verified = verify_note(note.encode(), keys)
                assert len(verified) >= 2
                checkpoint = parse_checkpoint(text)
                tile, path = Tile(0, 0, checkpoint.size), Tile(None, 0, checkpoint.size).path
                hashes = await eve.call(ops.READ_TILE, tile=tile.path.removeprefix("tile/"), replica=replica.api)
                assert root_of(checkpoint.size, nodes_in_tiles(checkpoint.size, {tile: hashes}.__getitem__)) == (
                    checkpoint.root
                )
                held = await eve.call(ops.READ_TILE, tile=path.removeprefix("tile/"), replica=replica.api)
                leaves = leaves_in(held)
                assert b"".join(map(leaf_hash, leaves)) == hashes
                assert [parse_leaf(one).index for one in leaves] == list(range(1, checkpoint.size + 1))
            for operation in (ops.SHOW_STATUS, ops.READ_LEDGER, ops.SHOW_METRICS):
                with pytest.raises(ApiError) as refused:
                    await eve.call(operation)
                assert refused.value.status == 403
    assert not them.stopped


@story
async def test_idle_cluster_signs_nothing(tmp_path: Path) -> None:
    config = make(tmp_path / "site", 3)
    async with three(config) as them:
        await them.until_they_have(await pools_set(config, 2))
        note = await signed_by_all(them)
        files = [path for name in them.replicas for path in (config.storage.directory / name / "signing").iterdir()]
        files += [config.storage.directory / name / "tlog/checkpoint" for name in them.replicas]
        before = {path: path.stat().st_mtime_ns for path in files}
        await asyncio.sleep(1.0)  # three periods, because an absent checkpoint gives no event
        assert them.published() == {note}
        assert {path: path.stat().st_mtime_ns for path in files} == before


@story
async def test_replica_with_history_rewritten_before_a_checkpoint_stops(tmp_path: Path) -> None:
    config = make(tmp_path / "site", 3)
    async with three(config) as them:
        await them.until_they_have(await pools_set(config, 3))
        await signed_by_all(them)
    assert rewrite(config, "r2", lambda entry: blamed(entry, SOMEBODY_ELSE))

    async def blind(checkpoints: Checkpoints) -> None:
        await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as patch:
        # The comparison of running replicas would find it too.
        patch.setattr(Checkpoints, "_run", blind)
        async with three(config) as them:
            async with asyncio.timeout(PATIENCE_S):
                while not them.stopped:
                    await asyncio.sleep(0.05)
    assert list(them.stopped) == ["r2"]
    assert isinstance(them.stopped["r2"], LedgerAltered)


@story
async def test_operator_distributes_checkpoint_keys_and_proof_and_shows_them_unaltered(
    tmp_path: Path,
) -> None:
    config = make(tmp_path / "site", 3)

    async def typed(*words: object, code: int = 0) -> str:
        result = await asyncio.to_thread(real, "audit", *words, FOREBAY_CONFIG=str(config.file))
        assert result.returncode == code, (words, result.stdout, result.stderr)
        return result.stdout + result.stderr

    async with three(config) as them:
        await them.until_they_have(await pools_set(config, 5))
        note = await signed_by_all(them)
        shown = await typed("checkpoint")
        assert note in shown and "signed by r1, r2, r3" in shown.replace("\n", " ")
        kept, keys = tmp_path / "kept.note", tmp_path / "keys"
        kept.write_text(note)
        keys.write_text(await typed("keys"))
        assert keys.read_text().count("forebay/") == 3 and "# r2" in keys.read_text()
        await them.until_they_have(await pools_set(config, 300))
        await signed_by_all(them)
        size = parse_checkpoint(parse_note(note.encode())[0]).size
        for options in ((), ("--keys", keys)):
            assert f"The first {size} entries are unchanged" in await typed("consistency", "--from", kept, *options)
        # A fork signed by a majority with its own keys.
        fork, signatures = Checkpoint(origin_of(config.cluster.id), size, bytes(32)).text(), []
        for name in ("r1", "r2"):
            held = (config.storage.directory / name / "signing/key").read_bytes()
            private = Ed25519PrivateKey.from_private_bytes(base64.b64decode(held))
            signatures.append(sign(fork, origin_of(config.cluster.id), private))
        kept.write_text(write_note(fork, signatures))
        assert "does not extend" in await typed("consistency", "--from", kept, code=7)
        kept.write_text(note.replace(note.splitlines()[2][:6], "AAAAAA"))
        assert "is not valid" in await typed("consistency", "--from", kept, code=7)
        kept.write_text("nothing")
        await typed("consistency", "--from", kept, code=7)
        await typed("prove", "--job", 7, "-o", tmp_path / "7.proof", code=3)
        assert not (tmp_path / "7.proof").exists()
        async with Client.from_config(config, "alice") as client:
            job = (await client.call(ops.SUBMIT_JOB, request(client, tmp_path / "site"))).job_id
        await signed_by_all(them)
        await typed("prove", "--job", job, "-o", tmp_path / "job.proof")
    verified = await asyncio.to_thread(
        subprocess.run,
        [
            sys.executable,
            str(ROOT / "cluster/security/proofs/verify_proof.py"),
            "--keys",
            str(keys),
            str(tmp_path / "job.proof"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert verified.returncode == 0, verified.stderr
    assert verified.stdout.count("signed by") == 3 and "submit_job by user alice" in verified.stdout


@story
@pytest.mark.parametrize("way", ["stopped", "asked to hand over"])
async def test_leaders_entries_are_signed_before_another_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(publish, "PERIOD_S", 3600.0)
    config = make(tmp_path / "site", 3)
    async with three(config) as them:
        await them.until_they_have(await pools_set(config, 5))
        leader = them.leader()
        assert leader is not None and them.published() == {""}
        async with asyncio.timeout(PATIENCE_S):
            while not all(one.service.past.progress.tree_size for one in them.replicas.values()):
                await asyncio.sleep(0.05)
        last = leader.controller.applied_index
        if way == "stopped":
            await leader.stop()
        else:
            async with Client.from_config(config, "operator") as client:
                wanted = TransferRequest(command_id=client.new_command_id())
                await client.call(ops.TRANSFER_LEADERSHIP, wanted)  # sent to the present leader
        (note,) = them.published()
        assert parse_checkpoint(parse_note(note.encode())[0]).size >= last
        if way == "stopped":
            them.replicas.pop(leader.controller.name)
