"""Three replicas and two witnesses, one of them dead; and a history that was forged on all three replicas."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from forebay.cluster.client import Client
from forebay.cluster.config.config import Config
from forebay.cluster.config.witnesses import WitnessConfig
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.security.proofs import Tile, new_tiles, parse_checkpoint, parse_note
from forebay.cluster.server.divergence import Checkpoints
from forebay.cluster.server.tlog import cosigning, publish
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.witness import (
    CheckpointStore,
    CheckpointWitness,
    WitnessServer,
    log_of,
    make_key,
    read_key,
)
from tests.cluster.audit.ledgers import real
from tests.cluster.harness import PATIENCE_S, story
from tests.cluster.server.tlog.go_reader import needs_go, read
from tests.cluster.server.tlog.test_cluster import SOMEBODY_ELSE, Three, pools_set, quick, signed_by_all, three
from tests.cluster.test_serve import make, request
from tests.faults.rewritten import blamed, rewrite
from tests.ports import free_ports
from tests.repo.tree import ROOT

__all__ = ["quick"]  # fixture: a checkpoint every 0.3 s


class Watched:
    """Cluster with two witnesses, one of them dead."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = free_ports(2)
        self.keys = [make_key(directory / f"w{number}", f"w{number}.example") for number in (1, 2)]
        CheckpointStore.create(directory / "w1.db", str(self.keys[0]))
        witnesses = tuple(
            WitnessConfig(name=f"w{number}", url=f"http://127.0.0.1:{port}", key=str(key))
            for number, (port, key) in enumerate(zip(self.ports, self.keys, strict=True), start=1)
        )
        config = replace(make(directory / "site", 3), witnesses=witnesses)
        self.config = replace(config, checkpoints=replace(config.checkpoints, witnesses_needed=1))

    @contextlib.asynccontextmanager
    async def witness(self, them: Three) -> AsyncIterator[None]:
        origin = next(iter(them.replicas.values())).publisher.origin
        log = log_of(origin, [one.publisher.key for one in them.replicas.values()])
        seen = CheckpointStore(self.directory / "w1.db", str(self.keys[0]))
        witness = CheckpointWitness(*read_key(self.directory / "w1"), [log], seen, SystemClock())
        server = WitnessServer(witness, Address("127.0.0.1", self.ports[0]), None)
        await server.start()
        try:
            yield
        finally:
            await server.stop()
            seen.close()


async def typed(config: Config, *words: object, code: int = 0) -> str:
    result = await asyncio.to_thread(real, *words, FOREBAY_CONFIG=str(config.file))
    assert result.returncode == code, (words, result.stdout, result.stderr)
    return " ".join((result.stdout + result.stderr).split())


async def fetched(config: Config, into: Path, who: str) -> int:
    """Write the checkpoint and its tiles and bundles, as served to a client; return its size."""
    async with Client.from_config(config, who) as client:
        note = await client.call(ops.READ_CHECKPOINT)
        (into / "checkpoint").write_text(note)
        size = parse_checkpoint(parse_note(note.encode())[0]).size
        tiles = [*new_tiles(0, size)]
        for tile in tiles + [Tile(None, one.index, one.width) for one in tiles if not one.level]:
            path = into / tile.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(await client.call(ops.READ_TILE, tile=tile.path.removeprefix("tile/")))
    return size


def verified(keys: Path, proof: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / "cluster/security/proofs/verify_proof.py"),
        "--keys",
        str(keys),
        str(proof),
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Watching(NamedTuple):
    """Output and files of a cluster with one dead witness."""

    directory: Path
    sizes: tuple[int, int]
    checkpoint: str
    consistency: tuple[str, ...]
    status: str


async def witnessed_by_all(them: Three) -> str:
    """Wait until all replicas have a checkpoint of all applied entries, cosigned by the live witness."""
    while True:
        note = await signed_by_all(them)
        seen = {(one.publisher.witnessed_by, one.publisher.unwitnessed_s) for one in them.replicas.values()}
        if seen == {(("w1",), 0.0)} and them.published() == {note}:
            return note
        await asyncio.sleep(0.05)


async def counted_by_all(them: Three) -> None:
    """Wait until the ledger records the record counts of each job, as a majority counted them."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            leader = them.leader()
            assert leader is not None
            with contextlib.suppress(LookupError):
                counted = await leader.service.past.counts(leader.publisher.size)
                if counted.jobs and counted.recorded == counted.root:
                    return
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Watching:
    directory = tmp_path_factory.mktemp("seen")
    site, log = Watched(directory), directory / "log"
    config, keys = site.config, directory / "keys"
    log.mkdir()
    authority = load_authority(config.tls.authority.parent)
    issue(authority, config.tls.certificates, role=Role.AUDITOR, name="eve", at=SystemClock().now())
    found: list[Watching] = []

    @story
    async def lived() -> None:
        async with three(config) as them, site.witness(them):
            await them.until_they_have(await pools_set(config, 5))
            note = await witnessed_by_all(them)
            assert len(parse_note(note.encode())[1]) == 4
            old_size = parse_checkpoint(parse_note(note.encode())[0]).size
            (log / "old").write_text(note)
            keys.write_text((await asyncio.to_thread(real, "audit", "keys", FOREBAY_CONFIG=str(config.file))).stdout)
            shutil.copy(keys, log / "keys")
            async with Client.from_config(config, "alice") as client:
                job = (await client.call(ops.SUBMIT_JOB, request(client, directory / "site"))).job_id
            await counted_by_all(them)
            await witnessed_by_all(them)
            checkpoint = await typed(config, "audit", "checkpoint")
            consistent = ("audit", "consistency", "--from", log / "old")
            consistency = (
                await typed(config, *consistent, "--witnesses", 1),
                await typed(config, *consistent, "--keys", keys, "--witnesses", 1),
                await typed(config, *consistent, "--keys", keys, "--witnesses", 2, code=7),
            )
            await typed(config, "audit", "prove", "--job", job, "-o", directory / "proof")
            status = await typed(config, "cluster", "probe")
            size = await fetched(config, log, "eve")
            found.append(Watching(directory, (old_size, size), checkpoint, consistency, status))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "PERIOD_S", 0.3)
        patch.setattr(publish, "POLL_S", 0.05)
        patch.setattr(publish, "COUNTED_S", 0.0)
        patch.setattr(cosigning, "RETRY_S", 0.1)
        patch.setattr(cosigning, "RETRY_S_MAX", 0.1)
        lived()
    return found[0]


@pytest.mark.campaign(3)
def test_with_one_dead_witness_checkpoints_are_cosigned_and_reported_so(seen: Watching) -> None:
    assert "Cosigned by the witness w1 (w1.example) at 20" in seen.checkpoint and "UNWITNESSED" not in seen.checkpoint
    assert all("Witness w1.example cosigned the" in said for said in seen.consistency[:2])
    assert "1 valid cosignatures, and --witnesses requires 2" in seen.consistency[2]
    assert "has no cosignature of the witness w2: Cannot connect to host" in seen.status
    assert "THE LEDGER" not in seen.status


def test_verifier_can_require_a_number_of_witnesses(seen: Watching) -> None:
    keys, old_keys = seen.directory / "keys", seen.directory / "old_keys"
    assert keys.read_text().count("# witness w") == 2
    # Keys from before there were witnesses.
    old_keys.write_text("".join(f"{line}\n" for line in keys.read_text().splitlines() if ".example" not in line))
    for given, options, code, said in (
        (keys, ("--witnesses", "1"), 0, "signed by w1.example"),
        (keys, (), 0, ", a witness, at 20"),
        (keys, ("--all",), 0, "proven: all 1 records of job 1 in the first"),
        (keys, ("--witnesses", "2"), 1, "1 of 2 required witnesses cosigned the checkpoint"),
        (old_keys, (), 1, "see --others"),
        (old_keys, ("--others",), 0, "whose key was not given: this signature does not count"),
        (old_keys, ("--others",), 0, "UNWITNESSED"),
        (old_keys, ("--others", "--witnesses", "1"), 1, "0 of 1 required witnesses cosigned the checkpoint"),
    ):
        found = verified(given, seen.directory / "proof", *options)
        assert (found.returncode, said in found.stdout + found.stderr) == (code, True), (options, found)
        assert ("UNWITNESSED" in found.stdout) is (given == old_keys and code == 0)


@needs_go
def test_independent_reader_verifies_signatures_and_cosignatures(
    seen: Watching,
) -> None:
    old_size, size = seen.sizes
    assert size > old_size
    said = f"{size} leaves go on from {old_size}, signed 3, cosigned 1"
    assert read(seen.directory / "log", 3) == said


@pytest.mark.campaign(3)
@story
async def test_history_forged_on_all_replicas_is_found_only_by_the_witness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cosigning, "RETRY_S", 0.1)
    monkeypatch.setattr(cosigning, "RETRY_S_MAX", 0.1)
    site = Watched(tmp_path)
    async with three(site.config) as them, site.witness(them):
        await them.until_they_have(await pools_set(site.config, 4))
        await witnessed_by_all(them)
    seen = CheckpointStore(tmp_path / "w1.db", str(site.keys[0]))
    cosigned, _ = seen.read_all()
    seen.close()
    for name in ("r1", "r2", "r3"):
        assert rewrite(site.config, name, lambda entry: blamed(entry, SOMEBODY_ELSE), has_all_keys=True)
        home = site.config.storage.directory / name
        # An attacker with the disks also has each replica's record of signatures and its tree.
        (home / "signing/signed").unlink()
        shutil.rmtree(home / "tlog")
        shutil.rmtree(home / "index", ignore_errors=True)

    async def blind(checkpoints: Checkpoints) -> None:
        await asyncio.Event().wait()

    async with contextlib.AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Checkpoints, "_run", blind)
        async with three(site.config) as them:
            await them.until_they_have(await pools_set(site.config, 2))
            altered = await signed_by_all(them)
            # Without a witness, three replicas sign it and nothing seems wrong.
            assert not them.stopped and len(parse_note(altered.encode())[1]) == 3
            assert "THE LEDGER" not in await typed(site.config, "cluster", "probe")
            await stack.enter_async_context(site.witness(them))
            async with asyncio.timeout(PATIENCE_S):
                while not (leader := them.leader()) or not leader.publisher.cosigning.disputes:
                    await asyncio.sleep(0.05)
            said = f"the history before entry {cosigned[0].size} differs from the one that the witness cosigned"
            status = await typed(site.config, "cluster", "probe")
            assert (
                f"THE LEDGER CONTRADICTS WHAT THE WITNESS w1 HAS COSIGNED ({leader.controller.name}): {said}" in status
            )
            async with Client.from_config(site.config, "operator") as client:
                metrics = await client.call(ops.SHOW_METRICS, replica=site.config.replica(leader.controller.name).api)
            assert 'forebay_witness_disputes{witness="w1"} 1.0' in metrics
            assert 'forebay_witness_disputes{witness="w2"} 0.0' in metrics
            assert "forebay_checkpoint_witnesses 0.0" in metrics and not them.stopped
            await signed_by_all(them)  # the cluster continues nevertheless
            assert "UNWITNESSED: 0 of 1 required witnesses cosigned the checkpoint." in await typed(
                site.config, "audit", "checkpoint"
            )
    seen = CheckpointStore(tmp_path / "w1.db", str(site.keys[0]))
    evidence = seen.read_all()[1]
    seen.close()
    assert evidence and all(parse_checkpoint(parse_note(one.note.encode())[0]) for one in evidence)
