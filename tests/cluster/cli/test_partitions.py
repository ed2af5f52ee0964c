"""`forebay policy partition …`, `forebay policy usage …`, `forebay job update`: requests, output, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.accounts import PartitionsAnswer, PartitionView, UsageAnswer, UsageView
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.views import PENDING

BATCH = PartitionView(
    name="batch", state="UP", default=True, nodes="n[1-4]", nodes_up=3, cpus=48, max_time_s=7200, min_nodes=0,
    max_nodes=None, users=("alice",), accounts=(),
)  # fmt: skip
DEBUG = PartitionView(
    name="debug", state="DOWN", default=False, nodes="ALL", nodes_up=4, cpus=64, max_time_s=None, min_nodes=1,
    max_nodes=2, users=(), accounts=(),
)  # fmt: skip


def sent_by(double: Double) -> dict[str, object]:
    body = dict(double.asked[-1].body)
    body = {field: value for field, value in body.items() if field not in ("command_id", "if_match")}
    return body


def test_the_default_partition_has_a_star(double: Double) -> None:
    double.answer("GET", "/v1/partitions", PartitionsAnswer(revision=9, partitions=(BATCH, DEBUG)))
    result = forebay(double.config, "policy", "partition", "list", columns=120)
    assert result.exit_code == ExitCode.OK, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == "PARTITION AVAIL TIMELIMIT JOB_SIZE UP CPUS NODELIST USERS ACCOUNTS".split()
    assert lines[1] == "batch* UP 02:00:00 0-infinite 3 48 n[1-4] alice ALL".split()
    assert lines[2] == "debug DOWN infinite 1-2 4 64 ALL ALL ALL".split()
    missing = forebay(double.config, "policy", "partition", "show", "none")
    assert missing.exit_code == ExitCode.NOT_FOUND and "batch, debug" in missing.stderr


def test_unnamed_partition_properties_do_not_change(double: Double) -> None:
    answer = PartitionsAnswer(revision=9, partitions=(BATCH,))
    double.answer("GET", "/v1/partitions", answer)
    double.answer("PUT", "/v1/partitions/[a-z]+", answer)
    result = forebay(double.config, "policy", "partition", "set", "batch", "--state", "drain", "--users", "")
    assert result.exit_code == ExitCode.OK, result.stderr
    assert sent_by(double) == {"nodes": "n[1-4]", "state": "DRAIN", "default": True, "max_time_s": 7200}
    words = ("--nodes", "m1", "--max-time", "1-0", "--max-nodes", "4", "--default", "--accounts", "a,b")
    forebay(double.config, "policy", "partition", "set", "fresh", *words)
    body = sent_by(double)
    assert (body["nodes"], body["max_time_s"], body["max_nodes"]) == ("m1", 86400, 4)
    assert (body["default"], body["accounts"], body.get("state", "UP")) == (True, ["a", "b"], "UP")
    forebay(double.config, "policy", "partition", "set", "batch", "--max-time", "unlimited", "--max-nodes", "UNLIMITED")
    assert not {"max_time_s", "max_nodes"} & set(sent_by(double))


@pytest.mark.parametrize("words", [("--max-time", "soon"), ("--max-nodes", "many"), ("--state", "SIDEWAYS")])
def test_invalid_partition_options_are_bad_input(double: Double, words: tuple[str, ...]) -> None:
    double.answer("GET", "/v1/partitions", PartitionsAnswer(revision=9, partitions=()))
    result = forebay(double.config, "policy", "partition", "set", "batch", *words)
    assert result.exit_code != ExitCode.OK and not any(asked.method == "PUT" for asked in double.asked)


def test_a_partition_is_deleted_by_name(double: Double) -> None:
    double.answer("POST", "/v1/partitions/batch/delete", PartitionsAnswer(revision=9, partitions=(DEBUG,)))
    result = forebay(double.config, "policy", "partition", "delete", "batch", "--yes")
    assert result.exit_code == ExitCode.OK and "debug" in result.stdout


def test_usage_is_printed_in_space_minutes_and_reset(double: Double) -> None:
    rows = (
        UsageView(account="lab", qos=None, user="alice", pool="fast", byte_minutes=3 * 2**30),
        UsageView(account=None, qos="high", user=None, pool=None, byte_minutes=0),
    )
    double.answer("GET", "/v1/usage", UsageAnswer(revision=9, usage=rows))
    result = forebay(double.config, "policy", "usage", "list", columns=120)
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1] == ["lab", "-", "alice", "fast", "3GiB-minutes"] and lines[2][:4] == ["-", "high", "-", "all"]
    assert "high" not in forebay(double.config, "policy", "usage", "list", "--account", "lab").stdout
    double.answer("POST", "/v1/usage/reset", UsageAnswer(revision=9, usage=()))
    forebay(double.config, "policy", "usage", "reset", "--qos", "high", "--yes")
    assert sent_by(double) == {"qos": "high"}
    for words in ((), ("--qos", "a", "--account", "b")):
        assert forebay(double.config, "policy", "usage", "reset", *words).exit_code == ExitCode.BAD_INPUT


# Changing jobs -------------------------------------------------------------------------------------------------------


def changed(double: Double, *words: str) -> dict[str, object]:
    double.answer("POST", "/v1/jobs/7/update", PENDING)
    result = forebay(double.config, "job", "update", "7", *words)
    assert result.exit_code == ExitCode.OK, result.stderr
    return {field: value for field, value in sent_by(double).items() if value not in (None, False)}


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (("--time", "2:00:00"), {"time_limit_s": 7200}),
        (("--priority", "7", "--nice", "-5"), {"priority": 7, "nice": -5}),
        (("-d", "afterok:1:2,singleton"), {"dependencies": ["afterok:1", "afterok:2", "singleton"]}),
        (("-d", "afterok:1?afterany:2"), {"dependencies": ["afterok:1", "afterany:2"], "dependency_any": True}),
        (("-d", ""), {"dependencies": []}),
        (("--begin", "now"), {"begin_at": ""}),
        (("--deadline", "2100-01-01T00:00:00Z"), {"deadline": "2100-01-01T00:00:00.000000Z"}),
        (("--deadline", ""), {"deadline": ""}),
        (("-A", "", "-q", "high"), {"account": "", "qos": "high"}),
        (("-L", "a:2,b", "-p", "batch"), {"licenses": ["a:2", "b"], "partition": "batch"}),
        (("-L", ""), {"licenses": []}),
        (("--requeue", "--comment", "x"), {"requeue": True, "comment": "x"}),
        (("--bb", "capacity=1GiB"), {"bb": "capacity=1GiB"}),
        (("--mail-type", "end,fail", "--mail-user", "a@b"), {"mail_types": ["end", "fail"], "mail_user": "a@b"}),
        (("-J", "another"), {"name": "another"}),
    ],
)
def test_a_job_update_sends_only_given_fields(double: Double, words: tuple[str, ...], sent: dict[str, object]) -> None:
    assert changed(double, *words) == sent


def test_an_update_reads_the_request_from_a_file(double: Double, tmp_path: Path) -> None:
    file = tmp_path / "request"
    file.write_text("#DW jobdw capacity=1GiB type=scratch access_mode=striped\n", encoding="utf-8")
    assert changed(double, "--bbf", str(file)) == {"bbf": file.read_text(encoding="utf-8")}
    assert forebay(double.config, "job", "update", "7", "--bbf", str(tmp_path / "none")).exit_code == ExitCode.BAD_INPUT


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ((), ""),
        (("--time", "soon"), "--time"),
        (("--priority", "-1"), "--priority"),
        (("-d", "afterok:1,afterok:2?afterok:3"), "--dependency"),
        (("-d", "often:1"), "--dependency"),
        (("--begin", "yesterday-ish"), "--begin"),
        (("-L", "a,,b"), "--licenses"),
    ],
)
def test_invalid_update_values_are_bad_input_before_any_request(
    double: Double, words: tuple[str, ...], place: str
) -> None:
    result = forebay(double.config, "job", "update", "7", *words)
    assert result.exit_code == ExitCode.BAD_INPUT and place in result.stderr and not double.asked
