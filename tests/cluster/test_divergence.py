"""Replicas compare their states, and the odd one out stops itself."""

import asyncio
import itertools
from pathlib import Path
from typing import NoReturn

import immutables
import msgspec
import pytest

from cluster import divergence
from cluster.client import Client
from cluster.client.requests import PoolRequest
from cluster.clock import SystemClock
from cluster.divergence import CHECKPOINT_S, Diverged, Verdict, is_checkpoint, judge
from cluster.serve import Replica
from replica.units import Instant, seconds
from tests.cluster.test_serve import make


@pytest.mark.parametrize("members", [1, 3, 5])
def test_only_a_majority_for_another_digest_makes_a_replica_the_odd_one(members: int) -> None:
    majority = members // 2 + 1
    for answers in itertools.product(("mine", "other", "third", None), repeat=members - 1):
        theirs = {f"p{number}": digest for number, digest in enumerate(answers) if digest is not None}
        counts = {digest: sum(answer == digest for answer in answers) for digest in ("mine", "other", "third")}
        verdict = judge("mine", theirs, members)
        if counts["mine"] + 1 >= majority:
            assert verdict is Verdict.AGREES
        elif max(counts["other"], counts["third"]) >= majority:
            assert verdict is Verdict.ODD
        elif counts["other"] + counts["third"]:
            assert verdict is Verdict.DISPUTED
        else:
            assert verdict is Verdict.UNDECIDED


def test_two_replicas_are_never_both_the_odd_one() -> None:
    for digests in itertools.product("abc", repeat=3):
        verdicts = [judge(mine, {"x": one, "y": two}, 3) for mine, one, two in (digests, digests[1:] + digests[:1])]
        assert verdicts.count(Verdict.ODD) <= 1 or len(set(digests)) == 1


def test_a_checkpoint_follows_from_the_entry_alone() -> None:
    minute = seconds(CHECKPOINT_S)
    assert is_checkpoint(divergence.CHECKPOINT_ENTRIES, Instant(5), Instant(5))
    assert is_checkpoint(1, Instant(minute - 1), Instant(minute))
    assert not is_checkpoint(1, Instant(minute), Instant(2 * minute - 1))


def test_a_replica_whose_state_differs_from_the_majority_stops_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence, "CHECKPOINT_ENTRIES", 1)
    monkeypatch.setattr(divergence, "COMPARE_PERIOD_S", 0.05)
    config = make(tmp_path / "site", 3)

    async def story() -> None:
        stopped: asyncio.Future[tuple[str, BaseException]] = asyncio.get_running_loop().create_future()

        def failing(name: str) -> object:
            def fail(error: BaseException) -> NoReturn:
                if not stopped.done():
                    stopped.set_result((name, error))
                raise asyncio.CancelledError

            return fail

        replicas = {
            replica.name: Replica(config, replica.name, clock=SystemClock(), fail=failing(replica.name))  # type: ignore[arg-type]
            for replica in config.replicas
        }
        try:
            for replica in replicas.values():
                await replica.start()
            async with Client.from_config(config, "operator") as client:
                leader = (await client.members()).leader
                victim = next(name for name in replicas if name != leader)
                await set_pool(client, "100MiB")
                # A fault of memory: one bit of the state of one follower.
                controller = replicas[victim].controller
                while controller.state.revision < replicas[leader or ""].controller.state.revision:
                    await asyncio.sleep(0.01)
                pool = controller.state.pools["fast"]
                flipped = msgspec.structs.replace(pool, quantity_bytes=pool.quantity_bytes ^ 1)
                controller._state = msgspec.structs.replace(
                    controller.state, pools=immutables.Map({"fast": flipped, "bulk": pool})
                )
                assert not stopped.done()
                for number in range(3):
                    await set_pool(client, f"{200 + number}MiB")
                async with asyncio.timeout(30):
                    name, error = await stopped
            assert name == victim
            assert isinstance(error, Diverged) and "the majority has another" in str(error)
        finally:
            for replica in replicas.values():
                await replica.stop()

    async def set_pool(client: Client, quantity: str) -> None:
        request = PoolRequest(command_id=client.new_command_id(), quantity=quantity, granularity="1MiB")
        await client.set_pool("fast", request)

    asyncio.run(story())
