"""A replica with a rewritten and rehashed history is detected by its peers: it never leads, and stops."""

import asyncio
import logging
from pathlib import Path
from typing import NoReturn

import pytest

from forebay.cluster.client import Client
from forebay.cluster.consensus import Role
from forebay.cluster.consensus.frames import VoteReply, VoteRequest
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.requests import PoolRequest
from forebay.cluster.serve import Replica
from forebay.cluster.server import divergence
from forebay.cluster.server.divergence import StateDiverged
from forebay.cluster.server.storage import StorageRefused, open_storage
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages.commands import Actor, ActorRole
from forebay.replica.state import digest
from forebay.wal import Condition, Environment, Journal
from forebay.wal.ledger import Ledger
from tests.cluster.consensus.harness import STAND_S, Harness
from tests.cluster.consensus.memory_journal import Disk, MemoryJournal
from tests.cluster.harness import PATIENCE_S
from tests.cluster.test_serve import make
from tests.faults.rewritten import blamed, rewrite

SOMEBODY_ELSE = Actor(ActorRole.OPERATOR, "mallory")


def test_replica_with_a_rewritten_history_never_leads_and_stops_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "COMPARE_PERIOD_S", 0.05)
    # The ledger records no digest of the rewritten part yet; with one, the replica would not even start.
    monkeypatch.setattr(digest, "CHECKPOINT_S", 10_000_000)
    config = make(tmp_path / "site", 3)
    victim = "r1"

    async def story() -> None:
        stopped: asyncio.Future[tuple[str, BaseException]] = asyncio.get_running_loop().create_future()

        def failing(name: str) -> object:
            def fail(error: BaseException) -> NoReturn:
                if not stopped.done():
                    stopped.set_result((name, error))
                raise asyncio.CancelledError

            return fail

        def started() -> dict[str, Replica]:
            return {
                replica.name: Replica(config, replica.name, clock=SystemClock(), fail=failing(replica.name))  # type: ignore[arg-type]
                for replica in config.replicas
            }

        async def run(replicas: dict[str, Replica]) -> None:
            for replica in replicas.values():
                await replica.start()

        replicas = started()
        await run(replicas)
        async with Client.from_config(config, "operator") as client:
            for number in range(3):
                request = PoolRequest(
                    command_id=client.new_command_id(), quantity=f"{100 + number}MiB", granularity="1MiB"
                )
                revision = (await client.call(ops.SET_POOL, request, name="fast")).revision
        async with asyncio.timeout(PATIENCE_S):
            while any(replica.controller.state.revision < revision for replica in replicas.values()):
                await asyncio.sleep(0.01)
        for replica in replicas.values():
            await replica.stop()

        altered = rewrite(config, victim, lambda entry: blamed(entry, SOMEBODY_ELSE))
        assert len(altered) >= 3
        environment = Environment.open(
            config.wal_directory(victim),
            cluster_id=config.cluster.id,
            replica=victim,
            map_size_bytes=config.storage.map_size_bytes,
            create=False,
        )
        Journal(environment)
        assert Ledger(environment).verify().first_index == 1, "its own disk must seem valid"
        environment.close()

        replicas = started()
        try:
            await run(replicas)
            async with asyncio.timeout(PATIENCE_S):
                while not stopped.done():
                    assert replicas[victim].controller.engine.role is not Role.LEADER
                    await asyncio.sleep(0.005)
            name, error = stopped.result()
            assert name == victim
            assert isinstance(error, StateDiverged)
            assert "the ledger of r1" in str(error) and "r2" in str(error) and "cluster replace" in str(error)
        finally:
            for replica in replicas.values():
                await replica.stop()

    asyncio.run(story())


def test_history_rewritten_before_a_recorded_digest_is_rejected_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without any peer."""
    monkeypatch.setattr(divergence, "QUIET_S", 1.1)
    monkeypatch.setattr(digest, "CHECKPOINT_S", 1)
    config = make(tmp_path / "site", 1)

    def fail(error: BaseException) -> NoReturn:
        raise AssertionError("the replica stopped") from error

    async def story() -> None:
        replica = Replica(config, "r1", clock=SystemClock(), fail=fail)
        await replica.start()
        try:
            async with Client.from_config(config, "operator") as client, asyncio.timeout(PATIENCE_S):
                request = PoolRequest(command_id=client.new_command_id(), quantity="100MiB", granularity="1MiB")
                revision = (await client.call(ops.SET_POOL, request, name="fast")).revision
                checkpoints = replica.controller.checkpoints
                assert checkpoints is not None
                while max(checkpoints._recorded, default=0) < revision:
                    await asyncio.sleep(0.01)
        finally:
            await replica.stop()

    asyncio.run(story())
    open_storage(config, "r1").close()
    assert rewrite(config, "r1", lambda entry: blamed(entry, SOMEBODY_ELSE))
    with pytest.raises(StorageRefused, match="they differ first between revision") as refused:
        open_storage(config, "r1")
    assert refused.value.condition is Condition.STATE_NOT_THE_RECORDED


A, B = b"a" * 32, b"b" * 32


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize(
    ("digest", "index", "granted"),
    [(A, 2, True), (B, 2, False), (B, 1, False), (B, 3, True), (b"", 0, True)],
    ids=["the same", "another", "another earlier", "further than is known here", "no ledger yet"],
)
def test_no_vote_is_given_to_a_replica_with_another_history(
    pre: bool, digest: bytes, index: int, granted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    harness = Harness(journal=MemoryJournal(Disk()))
    harness.journal.digest_at = {1: A, 2: A}.get
    caplog.set_level(logging.ERROR)
    harness.give("r2", VoteRequest(5, 1, 9, 9, pre, False, index, digest))
    assert [reply.granted for reply in harness.take(VoteReply, "r2")] == [granted]
    said = "the ledger of r2" in caplog.text and "so this replica does not vote for r2" in caplog.text
    assert said is not granted


def test_candidate_sends_the_digest_of_its_applied_history() -> None:
    harness = Harness()
    harness.follow([(1, b"\x01a"), (1, b"\x01b")], commit=1)
    harness.journal.digest_at = {1: A}.get
    harness.wait(2 * STAND_S)
    request = harness.take(VoteRequest)[0]
    assert (request.ledger_index, request.ledger_digest) == (1, A)
