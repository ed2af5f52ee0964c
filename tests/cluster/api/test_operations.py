"""The table of operations: its names are contract, and a call can say only what the row knows."""

import re
from types import NoneType
from typing import get_args

import pytest

from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.operations import OPERATIONS
from forebay.cluster.schemas.requests import BulkCommand
from forebay.replica.messages import commands as c

NAMES = """
    submit_job list_jobs send_commands show_job show_job_history explain_job estimate_job update_job cancel_job hold_job
    release_job suspend_job resume_job requeue_job clear_buffer export_buffer
    list_accounts set_account delete_account list_qos set_qos delete_qos list_licenses set_license delete_license
    list_revocations revoke_certificate unrevoke_certificate
    list_reservations set_reservation delete_reservation show_scheduling_rules
    list_partitions set_partition delete_partition list_usage reset_usage
    list_pools set_pool add_pool change_pool remove_pool list_filesystems add_filesystem remove_filesystem list_buffers
    clear_persistent_buffer show_burst
    show_provider_status show_configuration configure_site compare_configuration
    list_nodes admit_node drain_node resume_node lose_node register_node poll_orders report_operations
    list_transfers show_job_transfers list_receipts
    register_scheduler show_scheduler_site list_schedulers release_scheduler list_external_jobs show_external_job
    set_up_external_job stage_in_external_job begin_external_job_run end_external_job_run stage_out_external_job
    tear_down_external_job miss_external_job
    list_persistent make_persistent remove_persistent
    list_members add_member remove_member replace_member update_member transfer_leadership
    list_drills show_drill start_drill confirm_drill abort_drill end_drill probe_drill lock_drills unlock_drills
    show_feature_level raise_feature_level
    list_sessions open_session close_session show_clock set_clock
    show_overview list_sinks show_status list_digests show_state_digest show_history list_leaders list_pool_use
    show_diff read_ledger
    read_stored_entries
    read_checkpoint read_tile list_log_keys sign_checkpoint take_checkpoint prove_job save_snapshot
    list_snapshots fetch_snapshot stream_events
    show_openapi show_health show_readiness show_metrics
"""


def test_the_names_of_operations_are_contract() -> None:
    assert list(OPERATIONS) == NAMES.split()


def test_each_row_is_a_constant_of_its_name_and_says_what_it_is_for() -> None:
    for name, row in OPERATIONS.items():
        assert getattr(ops, name.upper()) is row
        assert row.summary.endswith(".") and row.roles
        assert row.has_body == (row.method != "GET" and row is not ops.SAVE_SNAPSHOT)


def test_a_command_in_bulk_has_the_name_of_the_operation_and_of_the_state_machines_command() -> None:
    tags = {kind.__struct_config__.tag for kind in get_args(BulkCommand)}
    assert tags <= set(OPERATIONS)
    kinds = {re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower() for kind in get_args(c.Command)}
    assert tags <= kinds


def test_a_target_is_path_and_query_encoded() -> None:
    assert ops.SHOW_JOB.target({"id": "12_[1-4]"}) == "/v1/jobs/12_%5B1-4%5D"
    assert ops.DRAIN_NODE.target({"name": "../jobs/1?x=1#y"}) == "/v1/nodes/..%2Fjobs%2F1%3Fx%3D1%23y/drain"
    asked = {"state": "PENDING,RUNNING", "user": None, "limit": 10, "stale": "ok"}
    assert ops.LIST_JOBS.target(asked) == "/v1/jobs?state=PENDING%2CRUNNING&limit=10&stale=ok"
    assert ops.LIST_BUFFERS.target({"live": True}) == "/v1/buffers?live=yes"
    assert ops.LIST_BUFFERS.target({"live": False}) == "/v1/buffers"


@pytest.mark.parametrize("wrong", [{}, {"id": 1, "colour": "blue"}, {"name": "n1"}])
def test_a_parameter_that_is_missing_or_unknown_is_not_sent(wrong: dict[str, ops.Parameter]) -> None:
    with pytest.raises(TypeError, match="show_job takes id, at, stale"):
        ops.SHOW_JOB.target(wrong)


def test_a_read_has_no_request() -> None:
    assert ops.LIST_JOBS.request is NoneType
