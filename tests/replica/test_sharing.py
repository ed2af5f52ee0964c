"""Equal values are kept once, whether a job was submitted here or came with a snapshot."""

from __future__ import annotations

import msgspec

from forebay.replica.model.buffers import Buffer
from forebay.replica.model.jobs import Job
from forebay.replica.model.requests import JobOptions, JobRequest, with_options
from forebay.replica.state.interning import intern_buffer, intern_job, intern_request
from forebay.replica.state.state import State
from forebay.snapshots.image import DIGEST_BYTES, Image, to_sections
from tests.replica.world import SCRIPT, World
from tests.snapshots.states import from_sections

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
    assert first.request.script is second.request.script
    assert first.request.workdir is second.request.workdir and first.request.user is second.request.user
    assert first.request.buffer is second.request.buffer
    assert first.request.options is second.request.options is not None
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
    asked = with_options(job.request, JobOptions(nice=3))
    for kind, record, shared in (
        (Job, job, intern_job(job)),
        (Buffer, buffer, intern_buffer(buffer, job)),
        (Buffer, buffer, intern_buffer(buffer, None)),
        (JobRequest, asked, intern_request(asked)),
    ):
        assert shared == record
        assert msgspec.msgpack.encode(shared) == msgspec.msgpack.encode(record)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(shared), type=kind) == record
    assert SCRIPT == job.request.script
