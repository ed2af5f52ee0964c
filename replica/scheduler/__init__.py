"""Scheduler: gates, quotas, backfill, preemption, the scheduling index, and the scheduling cycle."""

from replica.scheduler.estimates import Ahead, Estimate, ahead_in, estimate
from replica.scheduler.gates import depended_on, dependency_met, early_gate, later_reason, waits_for_space
from replica.scheduler.index import SchedulingIndex
from replica.scheduler.persistent import persistent_request
from replica.scheduler.priority import effective_priority
from replica.scheduler.quotas import alone_over, submit_over
from replica.scheduler.scheduling_pass import events_of_pass, free_for_setups, verdicts_of
