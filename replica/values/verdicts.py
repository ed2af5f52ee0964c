"""Verdicts of scheduling gates: a reason spelled exactly as Slurm spells it, a sentence, and the figures behind it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Reason(StrEnum):
    """Reasons of waiting jobs, byte for byte as in Slurm. Those of limits are in `replica.model.accounts`."""

    NONE = "None"
    PRIORITY = "Priority"
    RESOURCES = "Resources"
    DEPENDENCY = "Dependency"
    DEPENDENCY_NEVER_SATISFIED = "DependencyNeverSatisfied"
    NODE_DOWN = "NodeDown"
    TIME_LIMIT = "TimeLimit"
    NON_ZERO_EXIT_CODE = "NonZeroExitCode"
    REQ_NODE_NOT_AVAIL = "ReqNodeNotAvail"
    PARTITION_DOWN = "PartitionDown"
    PARTITION_INACTIVE = "PartitionInactive"
    PARTITION_NODE_LIMIT = "PartitionNodeLimit"
    PARTITION_TIME_LIMIT = "PartitionTimeLimit"
    PARTITION_CONFIG = "PartitionConfig"
    JOB_HELD_USER = "JobHeldUser"
    JOB_HELD_ADMIN = "JobHeldAdmin"
    BEGIN_TIME = "BeginTime"
    DEADLINE = "DeadLine"
    RESERVATION = "Reservation"
    RESERVATION_DELETED = "ReservationDeleted"
    INVALID_ACCOUNT = "InvalidAccount"
    INVALID_QOS = "InvalidQOS"
    LICENSES = "Licenses"
    JOB_ARRAY_TASK_LIMIT = "JobArrayTaskLimit"
    BURST_BUFFER_RESOURCES = "BurstBufferResources"
    BURST_BUFFER_STAGE_IN = "BurstBufferStageIn"
    BURST_BUFFER_OPERATION = "BurstBufferOperation"


class Verdict(msgspec.Struct, frozen=True):
    """Result of one gate for one job: the reason shown, a sentence, and the figures behind it."""

    reason: str
    sentence: str
    figures: tuple[tuple[str, str], ...] = ()
