"""Who else stages out to the same place, and where on its node a job's buffer is."""

from __future__ import annotations

from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from forebay.replica.views.jobs import SHARING_NAMED_MAX, Shared, buffer_path, shared_destinations
from tests.replica.test_request_options import taken
from tests.replica.test_request_options import world as site
from tests.replica.world import World, agent, user

SCRIPT = "#!/bin/sh\n#DW jobdw capacity=1\n#DW stage_out type=directory source=$DW_JOB_STRIPED/o destination={}\n"


def out_to(world: World, path: str) -> int:
    return world.submit(script=SCRIPT.format(path))


def test_jobs_that_stage_out_to_one_place_are_told_of_each_other_until_they_are_over() -> None:
    world = World()
    one, two, other = out_to(world, "/out/r"), out_to(world, "/out//r/"), out_to(world, "/out/else")
    assert shared_destinations(world.state, one) == (Shared("/out/r", (two,)),)
    assert shared_destinations(world.state, two) == (Shared("/out/r", (one,)),)
    assert shared_destinations(world.state, other) == ()
    world.settle(c.CancelJob(two), user())
    world.done(two)
    assert world.state.jobs[two].state is JobState.CANCELLED
    assert shared_destinations(world.state, one) == () == shared_destinations(world.state, two)


def test_however_many_jobs_there_are_a_few_are_named() -> None:
    world = World()
    jobs = [out_to(world, "/out/r") for _ in range(3 * SHARING_NAMED_MAX)]
    (shared,) = shared_destinations(world.state, jobs[0])
    assert len(shared.jobs) == SHARING_NAMED_MAX and jobs[0] not in shared.jobs


def test_tasks_of_an_array_without_their_number_in_the_destination_are_told_of_each_other() -> None:
    here = site()
    lines = "#DW jobdw capacity=1M\n#DW stage_out type=directory source=$DW_JOB_STRIPED/o destination={}"
    job = taken(here, lines.format("/out/r"), tasks=(1, 2, 3))
    assert shared_destinations(here.state, job) == (Shared("/out/r", (job + 1, job + 2)),)
    job = taken(here, lines.format("/out/%a"), tasks=(1, 2, 3))
    assert shared_destinations(here.state, job) == ()


def test_a_jobs_buffer_has_a_path_while_it_holds_its_space() -> None:
    world = World()
    world.settle(c.RegisterNode("n1", 8, "i2", "s1", "/var/lib/agent/buffers"), agent("n1"))
    job = out_to(world, "/out/r")
    assert buffer_path(world.state, job) == f"/var/lib/agent/buffers/{job}"
    world.settle(c.CancelJob(job), user())
    world.done(job)
    assert buffer_path(world.state, job) is None
