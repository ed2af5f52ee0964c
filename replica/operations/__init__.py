"""Lifecycle of operations: outcomes and retries, slots, timers, transfer limits, movers."""

from replica.operations.external_jobs import (
    ExternalJobPhase,
    FoundExternalJob,
    external_job_phase,
    find_external_job,
    given_up,
    has_results,
    is_lingering,
    lingers_until,
    made_later,
    no_space,
    waits_for_names,
)
from replica.operations.lost_nodes import Loss, loses_results, loss_of
from replica.operations.movers import (
    directory_in_filesystem,
    filesystem_of_pool,
    filesystems_of,
    jobs_beside,
    mover_again,
    mover_for,
    persistent_directory,
    stage_out_started,
)
from replica.operations.outcomes import (
    active_stage,
    failed,
    gone,
    persistent_changed,
    pre_run_failed,
    script_ended,
    succeeded,
    taken_back,
    unwound,
    waiting_stage,
)
from replica.operations.slots import BEGINNINGS, OperationSlots, slots_given, taking_slots, with_slots
from replica.operations.timers import due_at, due_events, reservation_instants, reservations_due
from replica.operations.transfer_limits import cap_s, has_shares, node_bytes_s, rules_in_force, shares_of
