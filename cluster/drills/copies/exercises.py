"""Exercises on a copy: restore from a snapshot, recover from a lost majority, upgrade.

Each exercise begins with a snapshot from a replica or a backup. The snapshot is verified, and its state is compared
with the states of the cluster's replicas at the same revision.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from forebay.cluster.client import ApiError, Client
from forebay.cluster.config import Config, ReplicaConfig
from forebay.cluster.drills.copies.directory import private_directory, remove_left_over
from forebay.cluster.drills.copies.replicas import LOOK_S, NAMES, STATUS_S, Copy, CopyFailed, open_copy
from forebay.cluster.drills.copies.resources import FLOOR_BYTES
from forebay.cluster.drills.figures import Probe, find_lost, latency_us
from forebay.cluster.drills.final_checks import CheckImpossible, Resent, ask_each, find_disagreement, resend_writes
from forebay.cluster.drills.probes import MeasurementFailed, Probes, prober_starter
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.drills import EndDrillRequest, StartDrillRequest
from forebay.cluster.schemas.requests import TransferRequest
from forebay.cluster.system import TREE, Clock, free_bytes, parse_instant
from forebay.replica.values import DRILL_S_MAX, MICROSECONDS_PER_SECOND, plain

CONTROL_S: Final = 2.0
"""Seconds of writes before the fault, to measure the copy's normal latency."""

SETTLE_S: Final = 1.0
"""Seconds of writes after the fault."""

LAST_S: Final = 30.0
"""Time limit for the next acknowledged write once all replicas are up, seconds."""

COMPARE_S: Final = 30.0
"""Time limit for a replica to report its state at a past revision, seconds."""


class ExerciseInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of an exercise."""

    scenario: str
    target: str
    """Replica to fetch the snapshot from."""
    base: Path
    """Parent of the copy's directory."""
    backup: Path | None = None
    """Snapshot to use instead of a fetched one."""
    release: Path | None = None
    """Release to upgrade the copy to; None for the running one."""
    away_s: int = 1
    """Time that the surviving replica is stopped before the majority is lost, seconds."""


class SnapshotUnavailable(Exception):
    """The snapshot for a copy cannot be fetched; the message has the cause."""


SnapshotFetcher = Callable[[Client, ReplicaConfig, Path], Awaitable[None]]
"""Has a replica write a snapshot and copies it into a file. Raises SnapshotUnavailable or ApiError."""


class Outcome(msgspec.Struct, kw_only=True):
    """Result of an exercise; `faults` has a sentence for each failure."""

    faults: list[str]
    figures: dict[str, int]
    sentence: str
    unchecked: dict[str, str] = {}
    """Checks that could not be made, each with the reason."""


class Exercise:
    """Drill on a copy of the cluster."""

    def __init__(
        self,
        given: ExerciseInputs,
        client: Client,
        original: Config,
        identity: str,
        clock: Clock,
        tell: Callable[[str], None],
        began_s: float,
        *,
        fetch_snapshot: SnapshotFetcher,
    ) -> None:
        """Create an exercise.

        `client` is connected to the cluster that `original` configures; `began_s` is the drill's start by `clock`.
        """
        self._fetch = fetch_snapshot
        self._given = given
        self._client = client
        self._original = original
        self._identity = identity
        self._clock = clock
        self._tell = tell
        self.figures: dict[str, int] = {}
        self._unchecked: dict[str, str] = {}
        self._began_s = began_s
        self._drill = 0
        """Number of the drill that runs on the copy, for its probes."""

    def room_fault(self) -> str:
        """Return a sentence if too little disk space is left for the copy, or an empty string."""
        try:
            left = free_bytes(self._given.base)
        except OSError as error:
            return f"{self._given.base}: {error.strerror}"
        least = FLOOR_BYTES >> 20
        return f"{self._given.base} has less than {least} MiB free" if left < FLOOR_BYTES else ""

    async def run(self) -> Outcome:
        """Run the exercise, and remove the copy.

        Raises:
            CopyFailed: if the copy does not behave as a cluster must.
            ApiError: if the cluster or the copy did not answer.
            SnapshotUnavailable: if the snapshot cannot be fetched.
            OSError: if the copy's files cannot be written.
        """
        base = self._given.base
        removed = await asyncio.to_thread(remove_left_over, base)
        if removed:
            self._tell(f"removed {removed} directories that earlier drills left in {base}")
        with private_directory(base) as (directory, lock):
            async with open_copy(directory, lock, self._original, self._identity, self._clock) as copy:
                file = await self._fetch_snapshot(directory)
                compared = await self._compare_snapshot(copy, file)
                done = {"restore": self._restore, "majority-lost": self._lose_majority, "upgrade": self._upgrade}
                outcome = await done[self._given.scenario](copy, file)
                outcome.faults[:0] = compared
                outcome.unchecked = self._unchecked
                return outcome

    # ---- snapshot

    async def _fetch_snapshot(self, directory: Path) -> Path:
        if self._given.backup is not None:
            return self._given.backup
        began_s, file = self._clock.monotonic_s(), directory / "snapshot.fbs"
        replica = self._original.replica(self._given.target)
        await self._fetch(self._client, replica, file)
        size_bytes = file.stat().st_size
        self.figures |= {"snapshot_bytes": size_bytes, "fetched_us": self._since_us(began_s)}
        self._tell(f"fetched a snapshot of {size_bytes} bytes from {replica.name}")
        return file

    async def _compare_snapshot(self, copy: Copy, file: Path) -> list[str]:
        """Verify the snapshot, compare its state with the replicas' states at that revision, and return the faults."""
        began_s = self._clock.monotonic_s()
        checked = await copy.audit("backup", "inspect", "--check", str(file))
        self.figures |= {"snapshot_bytes": checked["size_bytes"], "checked_us": self._since_us(began_s)}
        revision, replicas = checked["revision"], {one.name: one.api for one in self._original.replicas}
        if checked["cluster_id"] != self._original.cluster.id:
            return [f"the snapshot belongs to cluster {plain(checked['cluster_id'])}"]
        statuses = await ask_each(replicas, lambda at: self._client.call(ops.SHOW_STATUS, replica=at))
        digests = await ask_each(
            replicas,
            lambda at: self._client.call(
                ops.SHOW_STATE_DIGEST, at=str(revision), replica=at, stale=True, deadline_s=COMPARE_S
            ),
        )
        same = sorted(name for name, one in digests.items() if one.state_digest == checked["state_digest"])
        other = sorted(digests.keys() - same)
        moments = [parse_instant(one.at) for one in statuses.values() if one.at is not None]
        behind_us = max(0, max(moments, default=0) - parse_instant(checked["at"]))
        self.figures |= {
            "held_revision": revision,
            "behind_revisions": max(0, max((one.revision for one in statuses.values()), default=0) - revision),
            "behind_us": behind_us,
            "states_compared": len(same),
        }
        self._tell(
            f"the snapshot contains revision {revision} of {checked['at']}: the cluster is "
            f"{self.figures['behind_revisions']} revisions and {behind_us / MICROSECONDS_PER_SECOND:.1f} s ahead; "
            f"{len(same)} of {len(replicas)} replicas had the same state"
        )
        if other:
            return [f"{', '.join(other)} had a different state at revision {revision}"]
        # For an old backup, the replicas may have pruned that history.
        if not same and self._given.backup is None:
            self._unchecked["snapshot state"] = f"no replica reported its state at revision {revision}"
        return []

    # ---- the exercises

    async def _restore(self, copy: Copy, file: Path) -> Outcome:
        lost_s = self._clock.monotonic_s()
        self._tell("simulating the loss of all replicas")
        write_s, read_s = await self._start_restored(copy, file)
        self._tell(f"{NAMES[0]} acknowledged a write after {write_s - lost_s:.2f} s")
        async with self._probe(copy) as probes:
            await copy.join_replicas(NAMES[1:])
            self.figures["stands_loss_us"] = self._since_us(lost_s)
            self._tell(f"{len(NAMES)} replicas vote after {self._clock.monotonic_s() - lost_s:.2f} s")
            await asyncio.sleep(SETTLE_S)
            over_s = self._clock.monotonic_s()
        self.figures |= {
            "fault_at_us": self._us(lost_s - self._began_s),
            "write_stop_at_us": 0,
            "write_stop_us": self._us(write_s - lost_s),
            "read_stop_us": self._us(read_s - lost_s),
        }
        self._add_measurements(probes, write_s, over_s, lost_s)
        faults = await self._check_kept(copy, probes, await self._resend(copy, probes))
        faults += await self._fold_ledger(copy, NAMES[0], file)
        behind = f"{self.figures['behind_revisions']} revisions, {self.figures['behind_us'] / 1e6:.1f} s"
        sentence = (
            f"the copy had everything up to revision {self.figures['held_revision']} and acknowledged a write "
            f"{self.figures['write_stop_us'] / 1e6:.1f} s after the loss; later changes are lost, by now {behind}"
        )
        return Outcome(faults=faults, figures=self.figures, sentence=sentence)

    async def _lose_majority(self, copy: Copy, file: Path) -> Outcome:
        await self._start_three(copy, file)
        leader = await copy.wait_for_leader()
        left, *_ = (name for name in NAMES if name != leader)
        gone = tuple(name for name in NAMES if name != left)
        async with self._probe(copy) as probes:
            began_s = self._clock.monotonic_s()
            await asyncio.sleep(CONTROL_S)
            if self._given.away_s:
                self._tell(f"{left} is stopped for {self._given.away_s} s; the others continue")
                copy.signal(left, signal.SIGSTOP)
                await self._write_without(copy, probes, self._given.away_s)
            lost_s = self._clock.monotonic_s()
            await copy.kill(*NAMES)
            killed_s = self._clock.monotonic_s()
            for name in gone:
                await asyncio.to_thread(copy.remove_data, name)
            self._tell(f"{' and '.join(gone)} and their disks are lost; recovering {left}")
            plan = await copy.audit("cluster", "recover", "--name", left)
            self.figures["planned_us"] = self._since_us(lost_s)
            await copy.audit("cluster", "recover", "--name", left, "--confirm", plan["plan"], "--by", self._identity)
            self.figures["recovered_us"] = self._since_us(lost_s)
            await copy.start(left)
            await copy.wait_ready(left)
            await self._wait_for_write(probes, copy, killed_s)
            self._tell(f"{left} leads alone")
            await copy.join_replicas(gone)
            self.figures["stands_loss_us"] = self._since_us(lost_s)
            await asyncio.sleep(SETTLE_S)
            await self._wait_beyond(copy, max(one.revision for one in probes.writes))
            over_s = self._clock.monotonic_s()
        self._write_gap_us(probes, lost_s, over_s)
        self._add_measurements(probes, began_s, over_s, lost_s)
        again = await self._resend(copy, probes)
        known = (*probes.writes, *probes.user_writes)
        lost = lost_writes(known, again, killed_s, plan["lost_after_revision"])
        self.figures |= {
            "said_kept_revision": plan["kept_revision"],
            "said_lost_after_revision": plan["lost_after_revision"],
            "uncertain_entries": plan["uncertain_entries"],
            "writes_said_lost": len(lost.said),
            "lost_span_us": lost.span_us,
        }
        faults = await self._check_kept(copy, probes, again, lost)
        sentence = (
            f"{left} led alone {self.figures['write_stop_us'] / 1e6:.1f} s after the others were lost; the recovery "
            f"plan announced that changes after revision {plan['lost_after_revision']} may be lost, and "
            f"{len(lost.said)} of {self.figures['writes_acknowledged']} acknowledged writes are lost, all after that "
            "revision"
        )
        return Outcome(faults=faults, figures=self.figures, sentence=sentence)

    async def _upgrade(self, copy: Copy, file: Path) -> Outcome:
        release = self._given.release or TREE
        await self._start_three(copy, file)
        before = await copy.wait_ready(NAMES[0])
        async with self._probe(copy) as probes:
            began_s = self._clock.monotonic_s()
            await asyncio.sleep(CONTROL_S)
            fault_s = self._clock.monotonic_s()
            leader = await copy.wait_for_leader()
            for name in (*(one for one in NAMES if one != leader), leader):
                if await copy.wait_for_leader() == name:
                    heir = next(one for one in NAMES if one != name)
                    request = TransferRequest(command_id=copy.client.new_command_id(), name=heir)
                    await copy.client.call(ops.TRANSFER_LEADERSHIP, request)
                self._tell(f"restarting {name} with the release in {release}")
                await copy.stop(name)
                await copy.start(name, release=release)
                await copy.wait_ready(name)
                await self._wait_caught_up(copy, name)
            self.figures["upgraded_us"] = self._since_us(fault_s)
            after = await copy.wait_ready(NAMES[0])
            await asyncio.sleep(SETTLE_S)
            over_s = self._clock.monotonic_s()
        self._write_gap_us(probes, fault_s, over_s)
        self._add_measurements(probes, began_s, over_s, fault_s)
        faults = await self._check_kept(copy, probes, await self._resend(copy, probes))
        faults += await self._fold_ledger(copy, NAMES[0], file, release)
        sentence = (
            f"{len(NAMES)} replicas were upgraded from {before.version} to {after.version}, one at a time; writes "
            f"stopped for {self.figures['write_stop_us'] / 1000:.1f} ms, none of "
            f"{self.figures['writes_acknowledged']} acknowledged writes is lost, and both releases replay the ledger "
            "to the same states"
        )
        return Outcome(faults=faults, figures=self.figures, sentence=sentence)

    # ---- steps

    async def _start_three(self, copy: Copy, file: Path) -> None:
        """Start a copy with three voting replicas."""
        await self._start_restored(copy, file)
        await copy.join_replicas(NAMES[1:])
        self._tell(f"a copy of {len(NAMES)} replicas is up")

    async def _start_restored(self, copy: Copy, file: Path) -> tuple[float, float]:
        """Restore the snapshot, start a replica, and return the times of its first write and first read.

        The write is acknowledged, the read linearizable. Times are seconds of the monotonic clock.
        """
        first, began_s = NAMES[0], self._clock.monotonic_s()
        await copy.audit("backup", "restore", str(file), "--name", first, "--yes", "--by", self._identity)
        self.figures["restored_us"] = self._since_us(began_s)
        await copy.start(first)
        reading = asyncio.create_task(self._first_read(copy))
        try:
            write_s = await self._first_write(copy)
            return write_s, await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _first_read(self, copy: Copy) -> float:
        at = copy.replicas[NAMES[0]]
        await copy.wait_for(
            lambda: copy.client.ask_once(ops.LIST_DRILLS, replica=at, timeout_s=STATUS_S), "a linearizable read"
        )
        return self._clock.monotonic_s()

    async def _first_write(self, copy: Copy) -> float:
        """Start a drill on the copy, which its probes need; first end a drill that the snapshot contains."""
        at, request = copy.replicas[NAMES[0]], self._begin_request(copy)
        first_s: list[float] = []

        async def begin() -> int | None:
            nonlocal request
            try:
                begun = await copy.client.ask_once(ops.START_DRILL, request, replica=at, timeout_s=STATUS_S)
            except ApiError as error:
                if not await self._clear_drills(copy):
                    raise CopyFailed(f"the copy rejected a write: {error}") from error
                first_s.append(self._clock.monotonic_s())
                # Use a new command ID: a retry with the same ID would get the first answer, a rejection.
                request = self._begin_request(copy)
                return None
            return None if begun is None else begun.drill

        self._drill = await copy.wait_for(begin, "an acknowledged write")
        first_s.append(self._clock.monotonic_s())
        return first_s[0]

    @staticmethod
    async def _clear_drills(copy: Copy) -> bool:
        """Remove locks and end open drills of the copy; return whether there were any.

        An open drill blocks a new drill until its lease ends.

        Raises:
            ApiError: if the copy did not answer.
        """
        client = copy.client
        known = await client.call(ops.LIST_DRILLS)
        open_ones = [one.drill for one in known.drills if one.ended is None]
        for lock in known.locks:
            await client.call(ops.UNLOCK_DRILLS, name=lock.by)
        for number in open_ones:
            end = EndDrillRequest(
                command_id=client.new_command_id(),
                verdict="aborted",
                sentence="the cluster was copied during the drill",
            )
            with contextlib.suppress(ApiError):
                await client.call(ops.END_DRILL, end, drill=number)
        return bool(known.locks or open_ones)

    def _begin_request(self, copy: Copy) -> StartDrillRequest:
        return StartDrillRequest(
            command_id=copy.client.new_command_id(),
            scenario=self._given.scenario,
            target=NAMES[0],
            lasts_s=DRILL_S_MAX,
        )

    @contextlib.asynccontextmanager
    async def _probe(self, copy: Copy) -> AsyncIterator[Probes]:
        writer = prober_starter(copy.config.file, self._identity, copy.replicas)
        user = functools.partial(Client.from_config, copy.config, self._identity, clock=self._clock)
        probes = Probes(copy.client, self._clock, copy.replicas, self._drill, writer, user)
        async with probes.running():
            yield probes
            if probes.unmeasured():
                raise MeasurementFailed(probes.unmeasured())
        if probes.rejection:
            raise CopyFailed(f"the copy rejected a write: {probes.rejection}")

    async def _wait_for_write(self, probes: Probes, copy: Copy, since_s: float) -> None:
        """Wait until a write sent after `since_s` is acknowledged.

        Raises:
            CopyFailed: if none is acknowledged within LAST_S.
        """
        until_s = self._clock.monotonic_s() + LAST_S
        while probes.answered_s <= since_s:
            copy.check()
            if self._clock.monotonic_s() > until_s:
                raise CopyFailed(f"no write was acknowledged within {LAST_S:g} s")
            await asyncio.sleep(LOOK_S)

    async def _write_without(self, copy: Copy, probes: Probes, away_s: float) -> None:
        """Wait for `away_s`, and until a write sent meanwhile is acknowledged.

        Raises:
            CopyFailed: if none is acknowledged in time.
        """
        since_s = self._clock.monotonic_s()
        await asyncio.sleep(away_s)

        async def ask() -> bool | None:
            return any(one.answered_s is not None and one.sent_s > since_s for one in probes.writes) or None

        await copy.wait_for(ask, "an acknowledged write without the stopped replica")

    async def _wait_beyond(self, copy: Copy, revision: int) -> None:
        """Wait until the copy is beyond a revision, so that a lost write that is resent gets a later revision.

        Raises:
            CopyFailed: if the copy does not reach a later revision in time.
        """

        async def ask() -> bool | None:
            return True if (await copy.client.call(ops.LIST_DRILLS)).revision > revision else None

        await copy.wait_for(ask, f"revision {revision + 1}")

    async def _wait_caught_up(self, copy: Copy, name: str) -> None:
        """Wait until a replica has applied the leader's present commit index.

        Raises:
            CopyFailed: if the replica does not catch up in time.
        """
        leader = copy.replicas[await copy.wait_for_leader()]
        wanted = (await copy.client.call(ops.SHOW_STATUS, replica=leader)).commit_index

        async def ask() -> bool | None:
            found = await copy.client.ask_once(ops.SHOW_STATUS, replica=copy.replicas[name], timeout_s=STATUS_S)
            return True if found is not None and found.applied_index >= wanted else None

        await copy.wait_for(ask, f"{name} with entry {wanted}")

    # ---- measurements

    def _write_gap_us(self, probes: Probes, fault_s: float, over_s: float) -> None:
        self.figures |= {"fault_at_us": self._us(fault_s - self._began_s), **probes.stops(fault_s, over_s)}

    def _add_measurements(self, probes: Probes, began_s: float, over_s: float, fault_s: float) -> None:
        writes = probes.writes
        self.figures |= {
            "watched_us": self._us(over_s - fault_s),
            "write_p50_us": latency_us(writes, began_s, over_s, 0.5),
            "write_p99_us": latency_us(writes, began_s, over_s, 0.99),
            "client_late_us": self._us(probes.late_s),
            "writes_acknowledged": sum(one.answered_s is not None for one in (*writes, *probes.user_writes)),
        }

    async def _resend(self, copy: Copy, probes: Probes) -> Resent:
        self._tell("checking every acknowledged write and the replicas' states")
        return await resend_writes(copy.client, self._drill, (*probes.writes, *probes.user_writes))

    async def _check_kept(
        self, copy: Copy, probes: Probes, again: Resent, expected: LostWrites | None = None
    ) -> list[str]:
        """Return faults: acknowledged writes lost without a warning, and replicas with different states."""
        found = expected or lost_writes((*probes.writes, *probes.user_writes), again)
        self.figures["writes_lost"] = len(found.unsaid)
        differ = ""
        with self._record_unchecked("acknowledged writes"):
            again.require_all()
        with self._record_unchecked("replica states"):
            differ = await find_disagreement(copy.client, copy.replicas, self._clock)
            self.figures["states_agree"] = int(not differ)
        return [
            *([f"{len(found.unsaid)} acknowledged writes are lost without being announced"] if found.unsaid else ()),
            *([f"on the copy, {differ}"] if differ else ()),
        ]

    @contextlib.contextmanager
    def _record_unchecked(self, check: str) -> Iterator[None]:
        """Record the reason if a check in the block could not be made."""
        try:
            yield
        except (ApiError, CheckImpossible) as error:
            self._unchecked[check] = str(error)

    async def _fold_ledger(self, copy: Copy, name: str, file: Path, release: Path | None = None) -> list[str]:
        """Replay the copy's ledger from the snapshot, with this release and `release`.

        Return a sentence for each difference.
        """
        words = ["audit", "replay", "--data", str(copy.replica_directory(name)), "--from-snapshot", str(file)]
        words += [] if release is None else ["--release", str(release)]
        began_s = self._clock.monotonic_s()
        try:
            replayed = await copy.audit(*words)
        except CopyFailed as error:
            self.figures["folds_agree"] = 0
            return [str(error)]
        self.figures["folded_us"] = self._since_us(began_s)
        with self._record_unchecked(f"replay of the ledger of {name}"):
            held = await copy.client.call(
                ops.SHOW_STATE_DIGEST,
                at=str(replayed["revision"]),
                replica=copy.replicas[name],
                stale=True,
                deadline_s=COMPARE_S,
            )
            agree = held.state_digest == replayed["state_digest"]
            self.figures["folds_agree"] = int(agree)
            if not agree:
                return [f"the ledger of {name} replays to a different state at revision {replayed['revision']}"]
        return []

    def _since_us(self, moment_s: float) -> int:
        return self._us(self._clock.monotonic_s() - moment_s)

    @staticmethod
    def _us(length_s: float) -> int:
        return round(length_s * MICROSECONDS_PER_SECOND)


class LostWrites(msgspec.Struct, frozen=True):
    """Lost acknowledged writes, by command ID: announced by the recovery plan (`said`), and unannounced (`unsaid`)."""

    said: tuple[str, ...]
    unsaid: tuple[str, ...]
    span_us: int = 0
    """Time from the first announced lost write to the fault, µs."""


def lost_writes(
    probes: Iterable[Probe], again: Resent, fault_s: float = 0.0, lost_after: int | None = None
) -> LostWrites:
    """Return the acknowledged writes that got a different answer or a rejection when they were resent.

    The recovery plan announced the loss of writes after the revision `lost_after`, or of none if that is None.
    """
    known = tuple(probes)
    names_gone = set(find_lost(known, again.revisions, again.unanswered))
    gone = [one for one in known if one.command_id in names_gone]
    said = [one for one in gone if lost_after is not None and one.sent_s <= fault_s and one.revision > lost_after]
    names = {one.command_id for one in said}
    first_s = min((one.answered_s for one in said if one.answered_s is not None), default=fault_s)
    return LostWrites(
        tuple(sorted(names)),
        tuple(sorted(one.command_id for one in gone if one.command_id not in names)),
        max(0, round((fault_s - first_s) * MICROSECONDS_PER_SECOND)),
    )
