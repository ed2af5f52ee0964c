"""Scheduler: gates, quotas, backfill, preemption, the scheduling index, and the scheduling cycle."""

from forebay.replica.scheduler.estimates import Estimate, JobsAhead, estimate, jobs_ahead_in
from forebay.replica.scheduler.gates import (
    dependency_jobs,
    early_gate,
    is_dependency_met,
    later_reason,
    waits_for_space,
)
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.persistent import persistent_request
from forebay.replica.scheduler.priority import effective_priority
from forebay.replica.scheduler.quotas import limit_exceeded_alone, submit_limit_exceeded
from forebay.replica.scheduler.scheduling_cycle import run_cycle, space_for_setups, verdicts_of
