"""`forebay cluster …` for feature levels and clocks: requests, output, and exit codes."""

import json

import msgspec

from forebay.cluster.cli.exits import SERVE_MEANINGS, ExitCode
from forebay.cluster.schemas.ledger import ClockAnswer, FeatureLevelAnswer, MemberLevelView
from forebay.cluster.serve import EXIT_RELEASE_NEEDED
from tests.cluster.cli.double import Double, forebay

PRESENT = FeatureLevelAnswer(
    revision=5,
    feature_level=1,
    release="0.1.0",
    next_level=2,
    next_release="0.2.0",
    next_brings="more",
    may_be_raised=True,
    members=(
        MemberLevelView(name="r1", id="r1", known=2, version="0.2.0"),
        MemberLevelView(name="r2", id="r2#4", votes=False, known=None),
    ),
)
RAISED = msgspec.structs.replace(PRESENT, feature_level=2, next_level=None, may_be_raised=False)
PATH = "/v1/feature-level"


def test_the_feature_level_is_shown_with_each_replicas_support(double: Double) -> None:
    double.answer("GET", PATH, PRESENT)
    result = forebay(double.config, "cluster", "feature-level")
    assert result.exit_code == ExitCode.OK
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "REPLICA VOTES KNOWN-LEVEL VERSION" in lines and "r1 yes 2 0.2.0" in lines
    assert any(line.startswith("r2 no") for line in lines)
    assert "feature level 2 (release 0.2.0: more) is available" in result.stderr
    double.answer("GET", PATH, msgspec.structs.replace(PRESENT, may_be_raised=False))
    result = forebay(double.config, "cluster", "feature-level", "--json")
    assert result.stderr == "" and json.loads(result.stdout)["members"][1]["known"] is None
    result = forebay(double.config, "cluster", "feature-level")
    assert "is not available yet: upgrade every replica" in result.stderr


def test_raise_without_a_level_requests_the_next_level(double: Double) -> None:
    double.answer("GET", PATH, PRESENT)
    double.answer("POST", PATH, RAISED)
    result = forebay(double.config, "cluster", "raise-feature-level", "--json")
    assert result.exit_code == ExitCode.OK and json.loads(result.stdout)["feature_level"] == 2
    assert [asked.method for asked in double.asked] == ["GET", "POST"]
    assert double.asked[-1].body["level"] == 2
    result = forebay(double.config, "cluster", "raise-feature-level", "3")
    assert double.asked[-1].body["level"] == 3 and result.stderr == ""


def test_raise_at_the_highest_level_is_rejected_locally(double: Double) -> None:
    double.answer("GET", PATH, RAISED)
    result = forebay(double.config, "cluster", "raise-feature-level")
    assert result.exit_code == ExitCode.REFUSED
    assert "feature level 2 is the highest that the leader's release knows" in result.stderr
    assert [asked.method for asked in double.asked] == ["GET"]


def test_a_rejected_raise_prints_the_leaders_message(double: Double) -> None:
    double.refuse("POST", PATH, 409, "wrong_state", "not every member is known to support feature level 2: r2 knows 1")
    result = forebay(double.config, "cluster", "raise-feature-level", "2")
    assert result.exit_code == ExitCode.REFUSED and "r2 knows 1" in result.stderr and result.stdout == ""


def test_a_release_without_feature_levels_differs_from_a_wrong_address(double: Double) -> None:
    for method in ("GET", "POST"):
        double.refuse(method, PATH, 404, "unknown_route", "there is nothing at /v1/feature-level")
    for words in (("feature-level",), ("raise-feature-level",), ("raise-feature-level", "2")):
        result = forebay(double.config, "cluster", *words)
        assert result.exit_code == ExitCode.REFUSED
        assert "without feature levels, so the cluster is at level 1" in result.stderr


def test_a_level_below_the_first_step_is_bad_input(double: Double) -> None:
    for level in ("0", "1", "-3", "two"):
        result = forebay(double.config, "cluster", "raise-feature-level", level)
        assert (result.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])


def test_the_exit_code_of_a_release_that_is_too_old_is_documented() -> None:
    assert "start the release that stderr names" in SERVE_MEANINGS[EXIT_RELEASE_NEEDED]


def test_replicas_with_wrong_clocks_are_named_beside_the_cluster_time(double: Double) -> None:
    answer = ClockAnswer(revision=5, at="2026-01-31T12:00:00Z", off=("r2",))
    double.answer("GET", "/v1/clock", answer)
    result = forebay(double.config, "cluster", "clock")
    assert "2026-01-31T12:00:00Z" in result.stdout
    assert "the wall clock of r2 differs from a majority's" in result.stderr
    double.answer("GET", "/v1/clock", msgspec.structs.replace(answer, off=()))
    assert forebay(double.config, "cluster", "clock").stderr == ""
