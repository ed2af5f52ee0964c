"""Replicas compare their states, and a replica that differs from the majority stops."""

import asyncio
import itertools
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import immutables
import msgspec
import pytest

from forebay.cluster.audit.replay import replay
from forebay.cluster.client import Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.requests import PoolRequest
from forebay.cluster.serve import Replica
from forebay.cluster.server import divergence
from forebay.cluster.server.divergence import Checkpoints, Digests, StateDiverged, Verdict, judge
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages import CONTROLLER, Batch, Entry, StateDigested
from forebay.replica.state import digest
from forebay.replica.state.digest import CHECKPOINT_S, is_checkpoint, state_digest
from forebay.replica.state.state import State
from forebay.replica.values.units import Instant, Revision, seconds
from forebay.wal import Environment
from forebay.wal import Ledger as StoredLedger
from tests.cluster.harness import PATIENCE_S
from tests.cluster.test_serve import make
from tests.cluster.transitions import transition_of


@pytest.mark.parametrize("members", [1, 3, 5])
def test_only_a_majority_for_another_digest_makes_a_replica_odd(members: int) -> None:
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


def test_two_replicas_are_never_both_odd() -> None:
    for digests in itertools.product("abc", repeat=3):
        verdicts = [judge(mine, {"x": one, "y": two}, 3) for mine, one, two in (digests, digests[1:] + digests[:1])]
        assert verdicts.count(Verdict.ODD) <= 1 or len(set(digests)) == 1


def test_checkpoint_depends_on_the_entry_alone() -> None:
    minute = seconds(CHECKPOINT_S)
    assert is_checkpoint(digest.CHECKPOINT_ENTRIES, Instant(5), Instant(5))
    assert is_checkpoint(1, Instant(minute - 1), Instant(minute))
    assert not is_checkpoint(1, Instant(minute), Instant(2 * minute - 1))


def test_replica_whose_state_differs_from_the_majority_stops_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "CHECKPOINT_ENTRIES", 1)
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
                leader = (await client.call(ops.LIST_MEMBERS)).leader
                victim = next(name for name in replicas if name != leader)
                await set_pool(client, "100MiB")
                # A memory fault: one bit of a follower's state.
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
            assert isinstance(error, StateDiverged) and "the majority has another" in str(error)
        finally:
            for replica in replicas.values():
                await replica.stop()

    async def set_pool(client: Client, quantity: str) -> None:
        request = PoolRequest(command_id=client.new_command_id(), quantity=quantity, granularity="1MiB")
        await client.call(ops.SET_POOL, request, name="fast")

    asyncio.run(story())


class Ledger:
    """Ledger with some known digests."""

    def __init__(self, digests: dict[int, bytes]) -> None:
        self.digests = digests
        self.applied_index = max(digests, default=0)

    def digest_at(self, index: int) -> bytes | None:
        return self.digests.get(index)


def answering(digests: dict[str, dict[int, str]], ledgers: dict[str, dict[int, bytes]]) -> divergence.Ask:
    """Return a request function for peers that answer `digests`, and the requested or last digests of their ledgers."""

    async def ask(peer: str, index: int) -> Digests:
        ledger = ledgers.get(peer, {})
        at = min(index, max(ledger, default=0))
        return Digests(digests.get(peer, {}), {at: ledger[at].hex()} if at in ledger else {})

    return ask


def compared(
    mine: dict[int, str],
    theirs: dict[str, dict[int, str]],
    ledger: dict[int, bytes] | None = None,
    ledgers: dict[str, dict[int, bytes]] | None = None,
) -> tuple[Verdict, list[BaseException]]:
    """Compare once; return the verdict, and the error with which the replica stopped."""
    failures: list[BaseException] = []

    def fail(error: BaseException) -> NoReturn:
        failures.append(error)
        raise error

    peers = tuple(theirs or ledgers or ())
    checkpoints = Checkpoints("r1", lambda: peers, answering(theirs, ledgers or {}), fail, chain=Ledger(ledger or {}))
    checkpoints._digests.update(mine)
    with suppress(StateDiverged):
        asyncio.run(checkpoints._compare())
    return checkpoints.verdict, failures


def test_diverged_replica_stops_even_if_one_peer_lags_by_a_checkpoint() -> None:
    wrong = {index: f"bad{index}" for index in range(16)}
    right = {index: f"good{index}" for index in range(16)}
    verdict, failures = compared(wrong, {"r2": right, "r3": {index: right[index] for index in range(15)}})
    assert "after entry 0" in str(failures[0]) and "r2 good0, r3 good0" in str(failures[0])


def test_sound_replica_continues_whatever_one_peer_reports() -> None:
    right = {index: f"good{index}" for index in range(16)}
    wrong = {index: f"bad{index}" for index in range(17)}
    for behind in range(1, 17):
        some = {index: digest for index, digest in right.items() if index < behind}
        for theirs in ({"r2": wrong, "r3": some}, {"r2": right, "r3": wrong}):
            assert compared(right, theirs)[1] == []
    assert compared(right, {"r2": right, "r3": wrong})[0] is Verdict.AGREES
    assert compared(right, {"r2": wrong, "r3": {0: "good0"}})[0] is Verdict.DISPUTED


def history(last: int, rewritten_from: int | None = None) -> dict[int, bytes]:
    """Return digests of a ledger up to each entry. They are chained, so all differ from a rewritten entry on."""
    return {
        index: (b"\x01" if rewritten_from is not None and index >= rewritten_from else b"\0") * 31 + bytes([index])
        for index in range(1, last + 1)
    }


@pytest.mark.parametrize("lasts", [*itertools.product(range(1, 5), repeat=3)])
def test_rewritten_ledger_is_detected_at_any_lag_and_a_sound_one_is_not(
    lasts: tuple[int, int, int],
) -> None:
    own, *peers = lasts
    behind = min(lasts)
    for rewritten_from in range(1, own + 1):
        theirs = {f"r{number}": history(last) for number, last in enumerate(peers, start=2)}
        verdict, failures = compared({}, {}, history(own, rewritten_from), theirs)
        known = [min(own, last) for last in peers if min(own, last) >= rewritten_from]
        if behind >= rewritten_from or (len(known) == 2 and known[0] == known[1]):
            assert len(failures) == 1 and "the ledger of r1" in str(failures[0])
        else:
            assert failures == []
            assert (verdict is Verdict.DISPUTED) == bool(known)
        # The view of a sound replica with a rewritten peer.
        others = {"r2": history(peers[0], rewritten_from), "r3": history(peers[1])}
        verdict, failures = compared({}, {}, history(own), others)
        assert failures == []


def test_replica_compares_its_ledger_at_start_until_every_peer_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(divergence, "COMPARE_PERIOD_S", 0.001)
    asked: list[tuple[str, int]] = []

    async def story() -> None:
        loop = asyncio.get_running_loop()
        settled = loop.create_future()

        async def ask(peer: str, index: int) -> Digests:
            asked.append((peer, index))
            if peer == "r3" and len(asked) < 6:
                raise OSError("the peer is not running yet")
            if len(asked) >= 6:
                loop.call_soon(lambda: settled.done() or settled.set_result(None))
            return Digests({}, {index: history(7)[index].hex()})

        def fail(error: BaseException) -> NoReturn:
            raise error

        checkpoints = Checkpoints("r1", lambda: ("r2", "r3"), ask, fail, chain=Ledger(history(7)))
        checkpoints.start()
        async with asyncio.timeout(PATIENCE_S):
            await settled
            while not checkpoints._is_ledger_compared:
                await asyncio.sleep(0)
        assert not checkpoints._is_unfinished
        assert set(asked) == {("r2", 7), ("r3", 7)}
        await checkpoints.stop()

    asyncio.run(story())


def test_state_that_cannot_be_digested_stops_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(state: State) -> bytes:
        raise ValueError("no number of jobs")

    async def ask(peer: str, index: int) -> Digests:
        return Digests({}, {})

    async def story() -> None:
        stopped: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        def fail(error: BaseException) -> NoReturn:
            stopped.set_result(error)
            raise asyncio.CancelledError

        monkeypatch.setattr(divergence, "state_digest", broken)
        checkpoints = Checkpoints("r1", lambda: ("r2", "r3"), ask, fail, chain=Ledger({}))
        checkpoints.start()
        checkpoints.applied(transition_of(State(), State(), index=digest.CHECKPOINT_ENTRIES))
        async with asyncio.timeout(PATIENCE_S):
            assert str(await stopped) == "no number of jobs"
        await checkpoints.stop()

    asyncio.run(story())


def history_of(states: list[State], *, wrong: bool = False) -> list[tuple[State, State, Batch | None]]:
    """Return applied transitions: a change that passes a minute, and the record of the resulting digest."""
    first, second = states
    found = bytes(32) if wrong else state_digest(second)
    entry = Entry(b"", CONTROLLER, "record_state_digest", (StateDigested(second.revision, found),))
    third = msgspec.structs.replace(second, revision=Revision(second.revision + 1))
    return [(first, second, None), (second, third, Batch(second.revision, second.at, (entry,)))]


@pytest.mark.parametrize("late", [False, True], ids=["digested before", "digested after"])
@pytest.mark.parametrize("wrong", [False, True], ids=["the same", "another"])
def test_replica_whose_state_contradicts_the_record_stops_with_a_message(late: bool, wrong: bool) -> None:
    minute = seconds(CHECKPOINT_S)
    states = [State(revision=Revision(number), at=Instant(number * minute)) for number in (1, 2)]

    async def ask(peer: str, index: int) -> Digests:
        return Digests({}, {})

    async def story() -> None:
        failures: list[BaseException] = []

        def fail(error: BaseException) -> NoReturn:
            failures.append(error)
            raise error

        checkpoints = Checkpoints("r1", lambda: ("r2", "r3"), ask, fail, chain=Ledger({}))
        (before, after, batch), record = history_of(states, wrong=wrong)
        checkpoints.applied(transition_of(before, after, batch, index=7))
        with suppress(StateDiverged):
            if late:
                checkpoints.applied(transition_of(*record, index=8))
            checkpoints.start()
            async with asyncio.timeout(PATIENCE_S):
                while not failures and not checkpoints.digests:
                    await asyncio.sleep(0)
            if not late:
                checkpoints.applied(transition_of(*record, index=8))
        await checkpoints.stop()
        assert bool(failures) is wrong
        if wrong:
            sentence = str(failures[0])
            assert "the state of r1 after revision 2 has digest" in sentence and "entry 8 records" in sentence
            assert "cluster replace" in sentence

    asyncio.run(story())


def test_replicas_record_agreed_digests_and_nothing_while_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "COMPARE_PERIOD_S", 0.05)
    monkeypatch.setattr(divergence, "QUIET_S", 1.1)
    monkeypatch.setattr(digest, "CHECKPOINT_S", 1)
    monkeypatch.setattr(digest, "RECORDS_PER_EVENT", 1_000)
    config = make(tmp_path / "site", 3)

    def fail(error: BaseException) -> NoReturn:
        raise AssertionError("a replica stopped") from error

    async def story() -> None:
        replicas = [Replica(config, one.name, clock=SystemClock(), fail=fail) for one in config.replicas]
        controllers = [replica.controller for replica in replicas]

        def records() -> list[list[tuple[int, bytes]]]:
            return [
                [
                    (event.revision, event.state)
                    for applied in controller.applied_log._recent
                    if applied.batch is not None
                    for entry in applied.batch.entries
                    for event in entry.events
                    if isinstance(event, StateDigested)
                ]
                for controller in controllers
            ]

        def at_rest() -> bool:
            checkpoints = [controller.checkpoints for controller in controllers]
            same = len({controller.state.revision for controller in controllers}) == 1
            return same and all(
                one is not None
                and one._undigested is None
                and not one._pending
                and one.unrecorded is None
                and one.digests
                for one in checkpoints
            )

        try:
            for replica in replicas:
                await replica.start()
            async with Client.from_config(config, "operator") as client:
                for number in range(2):
                    request = PoolRequest(
                        command_id=client.new_command_id(), quantity=f"{100 + number}MiB", granularity="1MiB"
                    )
                    revision = (await client.call(ops.SET_POOL, request, name="fast")).revision
                    async with asyncio.timeout(PATIENCE_S):
                        while not at_rest() or max(records()[0], default=(0, b""))[0] < revision:
                            await asyncio.sleep(0.01)
                    seen, *others = records()
                    assert others == [seen, seen], "every replica must have the same records"
                    # Besides founding and the pool, all entries are records, and no record is of another record.
                    assert controllers[0].state.revision == 1 + (number + 1) + len(seen)
        finally:
            for replica in replicas:
                await replica.stop()
        with Environment.open_readonly(config.wal_directory("r1")) as environment:
            replayed = replay(StoredLedger(environment))
            assert (replayed.digests.recorded, replayed.digests.compared) == (len(seen), len(seen))

    asyncio.run(story())
