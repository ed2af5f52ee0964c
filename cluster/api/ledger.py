"""Handlers of the ledger and of the replica itself: entries for audits, snapshots, proofs, clock, status, health."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from forebay.cluster.api.history import history_busy
from forebay.cluster.api.history_service import HistoryServiceBusy, HistoryServiceTimeout, ProofUnavailable
from forebay.cluster.api.members import members_of
from forebay.cluster.api.metrics import CONTENT_TYPE, prometheus_text, state_families
from forebay.cluster.api.render import entry_view, record_event, record_head
from forebay.cluster.api.service import ApiCall, Reply, encode_view, handles
from forebay.cluster.api.statuses import machine_status
from forebay.cluster.api.web import Problem, bad_request, too_busy
from forebay.cluster.consensus import OFF_US, Role
from forebay.cluster.schemas import (
    CheckpointAnswer,
    CheckpointRequest,
    ClockAnswer,
    DigestsAnswer,
    HandedAnswer,
    HandedView,
    HistoriesView,
    LedgerAnswer,
    LedgerEntryView,
    LogKeysAnswer,
    LogKeyView,
    SetClockRequest,
    SignedAnswer,
    SignRequest,
    SnapshotsAnswer,
    SnapshotView,
    StateDigestAnswer,
    StatusView,
    StoredSnapshotView,
    WitnessKeyView,
)
from forebay.cluster.schemas import operations as ops
from forebay.cluster.server import PRUNED, AppliedEntry, NotLeading, Unavailable, Verdict, settled_at, snapshot_view
from forebay.cluster.server.tlog import NoteNotTaken, SignRefused, proof_file
from forebay.cluster.system import format_instant, parse_instant
from forebay.cluster.system.eventloop import SlicedWork
from forebay.replica.fold import find_reply
from forebay.replica.messages import SetClock, features
from forebay.replica.state import State, state_digest
from forebay.replica.values import MICROSECONDS_PER_SECOND
from forebay.snapshots import SNAPSHOT_BYTES_MAX, SnapshotFailed, SnapshotName, SnapshotRefused, inspect
from forebay.wal import HistoryEntry, export_history

ENTRIES_BYTES_MAX = 1024 * 1024
"""Ledger bytes of the entries in one response; as JSON they are several times larger."""

SNAPSHOT_PART_BYTES = 256 * 1024
"""Bytes of a snapshot per response: a fraction of a millisecond to read and send, so that a download delays nothing."""

SNAPSHOT_WAIT_S = 60.0
"""Time to wait for a snapshot to be written, seconds; the snapshot is completed in any case."""

READY_WAIT_S = 1.0
"""Time for the leader to prove that it can commit, seconds; load balancers ask every few seconds."""

LEADER_SILENCE_ELECTIONS = 2.0
"""Silence of the leader after which a follower is not ready, in longest election timeouts."""

INDEX_MAX = 2**63 - 1


@handles(ops.READ_LEDGER)
async def read_ledger(call: ApiCall[None]) -> Reply[LedgerAnswer]:
    controller = call.service.controller
    limit = call.integer("limit", ops.ENTRIES_READ, least=1, most=ops.ENTRIES_READ_MAX)
    applied_log = controller.applied_log
    first = max(call.integer("from", 1, least=0, most=INDEX_MAX), applied_log.first_index)
    rows: list[LedgerEntryView] = []
    size_bytes, work = 0, call.work
    async for applied in applied_log.walk(first, INDEX_MAX, work):
        rows.append(encode_view(entry_view(applied, [record async for record in _records(applied, work)])))
        size_bytes += applied.size_bytes
        if size_bytes >= ENTRIES_BYTES_MAX or len(rows) == limit:
            break
    revision = controller.state.revision
    answer = LedgerAnswer(
        revision=revision,
        first_index=applied_log.first_index,
        applied_index=controller.applied_index,
        entries=tuple(rows),
    )
    return Reply(revision, answer)


async def _records(applied: AppliedEntry, work: SlicedWork) -> AsyncIterator[msgspec.Raw]:
    """Yield the commands of an entry as JSON, rendered in slices."""
    batch = applied.batch
    if batch is None or applied.void:
        return
    for position, entry in enumerate(batch.entries):
        await work.take()
        events: list[msgspec.Raw] = []
        for event in entry.events:
            await work.take()
            events.append(encode_view(record_event(event)))
        yield encode_view({**record_head(entry, settled_at(applied, position)), "events": events})


@handles(ops.READ_STORED_ENTRIES)
async def read_stored_entries(call: ApiCall[None]) -> Reply[HandedAnswer]:
    service = call.service
    controller = service.controller
    if "last" not in call.query:
        raise bad_request("last is missing", "give the index of the last entry", "query last")
    last = call.integer("last", 0, least=1, most=INDEX_MAX)
    try:
        if controller.ledger.applied_index < last <= controller.applied_index:
            controller.journal.flush_hints()
        # In a thread, one at a time, because it reads up to a megabyte and is not urgent.
        async with service.digests:
            handed = await asyncio.to_thread(export_history, controller.ledger, last)
    except LookupError as error:
        pruned = controller.ledger.pruned_range()
        if pruned is not None and last < pruned.below:
            raise Problem(410, PRUNED, str(error), "read it from the archive", "last") from error
        raise Problem(404, "not_held", str(error), "ask another replica", "last") from error
    revision = service.controller.state.revision
    return Reply(
        revision,
        HandedAnswer(
            revision=revision,
            entries=tuple(handed_view(one) for one in handed),
        ),
    )


def handed_view(one: HistoryEntry) -> HandedView:
    """Return a ledger entry for a replica that lacks it."""
    return HandedView(
        index=one.entry.index,
        term=one.entry.term,
        data=one.entry.data,
        seal=one.entry.seal,
        digest_before=one.digest_before.hex(),
        revision_before=one.revision_before,
    )


@handles(ops.SAVE_SNAPSHOT)
async def save_snapshot(call: ApiCall[None]) -> Reply[SnapshotView]:
    controller = call.service.controller
    if controller.applied_index == 0:
        raise Problem(409, "wrong_state", "nothing has been applied yet", "try again when the cluster is founded")
    try:
        async with asyncio.timeout(SNAPSHOT_WAIT_S):
            path = await asyncio.shield(asyncio.wrap_future(controller.save_snapshot()))
        summary = await asyncio.to_thread(inspect, path)
    except TimeoutError as error:
        raise Problem(
            503, "too_slow", f"the snapshot is not complete after {SNAPSHOT_WAIT_S:g} s", "see /v1/status later"
        ) from error
    except (SnapshotFailed, SnapshotRefused) as error:
        raise Problem(
            507, "snapshot_failed", str(error), "check the free disk space; older snapshots are kept"
        ) from error
    return Reply(controller.state.revision, snapshot_view(path, summary))


@handles(ops.LIST_SNAPSHOTS)
async def list_snapshots(call: ApiCall[None]) -> Reply[SnapshotsAnswer]:
    controller = call.service.controller
    newest = controller.snapshots.newest()
    rows = () if newest is None else (newest,)
    revision = controller.state.revision
    answer = SnapshotsAnswer(
        revision=revision,
        replica=controller.name,
        snapshots=tuple(
            StoredSnapshotView(name=one.path.name, index=one.index, term=one.term, size_bytes=one.size_bytes)
            for one in rows
        ),
    )
    return Reply(revision, answer)


@handles(ops.FETCH_SNAPSHOT)
async def fetch_snapshot(call: ApiCall[None]) -> Reply[bytes]:
    controller = call.service.controller
    name, offset = call.params["name"], call.integer("offset", 0, least=0, most=SNAPSHOT_BYTES_MAX)
    if SnapshotName.parse(name) is None:
        raise bad_request(f"{name!r:.80} is not the name of a snapshot", "GET /v1/snapshots lists them", "name")
    try:
        part = await asyncio.to_thread(_part_of, controller.snapshots.directory / name, offset)
    except FileNotFoundError as error:
        raise Problem(
            404, "no_snapshot", f"this replica no longer has snapshot {name}", "fetch the newest one", "name"
        ) from error
    except OSError as error:
        raise Problem(507, "snapshot_failed", f"{name} cannot be read: {error.strerror}", "check the disk") from error
    return Reply(controller.state.revision, content=part, content_type=ops.BYTES)


def _part_of(path: Path, offset: int) -> bytes:
    """Return the next bytes of a file; none at its end."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.pread(file, SNAPSHOT_PART_BYTES, offset)
    finally:
        os.close(file)


@handles(ops.LIST_DIGESTS)
async def list_digests(call: ApiCall[None]) -> Reply[DigestsAnswer]:
    controller = call.service.controller
    checkpoints = controller.checkpoints
    applied = controller.applied_index
    asked = call.integer("ledger", applied, least=0, most=INDEX_MAX)
    digests = {} if checkpoints is None else dict(checkpoints.digests)
    chain = {index: controller.journal.digest_at(index) for index in (*digests, min(asked, applied))}
    view = DigestsAnswer(
        revision=controller.state.revision,
        replica=controller.name,
        digests=digests,
        ledgers={index: digest.hex() for index, digest in chain.items() if digest is not None},
        verdict=(Verdict.UNDECIDED if checkpoints is None else checkpoints.verdict).value,
    )
    return Reply(controller.state.revision, view)


@handles(ops.READ_CHECKPOINT)
async def read_checkpoint(call: ApiCall[None]) -> Reply[str]:
    note = call.service.publisher.note
    if not note:
        raise Problem(404, "no_checkpoint", "no checkpoint has been signed yet", "try again in some seconds")
    return _text(call, note.encode())


@handles(ops.READ_TILE)
async def read_tile(call: ApiCall[None]) -> Reply[bytes]:
    path = f"tile/{call.params['tile']}"
    try:
        found = await call.service.past.tile(path, call.identity)
    except ProofUnavailable as error:
        raise Problem(404, "no_tile", str(error), "see /v1/tlog/checkpoint for the size of the tree", "path") from error
    except (HistoryServiceBusy, HistoryServiceTimeout) as error:
        raise history_busy(error) from error
    return Reply(call.service.controller.state.revision, content=found, content_type=ops.BYTES)


@handles(ops.LIST_LOG_KEYS)
async def list_log_keys(call: ApiCall[None]) -> Reply[LogKeysAnswer]:
    controller, publisher = call.service.controller, call.service.publisher
    alone = call.query.get("alone") == "yes"
    keys = {controller.name: publisher.key} if alone else await publisher.keys()
    revision = controller.state.revision
    rows = tuple(LogKeyView(replica=name, key=str(key)) for name, key in sorted(keys.items()))
    cosigning = publisher.cosigning
    view = LogKeysAnswer(
        revision=revision,
        origin=publisher.origin,
        replica=controller.name,
        keys=rows,
        witnesses=tuple(WitnessKeyView(witness=one.name, key=str(one.key)) for one in cosigning.witnesses),
        witnesses_needed=cosigning.needed,
    )
    return Reply(revision, view)


@handles(ops.SIGN_CHECKPOINT)
async def sign_checkpoint(call: ApiCall[SignRequest]) -> Reply[SignedAnswer]:
    controller, publisher = call.service.controller, call.service.publisher
    if call.body.size > controller.applied_index:
        raise too_busy(f"this replica has applied {controller.applied_index} entries, not yet {call.body.size}")
    try:
        signed = await publisher.sign(call.body.size, call.body.root)
    except SignRefused as error:
        raise Problem(409, "not_signed", str(error), "request a later one", "size") from error
    except (ProofUnavailable, HistoryServiceTimeout) as error:
        raise too_busy(str(error)) from error
    histories = None
    if call.body.histories and signed.note is not None:
        with contextlib.suppress(ProofUnavailable, HistoryServiceTimeout):
            counted = await call.service.past.counts(call.body.size)
            histories = HistoriesView(jobs=counted.jobs, root=counted.root.hex())
    revision = controller.state.revision
    view = SignedAnswer(
        revision=revision,
        replica=controller.name,
        key=str(signed.key),
        root=signed.root.hex(),
        note=signed.note,
        histories=histories,
    )
    return Reply(revision, view)


@handles(ops.TAKE_CHECKPOINT)
async def take_checkpoint(call: ApiCall[CheckpointRequest]) -> Reply[CheckpointAnswer]:
    controller, publisher = call.service.controller, call.service.publisher
    try:
        await publisher.take(call.body.note)
    except NoteNotTaken as error:
        raise Problem(409, "not_taken", str(error), "send a checkpoint that a majority has signed", "note") from error
    except (ProofUnavailable, HistoryServiceTimeout) as error:
        raise too_busy(str(error)) from error
    revision = controller.state.revision
    return Reply(revision, CheckpointAnswer(revision=revision, size=publisher.size))


@handles(ops.PROVE_JOB)
async def prove_job(call: ApiCall[None]) -> Reply[bytes]:
    state = call.service.controller.state
    job, publisher = call.job_in(state), call.service.publisher
    if not publisher.note:
        raise Problem(404, "no_checkpoint", "no checkpoint has been signed yet", "try again in some seconds")
    note, size = publisher.note, publisher.size
    try:
        records, history = await call.service.past.proof(job, size, call.identity)
    except ProofUnavailable as error:
        remedy = f"try again once a checkpoint covers the job's records; the last one covers {size} entries"
        raise Problem(404, "not_proven", str(error), remedy, "job id") from error
    except (HistoryServiceBusy, HistoryServiceTimeout) as error:
        raise history_busy(error) from error
    content = await asyncio.to_thread(proof_file, note, job, records, history)
    return Reply(state.revision, content=content, content_type=ops.BYTES)


@handles(ops.SHOW_CLOCK)
async def show_clock(call: ApiCall[None]) -> Reply[ClockAnswer]:
    return _clock(call, await call.state())


@handles(ops.SET_CLOCK)
async def set_clock(call: ApiCall[SetClockRequest]) -> Reply[ClockAnswer]:
    await call.service.lead()
    try:
        at = parse_instant(call.body.at)
    except ValueError as error:
        raise bad_request(str(error), "write for example 2026-01-31T12:00:00Z", "at") from error
    controller = call.service.controller
    known = find_reply(controller.state, call.service.check_age(call.identity, call.body.command_id)) is not None
    earliest, latest, _ = controller.engine.clock_bounds
    if not known and (earliest is None or latest is None or not earliest - OFF_US <= at <= latest + OFF_US):
        said = "cannot be read" if earliest is None else f"show {format_instant(earliest)}"
        raise Problem(
            409,
            "clock_off",
            f"the wall clocks of a majority of the replicas {said}: the time would not stay at {call.body.at}",
            "correct those clocks first, then set the cluster's time to theirs",
            "at",
        )
    settled = await call.service.settle(call, SetClock(at))
    return _clock(call, settled.state)


def _clock(call: ApiCall[Any], state: State) -> Reply[ClockAnswer]:
    controller = call.service.controller
    earliest, latest, _ = controller.engine.clock_bounds
    view = ClockAnswer(
        revision=state.revision,
        at=format_instant(controller.agreed.now()) or "",
        earliest=None if earliest is None else format_instant(earliest),
        latest=None if latest is None else format_instant(latest),
        ahead_s=controller.agreed.ahead_us / MICROSECONDS_PER_SECOND,
        off=tuple(member.name for member in members_of(call, state) if member.clock_off),
    )
    return Reply(state.revision, view)


@handles(ops.SHOW_STATUS)
async def show_status(call: ApiCall[None]) -> Reply[StatusView]:
    state, view = call.service.controller.state, status_of(call)
    if call.query.get("digest") == "yes":
        async with call.service.digests:
            # In a thread, because hashing a large state takes longer than a heartbeat. A State never changes.
            digest = (await asyncio.to_thread(state_digest, state)).hex()
        view = msgspec.structs.replace(view, state_digest=digest)
    return Reply(state.revision, view)


@handles(ops.SHOW_STATE_DIGEST)
async def show_state_digest(call: ApiCall[None]) -> Reply[StateDigestAnswer]:
    state = await call.state()
    async with call.service.digests:
        digest = (await asyncio.to_thread(state_digest, state)).hex()
    return Reply(state.revision, StateDigestAnswer(revision=state.revision, state_digest=digest))


def status_of(call: ApiCall[Any]) -> StatusView:
    """Return this replica's current status, without the state digest."""
    service = call.service
    controller, engine, config = service.controller, service.controller.engine, service.config
    publisher, state = service.publisher, service.controller.state
    why_not = not_ready(call)
    leader = engine.leader
    return StatusView(
        cluster=config.cluster.name,
        cluster_id=config.cluster.id,
        incarnation=str(controller.incarnation),
        replica=controller.name,
        role=str(engine.role),
        term=engine.term,
        leader=leader,
        leader_api=None if leader is None else controller.membership.api_of(leader),
        ready=not why_not,
        not_ready=why_not,
        commit_index=engine.commit_index,
        applied_index=controller.applied_index,
        last_index=engine.last_index,
        first_index=controller.applied_log.first_index,
        revision=state.revision,
        at=format_instant(state.at),
        ledger_digest=controller.applied_digest.hex(),
        snapshot_index=controller.snapshot_index or None,
        queued_commands=controller.proposer.queued,
        version=service.version,
        feature_level=state.feature_level,
        feature_level_known=features.FEATURE_LEVEL_KNOWN,
        clock_off=engine.clock_off,
        clock_ahead_s=controller.agreed.ahead_us / MICROSECONDS_PER_SECOND,
        damaged_entries=controller.scrubbed.damaged_entries,
        unwitnessed_s=publisher.unwitnessed_s if publisher.cosigning.needed else None,
        witness_disputes=publisher.cosigning.disputes,
        witness_errors=publisher.cosigning.errors,
        **machine_status(controller),
    )


@handles(ops.SHOW_HEALTH)
async def show_health(call: ApiCall[None]) -> Reply[str]:
    return _text(call, b"ok\n")


@handles(ops.SHOW_READINESS)
async def show_readiness(call: ApiCall[None]) -> Reply[str]:
    controller = call.service.controller
    why_not = not_ready(call)
    if not why_not and controller.engine.role == Role.LEADER:
        try:
            async with asyncio.timeout(READY_WAIT_S):
                await controller.current()
        except (NotLeading, Unavailable, TimeoutError):
            why_not = "this replica leads but cannot reach a majority"
    if why_not:
        raise Problem(503, "not_ready", why_not, "try again, or ask another replica", headers={"Retry-After": "1"})
    return _text(call, b"ready\n")


@handles(ops.SHOW_METRICS)
async def show_metrics(call: ApiCall[None]) -> Reply[str]:
    service = call.service
    controller, state = service.controller, service.controller.state
    async with service.scrapes:
        contacts = controller.liveness if controller.leads else None
        families = [
            *service.metrics.families(),
            *await state_families(state, contacts, service.verdicts, call.work),
        ]
        # In a thread, because rendering takes longer than a heartbeat may wait.
        content = await asyncio.to_thread(prometheus_text, families, service.metrics.pid)
    return Reply(state.revision, content=content, content_type=CONTENT_TYPE)


def not_ready(call: ApiCall[Any]) -> str:
    """Return the reason this replica can neither commit nor forward, as far as known locally; empty if it can."""
    controller = call.service.controller
    engine = controller.engine
    if call.service.stopping.is_set():
        return "this replica is stopping"
    if engine.leader is None:
        return "no leader is known"
    if not engine.ready:
        return f"this replica has not caught up with the leader {engine.leader}"
    if engine.role == Role.LEADER:
        return "" if controller.state.revision else "the cluster is not founded yet"
    silence_s_max = LEADER_SILENCE_ELECTIONS * controller.config.timing.election_max_s
    for peer in engine.peers():
        if peer.name == engine.leader:
            if not peer.connected:
                return f"the leader {peer.name} is not connected"
            if peer.last_contact_s is None or peer.last_contact_s > silence_s_max:
                return f"the leader {peer.name} has sent nothing for more than {silence_s_max:g} s"
            return ""
    return f"the leader {engine.leader} is not a peer of this replica"


def _text(call: ApiCall[None], content: bytes) -> Reply[str]:
    revision = call.service.controller.state.revision
    return Reply(revision, content=content, content_type="text/plain; charset=utf-8")


@handles(ops.SHOW_OPENAPI)
async def show_openapi(call: ApiCall[None]) -> Reply[dict[str, Any]]:
    return Reply(call.service.controller.state.revision, content=call.service.document())
