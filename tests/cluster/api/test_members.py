"""Changes of membership over HTTP: what is refused before consensus is asked, and how its refusals are told."""

from typing import Any

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.config.toml import ConfigError
from forebay.cluster.consensus import ChangeRefused, MemberChange
from forebay.wal.configuration import ChangeKind
from tests.cluster.harness import Harness, story

R4 = {"name": "r4", "peer": "127.0.0.1:7404", "api": "127.0.0.1:7414"}


@story
async def test_a_name_or_an_address_that_cannot_be_is_refused_with_its_place(config: Config) -> None:
    async with Harness(config) as harness:
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"name": "r 4"}, "name"),
            ({"name": "r4#2"}, "name"),
            ({"peer": "nowhere"}, "peer"),
            ({"api": "127.0.0.1:99999"}, "api"),
        ]
        for fields, place in wrong:
            answer = await harness.ask("POST", "/v1/members", {"command_id": harness.new_id(), **R4, **fields})
            assert (answer.status, answer.body["error"]["place"]) == (400, place)


@story
async def test_what_consensus_refuses_is_told_with_its_code_and_remedy(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config) as harness:
        asked: list[MemberChange] = []

        def change(wanted: MemberChange) -> tuple[int, int]:
            asked.append(wanted)
            code = "unknown_member" if wanted.name == "r9" else "change_under_way"
            raise ChangeRefused(code, "it cannot be now", "wait")

        monkeypatch.setattr(harness.engine, "change", change)
        command_id = harness.new_id()
        answer = await harness.ask("POST", "/v1/members", {"command_id": command_id, **R4})
        assert (answer.status, answer.code, answer.sentence) == (409, "change_under_way", "it cannot be now")
        for verb, action in (("remove", ChangeKind.REMOVE), ("replace", ChangeKind.REPLACE)):
            answer = await harness.ask("POST", f"/v1/members/r9/{verb}", {"command_id": harness.new_id()})
            assert (answer.status, answer.code, asked[-1].action) == (404, "unknown_member", action)
        assert asked[0] == MemberChange(
            action=ChangeKind.ADD, id=bytes.fromhex(command_id), actor="operator operator", **R4
        )
        for fields, place in (({}, ""), ({"peer": "nowhere"}, "peer"), ({"api": "h:99999"}, "api")):
            body = {"command_id": harness.new_id(), **fields}
            answer = await harness.ask("POST", "/v1/members/r9/update", body)
            assert (answer.status, answer.body["error"]["place"]) == (400, place)
        moved = {"command_id": command_id, "peer": "10.0.0.9:7401"}
        assert (await harness.ask("POST", "/v1/members/r9/update", moved)).status == 404
        sent = {"id": bytes.fromhex(command_id), "actor": "operator operator", "name": "r9", "peer": "10.0.0.9:7401"}
        update = MemberChange(action=ChangeKind.UPDATE, **sent)
        assert asked[-1] == update
        answer = await harness.ask("POST", "/v1/members/transfer", {"command_id": harness.new_id()})
        assert (answer.status, answer.code) == (409, "no_heir")


@story
async def test_members_are_those_of_the_journal_not_those_of_the_file(config: Config) -> None:
    async with Harness(config) as harness:
        answer = await harness.ask("GET", "/v1/members")
        assert [(row["name"], row["id"], row["votes"]) for row in answer.body["members"]] == [("r1", "r1", True)]
        assert answer.body["version"] == 1


def test_a_replica_that_joins_is_in_the_file_and_no_founder(config: Config) -> None:
    text = config.file.read_text()
    founders = len(config.founders)
    row = '\n[[replica]]\nname = "{name}"\npeer = "127.0.0.1:{port}1"\napi = "127.0.0.1:{port}2"\n'
    added = row.format(name="r8", port=780) + "joins = true\n"
    file = config.file.with_name("joined.toml")
    file.write_text(text + added)
    joined = Config.load(file)
    assert (len(joined.founders), joined.replicas[-1].joins) == (founders, True)
    assert joined.members["r8"] == "127.0.0.1:7801" and joined.endpoints[-1].port == 7802
    file.write_text(text + row.format(name="r8", port=780))
    with pytest.raises(ConfigError, match="without joins"):
        Config.load(file)
