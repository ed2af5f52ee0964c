"""Properties over random histories with everything that burst buffers do: persistent buffers, requeues, suspension,
failures of every operation, and leaders that start operations again.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from forebay.replica.fold.apply import apply_batch
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.buffers import HOLDING, PERSISTENT_STATES, BufferState
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import Order
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent
from forebay.replica.scheduler.persistent import persistent_request
from forebay.replica.state.state import EMPTY
from forebay.replica.values.errors import Rejection
from tests.replica.scheduler.test_index import IndexedWorld
from tests.replica.test_histories import Histories
from tests.replica.test_persistent import asks
from tests.replica.world import OPERATOR, World, beside_space, user

NAMES = ("lake", "pond")
USERS = ("alan", "ben")
OPERATIONS = ("", "setup", "data_in", "paths", "create_persistent", "pre_run", "post_run", "data_out", "teardown")


class WholeHistories(Histories):
    """As Histories, with all that came with feature level 3."""

    def new_world(self) -> World:
        # Its index must at every step be as one that is built afresh, and give the passes of the walk over all jobs.
        made = IndexedWorld({"fast": 100, "bulk": 50}, granularity=5, nodes=3, cpus=2, stage_retries=1, max_passes=2)
        made.settle(c.ConfigureSite(settings=(ConfSetting("Flags", "EnablePersistent"),), partial=True))
        return made

    def is_hopeless(self, job: int) -> bool:
        """Nor does a persistent buffer come that nobody makes, or space that persistent buffers keep."""
        state = self.world.state
        buffer = state.buffers.get(job)
        if super().is_hopeless(job):
            return True
        if buffer is None or buffer.state is not BufferState.PENDING:
            return False
        kept = sum(one.granted_bytes for one in state.persistent.values() if one.pool == buffer.pool)
        crowded = buffer.pool in state.pools and kept + buffer.granted_bytes > state.pools[buffer.pool].usable_bytes
        return crowded or persistent_request(state.jobs[job]) is not None

    @rule(
        create=st.sampled_from((*NAMES, "")),
        destroy=st.sampled_from((*NAMES, "")),
        use=st.sampled_from((*NAMES, "")),
        size=st.integers(1, 60),
        own=st.integers(0, 40),
        pool=st.sampled_from(["fast", "bulk"]),
        none=st.booleans(),
        who=st.sampled_from(USERS),
        requeue=st.booleans(),
    )
    def submits_for_persistent_buffers(
        self, create: str, destroy: str, use: str, size: int, own: int, pool: str, none: bool, who: str, requeue: bool
    ) -> None:
        options = beside_space(
            creates=(CreatePersistent(create, size, pool),) if create else (),
            destroys=(DestroyPersistent(destroy),) if destroy and destroy != create else (),
            uses=(use,) if use and use != destroy else (),
        )
        asks(
            self.world,
            options,
            who=who,
            bb=f"capacity={own} pool=fast" if own and not none else "",
            nodes=0 if none else 1,
            requeue=requeue,
        )

    @rule(data=st.data(), what=st.sampled_from(["suspend", "resume", "requeue"]), operator=st.booleans())
    def changes_a_run(self, data: st.DataObject, what: str, operator: bool) -> None:
        job = self.some_job(data)
        if what == "requeue" and self.world.state.finished and data.draw(st.booleans()):
            job = data.draw(st.sampled_from(sorted(self.world.state.finished)))  # over, and pending again
        if job is not None:
            kinds = {"suspend": c.SuspendJob, "resume": c.ResumeJob, "requeue": c.RequeueJob}
            self.world.settle(kinds[what](job), OPERATOR if operator else user())

    def orders_of_jobs(self) -> list[tuple[str, Order]]:
        """Return what stands ordered but for removals of what was given up, which are about no job any more."""
        return [
            (node, order)
            for node in sorted(self.world.state.nodes)
            for order in self.world.orders(node)
            if not self.is_given_up(node, order)
        ]

    @rule(data=st.data(), operation=st.sampled_from(OPERATIONS), final=st.booleans())
    def an_operation_fails(self, data: st.DataObject, operation: str, final: bool) -> None:
        orders = self.orders_of_jobs()
        if orders:
            node, order = data.draw(st.sampled_from(orders))
            self.world.report(order.job, c.OperationFailed("it broke", final, operation), order)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def a_persistent_buffer_is_there_or_gone(self, data: st.DataObject, name: str) -> None:
        orders = self.orders_of_jobs()
        if orders:
            node, order = data.draw(st.sampled_from(orders))
            mine = name in {one.name for one in (*order.creates, *order.destroys)}
            known = self.world.report(order.job, c.PersistentChanged(name), order)
            assert isinstance(known, Rejection) != mine
            after = next(one for one in self.world.orders(node) if one.job == order.job)
            assert (after.attempt, after.stage) == (order.attempt, order.stage), "the order goes on"
            assert name not in {one.name for one in (*after.creates, *after.destroys)}

    @rule(data=st.data(), discard=st.booleans(), name=st.sampled_from((*NAMES, "")))
    def an_operator_clears(self, data: st.DataObject, discard: bool, name: str) -> None:
        job = self.some_job(data)
        self.world.settle(c.ClearBuffer(job or 0, name, discard))

    @rule(flag=st.sampled_from(["EnablePersistent", "EnablePersistent,TeardownFailure"]), requeues=st.integers(0, 2))
    def the_site_is_configured(self, flag: str, requeues: int) -> None:
        settings = (ConfSetting("Flags", flag), ConfSetting("PreRunRequeues", str(requeues)))
        self.world.settle(c.ConfigureSite(settings=settings, partial=True))

    @rule(policy=st.sampled_from(["forebay", "slurm"]))
    def the_leader_changes(self, policy: str) -> None:
        self.world.settle(c.ConfigureSite(settings=(ConfSetting("RestartPolicy", policy),), partial=True))
        self.world.settle(c.RestartOperations(tuple(sorted(self.world.state.unfinished))[:100]), c.CONTROLLER)

    @invariant()
    def a_job_that_waits_for_a_buffer_keeps_nothing_of_a_former_one(self) -> None:
        for buffer in self.world.state.buffers.values():
            if buffer.state is BufferState.PENDING:
                job = self.world.state.jobs[buffer.job]
                assert (buffer.node, job.node, buffer.staged_in_bytes, buffer.staged_in_files) == ("", "", 0, 0)
                assert job.state is JobState.PENDING and job.result is JobState.PENDING

    @invariant()
    def who_works_with_a_persistent_buffer_finds_it_allocated(self) -> None:
        state = self.world.state
        for name, jobs in state.using.items():
            for job_id in jobs:
                assert state.buffers[job_id].state in HOLDING
                job = state.jobs[job_id]
                if job.state in (JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED):
                    assert state.persistent[name].state is BufferState.ALLOCATED
                    assert state.persistent[name].node == job.node

    @invariant()
    def persistent_buffers_are_in_their_own_states(self) -> None:
        assert {buffer.state for buffer in self.world.state.persistent.values()} <= PERSISTENT_STATES

    def teardown(self) -> None:
        super().teardown()
        self.persistent_buffers_outlive_their_jobs()

    def persistent_buffers_outlive_their_jobs(self) -> None:
        """Nothing removes one but a job that was submitted for it, its creator before it was there, or an operator."""
        state, there = EMPTY, set[str]()
        for batch in self.world.ledger:
            events = [event for entry in batch.entries for event in entry.events]
            for event in events:
                if isinstance(event, e.PersistentCreated):
                    there.add(event.name)
                elif isinstance(event, e.PersistentDeletionStarted):
                    cleared = any(isinstance(other, e.PersistentDeleted) and other.reason for other in events)
                    options = state.jobs[event.job].request.buffer if event.job in state.jobs else None
                    destroys = {one.name for one in options.destroys} if options is not None else set()
                    assert cleared or event.name in destroys or event.name not in there
                elif isinstance(event, e.PersistentDeleted):
                    there.discard(event.name)
            following = apply_batch(state, msgspec.structs.replace(batch))
            assert following is not None
            state = following
        assert there == set(state.persistent)


WholeHistories.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestWholeHistories = WholeHistories.TestCase
TestWholeHistories.pytestmark = [pytest.mark.campaign(3)]  # type: ignore[attr-defined]
