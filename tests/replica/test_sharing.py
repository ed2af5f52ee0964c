"""Equal values are kept once, whether a job was submitted here or came with a snapshot."""

from __future__ import annotations

import msgspec

from replica.model.buffers import Buffer
from replica.model.job_options import JobOptions
from replica.model.jobs import Job
from replica.state.interning import shared_buffer, shared_job, shared_options
from replica.state.state import State
from snapshots.assembly import from_sections
from snapshots.image import DIGEST_BYTES, Image, to_sections
from tests.replica.world import SCRIPT, World

SCRIPT_WITH_MORE = "#!/bin/sh\n#DW jobdw capacity=10 type=scratch access_mode=striped\n" + (
    "#DW stage_in type=file source=/in/data destination=$DW_JOB_STRIPED/data\ntrue\n"
)


def submitted() -> State:
    world = World({"fast": 100})
    for _ in range(2):
        # Texts made anew each time, as they are when they come from the network.
        script, account = "".join(list(SCRIPT_WITH_MORE)), "".join(list("physics-department"))
        world.submit(script=script, workdir="".join(list("/out/somewhere")), options=JobOptions(comment=account))
    return world.state


def assert_shared(state: State) -> None:
    first, second = state.jobs[1], state.jobs[2]
    assert first.spec.script is second.spec.script
    assert first.spec.workdir is second.spec.workdir and first.spec.user is second.spec.user
    assert state.buffers[1].request is state.buffers[2].request
    assert state.buffers[1].user is state.jobs[1].spec.user
    assert state.options[1] is state.options[2]
    assert first.submitted_at is first.eligible_at is state.buffers[1].created_at


def test_jobs_that_are_alike_share_what_is_equal_after_a_submit_and_after_a_restart() -> None:
    state = submitted()
    assert_shared(state)
    sections = [(part.section, part.payload) for part in to_sections(Image(state, 1, 1, bytes(DIGEST_BYTES)))]
    loaded = from_sections(sections).state
    assert loaded == state
    assert_shared(loaded)


def test_sharing_changes_no_value() -> None:
    world = World({"fast": 100})
    world.submit("capacity=10", environment=(("A", "b"),), name="one")
    job, buffer = world.state.jobs[1], world.state.buffers[1]
    for kind, record, shared in (
        (Job, job, shared_job(job)),
        (Buffer, buffer, shared_buffer(buffer, job)),
        (Buffer, buffer, shared_buffer(buffer, None)),
        (JobOptions, JobOptions(nice=3), shared_options(JobOptions(nice=3))),
    ):
        assert shared == record
        assert msgspec.msgpack.encode(shared) == msgspec.msgpack.encode(record)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(shared), type=kind) == record
    assert SCRIPT == job.spec.script
