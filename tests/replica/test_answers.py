"""What is kept for retries (law 6): single commands for ten minutes, sessions until they say that they have the answer.

The model is a plain dict of every answer that was ever given, and the rules of who may still ask.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cluster.api.service import COMMAND_AGE_S_MAX, COMMAND_AHEAD_S_MAX, LEADER_LATE_S_MAX
from forebay.replica.decide import decide
from forebay.replica.fold.dedup_cache import (
    CacheLimits,
    find_reply,
    is_certainly_new,
    look_up_reply,
    may_cache,
    may_cache_reply,
)
from forebay.replica.messages import commands as c
from forebay.replica.messages.entries import Acceptance, CachedReply, Entry
from forebay.replica.values.command_ids import (
    SEQUENCE_MAX,
    SESSION_NUMBER_MAX,
    SessionCommandId,
    decode_reply_key,
    decode_session_command_id,
    encode_session_command_id,
    is_in_session,
    reply_key,
)
from forebay.replica.values.errors import LedgerViolation, Rejection, RejectionCode
from forebay.replica.values.limits import (
    RECEIPTS_KEPT_S,
    RECEIPTS_MAX,
    SESSION_IDLE_S_MAX,
    SESSION_WINDOW_MAX,
    SESSIONS_PER_ACTOR_MAX,
)
from forebay.replica.values.units import Instant
from tests.replica.world import OPERATOR, World, agent, user


def single_id(at: int, number: int) -> bytes:
    return (at // 1000).to_bytes(6, "big") + b"\x70\x00\x80" + number.to_bytes(7, "big")


def opened(world: World, who: c.Actor) -> int:
    world.settle(c.OpenSession(), who)
    return max(number for number, session in world.state.sessions.items() if session.actor == who)


def expire(world: World) -> None:
    decision = decide(world.state, c.Request(b"", c.CONTROLLER, c.ExpireCachedReplies()), world.at)
    assert isinstance(decision, Acceptance)
    world.commit(Entry(b"", c.CONTROLLER, "expire_cached_replies", decision.events))


# ---- ids


@given(st.integers(1, SESSION_NUMBER_MAX), st.integers(1, SEQUENCE_MAX), st.integers(1, SESSION_WINDOW_MAX))
def test_an_id_in_a_session_says_what_it_was_made_of_and_so_does_the_key_of_its_answer(
    session: int, sequence: int, outstanding: int
) -> None:
    outstanding = min(outstanding, sequence)
    made = encode_session_command_id(session, sequence, sequence - outstanding)
    assert len(made) == 16 and is_in_session(made)
    said = decode_session_command_id(made)
    assert said == SessionCommandId(session, sequence, sequence - outstanding)
    assert decode_reply_key(reply_key(session, sequence)) == (session, sequence)
    if outstanding:
        with pytest.raises(ValueError, match="is not the key of a reply"):
            decode_reply_key(made)


@given(st.binary(min_size=16, max_size=16))
def test_bytes_that_are_no_id_in_a_session_are_refused_with_a_sentence_and_others_read_back(found: bytes) -> None:
    try:
        said = decode_session_command_id(found)
    except ValueError as error:
        assert str(error).startswith(found.hex())
    else:
        assert encode_session_command_id(said.session, said.sequence, said.acknowledged) == found


@pytest.mark.parametrize(
    "numbers", [(0, 1, 0), (1, 0, 0), (1, 5, 5), (1, 5, 6), (1, 1, -1), (1, SESSION_WINDOW_MAX + 1, 0), (2**48, 1, 0)]
)
def test_numbers_that_no_session_has_make_no_id(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        encode_session_command_id(*numbers)


def test_no_id_that_may_still_come_in_is_as_old_as_an_answer_that_was_dropped() -> None:
    """What is dropped was made at most so much after it was settled, and that is RECEIPTS_KEPT_S ago."""
    assert COMMAND_AGE_S_MAX + COMMAND_AHEAD_S_MAX + LEADER_LATE_S_MAX < RECEIPTS_KEPT_S


# ---- histories

ACTORS = (user("ann"), user("bob"), agent("n1"))


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_whatever_is_sent_again_is_answered_as_at_first_or_refused_and_never_carried_out_twice(seed: int) -> None:
    """Singles and sessions, retries early and late, acknowledgements, idle times and expiry, in any order."""
    rng, world = random.Random(seed), World()
    job = world.submit()
    sent: list[tuple[c.Request, int, CachedReply]] = []
    """Everything that was carried out: when, and what it was answered."""
    sessions: dict[int, tuple[c.Actor, int]] = {}
    """Those that were opened: whose, and the sequence number used last."""
    for number in range(60):
        draw = rng.random()
        who = rng.choice(ACTORS[:2])
        if draw < 0.15:
            world.advance(rng.choice((1, 30, 200, 700, SESSION_IDLE_S_MAX + 1)))
            if rng.random() < 0.7:
                expire(world)
        elif draw < 0.25:
            session = opened(world, who)
            sessions[session] = (who, 0)
        elif draw < 0.3 and sessions:
            session = rng.choice(list(sessions))
            world.settle(c.CloseSession(session), sessions[session][0])
        elif draw < 0.6 and sent:
            request, at, first = rng.choice(sent)
            again = look_up_reply(world.state, request)
            if isinstance(again, CachedReply):
                assert again == first
            else:
                assert isinstance(again, Rejection), "it would be carried out again"
                if is_in_session(request.id):
                    said = decode_session_command_id(request.id)
                    session_now = world.state.sessions.get(said.session)
                    assert session_now is None or said.sequence <= session_now.acknowledged, "its answer was to be kept"
                else:
                    assert world.at - at > RECEIPTS_KEPT_S * 1_000_000, "its answer was to be kept"
            assert is_certainly_new(world.state, request) is False
        else:
            command = rng.choice((c.HoldJob(job), c.ReleaseJob(job), c.CancelJob(999)))
            mine = [session for session, (owner, _) in sessions.items() if owner == who]
            if mine and rng.random() < 0.7:
                session = rng.choice(mine)
                sequence = sessions[session][1] + rng.choice((1, 1, 1, 2))
                made = encode_session_command_id(session, sequence, rng.randrange(max(0, sequence - 40), sequence))
                sessions[session] = (who, sequence)
            else:
                made = single_id(world.at - rng.randrange(0, 250_000_000), number)
            request = c.Request(made, who, command)
            known = look_up_reply(world.state, request)
            if known is not None:
                assert isinstance(known, Rejection)
                assert known.code in (RejectionCode.UNKNOWN_SESSION, RejectionCode.COMMAND_TOO_OLD)
                if not is_in_session(made):
                    assert world.at // 1000 - int.from_bytes(made[:6], "big") > (RECEIPTS_KEPT_S - 260) * 1000
                continue
            world.settle(command, who, made)
            kept = find_reply(world.state, made)
            assert kept is not None
            sent.append((request, world.at, kept))
    outstanding = sum(sequence for _, sequence in sessions.values())
    assert len(world.state.answers) <= outstanding


@pytest.mark.parametrize("window", [1, 7, SESSION_WINDOW_MAX])
def test_what_a_session_keeps_follows_what_is_outstanding_and_not_what_was_done(window: int) -> None:
    world = World()
    session = opened(world, user())
    singles = len(world.state.receipts)
    for sequence in range(1, 40):
        world.settle(c.CancelJob(999), user(), encode_session_command_id(session, sequence, max(0, sequence - window)))
        assert len(world.state.answers) == world.state.sessions[session].answers == min(sequence, window)
    assert len(world.state.receipts) == singles
    world.settle(c.CancelJob(999), user(), encode_session_command_id(session, SEQUENCE_MAX, SEQUENCE_MAX - 1))
    assert len(world.state.answers) == 1, "a number far ahead forgets all before it, and walks over none"


def test_a_session_is_its_actors_and_its_program_is_told_where_it_is_over() -> None:
    world = World()
    session = opened(world, user("ann"))
    for who in (user("bob"), OPERATOR, agent("ann"), c.Actor(c.ActorRole.OPERATOR, "ann")):
        rejection = look_up_reply(world.state, c.Request(encode_session_command_id(session, 1, 0), who, c.CancelJob(1)))
        assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.UNKNOWN_SESSION
    rejection = world.settle(c.CloseSession(session), user("bob"))
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.UNKNOWN_SESSION
    rejection = world.settle(c.CloseSession(session), user("ann"), encode_session_command_id(session, 1, 0))
    assert isinstance(rejection, Rejection) and "outside the session" in rejection.remedy
    assert world.settle(c.CloseSession(session), OPERATOR) == 0
    assert not world.state.sessions and not world.state.answers
    again = world.settle(c.CancelJob(1), user("ann"), encode_session_command_id(session, 2, 0))
    assert isinstance(again, Rejection) and again.code is RejectionCode.UNKNOWN_SESSION


def test_a_session_ends_when_nothing_came_for_an_hour_of_the_replicated_clock() -> None:
    world = World()
    idle, busy = opened(world, user("ann")), opened(world, user("bob"))
    for sequence in range(1, 4):
        world.advance(SESSION_IDLE_S_MAX / 2)
        world.settle(c.CancelJob(9), user("bob"), encode_session_command_id(busy, sequence, sequence - 1))
    expire(world)
    assert list(world.state.sessions) == [busy] and idle not in world.state.sessions


def test_single_commands_are_remembered_for_ten_minutes_and_dropped_in_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import forebay.replica.decide.sessions as expiry

    monkeypatch.setattr(expiry, "RECEIPTS_DROPPED_MAX", 5)
    world = World()
    for _ in range(12):
        world.settle(c.CancelJob(9), user())
    before = len(world.state.receipts)
    world.advance(RECEIPTS_KEPT_S - 1)
    expire(world)
    assert len(world.state.receipts) >= before, "nobody is forgotten earlier"
    world.advance(2)
    world.settle(c.CancelJob(9), user())
    counts = []
    while expiry.is_expiry_due(world.state, world.at):
        expire(world)
        counts.append(len(world.state.receipts))
    assert counts and all(before - after <= 5 for before, after in zip(counts, counts[1:], strict=False))
    assert world.state.kept.get(user(), 0) == 1


def test_time_set_back_keeps_no_answer_and_no_session_for_as_much_longer() -> None:
    world = World()
    world.advance(7_000)
    world.settle(c.CancelJob(9), user())
    session = opened(world, user())
    world.settle(c.SetClock(Instant(world.at - 7_000_000_000)))
    assert world.state.sessions[session].used_at == world.state.at
    world.advance(RECEIPTS_KEPT_S + 1)
    world.settle(c.CancelJob(9), user("bob"))
    expire(world)
    assert world.state.kept.get(user(), 0) == 0
    world.advance(SESSION_IDLE_S_MAX)
    expire(world)
    assert not world.state.sessions


# ---- bounds


@given(st.lists(st.integers(0, 9), max_size=300), st.integers(1, 5), st.integers(5, 30), st.integers(2, 90))
def test_however_much_others_take_everybody_gets_the_least_and_all_together_is_bounded(
    takers: list[int], least: int, of_one: int, of_all: int
) -> None:
    kept: dict[int, int] = {}
    bounds = CacheLimits(least, of_one, of_all)
    for who in takers:
        own, total = kept.get(who, 0), sum(kept.values())
        assert own >= least or may_cache(own, total, bounds)
        if may_cache(own, total, bounds):
            kept[who] = own + 1
        assert kept.get(who, 0) <= of_one
    assert sum(kept.values()) <= of_all + least * len(kept)


def test_who_is_over_the_bound_is_refused_and_nobody_elses_answer_is_forgotten_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib

    answers = importlib.import_module("forebay.replica.fold.dedup_cache")
    monkeypatch.setattr(answers, "REPLY_LIMITS", CacheLimits(3, 20, RECEIPTS_MAX))
    world = World()
    first = single_id(world.at, 1)
    world.settle(c.CancelJob(9), user("bob"), first)
    while may_cache_reply(world.state, user("ann")):
        world.settle(c.CancelJob(9), user("ann"))
    assert world.state.kept[user("ann")] == 20
    assert may_cache_reply(world.state, user("bob")) and find_reply(world.state, first) is not None


def test_sessions_are_bounded_for_each_actor_and_all() -> None:
    world = World()
    for _ in range(SESSIONS_PER_ACTOR_MAX):
        opened(world, user("ann"))
    rejection = world.settle(c.OpenSession(), user("ann"))
    assert isinstance(rejection, Rejection) and rejection.code is RejectionCode.LIMIT_EXCEEDED
    assert "support session list" in rejection.remedy
    assert opened(world, user("bob"))


@pytest.mark.parametrize("who", [user("bob"), OPERATOR])
@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_no_ledger_settles_a_command_of_a_session_twice_or_for_somebody_else(who: c.Actor, sequence: int) -> None:
    from forebay.replica.state.builder import StateBuilder
    from forebay.replica.values.units import Revision

    world = World()
    session = opened(world, user("ann"))
    world.settle(c.CancelJob(9), user("ann"), encode_session_command_id(session, 1, 0))
    world.settle(c.CancelJob(9), user("ann"), encode_session_command_id(session, 2, 1))
    builder = StateBuilder(world.state)
    builder.revision += 1
    actor = who if sequence == 0 else user("ann")
    made = encode_session_command_id(session, sequence or 3, 0)
    with pytest.raises(LedgerViolation, match="session"):
        builder.settle(made, CachedReply(Revision(builder.revision), 0, None, b"", actor))


def test_reading_a_snapshot_counts_the_answers_again() -> None:
    from forebay.replica.state.derived import derive

    world: Any = World()
    session = opened(world, user("ann"))
    for sequence in range(1, 6):
        world.settle(c.CancelJob(9), user("ann"), encode_session_command_id(session, sequence, 0))
    again = derive(world.state)
    assert again.kept == world.state.kept and again.kept[user("ann")] == 6
