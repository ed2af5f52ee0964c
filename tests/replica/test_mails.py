"""Mail that is owed follows from the State alone: what was asked for and has happened, until it is settled."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.replica.decide.reports import mail_events
from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.job_states import JobState
from forebay.replica.model.mail import Mail, MailKind, message_id_local_part, wants_mail
from forebay.replica.model.requests import JobOptions
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.errors import Rejection
from forebay.replica.values.limits import MAILS_OWED_MAX, MAILS_SETTLED_MAX
from tests.replica.world import World

BB = "#DW jobdw capacity=10 access_mode=striped type=scratch"


def submit(world: World, *types: str, bb: str = BB, user: str = "", **spec: Any) -> int:
    options = JobOptions(mail_types=types, mail_user=user)
    return world.submit(script=f"#!/bin/sh\n{bb}\ntrue\n", options=options, **spec)


def run(world: World, job: int, *, result: JobState = JobState.COMPLETED, code: int = 0, buffer: bool = True) -> None:
    """Run the job to its end, each operation taking ten seconds."""
    if buffer:
        world.advance(10)
        world.report(job, c.OperationDone())
    world.advance(10)
    world.report(job, c.ScriptStarted())
    world.advance(10)
    world.report(job, c.ScriptEnded(result, code))


def drain(world: World, job: int) -> None:
    for _ in range(3):
        world.advance(10)
        world.report(job, c.OperationDone())


def kinds(state: State) -> list[tuple[MailKind, int]]:
    return [(mail.kind, mail.duration_s) for mail in sorted(state.mails.values(), key=lambda mail: mail.at)]


def test_a_job_that_asks_for_all_is_told_of_its_begin_its_end_and_the_end_of_its_stage_out() -> None:
    world = World()
    job = submit(world, "all")
    run(world, job)
    assert kinds(world.state) == [(MailKind.BEGIN, 20), (MailKind.END, 10)]
    drain(world, job)
    assert kinds(world.state) == [(MailKind.BEGIN, 20), (MailKind.END, 10), (MailKind.STAGE_OUT, 20)]


@pytest.mark.parametrize("asked", [(), ("none",), ("requeue",)])
def test_who_asks_for_nothing_that_happens_is_told_nothing(asked: tuple[str, ...]) -> None:
    world = World()
    job = submit(world, *asked)
    run(world, job)
    drain(world, job)
    assert not world.state.mails


@pytest.mark.parametrize(
    ("asked", "result", "told"),
    [
        (("end",), JobState.COMPLETED, [MailKind.END]),
        (("fail",), JobState.COMPLETED, []),
        (("fail",), JobState.FAILED, [MailKind.FAIL]),
        (("fail",), JobState.TIMEOUT, [MailKind.FAIL]),
        (("fail",), JobState.CANCELLED, []),
        (("end",), JobState.FAILED, [MailKind.END]),
        (("all",), JobState.NODE_FAIL, [MailKind.FAIL]),
        (("END", "Stage_Out"), JobState.CANCELLED, [MailKind.END]),
    ],
)
def test_an_end_and_a_failure_are_told_to_whom_slurm_tells_them(
    asked: tuple[str, ...], result: JobState, told: list[MailKind]
) -> None:
    world = World()
    job = submit(world, *asked, bb="")
    run(world, job, result=result, code=1, buffer=False)
    ends = [mail for mail in world.state.mails.values() if mail.kind is not MailKind.BEGIN]
    assert [mail.kind for mail in ends] == told
    for mail in ends:
        assert (mail.result, mail.exit_code) == (result, 1)


def test_a_job_that_is_cancelled_before_it_ran_has_ended_once() -> None:
    world = World()
    waiting = submit(world, "end", begin_at=world.at + 10**12)
    staged = submit(world, "end")
    world.report(staged, c.OperationDone())
    for job in (waiting, staged):
        assert not isinstance(world.settle(c.CancelJob(job)), Rejection)
    if world.state.jobs[staged].state not in (JobState.CANCELLED,):
        world.report(staged, c.ScriptEnded(JobState.CANCELLED))
    assert sorted(mail.job for mail in world.state.mails.values()) == sorted({waiting, staged})
    assert {mail.result for mail in world.state.mails.values()} == {JobState.CANCELLED}


def test_the_mail_goes_to_who_was_named_or_else_to_the_jobs_user() -> None:
    world = World(nodes=1, cpus=8)
    named, unnamed = submit(world, "begin", user="boss@example.org"), submit(world, "begin")
    for job in (named, unnamed):
        world.report(job, c.OperationDone())
        world.report(job, c.ScriptStarted())
    assert {mail.job: mail.recipient for mail in world.state.mails.values()} == {
        named: "boss@example.org",
        unnamed: "alan",
    }


def test_a_mail_is_owed_until_it_is_settled_and_settling_it_again_changes_nothing() -> None:
    world = World()
    job = submit(world, "all", bb="")
    run(world, job, buffer=False)
    begin, end = sorted(world.state.mails)
    settled = c.SettleMails((begin,), ((end, "no such mailbox"),))
    for _ in range(2):
        assert not isinstance(world.settle(settled, c.CONTROLLER), Rejection)
        assert not world.state.mails
    events = [event for batch in world.ledger for entry in batch.entries for event in entry.events]
    assert [event for event in events if isinstance(event, e.MailSent | e.MailDropped)] == [
        e.MailSent(job, begin),
        e.MailDropped(job, end, "no such mailbox"),
    ]


def test_a_mail_survives_the_purge_of_its_job() -> None:
    world = World(finished_jobs_kept=0)
    job = submit(world, "end", bb="")
    run(world, job, buffer=False)
    other = submit(world, bb="")
    run(world, other, buffer=False)
    world.advance(1)
    assert job not in world.state.jobs
    (mail,) = world.state.mails.values()
    assert (mail.job, mail.name) == (job, "job")
    assert not isinstance(world.settle(c.SettleMails((mail.key,)), c.CONTROLLER), Rejection)
    assert not world.state.mails


def test_only_the_leader_settles_mail_and_not_too_many_at_once() -> None:
    world = World()
    assert isinstance(world.settle(c.SettleMails(())), Rejection)
    many = tuple(str(number) for number in range(MAILS_SETTLED_MAX + 1))
    assert isinstance(world.settle(c.SettleMails(many), c.CONTROLLER), Rejection)


def test_each_run_of_a_job_has_a_mail_of_its_own_and_each_try_of_a_mail_the_same_name() -> None:
    world = World()
    job = submit(world, "begin", bb="")
    world.report(job, c.ScriptStarted())
    first = next(iter(world.state.mails.values()))
    second = Mail(job, MailKind.BEGIN, first.number + 1, "alan", "job", first.at)
    assert first.key != second.key
    names = {message_id_local_part("cafe", mail) for mail in (first, first, second)}
    assert len(names) == 2
    # Folding the same ledger again, as another replica does, gives the same mail.
    state = EMPTY
    for batch in world.ledger:
        following = apply_batch(state, batch)
        assert following is not None
        state = following
    assert state.mails == world.state.mails


def test_what_is_owed_is_bounded() -> None:
    owed = EMPTY.mails
    for number in range(3):
        mail = Mail(number + 1, MailKind.END, 1, "alan", "job", World().at)
        owed = owed.set(mail.key, mail)
    assert mail_events(owed, ("1.end.1", "9.end.1"), (("1.end.1", "twice"), ("2.end.1", "gone"))) == (
        e.MailSent(1, "1.end.1"),
        e.MailDropped(2, "2.end.1", "gone"),
    )
    assert MAILS_OWED_MAX >= MAILS_SETTLED_MAX


def test_types_are_read_without_regard_to_case() -> None:
    assert wants_mail(JobOptions(mail_types=("STAGE_OUT",)), MailKind.STAGE_OUT)
    assert wants_mail(JobOptions(mail_types=("All",)), MailKind.REQUEUE)
    assert not wants_mail(JobOptions(mail_types=("begin",)), MailKind.END)
