"""`forebay audit history`, `audit leaders`, `diff`: requests, pages, and output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.ledger import (
    ChangeView,
    DiffAnswer,
    LeadersAnswer,
    LeaderTermView,
    MomentView,
    StoryAnswer,
    StoryRow,
)
from tests.cluster.cli.double import Double, forebay

AT = "2026-11-23T10:03:00.250000Z"


def row(revision: int, **more: Any) -> StoryRow:
    fields: dict[str, Any] = {"actor": "operator", "command": "set_pool", "event": "pool_set", "sentence": "it was set"}
    return StoryRow(revision=revision, at=AT, **(fields | more))


def stretch(read: int, *rows: StoryRow, last: int = 9) -> StoryAnswer:
    return StoryAnswer(revision=last, rows=rows, read=read, read_at=AT, last=last)


@pytest.fixture
def told(double: Double) -> Double:
    """History in three pages, of which the second is empty."""
    refused = row(9, event="rejected", actor="user ada", command="hold_job", sentence="there is no job 7", remedy="see")
    double.answer("GET", r"/v1/history(\?(?!.*after=).*)?", stretch(3, row(2, job_id=4, user="ada\x1b[2J")))
    double.answer("GET", r"/v1/history\?.*after=3.*", stretch(8))
    double.answer("GET", r"/v1/history\?.*after=8.*", stretch(9, refused))
    return double


def test_a_history_is_read_in_pages_and_printed_as_one_line_per_event(told: Double) -> None:
    result = forebay(told.config, "audit", "history", "--from", "2", "--user", "ada", "--kind", "rejected")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and len(lines) == 2
    assert lines[0].split() == [
        "2026-11-23T10:03:00Z",
        "2",
        "operator",
        "job",
        "4",
        "(ada\\x1b[2J)",
        "it",
        "was",
        "set",
    ]
    assert lines[1].endswith("rejected hold_job: there is no job 7; see")
    assert [one.target for one in told.asked] == [
        f"/v1/history?user=ada&kind=rejected&from=2{after}" for after in ("", "&after=3", "&after=8")
    ]


def test_an_empty_history_as_json_is_one_object(told: Double, double: Double) -> None:
    found = json.loads(forebay(told.config, "audit", "history", "--json").stdout)
    assert [one["revision"] for one in found["rows"]] == [2, 9]
    assert (found["revision"], found["read"], found["read_at"]) == (9, 9, AT)
    double.answer("GET", r"/v1/history.*", stretch(9))
    assert json.loads(forebay(double.config, "audit", "history", "--json").stdout)["rows"] == []


@pytest.mark.parametrize(
    "words, query",
    [
        (("--pool", "fast"), "of=pool&name=fast"),
        (("--node", "n7"), "of=node&name=n7"),
        (("--of", "qos"), "of=qos"),
        (("--of", "account=chem"), "of=account&name=chem"),
    ],
)
def test_changes_of_other_objects_are_queried_by_kind_and_name(
    double: Double, words: tuple[str, str], query: str
) -> None:
    double.answer("GET", r"/v1/history.*", stretch(9))
    double.answer("GET", r"/v1/diff.*", DiffAnswer(revision=9, since=MOMENT, until=MOMENT, changes=(), more=False))
    assert forebay(double.config, "audit", "history", *words).exit_code == 0
    assert forebay(double.config, "audit", "diff", "4", *words).exit_code == 0
    assert [one.target for one in double.asked] == [f"/v1/history?{query}", f"/v1/diff?from=4&{query}"]


MOMENT = MomentView(revision=4, at=AT)


def test_contradicting_options_are_rejected_before_any_request(double: Double) -> None:
    for words, place in (
        (("audit", "history", "--pool", "a", "--of", "node"), "--pool and --of"),
        (("audit", "history", "--follow", "--to", "7"), "--follow"),
        (("audit", "history", "--from", "yesterday"), "--from"),
        (("audit", "diff", "tomorrow"), "A"),
    ):
        result = forebay(double.config, *words)
        assert result.exit_code == ExitCode.BAD_INPUT and place in result.stderr
    assert double.asked == []


def test_a_diff_shows_old_and_new_values_and_the_author(double: Double) -> None:
    by = {"revision": 8, "at": AT, "actor": "operator", "command": "set_pool"}
    nobody = dict.fromkeys(by)
    changes = (
        ChangeView(
            kind="pool",
            name="fast",
            change="changed",
            **by,
            fields={"quantity_bytes": (1 << 30, 2 << 30), "x": (True, None)},
        ),
        ChangeView(kind="job", name="7", change="new", **nobody, fields={"state": (None, "pending")}),
        ChangeView(kind="job", name="3", change="gone", **nobody, fields={}),
    )
    since, until = MOMENT, MomentView(revision=9, at=AT)
    double.answer("GET", r"/v1/diff.*", DiffAnswer(revision=9, since=since, until=until, changes=changes, more=True))
    lines = forebay(double.config, "audit", "diff", "4", "9", "--limit", "3").stdout.splitlines()
    assert double.asked[0].target == "/v1/diff?from=4&to=9&limit=3"
    assert lines == [
        "from revision 4 (2026-11-23T10:03:00Z) to revision 9 (2026-11-23T10:03:00Z): at least 3 changes",
        "",
        "pool fast changed, last at revision 8, 2026-11-23T10:03:00Z, by operator: set_pool",
        "   quantity_bytes: 1GiB -> 2GiB",
        "   x: yes -> none",
        "",
        "job 7 created",
        "   state: pending",
        "",
        "job 3 deleted",
        "",
        "more changes are not shown: use --job, --of or a larger --limit",
    ]


def test_leader_terms_are_printed_as_a_table(double: Double) -> None:
    first = LeaderTermView(term=1, leader=None, first_index=1, last_index=4, from_at=AT, to_at=AT, silent_s=None)
    second = LeaderTermView(term=3, leader="r2", first_index=5, last_index=5, from_at=None, to_at=None, silent_s=0.25)
    double.answer("GET", r"/v1/history/leaders.*", LeadersAnswer(revision=9, terms=(first, second)))
    lines = forebay(double.config, "audit", "leaders", "--limit", "2").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["TERM", "LEADER"], ["1", "-"], ["3", "r2"]]
    assert lines[2].split()[-1] == "0.250" and double.asked[0].target == "/v1/history/leaders?limit=2"
