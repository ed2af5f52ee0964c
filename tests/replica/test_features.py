"""The feature level: who may raise it and when, what is written below it, and where a release that is too old stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from forebay.replica.decide.decide import decide
from forebay.replica.fold.apply import SpeculativeState, apply_entry
from forebay.replica.fold.fold import fold, fold_since_level
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages import features
from forebay.replica.messages.entries import Acceptance, Entry
from forebay.replica.messages.features import LEVELS, ReleaseNeeded, level_rejection
from forebay.replica.model.requests import JobOptions
from forebay.replica.state.digest import state_digest, state_records
from forebay.replica.state.state import EMPTY, TABLES, State
from forebay.replica.values.errors import LedgerViolation, Rejection, RejectionCode
from tests.later_release import later_release
from tests.replica.world import OPERATOR, World, user

WORDS_OF_FORMAT_1 = json.loads(
    (Path(__file__).parents[1] / "golden" / "format-1-words.json").read_text(encoding="utf-8")
)
ALL_KNOW = (("r1", 2), ("r2", 2), ("r3#4", 3))


@pytest.fixture(autouse=True)
def made_up_levels() -> Iterator[None]:
    with later_release():
        yield


def founded() -> World:
    return World(level=features.FOUNDING_LEVEL)


def raised(world: World, level: int = 2, known: tuple[tuple[str, int], ...] = ALL_KNOW) -> Rejection | int:
    return world.settle(c.RaiseFeatureLevel(level, known))


def refused(world: World, level: int, known: tuple[tuple[str, int], ...] = ALL_KNOW) -> Rejection:
    before = world.state
    rejection = raised(world, level, known)
    assert isinstance(rejection, Rejection)
    assert world.state.feature_level == before.feature_level
    # It is in the ledger, where a release of level 1 must be able to read it.
    assert rejection.code.name in WORDS_OF_FORMAT_1["RejectionCode"]
    return rejection


def entry_that_raises(level: int, release: str) -> Entry:
    return Entry(b"", OPERATOR, "raise_feature_level", (e.FeatureLevelRaised(level, release),))


def test_every_cluster_begins_at_level_1_and_an_operator_raises_it_when_every_member_knows_the_next_level() -> None:
    world = founded()
    assert world.state.feature_level == features.FOUNDING_LEVEL == 1
    assert not isinstance(raised(world), Rejection)
    assert world.state.feature_level == 2
    assert world.ledger[-1].entries[0].events == (e.FeatureLevelRaised(2, features.release_of(2)),)


@pytest.mark.parametrize("level", [-1, 0, 1, 3, 2**31])
def test_a_level_that_is_not_the_next_one_is_refused(level: int) -> None:
    rejection = refused(founded(), level, (("r1", 2**32),))
    assert rejection.code is RejectionCode.WRONG_STATE
    assert rejection.sentence == f"feature level {level} does not follow the cluster's level 1"
    assert rejection.remedy == "raise it to 2"


def test_a_level_that_was_reached_is_refused_and_nothing_is_left_to_raise() -> None:
    world = founded()
    raised(world)
    assert refused(world, 2).remedy == "raise it to 3"
    for level in range(3, features.FEATURE_LEVEL_KNOWN + 1):
        assert refused(world, level - 1).remedy == f"raise it to {level}"
        raised(world, level, (("r1", level),))
    assert refused(world, features.FEATURE_LEVEL_KNOWN).remedy == "this release has no higher level"


def test_a_level_that_a_member_does_not_know_or_did_not_say_is_refused_and_the_members_are_named() -> None:
    rejection = refused(founded(), 2, (("r1", 2), ("r2", 1), ("r3#4", 0)))
    assert rejection.code is RejectionCode.WRONG_STATE
    assert rejection.sentence.endswith("by every member: r2 supports 1, r3#4 did not answer")


def test_a_level_above_what_this_release_knows_or_without_facts_is_refused_whatever_others_say() -> None:
    world = founded()
    assert refused(world, 2, ()).code is RejectionCode.INVALID_FIELD
    raised(world)
    for level in range(3, features.FEATURE_LEVEL_KNOWN + 1):
        raised(world, level, (("r1", level),))
    assert refused(world, features.FEATURE_LEVEL_KNOWN + 1, (("r1", 9),)).code is RejectionCode.INVALID_FIELD


@pytest.mark.parametrize("actor", [user(), c.Actor(c.ActorRole.AGENT, "n1")])
def test_nobody_but_an_operator_or_the_leader_of_its_own_accord_raises_the_level(actor: c.Actor) -> None:
    world = founded()
    outcome = decide(world.state, c.Request(b"", actor, c.RaiseFeatureLevel(2, ALL_KNOW)), world.at)
    assert isinstance(outcome, Rejection) and outcome.code is RejectionCode.PERMISSION_DENIED


def test_a_retry_that_brings_other_facts_is_the_same_command() -> None:
    def digest(level: int, known: tuple[tuple[str, int], ...]) -> bytes:
        return c.command_digest(c.Request(b"1" * 16, OPERATOR, c.RaiseFeatureLevel(level, known)))

    assert digest(2, ALL_KNOW) == digest(2, (("r1", 0),))
    assert digest(2, ALL_KNOW) != digest(3, ALL_KNOW)


def test_a_level_above_the_known_one_stops_the_replica_at_its_revision_and_names_the_release() -> None:
    world = founded()
    raised(world)
    known = features.FEATURE_LEVEL_KNOWN
    for level in range(3, known + 1):
        raised(world, level, (("r1", level),))
    before = world.state
    with pytest.raises(ReleaseNeeded) as stopped:
        apply_entry(before, entry_that_raises(known + 1, "7.1.0"), world.at)
    assert str(stopped.value) == (
        f"revision {before.revision + 1}: the cluster has feature level {known + 1}, but this release supports levels "
        f"up to {known}; start release 7.1.0 or a later one, on the same directory: nothing in it was changed"
    )
    found = stopped.value
    assert (found.level, found.release, found.revision) == (known + 1, "7.1.0", before.revision + 1)


def test_a_release_that_is_too_old_stops_where_the_present_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    world = founded()
    event = entry_that_raises(2, features.release_of(2))
    assert apply_entry(world.state, event, world.at).feature_level == 2
    monkeypatch.setattr(features, "FEATURE_LEVEL_KNOWN", 1)
    with pytest.raises(ReleaseNeeded, match=f"start release {features.release_of(2)} or a later one"):
        apply_entry(world.state, event, world.at)


def test_a_stop_in_the_middle_of_a_batch_leaves_what_was_settled_before_as_it_was() -> None:
    world = founded()
    batch = SpeculativeState(world.state, world.at)
    first = Entry(b"", OPERATOR, "set_pool", (e.PoolSet(world.state.pools["fast"]),))
    batch.add(first)
    events = (
        *(e.FeatureLevelRaised(level.number, level.release) for level in features.LEVELS[1:]),
        e.FeatureLevelRaised(features.FEATURE_LEVEL_KNOWN + 1, "9.0.0"),
    )
    all_levels = Entry(b"", OPERATOR, "raise_feature_level", events)
    with pytest.raises(ReleaseNeeded, match="start release 9.0.0"):
        batch.add(all_levels)
    assert batch.entries == [first] and batch.state().revision == world.state.revision + 1


def test_a_cluster_founded_above_the_known_level_stops_the_replica() -> None:
    event = e.ClusterFounded("id", "name", founded().state.site, (), features.FEATURE_LEVEL_KNOWN + 1)
    with pytest.raises(ReleaseNeeded, match="start a later release"):
        fold(EMPTY, [event], founded().at)


@pytest.mark.parametrize(("present", "level"), [(0, 1), (0, 2), (1, 1), (1, 3), (2, 2), (2, 1)])
def test_no_ledger_holds_a_step_that_is_not_one_up(present: int, level: int) -> None:
    state: State = msgspec.structs.replace(founded().state, feature_level=present)
    with pytest.raises(LedgerViolation, match=f"raised from {present} to {level}"):
        fold(state, [e.FeatureLevelRaised(level, "9.0.0")], state.at)


def test_an_event_that_came_with_a_level_is_folded_from_that_level_on_and_never_below_it() -> None:
    folded: list[int] = []

    class Level:
        feature_level = 2
        revision = 9

    fold_at_3 = fold_since_level(3, lambda builder, event: folded.append(builder.feature_level))
    with pytest.raises(LedgerViolation, match="PoolSet came with feature level 3, and the cluster is at 2"):
        fold_at_3(Level(), e.PoolSet(founded().state.pools["fast"]))
    Level.feature_level = 3
    fold_at_3(Level(), e.PoolSet(founded().state.pools["fast"]))
    assert folded == [2, 3]


def test_levels_are_numbered_from_1_without_a_hole_and_each_names_its_release() -> None:
    assert [level.number for level in LEVELS] == list(range(1, len(LEVELS) + 1))
    assert all(level.release and level.brings for level in LEVELS)
    assert features.LEVELS[-1].number == features.FEATURE_LEVEL_KNOWN
    assert (features.release_of(99), features.release_of(0)) == ("", "")


def test_every_event_that_level_1_did_not_have_says_which_level_it_came_with() -> None:
    events = set(get_args(e.Event))
    later = {event for event in events if event.__name__ not in WORDS_OF_FORMAT_1}
    assert later == {event for event in events if event.since_level > 1}, "a new event says its `since_level`"
    assert all(1 <= event.since_level <= LEVELS[-1].number for event in events)


def test_deciding_at_level_1_gives_nothing_that_level_1_does_not_have_except_the_step_to_level_2() -> None:
    world = founded()
    outcome = decide(world.state, c.Request(b"", OPERATOR, c.RaiseFeatureLevel(2, ALL_KNOW)), world.at)
    assert isinstance(outcome, Acceptance)
    assert [type(event) for event in outcome.events] == [e.FeatureLevelRaised]


def test_what_came_with_a_level_is_refused_below_it_with_the_remedy() -> None:
    rejection = level_rejection(1, 2, "a job that dances", "dance")
    assert (
        rejection is not None
        and rejection.code.name in WORDS_OF_FORMAT_1["RejectionCode"]
        and rejection.place == "dance"
    )
    assert rejection.sentence == "a job that dances requires feature level 2, but the cluster has 1"
    assert rejection.remedy.endswith("forebay cluster raise-feature-level")
    assert level_rejection(2, 2, "a job that dances") is None


def test_options_of_a_purged_job_go_with_it() -> None:
    world = World(finished_jobs_kept=0)
    job = world.submit(options=JobOptions(comment="x"))
    world.finish(job)
    world.advance(10**7)
    assert job not in world.state.jobs


def test_what_a_job_asked_for_is_in_the_digest_and_maps_that_are_empty_are_not() -> None:
    sections = {section for section, _ in state_records(World().state)}
    assert sections & {table.field for table in TABLES} == {"pools", "nodes", "receipts", "admitted"}
    one, other = World(), World()
    one.submit(options=JobOptions(comment="x"))
    other.submit()
    assert ("jobs", one.state.jobs[1]) in list(state_records(one.state))
    assert state_digest(one.state) != state_digest(other.state)
