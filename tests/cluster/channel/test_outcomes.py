"""What `Channel.perform` says of a command is true of every request that it sent, whatever the last answer was."""

import asyncio
from collections.abc import Callable, Iterable

import pytest

from forebay.cluster.client.channel import ChannelClient, ChannelConnection, ChannelError
from forebay.cluster.client.errors import OUTCOME_UNKNOWN, UNREACHABLE, ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import requests as r
from forebay.cluster.schemas.channel_frames import NOT_LEADER, FailureFrame, SuccessFrame
from forebay.cluster.system.address import Address
from tests.cluster.harness import story

ADDRESSES = [Address("127.0.0.1", 1), Address("127.0.0.1", 2)]
COMMAND = r.HoldCommand(command_id="0" * 32, job_id=1)
# Long enough for every behaviour before the last, on a busy machine.
DEADLINE_S = 1.0

Behaviour = Callable[[int], SuccessFrame | FailureFrame | None]
"""What a replica answers to the request with a number; None: nothing, ever."""


def done(number: int) -> SuccessFrame:
    return SuccessFrame(number, 7, 1)


def silent(number: int) -> None:
    return None


def fails(status: int, code: str, outcome: str = "rejected", leader: str = "") -> Behaviour:
    return lambda number: FailureFrame(number, status, code, "because", "", "", outcome, leader)  # type: ignore[arg-type]


REDIRECTED = fails(307, NOT_LEADER, leader=str(ADDRESSES[1]))
FULL = fails(429, "queue_full")
NOBODY = fails(503, "no_leader")
UNKNOWN = fails(503, OUTCOME_UNKNOWN, "unknown")


class Scripted(ChannelConnection):
    """A connection whose other end behaves as told, one behaviour after the other; the last one stays."""

    def __init__(self, address: Address, behaviours: list[Behaviour]) -> None:
        super().__init__(address, "c")
        self._behaviours = behaviours

    @property
    def is_open(self) -> bool:
        return True

    def _flush(self) -> None:
        """Take what was written, and answer."""
        self._out.clear()
        behaviour = self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]
        message = behaviour(self._number)
        if message is not None:
            answer = self._answers.pop(self._number)
            if isinstance(message, SuccessFrame):
                answer.set_result(message)
            else:
                error = ChannelError(message.status, message.code, message.sentence, outcome=message.outcome)
                error.leader = message.leader
                answer.set_exception(error)


async def perform(config: Config, behaviours: Iterable[Behaviour], monkeypatch: pytest.MonkeyPatch) -> SuccessFrame:
    remaining = list(behaviours)

    async def opened(address: Address, *_: object) -> ChannelConnection:
        return Scripted(address, remaining)

    monkeypatch.setattr(ChannelConnection, "open", opened)
    channel = ChannelClient(ADDRESSES, config.tls_files("alice"), "c", chance=lambda: 0.0)
    return await channel.perform(COMMAND, deadline_s=DEADLINE_S)


@pytest.mark.parametrize("before", [(), (REDIRECTED,), (FULL,), (NOBODY,), (REDIRECTED, FULL), (UNKNOWN, REDIRECTED)])
def test_a_request_that_is_out_when_the_deadline_passes_leaves_the_outcome_unknown(
    config: Config, monkeypatch: pytest.MonkeyPatch, before: tuple[Behaviour, ...]
) -> None:
    @story
    async def run() -> None:
        with pytest.raises(ApiError) as told:
            await perform(config, [*before, silent], monkeypatch)
        assert (told.value.outcome, told.value.code) == ("unknown", OUTCOME_UNKNOWN)
        assert told.value.command_id == COMMAND.command_id

    run()


@pytest.mark.parametrize("only", [REDIRECTED, FULL, NOBODY])
def test_requests_that_were_all_answered_with_not_now_have_done_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch, only: Behaviour
) -> None:
    @story
    async def run() -> None:
        with pytest.raises(ApiError) as told:
            await perform(config, [only], monkeypatch)
        assert (told.value.outcome, told.value.code) == ("rejected", UNREACHABLE)

    run()


@pytest.mark.parametrize("later", [REDIRECTED, FULL, NOBODY])
def test_not_now_takes_nothing_away_of_a_request_that_nobody_knows_of(
    config: Config, monkeypatch: pytest.MonkeyPatch, later: Behaviour
) -> None:
    @story
    async def run() -> None:
        with pytest.raises(ApiError) as told:
            await perform(config, [UNKNOWN, later], monkeypatch)
        assert told.value.outcome == "unknown"

    run()


REFUSALS = [
    # status, code, outcome, whether it tells what became of the requests before it
    (400, "invalid_field", "rejected", True),
    (404, "unknown_job", "rejected", True),
    (409, "wrong_state", "rejected", True),
    (400, "command_too_old", "rejected", False),
    (400, "command_too_old", "unknown", False),
    (409, "command_id_reused", "rejected", False),
    (403, "permission_denied", "rejected", False),
    (404, "unknown_job", "unknown", False),
    (500, "internal_error", "unknown", False),
    (507, "journal_full", "rejected", False),
]


@pytest.mark.parametrize(("status", "code", "outcome", "tells"), REFUSALS)
def test_a_rejection_that_looked_at_nothing_says_nothing_of_the_request_before_it(
    config: Config, monkeypatch: pytest.MonkeyPatch, status: int, code: str, outcome: str, tells: bool
) -> None:
    @story
    async def run() -> None:
        rejection = fails(status, code, outcome)
        with pytest.raises(ApiError) as told:
            await perform(config, [rejection], monkeypatch)
        assert (told.value.status, told.value.code, told.value.outcome) == (status, code, outcome)
        for between in ([], [REDIRECTED], [FULL]):
            with pytest.raises(ApiError) as told:
                await perform(config, [UNKNOWN, *between, rejection], monkeypatch)
            assert told.value.status == status
            if tells:
                assert (told.value.code, told.value.outcome) == (code, outcome)
            else:
                assert (told.value.code, told.value.outcome) == (OUTCOME_UNKNOWN, "unknown")
                assert COMMAND.command_id in told.value.remedy
            assert told.value.command_id == COMMAND.command_id

    run()


@story
async def test_an_answer_after_a_request_that_nobody_knew_of_is_the_answer(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await perform(config, [UNKNOWN, REDIRECTED, FULL, done], monkeypatch)).revision == 7


@story
async def test_a_program_that_reached_nobody_until_the_deadline_is_told_that_nothing_happened(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> ChannelConnection:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(ChannelConnection, "open", never)
    channel = ChannelClient(ADDRESSES, config.tls_files("alice"), "c")
    with pytest.raises(ApiError) as told:
        await channel.perform(COMMAND, deadline_s=DEADLINE_S)
    assert (told.value.outcome, told.value.code) == ("rejected", UNREACHABLE)
