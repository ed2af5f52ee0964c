"""Decide commands about the cluster: founding, recovery, pools, configuration, feature level, nodes, certificates."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from forebay.replica.decide.accounts import ACCOUNTING_BY_KEY, PARTITIONS_BY_KEY
from forebay.replica.decide.configuration import configuration_events
from forebay.replica.decide.pools import (
    change_pool,
    filesystem_removal_rejection,
    mover_rejection,
    pool_rejection,
    remove_pool,
    set_pool_events,
)
from forebay.replica.grammar import check_adapters, check_filesystem, path_fault
from forebay.replica.messages import NOTHING, Acceptance, Decision, decision_of, features
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import (
    CAPACITY_CONTROLS,
    PROCESS_CONTROLS,
    Recovery,
    Revocation,
    SharedFilesystem,
    Stage,
    agent_of,
    certificate_fault,
    check_site,
    clamp_times,
)
from forebay.replica.operations import active_stage
from forebay.replica.state import Facts, State
from forebay.replica.values import (
    CPUS_MAX,
    DISCLOSURE_KEY_BYTES,
    MEMBERS_MAX,
    MESSAGE_CHARACTERS_MAX,
    NEVER,
    NODES_MAX,
    POOLS_MAX,
    RECOVERIES_KEPT,
    REVOCATIONS_DROPPED_MAX,
    REVOCATIONS_MAX,
    Instant,
    Rejection,
    RejectionCode,
    first_job_id_at,
    name_fault,
)

_MARK = re.compile(r"[0-9a-f]{16}", re.ASCII)


def _found_cluster(state: Facts, actor: c.Actor, command: c.FoundCluster, at: Instant) -> Decision:
    if state.feature_level:
        return Rejection(RejectionCode.ALREADY_FOUNDED, f"cluster {state.name!r} already exists", "join it instead")
    rejection = check_site(command.site)
    placed: dict[str, SharedFilesystem] = {}
    for filesystem in command.filesystems:
        rejection = rejection or check_filesystem(placed, filesystem.name, filesystem.path)
        rejection = rejection or check_adapters(filesystem)
        placed[filesystem.name] = filesystem
    for pool in command.pools:
        rejection = rejection or pool_rejection(pool, placed)
    if rejection is None and sum(pool.is_default for pool in command.pools) > 1:
        rejection = Rejection(
            RejectionCode.INVALID_FIELD, "more than one pool is marked as default", "mark only one", "pool.default"
        )
    for node in command.nodes:
        rejection = rejection or _node_name_rejection(node)
    if len(command.nodes) > NODES_MAX:
        rejection = rejection or Rejection(
            RejectionCode.LIMIT_EXCEEDED, f"{len(command.nodes)} nodes exceed the limit of {NODES_MAX}", "list fewer"
        )
    if len(command.disclosure_key) not in {0, DISCLOSURE_KEY_BYTES}:
        rejection = rejection or Rejection(
            RejectionCode.INVALID_FIELD,
            f"the disclosure key has {len(command.disclosure_key)} bytes",
            f"use {DISCLOSURE_KEY_BYTES} bytes",
        )
    if rejection is not None:
        return rejection
    founded = e.ClusterFounded(
        command.cluster_id,
        command.name,
        command.site,
        command.pools,
        nodes=command.nodes,
        filesystems=tuple(replace(filesystem, identity="", movers=()) for filesystem in command.filesystems),
    )
    return Acceptance((founded, e.DisclosureKeyDrawn(command.disclosure_key)) if command.disclosure_key else (founded,))


def _set_pool(state: Facts, actor: c.Actor, command: c.SetPool, at: Instant) -> Decision:
    pool, known = command.pool, state.pools.get(command.pool.name)
    if known is not None and not pool.filesystem:
        pool = replace(pool, filesystem=known.filesystem)
    rejection = pool_rejection(pool, state.filesystems)
    if rejection is None and known is not None and pool.filesystem != known.filesystem:
        remedy = "change it with `forebay pool set` while the pool is unused"
        rejection = Rejection(
            RejectionCode.WRONG_STATE, f"pool {pool.name} has another shared filesystem", remedy, "pool.filesystem"
        )
    if rejection is not None:
        return rejection
    if pool.name not in state.pools and len(state.pools) >= POOLS_MAX:
        return Rejection(
            RejectionCode.LIMIT_EXCEEDED,
            f"the limit of {POOLS_MAX} pools is reached",
            "change an existing pool",
            "pool.name",
        )
    return Acceptance(set_pool_events(state, pool))


def _change_pool(state: State, actor: c.Actor, command: c.ChangePool, at: Instant) -> Decision:
    return decision_of(
        change_pool(
            state,
            command.pool,
            exists=command.exists,
            quantity=command.quantity,
            granularity=command.granularity,
            out_of_service=command.out_of_service,
            drain_all=command.drain_all,
            is_default=command.is_default,
            unit=command.unit,
            is_reported=command.is_reported,
            filesystem=command.filesystem,
        )
    )


def _remove_pool(state: State, actor: c.Actor, command: c.RemovePool, at: Instant) -> Decision:
    return decision_of(remove_pool(state, command.pool))


def _add_filesystem(state: Facts, actor: c.Actor, command: c.AddFilesystem, at: Instant) -> Decision:
    known = state.filesystems.get(command.filesystem)
    changes = known is not None and known.path == command.path
    wanted = known if known is not None and changes else SharedFilesystem(command.filesystem, command.path)
    wanted = replace(
        wanted,
        quota=wanted.quota if command.quota is None else command.quota,
        layout=wanted.layout if command.layout is None else command.layout,
    )
    rejection = None if changes else check_filesystem(state.filesystems, command.filesystem, command.path)
    rejection = rejection or check_adapters(wanted)
    if rejection is not None:
        return rejection
    return NOTHING if wanted == known else Acceptance((e.FilesystemSet(wanted),))


def _remove_filesystem(state: Facts, actor: c.Actor, command: c.RemoveFilesystem, at: Instant) -> Decision:
    rejection = filesystem_removal_rejection(state, command.filesystem)
    return Acceptance((e.FilesystemRemoved(command.filesystem),)) if rejection is None else rejection


def _configure_site(state: Facts, actor: c.Actor, command: c.ConfigureSite, at: Instant) -> Decision:
    return decision_of(
        configuration_events(
            state, command.settings, partial=command.partial, expected_revision=command.expected_revision
        )
    )


def _change_accounting(state: Facts, actor: c.Actor, command: c.Command, at: Instant) -> Decision:
    return decision_of(ACCOUNTING_BY_KEY[type(command)](state, command, at))


def _change_partitions(state: Facts, actor: c.Actor, command: c.Command, at: Instant) -> Decision:
    return decision_of(PARTITIONS_BY_KEY[type(command)](state, command))


def _set_clock(state: State, actor: c.Actor, command: c.SetClock, at: Instant) -> Decision:
    if command.at <= NEVER:
        return Rejection(RejectionCode.INVALID_FIELD, "the time is before 1970", "use the current time", "at")
    if command.at >= at:
        return Rejection(
            RejectionCode.WRONG_STATE,
            "the cluster's clock is not ahead of the given time",
            "no action is needed: a clock that is behind follows the majority of the replicas",
            "at",
        )
    touched = []
    for job_id in sorted(state.unfinished):
        job, buffer = state.jobs[job_id], state.buffers.get(job_id)
        if clamp_times(job, buffer, command.at) != (job, buffer):
            touched.append(job_id)
    return Acceptance((e.ClockSet(command.at, tuple(touched)),))


def _raise_feature_level(state: Facts, actor: c.Actor, command: c.RaiseFeatureLevel, at: Instant) -> Decision:
    # The ledger contains rejections, so only codes of feature level 1 are possible.
    if command.level != state.feature_level + 1:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"feature level {command.level} does not follow the cluster's level {state.feature_level}",
            "this release has no higher level"
            if state.feature_level == features.FEATURE_LEVEL_KNOWN
            else f"raise it to {state.feature_level + 1}",
            "level",
        )
    without = [(member, known) for member, known in command.known if known < command.level]
    if without:
        who = ", ".join(
            f"{member} supports {known}" if known else f"{member} did not answer" for member, known in without
        )
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"feature level {command.level} is not supported by every member: {who}"[:MESSAGE_CHARACTERS_MAX],
            "start a release that supports it on each of them, or remove members that will not return",
            "level",
        )
    release = features.release_of(command.level)
    if not release or not command.known:
        return Rejection(
            RejectionCode.INVALID_FIELD, f"feature level {command.level} is unknown", "send the command to the leader"
        )
    return Acceptance((e.FeatureLevelRaised(command.level, release),))


def _register_node(state: Facts, actor: c.Actor, command: c.RegisterNode, at: Instant) -> Decision:
    bad = _node_name_rejection(command.node)
    if bad is not None:
        return bad
    if command.filesystems and command.cpus:
        sentence = f"cpus is {command.cpus}, but a mover runs no scripts"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, "register a mover with cpus 0", "cpus")
    if not command.filesystems and not 1 <= command.cpus <= CPUS_MAX:
        return Rejection(
            RejectionCode.INVALID_FIELD, f"cpus is {command.cpus}", f"use a number from 1 to {CPUS_MAX}", "cpus"
        )
    if command.buffers and path_fault(command.buffers) is not None:
        return Rejection(
            RejectionCode.INVALID_FIELD,
            f"the directory of the buffers {path_fault(command.buffers)}",
            "use an absolute path without ..",
            "buffers",
        )
    controls = (
        ("process_control", command.process_control, PROCESS_CONTROLS),
        ("capacity_control", command.capacity_control, CAPACITY_CONTROLS),
    )
    for field, said, words in controls:
        if said not in words:
            remedy = f"use one of {', '.join(words[1:])}, or nothing"
            return Rejection(RejectionCode.INVALID_FIELD, f"{field} {said[:32]!r} is unknown", remedy, field)
    known = state.nodes.get(command.node)
    if known is None and command.node not in state.admitted:
        # A certificate proves the identity of an agent. An operator decides whether its machine belongs to the cluster.
        return Rejection(
            RejectionCode.UNKNOWN_NODE,
            f"node {command.node} is not admitted to this cluster",
            f"ask an operator to run: forebay node admit {command.node}",
            "node",
        )
    if known is None and len(state.nodes) >= NODES_MAX:
        return Rejection(
            RejectionCode.LIMIT_EXCEEDED, f"the limit of {NODES_MAX} nodes is reached", "use an existing node", "node"
        )
    jobs = [state.jobs[job_id] for job_id in sorted(state.on_node.get(command.node, ()))]
    if known is not None and jobs and known.is_mover != bool(command.filesystems):
        here, there = ("a mover", "as a node for jobs") if known.is_mover else ("a node for jobs", "as a mover")
        sentence = f"node {command.node} has {len(jobs)} jobs as {here}, and cannot register {there}"
        return Rejection(RejectionCode.WRONG_STATE, sentence, "start it as before, or drain it first", "filesystems")
    rejection = mover_rejection(state, command.node, command.filesystems)
    if rejection is not None:
        return rejection
    # Data staged by a mover is in its shared filesystems, not in its own directory.
    held = [job for job in jobs if job.node == command.node]
    if known is not None and known.storage_id != command.storage_id and held:
        return Rejection(
            RejectionCode.STORAGE_CHANGED,
            f"node {command.node} has another storage directory, but {len(held)} jobs have data in the previous one",
            "start the agent with its previous directory, or cancel those jobs first",
            "storage_id",
        )
    fields = [field for field in command.__struct_fields__ if field != "node"]
    plain = [field for field in fields if field != "filesystems"]
    same = known is not None and not known.down and all(getattr(known, f) == getattr(command, f) for f in plain)
    if same and known is not None and known.filesystems == tuple(sorted(seen.name for seen in command.filesystems)):
        # A shared filesystem that was removed and added again has lost its list of movers.
        if all(command.node in state.filesystems[seen.name].movers for seen in command.filesystems):
            return NOTHING
    events: list[e.Event] = [e.NodeRegistered(command.node, *(getattr(command, field) for field in fields))]
    if known is not None and known.instance != command.instance:
        # The previous agent has ended: its unfinished staging restarts, and its late reports no longer count. A script
        # outlives its agent, so its order does not change.
        for job in jobs:
            buffer = state.buffers.get(job.id)
            stage = active_stage(job, buffer) if agent_of(job, buffer) == command.node else None
            if stage is not None and stage is not Stage.RUN:
                events.append(e.StageRetried(job.id, stage, job.attempt + 1, "the agent was restarted"))
    return Acceptance(tuple(events))


def _node_name_rejection(node: str) -> Rejection | None:
    fault = name_fault(node)
    if fault is None:
        return None
    return Rejection(RejectionCode.INVALID_FIELD, f"the node name {fault}", "choose another name", "node")


def _admit_node(state: Facts, actor: c.Actor, command: c.AdmitNode, at: Instant) -> Decision:
    bad = _node_name_rejection(command.node)
    if bad is not None:
        return bad
    if command.node in state.admitted or command.node in state.nodes:
        return NOTHING
    if len(state.admitted) >= NODES_MAX:
        return Rejection(
            RejectionCode.LIMIT_EXCEEDED,
            f"the limit of {NODES_MAX} admitted nodes is reached",
            "use one of them",
            "node",
        )
    return Acceptance((e.NodeAdmitted(command.node, actor.name),))


def _unknown_node_rejection(state: Facts, node: str) -> Rejection | None:
    if node in state.nodes:
        return None
    return Rejection(
        RejectionCode.UNKNOWN_NODE, f"node {node!r} does not exist", "forebay node list shows the nodes", "node"
    )


def _drain_node(state: Facts, actor: c.Actor, command: c.DrainNode, at: Instant) -> Decision:
    rejection = _unknown_node_rejection(state, command.node)
    if rejection is not None:
        return rejection
    return Acceptance((e.NodeDrained(command.node, command.reason[:MESSAGE_CHARACTERS_MAX]),))


def _resume_node(state: Facts, actor: c.Actor, command: c.ResumeNode, at: Instant) -> Decision:
    rejection = _unknown_node_rejection(state, command.node)
    if rejection is not None:
        return rejection
    return Acceptance((e.NodeResumed(command.node),)) if state.nodes[command.node].drained else NOTHING


def loss_rejection(state: Facts, name: str) -> Rejection | None:
    """Return the rejection of declaring a node lost, or None."""
    rejection = _unknown_node_rejection(state, name)
    if rejection is not None:
        return rejection
    node = state.nodes[name]
    if not node.down:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"node {name} is {node.state.name}: its agent answers",
            "only nodes that are DOWN can be declared lost; to stop new work, use `forebay node drain`",
            "node",
        )
    if node.is_mover:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"node {name} is a mover: its buffers are in shared filesystems, and not lost with it",
            f"start another mover of {', '.join(node.filesystems)}; it takes over the work",
            "node",
        )
    return None


def _lose_node(state: Facts, actor: c.Actor, command: c.LoseNode, at: Instant) -> Decision:
    rejection = loss_rejection(state, command.node)
    if rejection is not None:
        return rejection
    said = f": {command.reason}" if command.reason else ""
    reason = f"declared lost by {actor.name}{said}"[:MESSAGE_CHARACTERS_MAX]
    return NOTHING if state.nodes[command.node].lost else Acceptance((e.NodeLost(command.node, reason),))


def _mark_node_down(state: Facts, actor: c.Actor, command: c.MarkNodeDown, at: Instant) -> Decision:
    rejection = _unknown_node_rejection(state, command.node)
    if rejection is not None:
        return rejection
    return NOTHING if state.nodes[command.node].down else Acceptance((e.NodeWentDown(command.node, command.reason),))


def _mark_node_back(state: Facts, actor: c.Actor, command: c.MarkNodeBack, at: Instant) -> Decision:
    rejection = _unknown_node_rejection(state, command.node)
    if rejection is not None:
        return rejection
    if not state.nodes[command.node].down:
        return NOTHING
    jobs = (state.jobs[job_id] for job_id in sorted(state.on_node.get(command.node, ())))
    waiting = tuple(job.id for job in jobs if job.order_at != NEVER)
    return Acceptance((e.NodeCameBack(command.node, waiting),))


def _revoke_certificate(state: Facts, actor: c.Actor, command: c.RevokeCertificate, at: Instant) -> Decision:
    certificate = command.certificate
    fault = certificate_fault(certificate)
    if fault is not None:
        remedy = "write serial:1f2e for one certificate, user:NAME for all of a user"
        return Rejection(RejectionCode.INVALID_FIELD, f"the certificate {fault}", remedy, "certificate")
    if certificate == f"operator:{actor.name}":
        sentence = f"{certificate} is your own identity, and you could not undo its revocation"
        return Rejection(RejectionCode.WRONG_STATE, sentence, "use the identity of another operator", "certificate")
    if command.until != NEVER and command.until <= at:
        sentence = "the certificate has already expired"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, "no action is needed", "until")
    expired = [known.certificate for known in state.revocations.values() if known.until != NEVER and known.until <= at]
    expired = sorted(set(expired) - {certificate})[:REVOCATIONS_DROPPED_MAX]
    if certificate not in state.revocations and len(state.revocations) - len(expired) >= REVOCATIONS_MAX:
        sentence = f"the limit of {REVOCATIONS_MAX} revoked certificates is reached"
        remedy = "remove entries of unusable certificates, or renew the authority"
        return Rejection(RejectionCode.LIMIT_EXCEEDED, sentence, remedy, "certificate")
    revoked = Revocation(certificate, command.reason[:MESSAGE_CHARACTERS_MAX], actor.name, at, command.until)
    events: tuple[e.Event, ...] = (e.CertificatesUnrevoked(tuple(expired)),) if expired else ()
    return Acceptance((*events, e.CertificateRevoked(revoked)))


def _unrevoke_certificate(state: Facts, actor: c.Actor, command: c.UnrevokeCertificate, at: Instant) -> Decision:
    if command.certificate not in state.revocations:
        sentence = f"{command.certificate!r:.80} is not revoked"
        remedy = "`forebay cert revocations` lists revoked certificates"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, remedy, "certificate")
    return Acceptance((e.CertificatesUnrevoked((command.certificate,)),))


def _record_state_digest(state: Facts, actor: c.Actor, command: c.RecordStateDigest, at: Instant) -> Decision:
    if not 0 < command.revision <= state.revision:
        sentence = f"revision {command.revision} is not settled; the last one is {state.revision}"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, "digest a state that was applied", "revision")
    return Acceptance((e.StateDigested(command.revision, command.state),))


def _recover_cluster(state: Facts, actor: c.Actor, command: c.RecoverCluster, at: Instant) -> Decision:
    if not _MARK.fullmatch(command.mark):
        return Rejection(
            RejectionCode.INVALID_FIELD, f"mark {command.mark!r:.80} is not valid", "use 16 hexadecimal digits", "mark"
        )
    if len(command.members) > MEMBERS_MAX:
        sentence = f"{len(command.members)} members exceed the limit"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, f"name at most {MEMBERS_MAX}", "members")
    if not 0 <= command.known_index <= command.kept_index:
        sentence = f"known_index {command.known_index} is not between 0 and kept_index {command.kept_index}"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, "name the last entry that is kept", "kept_index")
    recovery = Recovery(
        incarnation=max(state.recoveries, default=1) + 1,
        mark=command.mark,
        by=actor.name,
        replica=command.replica,
        members=command.members,
        kept_index=command.kept_index,
        known_index=command.known_index,
        kept_at=Instant(state.at),
        first_job=max(state.next_job, first_job_id_at(at)),
        last_job=state.next_job - 1,
        is_snapshot=command.is_snapshot,
    )
    forgotten = min(state.recoveries) if len(state.recoveries) >= RECOVERIES_KEPT else 0
    return Acceptance((e.ClusterRecovered(recovery, forgotten),))


def _record_histories(state: Facts, actor: c.Actor, command: c.RecordHistories, at: Instant) -> Decision:
    if not 0 < command.jobs < state.next_job:
        sentence = f"job {command.jobs} does not exist; the last one is {state.next_job - 1}"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, "count existing jobs", "jobs")
    return Acceptance((e.HistoriesCounted(command.index, command.jobs, command.root),))


CLUSTER_BY_KEY: dict[type, Callable[[Facts, c.Actor, Any, Instant], Decision]] = {
    c.FoundCluster: _found_cluster,
    c.RecoverCluster: _recover_cluster,
    c.SetPool: _set_pool,
    c.ConfigureSite: _configure_site,
    c.AddFilesystem: _add_filesystem,
    c.RemoveFilesystem: _remove_filesystem,
    c.AdmitNode: _admit_node,
    c.DrainNode: _drain_node,
    c.ResumeNode: _resume_node,
    c.LoseNode: _lose_node,
    c.MarkNodeDown: _mark_node_down,
    c.MarkNodeBack: _mark_node_back,
    c.RegisterNode: _register_node,
    c.RaiseFeatureLevel: _raise_feature_level,
    c.RevokeCertificate: _revoke_certificate,
    c.UnrevokeCertificate: _unrevoke_certificate,
    c.RecordStateDigest: _record_state_digest,
    c.RecordHistories: _record_histories,
    **dict.fromkeys(ACCOUNTING_BY_KEY, _change_accounting),
    **dict.fromkeys(PARTITIONS_BY_KEY, _change_partitions),
}
"""Command type -> handler that needs lookups by key only."""

CLUSTER_BY_SCAN: dict[type, Callable[[State, c.Actor, Any, Instant], Decision]] = {
    c.SetClock: _set_clock,
    c.ChangePool: _change_pool,
    c.RemovePool: _remove_pool,
}
"""Command type -> handler that scans all jobs, and therefore needs a complete State."""
