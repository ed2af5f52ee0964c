"""Partitions: which nodes a job may run on, for whom, for how long, and what is said of one that may not."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.accounts import Account, AccountUser
from forebay.replica.model.job_states import JobState
from forebay.replica.model.partitions import Partition, PartitionState
from forebay.replica.model.requests import CreatePersistent, Dependency, DependencyKind, JobOptions
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.limits import NODES_MAX
from forebay.replica.values.names import NodeListError, format_nodes, parse_nodes
from tests.replica.scheduler.test_index import IndexedWorld
from tests.replica.world import World, beside_space, user

P = PartitionState


def world(*partitions: Partition, nodes: int = 3, cpus: int = 4) -> World:
    made = IndexedWorld({"fast": 100}, nodes=nodes, cpus=cpus)
    for partition in partitions:
        assert not isinstance(made.settle(c.SetPartition(partition)), Rejection)
    return made


def of(name: str, **options: Any) -> JobOptions:
    return JobOptions(partition=name, **options)


def test_a_job_runs_and_stages_on_the_nodes_of_its_partition_alone() -> None:
    made = world(Partition("far", ("n2", "n3")), Partition("near", ("n1",)))
    far = [made.submit("capacity=5", options=of("far")) for _ in range(4)]
    near = [made.submit("capacity=5", options=of("near")) for _ in range(2)]
    plain = [made.submit(options=of("far")), made.submit(options=of("near")), made.submit()]
    assert {made.state.jobs[job].node for job in far} == {"n2", "n3"}
    assert {made.state.jobs[job].node for job in near} == {"n1"}
    assert made.state.jobs[plain[0]].node in ("n2", "n3") and made.state.jobs[plain[1]].node == "n1"
    assert made.state.jobs[plain[2]].state is JobState.CONFIGURING
    for job in (*far, *near):
        made.finish(job)


def test_who_waits_for_any_node_of_his_partition_keeps_others_from_its_nodes_and_from_no_others() -> None:
    made = world(Partition("wide", ("n1", "n2")), Partition("edge", ("n2", "n3")), cpus=2)
    for _ in range(2):
        made.submit(options=of("wide"), cpus=2)
    waits = made.submit(options=of("wide"), cpus=2)
    assert made.reason(waits) == "Resources"
    made.submit(options=of("edge"), cpus=1)
    behind = made.submit(options=of("wide"), cpus=1)
    assert made.reason(behind) == "Priority"
    # n2 is waited for; n3 is not.
    edge = [made.submit(options=of("edge"), cpus=1) for _ in range(2)]
    assert [made.state.jobs[job].node for job in edge] == ["n3", ""]
    assert made.reason(edge[1]) == "Resources"
    figures = dict(made.verdict(edge[1]).figures)
    assert figures["partition"] == "edge" and figures["free_cpus"] == "n2:0,n3:0"


@pytest.mark.parametrize(
    "reason,partition,job",
    [
        ("PartitionDown", Partition("p", state=P.DOWN, every_node=True), {}),
        ("PartitionInactive", Partition("p", state=P.INACTIVE, every_node=True), {}),
        ("PartitionTimeLimit", Partition("p", every_node=True, max_time_s=59), {}),
        ("PartitionNodeLimit", Partition("p", every_node=True, max_nodes=0), {}),
        ("PartitionNodeLimit", Partition("p", every_node=True, min_nodes=2), {}),
        ("PartitionConfig", Partition("p", every_node=True, users=("eve",)), {}),
        ("PartitionConfig", Partition("p", every_node=True, accounts=("physics",)), {}),
        ("ReqNodeNotAvail", Partition("p", ("n9",)), {}),
        ("ReqNodeNotAvail", Partition("p", ()), {}),
        ("Dependency", Partition("p", every_node=True), {"waits": True}),
        ("PartitionDown", Partition("p", every_node=True, state=P.DOWN), {"waits": True}),
        ("BeginTime", Partition("p", every_node=True, state=P.DOWN), {"begins": True}),
    ],
)
def test_the_gate_names_its_reason_as_slurm_does_and_opens_again(
    reason: str, partition: Partition, job: dict[str, bool]
) -> None:
    made = world(Partition("p", every_node=True, state=P.DOWN))
    first = made.submit(options=of("p"))
    waits: dict[str, Any] = {}
    if job.get("waits"):
        waits["dependencies"] = (Dependency(DependencyKind.AFTER_OK, first),)
    if job.get("begins"):
        waits["begin_at"] = made.at + 10**9
    asked = made.submit(options=of("p"), **waits)
    made.settle(c.HoldJob(first))
    made.settle(c.SetPartition(partition))
    assert made.reason(asked) == reason
    if not waits:
        made.settle(c.SetPartition(Partition("p", every_node=True)))
        assert made.reason(asked) == "None"


def test_a_partition_that_is_deleted_leaves_its_jobs_waiting_and_the_last_one_leaves_none() -> None:
    made = world(Partition("p", state=P.DOWN), Partition("q", every_node=True))
    job = made.submit(options=of("p"))
    made.settle(c.DeletePartition("p"))
    verdict = made.verdict(job)
    assert verdict.reason == "PartitionConfig" and "update the job" in verdict.sentence
    # Where a site has no partitions, their names mean nothing.
    made.settle(c.DeletePartition("q"))
    assert made.reason(job) == "None"


def test_a_running_job_keeps_its_node_when_its_partition_changes_and_what_is_only_staged_is_staged_again() -> None:
    made = world(Partition("p", ("n1",)))
    runs, staged = made.submit("capacity=5", options=of("p"), cpus=4), made.submit("capacity=5", options=of("p"))
    for job in (runs, staged):
        made.done(job)
    assert made.shown(runs)[2] == "pre-run" and made.shown(staged)[2] == "staged-in"
    made.settle(c.SetPartition(Partition("p", ("n2",))))
    assert made.state.jobs[runs].node == "n1" and made.shown(runs)[0] == "CONFIGURING"
    assert made.shown(staged)[2] == "teardown"
    made.done(staged)
    assert made.state.jobs[staged].node == "n2"


# Submitting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "partition,code",
    [
        (Partition("p", every_node=True, state=P.DRAIN), RejectionCode.WRONG_STATE),
        (Partition("p", every_node=True, state=P.INACTIVE), RejectionCode.WRONG_STATE),
        (Partition("p", every_node=True, users=("eve",)), RejectionCode.PERMISSION_DENIED),
        (Partition("p", every_node=True, accounts=("physics",)), RejectionCode.PERMISSION_DENIED),
        (Partition("other", every_node=True), RejectionCode.INVALID_FIELD),
    ],
)
def test_a_submit_is_refused_where_the_partition_takes_no_such_job(partition: Partition, code: RejectionCode) -> None:
    rejection = world(partition).try_submit(options=of("p"))
    assert isinstance(rejection, Rejection) and (rejection.code, rejection.place) == (code, "partition")


@pytest.mark.parametrize(
    "partition",
    [
        Partition("p", every_node=True, state=P.DOWN),
        Partition("p", every_node=True, max_time_s=1),
        Partition("p", every_node=True, max_nodes=0),
    ],
)
def test_what_exceeds_the_limits_of_a_partition_is_accepted_and_waits(partition: Partition) -> None:
    assert isinstance(world(partition).try_submit(options=of("p")), int)


def test_a_job_that_names_none_goes_to_the_default_partition_or_where_there_is_none_to_any_node() -> None:
    made = world(Partition("a", ("n1",)), Partition("b", ("n2",)))
    free = made.submit()
    assert made.state.jobs[free].request.options is None
    made.settle(c.SetPartition(Partition("a", ("n1",), is_default=True)))
    first = made.submit()
    assert made.state.jobs[first].request.options.partition == "a"
    made.settle(c.SetPartition(Partition("b", ("n2",), is_default=True)))
    assert [name for name, one in made.state.partitions.items() if one.is_default] == ["b"]
    second = made.submit()
    assert made.state.jobs[second].request.options.partition == "b"


def test_the_account_that_counts_is_the_default_one_where_none_is_named() -> None:
    made = world(Partition("p", every_node=True, accounts=("physics",), is_default=True))
    made.settle(c.SetAccount(Account("physics", members=(AccountUser("alan"),))))
    assert isinstance(made.try_submit(), Rejection)
    made.configure(DefaultAccount="physics")
    assert isinstance(made.try_submit(), int)


def test_only_operators_change_partitions() -> None:
    made = world(Partition("p", every_node=True))
    for command in (c.SetPartition(Partition("q")), c.DeletePartition("p"), c.ResetUsage("a", "x")):
        rejection = made.settle(command, user())
        assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    "partition",
    [
        Partition(""),
        Partition("all"),
        Partition("a,b"),
        Partition("p", ("n2", "n1")),
        Partition("p", ("n1", "n1")),
        Partition("p", ("n1",), every_node=True),
        Partition("p", max_time_s=-1),
        Partition("p", min_nodes=-1),
        Partition("p", max_nodes=NODES_MAX + 1),
        Partition("p", users=("a b",)),
    ],
)
def test_a_record_that_cannot_be_is_refused(partition: Partition) -> None:
    rejection = world().settle(c.SetPartition(partition))
    assert isinstance(rejection, Rejection) and rejection.place.startswith("partition.")


def test_setting_what_is_there_already_changes_nothing_and_an_unknown_one_cannot_be_deleted() -> None:
    made = world(Partition("p", ("n1",)))
    before = len([e_ for batch in made.ledger for entry in batch.entries for e_ in entry.events])
    made.settle(c.SetPartition(Partition("p", ("n1",))))
    assert len([e_ for batch in made.ledger for entry in batch.entries for e_ in entry.events]) == before
    assert isinstance(made.settle(c.DeletePartition("q")), Rejection)


# Persistent buffers --------------------------------------------------------------------------------------------------


def test_a_persistent_buffer_on_a_node_outside_the_partition_is_said() -> None:
    made = world(Partition("p", ("n1",)), Partition("q", ("n2",)))
    made.settle(c.ConfigureSite(settings=(ConfSetting("Flags", "EnablePersistent"),), partial=True))
    creates = beside_space(creates=(CreatePersistent("lake", 5, "fast"),))
    script = "#!/bin/sh\n#BB create_persistent name=lake capacity=5 pool=fast\n"
    maker = made.submit(script=script, options=of("p"), buffer=creates)
    made.finish(maker)
    assert made.state.persistent["lake"].node == "n1"
    uses = made.submit(script="#!/bin/sh\n#DW persistentdw name=lake\n", options=of("q"))
    verdict = made.verdict(uses)
    assert verdict.reason == "PartitionConfig" and "node n1, which is not in partition q" in verdict.sentence


# Lists of nodes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,names",
    [
        ("n1", ("n1",)),
        ("n[1-3],m", ("m", "n1", "n2", "n3")),
        ("n[08-10]", ("n08", "n09", "n10")),
        ("r[1-2]n", ("r1n", "r2n")),
        ("n[1,3]", ("n1", "n3")),
    ],
)
def test_a_list_of_nodes_is_read_as_the_field_writes_it(text: str, names: tuple[str, ...]) -> None:
    assert parse_nodes(text) == names


@pytest.mark.parametrize("text", ["", ",", "n[", "n[]", "n[3-1]", "a b", "n[1-99999]", "n[1-2][3-4]x[", "n[x]"])
def test_a_list_of_nodes_that_cannot_be_read_is_said_so(text: str) -> None:
    with pytest.raises(NodeListError, match="; write"):
        parse_nodes(text)


def test_a_short_text_never_lists_more_nodes_than_there_may_be() -> None:
    with pytest.raises(NodeListError, match="more than"):
        parse_nodes(",".join(["n[1-9999]"] * 400))


@given(st.sets(st.from_regex(r"[a-c]{0,2}[0-9]{1,3}[ab]?", fullmatch=True), min_size=1, max_size=30))
def test_what_is_written_of_a_list_of_nodes_is_read_as_the_same(names: set[str]) -> None:
    assert parse_nodes(format_nodes(sorted(names))) == tuple(sorted(names))


def test_every_state_of_a_partition_has_one_answer_for_taking_and_starting_jobs() -> None:
    said = {state: (state.takes_jobs, state.starts_jobs) for state in P}
    assert said == {P.UP: (True, True), P.DOWN: (True, False), P.DRAIN: (False, True), P.INACTIVE: (False, False)}
    for state, name in itertools.product(P, ("p", "")):
        made = world(Partition("p", every_node=True, state=state, is_default=True))
        outcome = made.try_submit(options=of(name))
        assert isinstance(outcome, int) == state.takes_jobs
        if isinstance(outcome, int):
            assert (made.reason(outcome) == "None") == state.starts_jobs
    assert e.PartitionSet.__struct_config__.tag == 24
