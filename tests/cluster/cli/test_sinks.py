"""`forebay sink list`: a row for each sink, and all fields as JSON."""

from __future__ import annotations

import json

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.overview import SinksAnswer, SinkView
from tests.cluster.cli.double import Double, forebay

ROWS = (
    SinkView(name="audit", url="https://a.example.org/x", state="active", mark=1523, delivered=1530),
    SinkView(
        name="monitor", url="http://127.0.0.1:9/", state="failing", mark=7, delivered=7, lag_revisions=1523,
        lag_s=754.0, failures=12, error="status 503",
    ),
    SinkView(name="new", url="https://n.example.org", state="starting"),
)  # fmt: skip


def test_sinks_are_listed_with_their_lag_and_last_error(double: Double) -> None:
    double.answer("GET", "/v1/sinks", SinksAnswer(revision=1530, replica="r1", sinks=ROWS))
    result = forebay(double.config, "sink", "list", columns=160)
    assert result.exit_code == ExitCode.OK, result.stderr
    head, audit, monitor, new = (line.split() for line in result.stdout.splitlines())
    assert head == "SINK STATE MARK LAG LAG-TIME URL LAST-ERROR".split()
    assert audit[:4] == ["audit", "active", "1523", "0"] and ROWS[0].url in audit
    assert monitor[:4] == ["monitor", "failing", "7", "1523"] and monitor[-2:] == ["status", "503"]
    assert new[:2] == ["new", "starting"]


def test_json_has_all_fields(double: Double) -> None:
    double.answer("GET", "/v1/sinks", SinksAnswer(revision=1530, replica="r1", sinks=ROWS))
    result = forebay(double.config, "sink", "list", "--json")
    assert result.exit_code == ExitCode.OK, result.stderr
    found = json.loads(result.stdout)
    assert [row["name"] for row in found["sinks"]] == ["audit", "monitor", "new"]
    assert found["sinks"][1]["lag_s"] == 754.0 and found["sinks"][2]["mark"] is None
