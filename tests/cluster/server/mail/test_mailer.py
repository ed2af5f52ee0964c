"""The leader sends what is owed, at least once and under one name, and nothing waits for a mailer that fails."""

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
    """A world whose leader has a mailer, which is told to look by hand; a send is whatever the test says."""

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
        """Let everything that can happen now happen."""
        self.mailer.poll()
        for _ in range(50):
            await asyncio.sleep(0)

    def reasons(self) -> list[str]:
        events = [event for batch in self.world.ledger for entry in batch.entries for event in entry.events]
        return [event.reason for event in events if type(event).__name__ == "MailDropped"]


@story
async def test_what_is_owed_is_sent_once_and_settled() -> None:
    site = Site(jobs=20)
    await site.rest()
    assert len(site.taken) == len(set(site.taken)) == 20
    assert not site.world.state.mails
    await site.rest()
    assert len(site.taken) == 20


@story
async def test_a_follower_sends_nothing_and_one_that_stops_leading_gives_up_what_it_sends() -> None:
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
async def test_a_leader_that_dies_between_the_send_and_the_commit_leaves_the_same_mail_to_the_next() -> None:
    site = Site()
    site.full = True  # the command cannot be taken: as if the leader had died here
    await site.rest()
    assert len(site.taken) == 1 and site.world.state.mails
    site.full, site.mailer = False, site.new_mailer()
    await site.rest()
    assert len(site.taken) == 2 and len(set(site.taken)) == 1
    assert not site.world.state.mails


@story
async def test_a_command_that_could_not_be_taken_is_tried_again_without_another_mail() -> None:
    site = Site()
    site.full = True
    await site.rest()
    site.full = False
    await site.rest()
    assert len(site.taken) == 1 and not site.world.state.mails


@story
async def test_an_answer_that_is_lost_costs_no_second_mail() -> None:
    site = Site()
    site.lose_answers = True
    await site.rest()
    await site.rest()
    assert len(site.taken) == 1 and not site.world.state.mails


@story
async def test_a_failing_mailer_is_tried_again_with_pauses_that_grow_and_given_up_after_a_day() -> None:
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
async def test_what_can_never_be_delivered_is_given_up_at_once_and_a_fault_in_a_sender_is_a_failure() -> None:
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
async def test_where_mail_is_off_it_is_dropped_and_says_so() -> None:
    site = Site(jobs=3)
    site.sending = None
    await site.rest()
    assert not site.world.state.mails and site.reasons() == [OFF] * 3


@story
async def test_mails_that_hang_hold_up_no_more_than_their_share_and_look_returns_at_once() -> None:
    site = Site(jobs=SENDING_MAX + 3)
    under_way: set[str] = set()
    go_on = asyncio.Event()

    async def hang(mail: Mail) -> None:
        under_way.add(mail.key)
        await go_on.wait()

    site.sending = hang
    await site.rest()
    assert len(under_way) == SENDING_MAX
    # The cluster goes on: jobs are submitted and end meanwhile.
    site.world.submit()
    go_on.set()
    await site.rest()
    await site.rest()
    assert not site.world.state.mails


def test_a_sender_is_what_the_mailer_calls() -> None:
    sender: Send = Site().take
    assert callable(sender)
