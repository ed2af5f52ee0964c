"""Recovery from a lost majority: one surviving replica continues alone as a new incarnation of the cluster.

Entries that only lost replicas acknowledged are gone, and cannot be identified. All entries of the survivor are kept,
including its uncommitted tail, because the survivor may have been part of the majority that acknowledged them. Nothing
that the survivor acknowledged is lost. The tail may add commands whose outcome their clients do not know.

The new incarnation is one transaction: its number and mark, a configuration with one member, and an entry that records
the recovery for auditors. A crash leaves exactly one of the two incarnations. Members of the previous incarnation are
ignored.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from forebay.cluster.config import Config
from forebay.cluster.consensus import SealBroken, SealChecks, Seals, check_tail, recovery_configuration
from forebay.cluster.schemas import StatusView
from forebay.cluster.server.applied_log import read_batch, read_configuration
from forebay.cluster.server.pending import entry_of
from forebay.cluster.server.recovery.start_checks import ask_replicas
from forebay.cluster.server.storage import Storage, open_storage
from forebay.cluster.server.tlog import SIGNING_DIRECTORY, private_key
from forebay.cluster.system import Clock, start_command
from forebay.replica.decide import decide
from forebay.replica.fold import apply_batch
from forebay.replica.messages import (
    Actor,
    ActorRole,
    Batch,
    ClusterRecovered,
    Event,
    RecoverCluster,
    ReleaseNeeded,
    Request,
)
from forebay.replica.model import JobState, Recovery
from forebay.replica.state import State
from forebay.replica.values import Instant, LedgerViolation, Rejection
from forebay.wal import (
    CodecError,
    Configuration,
    ConfigurationAt,
    Entry,
    Incarnation,
    Journal,
    Member,
    encode_batch,
    encode_configuration,
)

MARK_BYTES: Final = 8
"""Number of random bytes in a recovery's mark, so that independent recoveries have different marks."""

READ_ENTRIES: Final = 512
READ_BYTES: Final = 4 << 20
"""Limits of one read of the tail: entries, and their bytes without the last entry."""

PLAN_DIGITS: Final = 8
"""Hexadecimal digits of a plan's ID: short enough to type, and different for different kept data."""


class RecoveryNotPossible(Exception):
    """The recovery is not possible; nothing was changed. The message includes the remedy."""


class RecoveryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Data that the recovery would keep, and data that may be lost."""

    id: str
    """ID of this plan, for `--confirm`."""
    replica: str
    member: str
    """ID of the survivor as a member."""
    incarnation: str
    """Incarnation that the recovery would end."""
    members: tuple[str, ...]
    """IDs of the members of that incarnation."""
    known_index: int
    """Last entry known here to be committed. All acknowledged entries up to it are kept."""
    known_revision: int
    known_at: Instant
    """Revision after entry `known_index`, and the time of the last batch up to it, by the cluster's clock."""
    kept_index: int
    """Last entry kept. Entries after `known_index` are kept as this replica has them.

    A majority that continued without this replica may have acknowledged other entries instead.
    """
    kept_revision: int
    kept_at: Instant
    """Time of the last batch kept, by the cluster's clock."""
    void_entries: int
    """Number of batches after `known_index` that the base check voids, as on every replica."""
    jobs: dict[str, int]
    """Jobs kept, by state."""
    last_job: int
    """Last job ID that is known here to be used."""
    reachable: dict[str, int]
    """Index of the last entry of each replica that answers."""

    @property
    def uncertain_entries(self) -> int:
        """Number of kept entries that were not known to be committed."""
        return self.kept_index - self.known_index


class RecoveryResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a recovery."""

    plan: RecoveryPlan
    recovery: Recovery


class _Kept(msgspec.Struct, frozen=True):
    """State of a replica with its tail folded."""

    begun: bool
    """True if the last entry begins an incarnation, so the replica was recovered and has not run since."""

    state: State
    placed: ConfigurationAt
    known_state: State
    """State after the last entry known to be committed."""
    void_entries: int
    digest: bytes
    """Digest of all kept entries."""


async def plan_recovery(config: Config, name: str, *, clock: Clock, leave_behind: Sequence[str] = ()) -> RecoveryPlan:
    """Return the recovery plan of replica `name`, which must not run.

    Raises:
        RecoveryNotPossible: There is nothing to recover, or a better remedy exists.

    Exceptions of `open_storage` also propagate.
    """
    storage = open_storage(config, name)
    try:
        kept = _kept(storage)
        answers = await _others(config, name, storage, clock)
        _refuse(config, name, storage, kept, answers, leave_behind)
        return _plan(name, storage, kept, answers)
    finally:
        storage.close()


async def recover(
    config: Config,
    name: str,
    plan_id: str,
    *,
    by: str,
    clock: Clock,
    leave_behind: Sequence[str] = (),
    draw: Callable[[int], bytes] = secrets.token_bytes,
) -> RecoveryResult:
    """Turn the data of replica `name` into a cluster of one member, by the plan with this ID.

    `by` is the operator; `draw` returns unpredictable bytes. Also raises the exceptions of `plan_recovery`.

    Raises:
        RecoveryNotPossible: The plan has changed.
    """
    storage = open_storage(config, name)
    try:
        kept = _kept(storage)
        answers = await _others(config, name, storage, clock)
        _refuse(config, name, storage, kept, answers, leave_behind)
        plan = _plan(name, storage, kept, answers)
        if plan.id != plan_id:
            raise RecoveryNotPossible(
                f"the plan changed: it is {plan.id} now, but {plan_id} was confirmed; review it with `forebay cluster "
                f"recover --name {name}`"
            )
        survivor = kept.placed.configuration.member(storage.identity)
        assert survivor is not None  # checked by `_refuse`
        recovery = begin(
            storage.journal,
            kept.state,
            kept.placed.configuration,
            survivor,
            RecoverCluster(draw(MARK_BYTES).hex(), storage.identity, plan.members, plan.kept_index, plan.known_index),
            by=by,
            at=Instant(max(clock.now(), kept.state.at)),
            seals=seals_of(config, name, survivor),
        )
        return RecoveryResult(plan=plan, recovery=recovery)
    finally:
        storage.close()


def seals_of(config: Config, name: str, member: Member) -> Seals:
    """Return the seals that replica `name` uses to sign entries as this member.

    Raises:
        StorageRefused: The replica's key is missing or unusable.
    """
    private = private_key(config.storage.directory / name / SIGNING_DIRECTORY, member)
    return Seals(config.cluster.id, member.id, private)


def begin(
    journal: Journal,
    state: State,
    current: Configuration,
    survivor: Member,
    command: RecoverCluster,
    *,
    by: str,
    at: Instant,
    seals: Seals,
) -> Recovery:
    """Write a new incarnation after the kept entries, in one transaction; return the ledger's record of the recovery.

    `state` and `current` are the state and configuration at the end of the journal. `survivor` becomes the only member,
    with the key of `seals`.
    """
    request = Request(b"", Actor(ActorRole.OPERATOR, by), command)
    decision = decide(state, request, at)
    if isinstance(decision, Rejection):
        raise RecoveryNotPossible(f"{decision.sentence}; {decision.remedy}")
    (event,) = decision.events
    assert isinstance(event, ClusterRecovered)
    batch = Batch(state.revision, at, (entry_of(request, decision.events),))
    survivor = msgspec.structs.replace(survivor, key=seals.key)
    alone = recovery_configuration(current, survivor, actor=f"operator {by}", at=at)
    index, term = journal.last_index + 1, journal.term + 1
    first = seals.sealed(Entry(index, term, encode_configuration(alone)), journal.last_term, {})
    second = seals.sealed(Entry(index + 1, term, encode_batch(batch)), term, {})
    journal.begin_incarnation(Incarnation(event.recovery.incarnation, event.recovery.mark), term, [first, second])
    return event.recovery


def _kept(storage: Storage) -> _Kept:
    """Fold the whole journal, and return the result, as a replica that commits it will have it."""
    journal, state, placed = storage.journal, storage.state, storage.configuration
    digest = hashlib.sha256(journal.applied_digest)
    index, void, known, begun = storage.index, 0, state, False
    seals = SealChecks(storage.environment.identity.cluster_id, storage.identity)
    if journal.base_index < index:
        seals.note(journal.entry(index))
    while index < journal.last_index:
        for entry in journal.entries(index + 1, max_bytes=READ_BYTES, max_entries=READ_ENTRIES):
            if placed is not None:
                try:
                    term_before = journal.term_of(index) or 0
                    check_tail(seals, [entry], term_before, placed.configuration, known_index=journal.commit_index)
                except SealBroken as error:
                    raise RecoveryNotPossible(
                        f"{error}: it was inserted while the replica was stopped. Keep the directory for an "
                        "examination, and recover another replica, or restore a snapshot"
                    ) from error
            digest.update(b"%d %d %d " % (entry.index, entry.term, len(entry.data)) + entry.data)
            index = entry.index
            try:
                batch, configuration = read_batch(entry.data), read_configuration(entry.data)
                following = state if batch is None else apply_batch(state, batch)
            except ReleaseNeeded:
                raise
            except (CodecError, LedgerViolation) as error:
                raise RecoveryNotPossible(
                    f"entry {index}, which was not known to be committed, cannot be applied: {error}; keep the "
                    "directory for an examination"
                ) from error
            void += following is None
            begun = batch is not None and any(isinstance(one, ClusterRecovered) for one in _events_of(batch))
            state = state if following is None else following
            known = state if index <= journal.commit_index else known
            placed = placed if configuration is None else ConfigurationAt(index, configuration)
    if placed is None or not state.revision:
        raise RecoveryNotPossible(f"{storage.environment.directory} has no history: the cluster was never founded")
    return _Kept(begun, state, placed, known, void, digest.digest())


def _events_of(batch: Batch) -> Iterator[Event]:
    return (event for entry in batch.entries for event in entry.events)


async def _others(config: Config, name: str, storage: Storage, clock: Clock) -> dict[str, StatusView]:
    """Return the status of the other replicas, which may have more entries."""
    others = [replica for replica in config.replicas if replica.name != name]
    return await ask_replicas(config, name, others, clock=clock)


def _refuse(
    config: Config,
    name: str,
    storage: Storage,
    kept: _Kept,
    answers: dict[str, StatusView],
    leave_behind: Sequence[str],
) -> None:
    """Check that there is no better remedy than this recovery.

    Raises:
        RecoveryNotPossible: There is a better remedy; the message names it.
    """
    mine, last = storage.environment.incarnation, storage.journal.last_index
    if kept.begun:
        raise RecoveryNotPossible(
            f"{name} was already recovered as incarnation {mine}, and has not run since: start it with "
            f"`{start_command('replica', name)}`; another recovery would only skip more job IDs"
        )
    if kept.placed.configuration.member(storage.identity) is None:
        raise RecoveryNotPossible(
            f"{storage.identity} was removed from the cluster, which continued without it: recover one of "
            f"{', '.join(member.name for member in kept.placed.configuration.members())}"
        )
    for other, answer in answers.items():
        if answer.incarnation != str(mine):
            raise RecoveryNotPossible(
                f"{other} has incarnation {answer.incarnation}, and {name} has {mine}: the cluster was already "
                f"recovered. Move the directory of {name} away, and let it join: `{config.replica(name).add_command}`"
            )
        if answer.leader is not None:
            raise RecoveryNotPossible(
                f"{other} reports the leader {answer.leader}: a majority runs, and there is nothing to recover. Start "
                f"{name}; if its data is lost, `forebay cluster replace {name}`"
            )
        if answer.last_index > last and other not in leave_behind:
            raise RecoveryNotPossible(
                f"{other} has {answer.last_index} entries, and {name} has {last}: stop {other} and recover it "
                f"instead, or accept the loss of its additional entries: --leave-behind {other}"
            )


def _plan(name: str, storage: Storage, kept: _Kept, answers: dict[str, StatusView]) -> RecoveryPlan:
    journal, state = storage.journal, kept.state
    jobs = dict.fromkeys((state_of_job.name for state_of_job in JobState), 0)
    for job in state.jobs.values():
        jobs[job.state.name] += 1
    members = tuple(member.id for member in kept.placed.configuration.members())
    identity = hashlib.sha256(kept.digest)
    identity.update(f"{storage.identity} {storage.environment.incarnation} {sorted(answers)}".encode())
    return RecoveryPlan(
        id=identity.hexdigest()[:PLAN_DIGITS],
        replica=name,
        member=storage.identity,
        incarnation=str(storage.environment.incarnation),
        members=members,
        known_index=journal.commit_index,
        known_revision=kept.known_state.revision,
        known_at=kept.known_state.at,
        kept_index=journal.last_index,
        kept_revision=state.revision,
        kept_at=state.at,
        void_entries=kept.void_entries,
        jobs={word: count for word, count in jobs.items() if count},
        last_job=state.next_job - 1,
        reachable={other: answer.last_index for other, answer in answers.items()},
    )
