"""Flags=PrivateData: nothing that a user wrote about a job, or that was said of its files, is another user's to see."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import msgspec
import pytest

from forebay.cluster.api import privacy
from forebay.cluster.schemas import JobDetailsView, JobView
from forebay.cluster.schemas.operations import OPERATIONS
from forebay.replica.messages.events import JobPurged
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import LeftOut
from tests.contract.in_memory import Answer
from tests.contract.maker import Maker, asks, ended, failed, receipt

SECRET = "s3cret"
"""What stands in every text of the jobs below that may name a file, a person or a purpose."""

ELSEWHERE = frozenset({"/v1/events", "/metrics", "/v1/jobs/{id}/proof"})
"""Asked elsewhere (test_events, test_tlog); metrics name no jobs."""

SCRIPT = asks(
    "#DW jobdw capacity=20GiB access_mode=striped type=scratch",
    f"#DW stage_in type=directory source=/in/{SECRET} destination=$DW_JOB_STRIPED/data",
    f"#DW stage_out type=file source=$DW_JOB_STRIPED/result destination=/out/{SECRET}",
)


async def with_jobs_at_every_point(m: Maker) -> list[int]:
    """Return jobs of ada: held, without a buffer, being tried again, stuck before and after the run, over."""
    for node in m.cpus:
        await m.register(node)
    await m.configure(Flags="PrivateData,EnablePersistent", StageRetries="1")
    texts: dict[str, Any] = {
        "workdir": f"/out/{SECRET}", "output": f"{SECRET}.%j", "comment": SECRET, "mail_user": f"{SECRET}@example.org",
        "mail_types": ["all"], "environment": {"A": SECRET},
    }  # fmt: skip
    held = await m.submit("ada", script=SCRIPT, hold=True, **texts)
    plain = await m.submit("ada", hold=True, **texts)
    tried, stuck, after, over = [await m.submit("ada", script=SCRIPT, **texts) for _ in range(4)]
    missing = failed(f"/in/{SECRET} is not there")
    await m.report(tried, missing)
    for _ in range(3):
        await m.report(stuck, missing, 11)
    left = (LeftOut(f"/in/{SECRET}", "a FIFO holds no data"),)
    of_files = receipt(Stage.STAGE_IN, 1, left_out=1, left_out_first=left)
    await m.report(over, {"type": "done", "files": 3, "size_bytes": 5, "receipt": of_files})
    await m.finish(over)
    await m.until(after, "run")
    await m.done(after)
    await m.report(after, ended())
    for _ in range(3):
        await m.report(after, failed(f"/out/{SECRET} is read-only", final=True), 11)
    jobs = [held, plain, tried, stuck, after, over]
    assert all(job in m.state.jobs for job in jobs)
    return jobs


async def asked(m: Maker, who: str, jobs: list[int]) -> dict[str, Answer]:
    """Return what somebody is answered to everything that can be read, about each of the jobs."""
    found: dict[str, Answer] = {}
    for operation in OPERATIONS.values():
        if operation.method != "GET" or operation.path in ELSEWHERE or re.search(r"\{(name|tile)\}", operation.path):
            continue
        thens = ("", f"?at={m.state.revision}") if "at" in operation.query else ("",)
        for job, then in itertools.product(jobs, thens):
            target = operation.path.replace("{id}", str(job)).replace("{job}", str(job)) + then
            if target not in found:
                try:
                    found[target] = await m.day.replica.ask(who, "GET", target)
                except AttributeError:
                    assert "{" not in operation.path  # about replicas, their members and storage: not of this house
    return found


class LaterView(JobView, frozen=True, kw_only=True):
    """View of a later release, with fields that its developers have not marked."""

    inputs: tuple[str, ...] = ()
    purpose: str


def test_a_field_of_a_job_is_hidden_unless_it_is_marked_public() -> None:
    hidden = privacy._hidden(LaterView, privacy.PUBLIC_STATE)
    assert hidden == {**privacy.HIDDEN, "inputs": (), "purpose": privacy.PRIVATE_WORD}


@pytest.mark.parametrize(
    "view, public, hidden",
    [(JobView, privacy.PUBLIC_STATE, privacy.HIDDEN), (JobDetailsView, privacy.PUBLIC_DETAILS, privacy.HIDDEN_DETAILS)],
)
def test_each_field_that_is_marked_public_exists(view: Any, public: frozenset[str], hidden: dict[str, Any]) -> None:
    assert public | set(hidden) <= set(view.__struct_fields__) and not public & set(hidden)


def text_of(answer: Answer) -> str:
    return msgspec.json.encode(answer.body).decode()


@pytest.mark.parametrize("purged", (False, True))
def test_with_private_data_nothing_that_can_be_read_tells_a_user_of_the_files_and_texts_of_another(
    purged: bool,
) -> None:
    asyncio.run(nothing_is_told(purged))


async def nothing_is_told(purged: bool) -> None:
    m = Maker(1)
    jobs = await with_jobs_at_every_point(m)
    if purged:
        m.day.replica.commit_pass(tuple(JobPurged(job) for job in jobs[-1:]))
        jobs = jobs[-1:]
        assert jobs[0] not in m.state.jobs
    told = await asked(m, "user ben", jobs)
    leaks = [target for target, answer in told.items() if SECRET in text_of(answer)]
    assert not leaks, {target: text_of(told[target]) for target in leaks}
    own = await asked(m, "user ada", jobs)
    theirs = [target for target in own if own[target].status == 200 and told[target].status == 403]
    assert any(target.endswith("/history") for target in theirs)
    assert any(target.endswith("/receipts") for target in theirs)
    assert purged or SECRET in text_of(own[f"/v1/jobs/{jobs[0]}"])
    assert SECRET in text_of((await asked(m, "operator", jobs))[f"/v1/transfers/{jobs[-1]}/receipts"])


@pytest.mark.parametrize("flags", ("PrivateData,EnablePersistent", "EnablePersistent"))
def test_who_carries_out_drills_sees_what_a_drill_should_not_lead_to_and_nothing_of_files_and_texts(flags: str) -> None:
    asyncio.run(of_a_drill(flags))


async def of_a_drill(flags: str) -> None:
    m = Maker(1)
    jobs = await with_jobs_at_every_point(m)
    await m.configure(Flags=flags, StageRetries="1")
    told = await asked(m, "drill dora", jobs)
    leaks = [target for target, answer in told.items() if SECRET in text_of(answer)]
    assert not leaks, {target: text_of(told[target]) for target in leaks}
    assert told["/v1/transfers"].body["transfers"], "that something is moved is its business"
