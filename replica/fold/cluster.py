"""Fold events of the cluster: founding, recovery, configuration, pools, nodes, certificates, clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from forebay.replica.messages import check_level, features
from forebay.replica.messages import events as e
from forebay.replica.model import AdmittedNode, Node, clamp_times
from forebay.replica.state import StateBuilder
from forebay.replica.values import NEVER, Instant, LedgerViolation


def _fold_cluster_founded(builder: StateBuilder, event: e.ClusterFounded) -> None:
    builder.cluster_id = event.cluster_id
    builder.name = event.name
    builder.site = event.site
    features.check_level(event.feature_level, "", revision=builder.revision)
    builder.feature_level = event.feature_level
    for filesystem in event.filesystems:
        builder.filesystems = builder.filesystems.set(filesystem.name, filesystem)
    for pool in event.pools:
        builder.pools = builder.pools.set(pool.name, pool)
    for node in event.nodes:
        builder.admitted = builder.admitted.set(node, AdmittedNode(node, at=Instant(builder.at)))


def _fold_cluster_recovered(builder: StateBuilder, event: e.ClusterRecovered) -> None:
    begun = event.recovery
    if begun.incarnation != max(builder.recoveries, default=1) + 1:
        raise LedgerViolation(f"incarnation {begun.incarnation} began after {max(builder.recoveries, default=1)}")
    if begun.first_job < builder.next_job:
        raise LedgerViolation(f"job numbers go back from {builder.next_job} to {begun.first_job}")
    if event.forgotten:
        builder.recoveries = builder.recoveries.delete(event.forgotten)
    builder.recoveries = builder.recoveries.set(begun.incarnation, replace(begun, at=Instant(builder.at)))
    builder.next_job = begun.first_job


def _fold_pool_set(builder: StateBuilder, event: e.PoolSet) -> None:
    builder.pools = builder.pools.set(event.pool.name, event.pool)


def _fold_site_configured(builder: StateBuilder, event: e.SiteConfigured) -> None:
    builder.site = replace(event.site, revision=builder.revision)


def _fold_pool_removed(builder: StateBuilder, event: e.PoolRemoved) -> None:
    if event.pool not in builder.pools:
        raise LedgerViolation(f"pool {event.pool!r} was removed, but does not exist")
    if builder.held_bytes.get(event.pool, 0):
        raise LedgerViolation(f"pool {event.pool!r} was removed while its space is held")
    builder.pools = builder.pools.delete(event.pool)
    if event.pool in builder.rates:
        builder.rates = builder.rates.delete(event.pool)


def _fold_filesystem_set(builder: StateBuilder, event: e.FilesystemSet) -> None:
    builder.filesystems = builder.filesystems.set(event.filesystem.name, event.filesystem)


def _fold_filesystem_removed(builder: StateBuilder, event: e.FilesystemRemoved) -> None:
    if event.filesystem not in builder.filesystems:
        raise LedgerViolation(f"shared filesystem {event.filesystem!r} was removed, but does not exist")
    if any(pool.filesystem == event.filesystem for pool in builder.pools.values()):
        raise LedgerViolation(f"shared filesystem {event.filesystem!r} was removed while a pool has its buffers there")
    builder.filesystems = builder.filesystems.delete(event.filesystem)


def _set_movers(builder: StateBuilder, node: str, seen: dict[str, str]) -> None:
    """Register a node as mover of exactly the shared filesystems in `seen`, with the identities it found."""
    for name, filesystem in builder.filesystems.items():
        if name in seen:
            others = {*filesystem.movers, node}
        elif node in filesystem.movers:
            others = {*filesystem.movers} - {node}
        else:
            continue
        filesystem = replace(filesystem, identity=seen.get(name) or filesystem.identity, movers=tuple(sorted(others)))
        builder.filesystems = builder.filesystems.set(name, filesystem)


def _fold_node_registered(builder: StateBuilder, event: e.NodeRegistered) -> None:
    known = builder.nodes.get(event.node)
    if builder.filesystems:
        _set_movers(builder, event.node, {seen.name: seen.identity for seen in event.filesystems})
    node = Node(
        name=event.node,
        cpus=event.cpus,
        instance=event.instance,
        storage_id=event.storage_id,
        process_control=event.process_control,
        capacity_control=event.capacity_control,
        registered_at=Instant(builder.at),
        drained=known is not None and known.drained,
        reason=known.reason if known is not None and known.drained else "",
        buffers=event.buffers,
        filesystems=tuple(sorted(seen.name for seen in event.filesystems)),
    )
    if known is not None and known.storage_id != event.storage_id and event.node in builder.abandoned:
        # The abandoned buffers were on the node's previous disk.
        builder.abandoned = builder.abandoned.delete(event.node)
    builder.nodes = builder.nodes.set(event.node, node)


def _fold_node_drained(builder: StateBuilder, event: e.NodeDrained) -> None:
    builder.nodes = builder.nodes.set(event.node, replace(builder.node(event.node), drained=True, reason=event.reason))


def _fold_node_resumed(builder: StateBuilder, event: e.NodeResumed) -> None:
    builder.nodes = builder.nodes.set(event.node, replace(builder.node(event.node), drained=False, reason=""))


def _fold_node_went_down(builder: StateBuilder, event: e.NodeWentDown) -> None:
    node = builder.node(event.node)
    reason = node.reason if node.drained else event.reason
    builder.nodes = builder.nodes.set(event.node, replace(node, down=True, down_at=Instant(builder.at), reason=reason))


def _fold_node_came_back(builder: StateBuilder, event: e.NodeCameBack) -> None:
    node = builder.node(event.node)
    reason = node.reason if node.drained else ""
    back = replace(node, down=False, down_at=NEVER, lost=False, reason=reason)
    builder.nodes = builder.nodes.set(event.node, back)
    for job_id in event.jobs:
        builder.change(job_id, None, order_at=Instant(builder.at))


def _fold_node_lost(builder: StateBuilder, event: e.NodeLost) -> None:
    node = builder.node(event.node)
    if not node.down:
        raise LedgerViolation(f"node {event.node!r} was declared lost though it is not down")
    reason = node.reason if node.drained else event.reason
    builder.nodes = builder.nodes.set(event.node, replace(node, lost=True, reason=reason))


def _fold_abandoned_buffer_removed(builder: StateBuilder, event: e.AbandonedBufferRemoved) -> None:
    known = builder.abandoned.get(event.node)
    removed = None if known is None else known.find(event.job, event.attempt)
    if known is None or removed is None:
        raise LedgerViolation(f"job {event.job} has no abandoned buffer on node {event.node!r}")
    rest = tuple(one for one in known.buffers if one is not removed)
    if rest:
        builder.abandoned = builder.abandoned.set(event.node, replace(known, buffers=rest))
    else:
        builder.abandoned = builder.abandoned.delete(event.node)


def _fold_node_admitted(builder: StateBuilder, event: e.NodeAdmitted) -> None:
    builder.admitted = builder.admitted.set(event.node, AdmittedNode(event.node, event.by, Instant(builder.at)))


def _fold_certificate_revoked(builder: StateBuilder, event: e.CertificateRevoked) -> None:
    builder.revocations = builder.revocations.set(event.revocation.certificate, event.revocation)


def _fold_certificates_unrevoked(builder: StateBuilder, event: e.CertificatesUnrevoked) -> None:
    for certificate in event.certificates:
        if certificate not in builder.revocations:
            raise LedgerViolation(f"{certificate!r} was unrevoked, but is not revoked")
        builder.revocations = builder.revocations.delete(certificate)


def fold_feature_level(builder: FeatureLevelHolder, event: e.FeatureLevelRaised) -> None:
    """Raise the feature level.

    Raises:
        ReleaseNeeded: This release does not support the level.
        LedgerViolation: The level is not the next one.
    """
    if event.level != builder.feature_level + 1 or not builder.feature_level:
        raise LedgerViolation(f"the feature level was raised from {builder.feature_level} to {event.level}")
    check_level(event.level, event.release, revision=builder.revision)
    builder.feature_level = event.level


def _fold_clock_set(builder: StateBuilder, event: e.ClockSet) -> None:
    for job_id in event.jobs:
        builder.put(*clamp_times(builder.job(job_id), builder.buffers.get(job_id), event.at))
    builder.clock_set_back = builder.clock_set_back or builder.revision
    builder.set_back_replies(event.at)
    builder.at = event.at


def _fold_state_digested(builder: StateBuilder, event: e.StateDigested) -> None:
    """Change nothing: a digest stored in the state would change the next digest."""


def _fold_histories_counted(builder: StateBuilder, event: e.HistoriesCounted) -> None:
    """Change nothing: the event describes the ledger, not the state."""


def _fold_disclosure_key_drawn(builder: StateBuilder, event: e.DisclosureKeyDrawn) -> None:
    """Change nothing: the key is read from the start of the ledger and must not appear in the state."""


CLUSTER_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    e.ClusterFounded: _fold_cluster_founded,
    e.ClusterRecovered: _fold_cluster_recovered,
    e.PoolSet: _fold_pool_set,
    e.FilesystemSet: _fold_filesystem_set,
    e.FilesystemRemoved: _fold_filesystem_removed,
    e.NodeRegistered: _fold_node_registered,
    e.NodeDrained: _fold_node_drained,
    e.NodeResumed: _fold_node_resumed,
    e.NodeWentDown: _fold_node_went_down,
    e.NodeCameBack: _fold_node_came_back,
    e.SiteConfigured: _fold_site_configured,
    e.PoolRemoved: _fold_pool_removed,
    e.FeatureLevelRaised: fold_feature_level,
    e.NodeLost: _fold_node_lost,
    e.AbandonedBufferRemoved: _fold_abandoned_buffer_removed,
    e.NodeAdmitted: _fold_node_admitted,
    e.CertificateRevoked: _fold_certificate_revoked,
    e.CertificatesUnrevoked: _fold_certificates_unrevoked,
    e.ClockSet: _fold_clock_set,
    e.StateDigested: _fold_state_digested,
    e.HistoriesCounted: _fold_histories_counted,
    e.DisclosureKeyDrawn: _fold_disclosure_key_drawn,
}
"""Event type -> fold, merged in `replica.fold.fold`."""


class FeatureLevelHolder(Protocol):
    """Protocol of builders that have a feature level."""

    feature_level: int
    revision: int
