"""The feature level over HTTP: who is asked what they know, and what an operator is told."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.schemas.jobs import StatusView
from forebay.cluster.server.feature_levels import MemberLevel
from forebay.replica.messages import features
from forebay.replica.messages.features import ReleaseNeeded
from forebay.wal.configuration import Member, initial
from tests.cluster.harness import Harness, story, until
from tests.later_release import later_release


@pytest.fixture(autouse=True)
def made_up_levels() -> Iterator[None]:
    with later_release():
        yield


STATUS = StatusView(
    cluster="test", cluster_id="c", replica="r2", role="follower", term=1, leader="r1", ready=True, commit_index=1,
    applied_index=1, last_index=1, revision=1, version="0.1.0", feature_level_known=2,
)  # fmt: skip


def of_three(harness: Harness, monkeypatch: pytest.MonkeyPatch, answers: dict[str, StatusView]) -> None:
    """Let the replica believe that it has two peers, which answer like this; who is not named does not answer."""
    members = initial((Member("r1"), Member("r2"), Member("r3#4")), version=1)
    monkeypatch.setattr(type(harness.engine), "configuration", property(lambda engine: members))
    harness.statuses = answers


def known(answer: Any) -> dict[str, int | None]:
    return {row["name"]: row["known"] for row in answer.body["members"]}


@story
async def test_a_cluster_of_one_is_raised_once_and_a_retry_gets_the_first_answer(config: Config) -> None:
    async with Harness(config, raises=False) as harness:
        shown = await harness.ask("GET", "/v1/feature-level")
        assert (shown.body["feature_level"], shown.body["next_level"], shown.body["may_be_raised"]) == (1, 2, True)
        assert (shown.body["next_release"], known(shown)) == (
            features.release_of(2),
            {"r1": features.FEATURE_LEVEL_KNOWN},
        )
        command_id = harness.new_id()
        for _ in range(2):
            answer = await harness.ask("POST", "/v1/feature-level", {"command_id": command_id, "level": 2})
            assert (answer.status, answer.body["feature_level"], answer.body["next_level"]) == (200, 2, 3)
        again = await harness.ask("POST", "/v1/feature-level", {"command_id": harness.new_id(), "level": 2})
        assert (again.status, again.code) == (409, "wrong_state")
        status = (await harness.ask("GET", "/v1/status")).body
        assert (status["feature_level"], status["feature_level_known"]) == (2, features.FEATURE_LEVEL_KNOWN)
        await harness.restart()
        assert harness.controller.state.feature_level == 2


@story
async def test_a_member_that_knows_less_does_not_answer_or_is_somebody_else_keeps_the_level_where_it_is(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config, raises=False) as harness:
        of_r3 = msgspec.structs.replace(STATUS, replica="r3")
        of_before = msgspec.json.decode(msgspec.json.encode(of_r3))
        del of_before["feature_level_known"]
        earlier = msgspec.convert(of_before, StatusView)
        cases: list[tuple[dict[str, StatusView], int | None, str]] = [
            ({"r2": STATUS, "r3": earlier}, 1, "r3#4 supports 1"),
            ({"r2": STATUS}, None, "r3#4 did not answer"),
            ({"r2": STATUS, "r3": STATUS}, None, "r3#4 did not answer"),
        ]
        for answers, of_third, words in cases:
            of_three(harness, monkeypatch, answers)
            shown = await harness.ask("GET", "/v1/feature-level")
            assert (
                known(shown) == {"r1": features.FEATURE_LEVEL_KNOWN, "r2": 2, "r3": of_third}
                and not shown.body["may_be_raised"]
            )
            answer = await harness.ask("POST", "/v1/feature-level", {"command_id": harness.new_id(), "level": 2})
            assert (answer.status, answer.code) == (409, "wrong_state")
            assert answer.sentence == f"feature level 2 is not supported by every member: {words}"
            assert harness.controller.state.feature_level == 1
        of_three(harness, monkeypatch, {"r2": STATUS, "r3": of_r3})
        assert await harness.controller.levels.gather() == (
            MemberLevel("r1", "r1", True, features.FEATURE_LEVEL_KNOWN, ""),
            MemberLevel("r2", "r2", True, 2, "0.1.0"),
            MemberLevel("r3#4", "r3", True, 2, "0.1.0"),
        )
        answer = await harness.ask("POST", "/v1/feature-level", {"command_id": harness.new_id(), "level": 2})
        assert (answer.status, answer.body["feature_level"]) == (200, 2)


@story
async def test_a_level_that_cannot_be_one_is_refused_with_its_place(config: Config) -> None:
    async with Harness(config, raises=False) as harness:
        for level in (0, -1, 2**31, "2", None):
            answer = await harness.ask("POST", "/v1/feature-level", {"command_id": harness.new_id(), "level": level})
            assert (answer.status, answer.body["error"]["place"]) == (400, "level"), level


@story
async def test_the_raise_is_in_the_ledger_with_who_asked_and_told_to_who_follows_events(config: Config) -> None:
    async with Harness(config, raises=False) as harness:
        await harness.ask("POST", "/v1/feature-level", {"command_id": harness.new_id(), "level": 2})
        rows = [
            record for entry in (await harness.ask("GET", "/v1/ledger")).body["entries"] for record in entry["records"]
        ]
        raised = next(row for row in rows if row["command"] == "raise_feature_level")
        assert (raised["actor"], raised["rejection"]) == ("operator", None)
        detail = {"level": 2, "release": features.release_of(2)}
        assert raised["events"] == [{"event": "feature_level_raised", "detail": detail}]


@story
async def test_a_replica_that_is_too_old_for_an_entry_stops_before_it_and_keeps_everything(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config, raises=False) as harness:
        harness.engine.automatic = False
        sent = harness.new_id()
        asking = harness.ask("POST", "/v1/feature-level", {"command_id": sent, "level": 2})
        waiting = asyncio.create_task(asking)
        await until(lambda: harness.engine.uncommitted > 0)
        # Its leader is somebody else from now on, so it folds the entry as a follower does.
        harness.engine.depose("r2", lose=False)
        await waiting
        journal, state = harness.storage.journal, harness.controller.state
        before = (journal.last_index, journal.applied_index, journal.applied_digest)
        monkeypatch.setattr(features, "FEATURE_LEVEL_KNOWN", 1)
        with pytest.raises(ReleaseNeeded, match=f"^revision {state.revision + 1}: the cluster has feature level 2"):
            harness.engine.commit()
        assert (journal.last_index, journal.applied_index, journal.applied_digest) == before
        assert harness.controller.state is state
        # The release that it asked for goes on with the same entry.
        monkeypatch.undo()
        harness.engine.commit()
        assert harness.controller.state.feature_level == 2


@story
async def test_a_cluster_that_is_founded_now_is_at_once_raised_to_what_all_its_members_know(config: Config) -> None:
    async with Harness(config) as harness:
        shown = await harness.ask("GET", "/v1/feature-level")
        assert (shown.body["feature_level"], shown.body["next_level"]) == (features.FEATURE_LEVEL_KNOWN, None)
        rows = [
            record for entry in (await harness.ask("GET", "/v1/ledger")).body["entries"] for record in entry["records"]
        ]
        raised = [row for row in rows if row["command"] == "raise_feature_level"]
        assert [row["actor"] for row in raised] == ["leader"] * (features.FEATURE_LEVEL_KNOWN - 1)


@story
async def test_a_new_cluster_with_a_member_that_knows_less_is_raised_no_further_and_later_when_it_is_upgraded(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config, raises=False) as harness:
        of_r3 = msgspec.structs.replace(STATUS, replica="r3")
        of_three(harness, monkeypatch, {"r2": STATUS, "r3": of_r3})
        harness.raises = True
        await harness.restart()
        await until(lambda: harness.controller.state.feature_level == 2)
        know_all = {name: msgspec.structs.replace(STATUS, replica=name, feature_level_known=3) for name in ("r2", "r3")}
        of_three(harness, monkeypatch, know_all)
        await until(lambda: harness.controller.state.feature_level == 3)  # the leader looks every second
