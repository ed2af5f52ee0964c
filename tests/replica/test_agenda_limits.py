"""The laws of the agenda with limits, licences, reservations and revocation: it decides what walking decides."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from replica import agenda_pass, judging, scheduling
from replica import commands as c
from replica import events as e
from replica.accounting import Account, AccountUser, License, Limit, LimitKind, Qos, SchedulingRules
from replica.agenda import Agenda
from replica.directives import parse_request
from replica.fold import fold
from replica.invariants import check
from replica.jobs import JobSpec
from replica.options import JobOptions
from replica.reservations import Reservation, ReservedSpace
from replica.scheduling import events_of_pass, next_due, plan
from replica.state import State
from replica.units import Instant, seconds
from tests.replica.test_agenda import Agendas, crowd, happening, node_happening, submitted
from tests.replica.world import SCRIPT, START, user

USERS = ("alan", "eve", "bo")
POOLS = ("p0", "p1", "p2")


def some_limits(random: Random, kinds: tuple[LimitKind, ...], most: int = 400) -> tuple[Limit, ...]:
    chosen = random.sample(kinds, random.randrange(min(3, len(kinds)) + 1))
    return tuple(
        Limit(kind, random.choice((*POOLS, "native")), random.randrange(most) * (50 if "MINUTES" in kind.name else 1))
        if kind.counts_space
        else Limit(kind, "", random.randrange(1, 12))
        for kind in chosen
    )


K = LimitKind
QOS_KINDS = (K.GRP_BB, K.GRP_BB_RUN_MINUTES, K.MAX_BB_PER_USER, K.MAX_BB_PER_ACCOUNT, K.GRP_NODES, K.GRP_CPUS)
ACCOUNT_KINDS = (K.GRP_BB, K.GRP_BB_RUN_MINUTES, K.MAX_JOBS_PER_USER, K.GRP_NODES, K.MAX_BB_PER_JOB)


def change(random: Random, state: State, at: Instant) -> tuple[e.Event, ...]:
    """Return what an operator might change."""
    what = random.randrange(8)
    name = str(random.randrange(3))
    if what == 0:
        members = tuple(
            AccountUser(user, some_limits(random, ACCOUNT_KINDS)) for user in USERS[: random.randrange(1, 4)]
        )
        parent = "a0" if name != "0" and "a0" in state.accounts else ""
        return (e.AccountSet(Account(f"a{name}", parent, members, some_limits(random, ACCOUNT_KINDS, 900))),)
    if what == 1:
        return (e.QosSet(Qos(f"q{name}", random.randrange(3), some_limits(random, QOS_KINDS))),)
    if what == 2:
        return (e.LicenseSet(License(f"l{name}", random.randrange(4))),)
    if what == 3 and f"q{name}" in state.qos and not random.randrange(3):
        return (e.QosDeleted(f"q{name}"),)
    if what == 4:
        rules = SchedulingRules(revocations_max=random.randrange(3), revoke_after_s=random.choice((0, 30)))
        return (e.SchedulingRulesSet(rules),)
    if what == 5 and f"r{name}" in state.reservations and not random.randrange(3):
        return (e.ReservationDeleted(f"r{name}"),)
    start_at = Instant(at + seconds(random.choice((-5, 20, 400))))
    space = tuple(ReservedSpace(pool, random.randrange(20, 200)) for pool in random.sample(POOLS, 2))
    end_at = Instant(at + seconds(random.choice((500, 3_000))))
    active = start_at <= at and bool(random.randrange(2))
    return (e.ReservationSet(Reservation(f"r{name}", start_at, end_at, USERS[:2], ("a1",), space, active)),)


def with_options(random: Random, submit: e.JobSubmitted) -> tuple[e.Event, ...]:
    import msgspec

    submit = msgspec.structs.replace(submit, spec=msgspec.structs.replace(submit.spec, user=random.choice(USERS)))
    if not random.randrange(4):
        return (submit,)
    options = JobOptions(
        account=random.choice(("", "a0", "a1", "a2")),
        qos=random.choice(("", "q0", "q1")),
        licenses=((f"l{random.randrange(3)}", random.randrange(1, 3)),) if not random.randrange(4) else (),
        reservation=f"r{random.randrange(3)}" if not random.randrange(6) else "",
        nice=random.randrange(-2, 3),
    )
    return (submit, e.JobOptionsGiven(submit.job, options))


def limited_crowd(random: Random, jobs: int) -> State:
    state = crowd(random, 0)
    raised = tuple(e.FeatureLevelRaised(level, "") for level in range(state.feature_level + 1, 4))
    state = fold(state, raised, START)
    for _ in range(14):
        state = fold(state, change(random, state, START), START)
    for number in range(1, jobs + 1):
        state = fold(state, with_options(random, submitted(random, number)), START)
    return state


@pytest.mark.parametrize("seed", range(6))
def test_in_a_crowd_with_limits_the_agenda_decides_what_walking_over_all_jobs_decides(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    if seed % 3 == 1:
        for module in (scheduling, agenda_pass):
            monkeypatch.setattr(module, "EVENTS_PER_PASS_MAX", 7)
    if seed % 3 == 2:
        for name in ("CANDIDATES_BEHIND_MAX", "TURNED_AWAY_MAX"):
            monkeypatch.setattr(judging, name, 3)
    state, at = limited_crowd(random, 80), START
    agenda = Agenda(state)
    kinds: set[type] = set()
    reasons: set[str] = set()
    for step in range(60):
        planned = plan(state, at)
        expected = planned.events
        assert expected == events_of_pass(state, at)
        assert agenda.events_of_pass(at) == expected
        assert agenda.next_due(at) == next_due(state, at)
        if step % 5 == 0:
            assert agenda.verdicts_of(sorted(state.unfinished), at) == planned.verdicts
            reasons |= {str(verdict.reason) for verdict in planned.verdicts.values()}
        kinds |= {type(event) for event in expected}
        batch = list(expected)
        state = fold(state, expected, at)
        if random.randrange(3):
            for job_id in random.sample(sorted(state.unfinished), min(12, len(state.unfinished))):
                events = happening(random, state, job_id, at)
                state = fold(state, events, at)
                batch += events
        if not random.randrange(3):
            events = change(random, state, at)
            state = fold(state, events, at)
            batch += events
        if not random.randrange(12):
            events = node_happening(random, state)
            state = fold(state, events, at)
            batch += events
        if not random.randrange(3):
            events = with_options(random, submitted(random, state.next_job))
            state = fold(state, events, at)
            batch += events
        agenda.advance(state, batch)
        if step % 10 == 0:
            assert agenda.contents() == Agenda(state).contents()
            assert check(state) == []
        at = Instant(at + seconds(random.choice((0, 0, 1, 20, 300))))
    assert {e.BufferAllocated, e.RunOrdered} <= kinds
    assert len(reasons) > 8, reasons


class LimitedAgendas(Agendas):
    """Random histories with accounts, QOS, licences, reservations and rules that change."""

    @rule(seed=st.integers(0, 10_000))
    def an_operator_changes_something(self, seed: int) -> None:
        world = self.world
        pools = {"p0": "fast", "p1": "bulk", "p2": "bulk"}
        for event in change(Random(seed), world.state, world.at):
            match event:
                case e.AccountSet():
                    world.settle(c.SetAccount(event.account))
                case e.QosSet():
                    world.settle(c.SetQos(event.qos))
                case e.LicenseSet():
                    world.settle(c.SetLicense(event.license))
                case e.SchedulingRulesSet():
                    world.settle(c.SetSchedulingRules(event.rules))
                case e.ReservationSet():
                    import msgspec

                    space = {pools[one.pool]: one.size_bytes // 4 for one in event.reservation.space}
                    listed = tuple(ReservedSpace(pool, size) for pool, size in sorted(space.items()))
                    world.settle(c.SetReservation(msgspec.structs.replace(event.reservation, space=listed)))

    @rule(
        seed=st.integers(0, 10_000),
        bb=st.sampled_from(["", "capacity=20", "capacity=60", "capacity=40 pool=bulk"]),
        priority=st.integers(0, 3),
    )
    def submits_with_a_standing(self, seed: int, bb: str, priority: int) -> None:
        random = Random(seed)
        spec = JobSpec("job", "alan", SCRIPT, "/out", random.choice((10, 60, 3_600)), priority=priority)
        events = with_options(random, e.JobSubmitted(1, spec, None, "", 0))
        given = events[1].options if len(events) > 1 and isinstance(events[1], e.JobOptionsGiven) else JobOptions()
        request = parse_request(SCRIPT, bb) if bb else None
        self.world.settle(c.SubmitJob(spec, request, options=given), user())

    def teardown(self) -> None:
        """At the end nothing keeps jobs back any more, and everything comes to an end."""
        world = self.world
        for name in sorted(world.state.reservations):
            world.settle(c.DeleteReservation(name))
        for name in sorted(world.state.qos):
            world.settle(c.SetQos(Qos(name)))
        for name in sorted(world.state.accounts):
            world.settle(c.SetAccount(Account(name, world.state.accounts[name].parent, tuple(map(AccountUser, USERS)))))
        for name in sorted(world.state.licenses):
            world.settle(c.SetLicense(License(name, 9)))
        for job in sorted(world.state.unfinished):
            options = world.state.options.get(job)
            if options is not None and options.reservation:
                world.settle(c.CancelJob(job), user())
        super().teardown()


LimitedAgendas.TestCase.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)
TestLimitedAgendas = LimitedAgendas.TestCase
