"""The leader sends queued mail at least once with one Message-ID, and a failing mailer delays nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

from forebay.cluster.server.mail import Mailer, Undeliverable
from forebay.cluster.server.mail.mailer import OFF, RETRY_S, SENDING_MAX
from forebay.cluster.server.mail.sending import Send, SendFailed
from forebay.cluster.server.pending import NotLeading, QueueFull, Settlement
from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from forebay.replica.model.mail import Mail
from forebay.replica.model.requests import JobOptions
from forebay.replica.values.errors import Rejection
from tests.clocks import ManualClock
from tests.cluster.harness import story
from tests.replica.world import World


class Site:
    """Leader with a mailer that is polled by hand; the test decides the result of each send."""

    def __init__(self, jobs: int = 1) -> None:
        self.world = World(cpus=max(8, jobs))
        self.clock = ManualClock(self.world.at)
        self.leads = True
        self.full = False
        self.lose_answers = False
        self.taken: list[str] = []
        self.sending: Any = self.take
        self.mailer = self.new_mailer()
        for _ in range(jobs):
            job = self.world.submit(options=JobOptions(mail_types=("end",)))
            self.world.report(job, c.ScriptStarted())
            self.world.report(job, c.ScriptEnded(JobState.COMPLETED))

    def new_mailer(self) -> Mailer:
        return Mailer(
            state=lambda: self.world.state,
            leads=lambda: self.leads,
            submit=self.submit,
            sender=lambda state: self.sending,
            clock=self.clock,
        )

    async def take(self, mail: Mail) -> None:
        self.taken.append(mail.key)

    def submit(self, request: c.Request) -> asyncio.Future[Settlement]:
        if self.full:
            raise QueueFull
        if not self.leads:
            raise NotLeading(None)
        assert request.actor == c.CONTROLLER
        answer: asyncio.Future[Settlement] = asyncio.get_running_loop().create_future()
        outcome = self.world.settle(request.command, request.actor)
        rejection = outcome if isinstance(outcome, Rejection) else None
        if self.lose_answers:
            answer.cancel()
        else:
            answer.set_result(Settlement(self.world.state.revision, 0, rejection, self.world.state, True))
        return answer

    async def rest(self) -> None:
        """Run all tasks that can proceed now."""
        self.mailer.poll()
        for _ in range(50):
            await asyncio.sleep(0)

    def reasons(self) -> list[str]:
        events = [event for batch in self.world.ledger for entry in batch.entries for event in entry.events]
        return [event.reason for event in events if type(event).__name__ == "MailDropped"]


@story
async def test_queued_mail_is_sent_once_and_settled() -> None:
    site = Site(jobs=20)
    await site.rest()
    assert len(site.taken) == len(set(site.taken)) == 20
    assert not site.world.state.mails
    await site.rest()
    assert len(site.taken) == 20


@story
async def test_follower_sends_nothing_and_a_deposed_leader_abandons_its_sends() -> None:
    site = Site(jobs=2)
    hanging = asyncio.Event()
    ended: list[str] = []

    async def hang(mail: Mail) -> None:
        try:
            await hanging.wait()
        finally:
            ended.append(mail.key)

    site.leads, site.sending = False, hang
    await site.rest()
    assert not ended
    site.leads = True
    await site.rest()
    site.leads = False
    await site.rest()
    assert len(ended) == 2 and len(site.world.state.mails) == 2


@story
async def test_leader_dying_between_send_and_commit_leaves_the_same_mail() -> None:
    site = Site()
    site.full = True  # the command is rejected, as if the leader had died here
    await site.rest()
    assert len(site.taken) == 1 and site.world.state.mails
    site.full, site.mailer = False, site.new_mailer()
    await site.rest()
    assert len(site.taken) == 2 and len(set(site.taken)) == 1
    assert not site.world.state.mails


@story
async def test_rejected_command_is_retried_without_a_second_mail() -> None:
    site = Site()
    site.full = True
    await site.rest()
    site.full = False
    await site.rest()
    assert len(site.taken) == 1 and not site.world.state.mails


@story
async def test_lost_answer_causes_no_second_mail() -> None:
    site = Site()
    site.lose_answers = True
    await site.rest()
    await site.rest()
    assert len(site.taken) == 1 and not site.world.state.mails


@story
async def test_failing_mail_is_retried_with_growing_pauses_and_dropped_after_a_day() -> None:
    site = Site()
    tries: list[int] = []

    async def fail(mail: Mail) -> None:
        tries.append(site.clock.now())
        raise SendFailed("no route to host")

    site.sending = fail
    await site.rest()
    await site.rest()
    assert len(tries) == 1
    site.clock.advance(RETRY_S)
    await site.rest()
    assert len(tries) == 2
    site.clock.advance(RETRY_S)
    await site.rest()
    assert len(tries) == 2
    for _ in range(40):
        site.clock.advance(3600)
        await site.rest()
    assert not site.world.state.mails
    assert site.reasons() == ["not accepted for a day; the last attempt: no route to host"]


@story
async def test_undeliverable_mail_is_dropped_at_once_and_a_sender_fault_is_a_failure() -> None:
    site = Site(jobs=2)

    async def refuse(mail: Mail) -> None:
        if mail.job == 1:
            raise Undeliverable("no such user")
        raise ZeroDivisionError

    site.sending = refuse
    await site.rest()
    assert site.reasons() == ["no such user"]
    assert [mail.job for mail in site.world.state.mails.values()] == [2]


@story
async def test_mail_is_dropped_with_a_reason_if_disabled() -> None:
    site = Site(jobs=3)
    site.sending = None
    await site.rest()
    assert not site.world.state.mails and site.reasons() == [OFF] * 3


@story
async def test_hanging_mails_are_bounded_and_poll_returns_at_once() -> None:
    site = Site(jobs=SENDING_MAX + 3)
    under_way: set[str] = set()
    go_on = asyncio.Event()

    async def hang(mail: Mail) -> None:
        under_way.add(mail.key)
        await go_on.wait()

    site.sending = hang
    await site.rest()
    assert len(under_way) == SENDING_MAX
    # The cluster continues: jobs are submitted and end meanwhile.
    site.world.submit()
    go_on.set()
    await site.rest()
    await site.rest()
    assert not site.world.state.mails


def test_sender_matches_what_the_mailer_calls() -> None:
    sender: Send = Site().take
    assert callable(sender)
