"""Checks of a cluster after its jobs have finished. Each returns a sentence about the result, or raises RunFailed."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.jobs import JobView, StatusView
from tests.faults.local_cluster import LocalCluster, RunFailed
from tests.faults.workload import Workload

SETTLE_S = 30.0
"""How long replicas may take to come to the same revision, seconds."""


async def jobs(client: Client) -> dict[int, JobView]:
    """Return the jobs that there are, by number."""
    return {job.job_id: job for job in (await client.call(ops.LIST_JOBS, limit=10_000)).jobs}


async def free_capacity(client: Client) -> str:
    """Free capacity is back to the total in every pool."""
    pools = (await client.call(ops.LIST_POOLS)).pools
    for pool in pools:
        usable = pool.quantity_bytes // pool.granularity_bytes * pool.granularity_bytes
        if pool.held_bytes or pool.free_bytes != usable:
            raise RunFailed(f"pool {pool.name} has {pool.free_bytes} of {usable} bytes free, {pool.held_bytes} held")
    return f"free capacity is back to the total in {len(pools)} pools"


async def same_digest(cluster: LocalCluster, client: Client) -> tuple[str, StatusView]:
    """All replicas have the same state digest at the same revision."""
    assert cluster.config is not None
    until = time.monotonic() + SETTLE_S
    while True:
        statuses = []
        for replica in cluster.config.replicas:
            try:
                statuses.append(await client.call(ops.SHOW_STATUS, replica=replica.api, digest=True, deadline_s=5))
            except ApiError as error:
                if time.monotonic() > until:
                    raise RunFailed(f"replica {replica.name} does not answer: {error}") from error
        if len(statuses) == len(cluster.config.replicas) and len({status.revision for status in statuses}) == 1:
            digests = {status.state_digest for status in statuses}
            if len(digests) != 1:
                raise RunFailed(f"at revision {statuses[0].revision} the replicas have the digests {digests}")
            first = statuses[0]
            return (
                f"{len(statuses)} replicas have digest {first.state_digest[:16]}… at revision {first.revision}",
                first,
            )
        if time.monotonic() > until:
            raise RunFailed(f"the replicas stay at revisions {[status.revision for status in statuses]}")
        await asyncio.sleep(0.1)


async def ran_once(client: Client, workload: Workload, jobs: Iterable[int], *, all_complete: bool) -> str:
    """No job's script was started or completed twice; with `all_complete` each completed exactly once."""
    jobs = list(jobs)
    completions = workload.completions()
    for job in jobs:
        rows = (await client.call(ops.SHOW_JOB_HISTORY, id=job)).rows
        starts = Counter(row.event for row in rows)["run_started"]
        if starts > 1 or completions[job] > 1 or (all_complete and (starts, completions[job]) != (1, 1)):
            raise RunFailed(f"job {job} was started {starts} times and ran to its end {completions[job]} times")
    return f"{len(jobs)} jobs, none started or finished twice"


def replayed(cluster: LocalCluster, status: StatusView, *, replica: str = "r1") -> str:
    """Folding the whole ledger from nothing, under another PYTHONHASHSEED, gives the digest of the live replicas."""
    until = time.monotonic() + SETTLE_S
    # A running replica writes its applied mark when it is idle for a moment; until then its last entries are not yet
    # settled for who reads its directory.
    while json.loads(cluster.forebay("audit", "replay", "--name", replica, "--json"))["revision"] < status.revision:
        if time.monotonic() > until:
            raise RunFailed(f"the ledger of {replica} does not reach revision {status.revision} on disk")
        time.sleep(0.2)
    for seed in ("0", "4242"):
        words = ("audit", "replay", "--name", replica, "--at", str(status.revision), "--json")
        answer = json.loads(cluster.forebay(*words, environment={"PYTHONHASHSEED": seed}))
        found = (answer["revision"], answer["state_digest"])
        if found != (status.revision, status.state_digest):
            raise RunFailed(f"the ledger of {replica} replays to {found}, not to {status.state_digest}")
    return f"a replay of all {status.revision} revisions, with several hash seeds, ends at the same digest"


def redecided(cluster: LocalCluster, *, replica: str = "r1") -> str:
    """Every decision in the ledger that can be taken again comes out the same."""
    answer = json.loads(cluster.forebay("audit", "redecide", "--name", replica, "--json"))
    if answer["different"] or not answer["same"]:
        raise RunFailed(f"the ledger of {replica} would be decided otherwise: {answer['differences'][:1]}")
    return f"{answer['same']} decisions are the same when decided again, {answer['rebuilt_share']:.1%} of all"


def gone_through(cluster: LocalCluster, *, replica: str = "r1") -> str:
    """A what-if in which nothing is changed is what was."""
    answer = json.loads(cluster.forebay("audit", "whatif", "--name", replica, "--json"))
    fit = answer["calibration"]["in_place"]
    if answer["recorded"] != answer["unchanged"] or fit["identical"] != fit["starts"] or not fit["starts"]:
        raise RunFailed(f"the ledger of {replica}, gone through again, is another one: {answer['calibration']}")
    return f"simulated without a change, all {fit['starts']} jobs start when they did"


async def why_agrees(client: Client, seen: dict[tuple[int, int], str]) -> str:
    """`why --at` gives the reason that `show` gave at every revision that was seen."""
    for (job, revision), reason in seen.items():
        said = await client.call(ops.EXPLAIN_JOB, id=job, at=revision)
        if said.reason != reason:
            raise RunFailed(f"job {job} at revision {revision}: show said {reason!r}, why says {said.reason!r}")
    return f"`job why --at` agrees with `job show` at {len(seen)} moments"


def over(job: JobView) -> bool:
    """Whether a job and its buffer are over."""
    ended = job.state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    return ended and job.burst_buffer_state in (None, "complete")


def has_nothing_to_bring(job: JobView) -> bool:
    """Whether a job's stage-out waits for an operator since what it should bring back was never written."""
    return job.state == "STAGE_OUT" and job.reason.endswith("does not exist")
