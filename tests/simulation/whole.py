"""Random requests beside plain jobs: persistent buffers, arrays, interrupted runs, pools, and configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.messages import features
from forebay.replica.model.buffers import Access
from forebay.replica.model.configuration import check_persistent_allowed
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.orders import Order
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent, JobOptions, with_options
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import LeftOut, TransferCheckpoint, TransferReceipt
from forebay.replica.values.errors import Rejection
from tests.replica.world import beside_space
from tests.simulation import waiting

if TYPE_CHECKING:
    from tests.simulation.clients import SimClient

GRAIN_BYTES = 1 << 20
NAMES = ("lake", "pond", "mere")
LAKES = "lakes"
"""The pool that most persistent buffers are made in: the others are full of jobs, which they never pass."""
OPERATIONS = {
    "stage_in": ("", "setup", "data_in", "paths", "create_persistent", "destroy_persistent"),
    "post_run": ("", "post_run"),
    "stage_out": ("", "data_out"),
    "teardown": ("", "teardown"),
}
"""What of a stage can fail, by name."""


def idea(client: SimClient) -> c.Request:
    """Return a random request."""
    rng, state = client.rng, client.world.oracle.state
    if isinstance(check_persistent_allowed(state.site, is_operator=False, place=""), Rejection):
        if rng.random() < 0.5:
            return client.request(_configuration(client, persistent=True), operator=True)
    if rng.random() < 0.2:
        return waiting.idea(client)
    draw = rng.random()
    if draw < 0.40 or not client.jobs:
        return client.request(persistent(client), operator=rng.random() < 0.1)
    if draw < 0.50:
        return client.request(array(client))
    job = rng.choice(client.jobs[-4:])
    operator = rng.random() < 0.7
    if draw < 0.64:
        return client.request(c.SuspendJob(_one_of(client, JobState.RUNNING) or job), operator=operator)
    if draw < 0.72:
        return client.request(c.ResumeJob(_one_of(client, JobState.SUSPENDED) or job), operator=operator)
    if draw < 0.86:
        wanted = rng.choice((JobState.RUNNING, JobState.CONFIGURING, JobState.SUSPENDED, JobState.PENDING))
        return client.request(c.RequeueJob(_one_of(client, wanted) or job), operator=operator)
    if draw < 0.90:
        by_name = c.ClearBuffer(name=rng.choice(NAMES), discard=rng.random() < 0.3)
        stuck = [one for one in sorted(state.unfinished) if state.jobs[one].stuck]
        by_job = c.ClearBuffer(rng.choice(stuck or [job]), discard=rng.random() < 0.5)
        return client.request(rng.choice((by_name, by_job)), operator=True)
    if draw < 0.93:
        tasks = rng.choice((None, (0,), (1, 2)))
        of_array = rng.choice(sorted(state.arrays)) if state.arrays else job
        return client.request(rng.choice((c.CancelJob(of_array, tasks=tasks), c.HoldJob(of_array, tasks))))
    if draw < 0.98:
        return client.request(_pool_change(client), operator=True)
    return client.request(_configuration(client, persistent=rng.random() < 0.9), operator=True)


def _one_of(client: SimClient, wanted: JobState) -> int:
    """Return a job that is in this state and has not only just been submitted, 0 if there is none."""
    state = client.world.oracle.state
    found = sorted(
        job for jobs in state.on_node.values() for job in jobs if job in state.jobs and state.jobs[job].state is wanted
    )
    return client.rng.choice(found) if found else 0


def persistent(client: SimClient) -> c.SubmitJob:
    """Make a job that creates, uses or destroys persistent buffers."""
    rng = client.rng
    creates = destroys = uses = ""
    match rng.randrange(4):
        case 0:
            creates = rng.choice(NAMES)
        case 1:
            destroys = rng.choice(NAMES)
        case 2:
            uses = rng.choice(NAMES)
        case _:
            creates = uses = rng.choice(NAMES)
    pool = rng.choice((LAKES, LAKES, LAKES, "", "slow"))
    create = CreatePersistent(creates, rng.randrange(1, 3) * GRAIN_BYTES, pool, (Access.STRIPED,), "scratch", "line 2")
    buffer = beside_space(
        directives_kind="bb",
        creates=(create,) if creates else (),
        destroys=(DestroyPersistent(destroys, rng.random() < 0.5, "line 2"),) if destroys else (),
        uses=(uses,) if uses else (),
    )
    options = JobOptions(nodes=1 if uses or rng.random() < 0.3 else 0, requeue=rng.random() < 0.9)
    made = client.submission()
    own = made.request.buffer
    if options.nodes and rng.random() < 0.4:
        beside = {name: getattr(buffer, name) for name in ("directives_kind", "creates", "destroys", "uses")}
        buffer = buffer if own is None else replace(own, **beside)
    return replace(made, request=with_options(replace(made.request, buffer=buffer), options))


def destroyer(client: SimClient, name: str) -> c.SubmitJob:
    """Make a job that removes a persistent buffer, whoever may own it, and does nothing else."""
    buffer = beside_space(directives_kind="bb", destroys=(DestroyPersistent(name, True, "line 2"),))
    made = client.submission()
    request = replace(made.request, buffer=buffer, options=JobOptions(nodes=0))
    return replace(made, request=request, hold=Hold.NONE)


def array(client: SimClient) -> c.SubmitJob:
    """Make a job array, some of which may be under way at once."""
    rng = client.rng
    made = client.submission()
    throttle, options = rng.choice((0, 1, 2)), JobOptions(requeue=rng.random() < 0.9)
    request = with_options(made.request, options)
    return replace(made, request=request, throttle=throttle, tasks=tuple(range(rng.randrange(2, 5))))


def _pool_change(client: SimClient) -> c.Command:
    rng = client.rng
    match rng.randrange(4):
        case 0:
            return c.RemovePool(rng.choice(("slow", "spare", "spare")))
        case 1:
            return c.ChangePool("spare", exists=False, quantity=4 * GRAIN_BYTES, granularity=GRAIN_BYTES)
        case 2:
            return c.ChangePool("fast", out_of_service=rng.choice((0, 1, 3)) * GRAIN_BYTES)
        case _:
            return c.ChangePool("fast", quantity=rng.choice((6, 8, 10)) * GRAIN_BYTES)


def receipt(order: Order, *, complete: bool = True) -> TransferReceipt | None:
    """Return the receipt that an agent gives for an order, None for what moves nothing."""
    if order.rules is None:
        return None
    # The agent says another stage and attempt than the order's now and then: what counts is the order.
    left_out = (LeftOut("/in/device", "a device"),) if order.job % 3 == 0 else ()
    return TransferReceipt(
        Stage.STAGE_IN,
        order.attempt - order.job % 2,
        complete=complete,
        files=1,
        size_bytes=1,
        left_out=len(left_out),
        left_out_first=left_out,
        digest="xxh3-128:00",
    )


def checkpoints(order: Order) -> bool:
    """Whether the agent says of this order how far it is."""
    return order.rules is not None and (order.job + order.attempt) % 3 == 0


def reached(order: Order) -> c.TransferProgressed:
    """Return what it says."""
    return c.TransferProgressed(TransferCheckpoint(Stage.STAGE_OUT, order.attempt, files=1, size_bytes=2**62))


def _transfer_settings(client: SimClient) -> tuple[ConfSetting, ...]:
    """Return limits on transfers, none of which stops all of them: somebody has to come to an end."""
    rng = client.rng
    at_once = ("1", "2", "unlimited")
    return (
        ConfSetting("TransfersPerUser", rng.choice(at_once)),
        ConfSetting("TransfersPerNode", rng.choice(at_once)),
        ConfSetting("TransfersAtOnce", rng.choice(at_once)),
        ConfSetting("TransferRateOfCluster", rng.choice(("0", "1GiB", "unlimited"))),
        ConfSetting("TransferTimeouts", rng.choice(("progress", "fixed"))),
    )


def _configuration(client: SimClient, *, persistent: bool) -> c.ConfigureSite:
    rng = client.rng
    flags = ["EnablePersistent"] if persistent else ["DisablePersistent"]
    if rng.random() < 0.4:
        flags.append("TeardownFailure")
    settings = (
        ConfSetting("Flags", ",".join(flags)),
        ConfSetting("PreRunRequeues", str(rng.randrange(3))),
        ConfSetting("RestartPolicy", rng.choice(("forebay", "forebay", "slurm"))),
        ConfSetting("OperationsPerStage", rng.choice(("1", "2", "128"))),
        ConfSetting("MaxPasses", str(rng.choice((6, 8, 10)))),
        *_transfer_settings(client),
    )
    return c.ConfigureSite(settings, True)


def raised(client: SimClient) -> c.RaiseFeatureLevel:
    """Return the command to raise the level, of an operator who has seen that all members run the present release."""
    oracle = client.world.oracle
    members = oracle.members.newest
    known = () if members is None else tuple((one.id, features.FEATURE_LEVEL_KNOWN) for one in members.members())
    return c.RaiseFeatureLevel(oracle.state.feature_level + 1, known)
