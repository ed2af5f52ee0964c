"""Which events an agenda looks at how: by job, as nearly all of a busy cluster are, or each in its own way."""

from __future__ import annotations

from replica.messages import events as e

NODE_EVENTS = (e.NodeRegistered, e.NodeDrained, e.NodeResumed, e.NodeWentDown, e.NodeCameBack)
RESERVATION_EVENTS = (e.ReservationSet, e.ReservationDeleted, e.ReservationStarted, e.ReservationEnded)
EVENTS_ABOUT_ALL = (
    e.ClusterFounded,
    e.PolicySet,
    e.SiteConfigured,
    e.AccountSet,
    e.AccountDeleted,
    e.QosSet,
    e.QosDeleted,
    e.SchedulingRulesSet,
    e.PartitionSet,
    e.PartitionDeleted,
    e.TransferRulesSet,
    e.FeatureLevelRaised,
)
POOL_EVENTS = (e.PoolSet, e.PoolRemoved)
EVENTS_ABOUT_NONE = (
    e.PoolUnitSet,
    e.MailSent,
    e.MailDropped,
    e.LicenseSet,
    e.LicenseDeleted,
    e.UsageReset,
)
"""Events that are not about one job: about a node, a pool, every job, or about nothing that is kept here."""

CHANGES = (e.JobUpdated, e.BufferRequestChanged)
"""Events after which a job may depend on others than before."""

EVENTS_OF_THEIR_OWN = frozenset(
    (
        *NODE_EVENTS,
        *RESERVATION_EVENTS,
        *POOL_EVENTS,
        *EVENTS_ABOUT_ALL,
        *EVENTS_ABOUT_NONE,
        *CHANGES,
        e.ArraySubmitted,
    )
)
"""All events that are not simply about one job, which nearly every event of a busy cluster is: found at one look."""
