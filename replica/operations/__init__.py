"""Lifecycle of operations: outcomes and retries, slots, timers, transfer limits, movers."""

from forebay.replica.operations.external_jobs import (
    ExternalJobLookup,
    ExternalJobPhase,
    external_job_phase,
    find_external_job,
    give_up_events,
    has_results,
    is_lingering,
    lingers_until,
    no_space_message,
    persistent_obstacle,
    persistent_wait_message,
)
from forebay.replica.operations.lost_nodes import Loss, loses_results, loss_of
from forebay.replica.operations.movers import (
    choose_external_job_mover,
    choose_mover,
    directory_in_filesystem,
    filesystem_of_pool,
    filesystems_of,
    jobs_of_peer_movers,
    persistent_directory,
    stage_out_event,
)
from forebay.replica.operations.outcomes import (
    active_stage,
    failure_events,
    persistent_change_events,
    pre_run_failure_events,
    removal_events,
    revocation_events,
    rollback_events,
    script_end_events,
    success_events,
    waiting_stage,
)
from forebay.replica.operations.slots import (
    SLOT_EVENTS,
    OperationSlots,
    assign_slots,
    assign_slots_in_steps,
    grant_slots,
)
from forebay.replica.operations.timers import due_at, due_events, reservation_instants, reservations_due
from forebay.replica.operations.transfer_limits import (
    active_rules,
    has_shares,
    longest_transfer_s,
    node_bytes_s,
    rate_shares,
)
