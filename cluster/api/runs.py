"""What is done to jobs that run, and to buffers that are stuck: suspend, resume, requeue, clear."""

from __future__ import annotations

from cluster.api.jobs import change
from cluster.api.problems import bad
from cluster.api.service import Call, Reply
from cluster.schemas.requests import PersistentCleared
from replica.messages import commands as c


async def suspend(call: Call) -> Reply:
    """Stop the script of a running job where it is; its time limit stands still."""
    return await change(call, c.SuspendJob(*call.job_reference()))


async def resume(call: Call) -> Reply:
    """Let the script of a suspended job go on."""
    return await change(call, c.ResumeJob(*call.job_reference()))


async def requeue(call: Call) -> Reply:
    """End the present run of a job, or take back its buffer, and let it wait and stage in again."""
    return await change(call, c.RequeueJob(*call.job_reference()))


async def clear(call: Call) -> Reply:
    """Forget the buffer of a job that could not be removed; with `discard` also results that were not staged out."""
    job_id, tasks = call.job_reference()
    if tasks is not None:
        raise bad("the buffers of array tasks are cleared one by one", "name the task's own job number", "job id")
    return await change(call, c.ClearBuffer(job=job_id, discard=call.body.discard))


async def clear_persistent(call: Call) -> Reply:
    """Forget a persistent buffer that cannot be removed; with `discard` also one that is whole."""
    name = call.params["name"]
    settled = await call.service.settle(call, c.ClearBuffer(name=name, discard=call.body.discard))
    return Reply(settled.state.revision, PersistentCleared(revision=settled.state.revision, name=name))
