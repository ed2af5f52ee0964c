"""Conversion of a script and the command line to a submit request: precedence, and places of errors."""

import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from forebay.cluster.cli.exits import Failure
from forebay.cluster.cli.submission.readers import parse_dependencies
from forebay.cluster.cli.submission.request import PreparedSubmit, locate, parse_exports, prepare
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.system.clock import parse_instant
from forebay.replica.values.limits import (
    CPUS_MAX,
    DEPENDENCIES_MAX,
    DIRECTIVE_TEXT_BYTES_MAX,
    ENVIRONMENT_VARIABLES_MAX,
    PRIORITY_MAX,
)

NOW = parse_instant("2026-01-31T12:00:00Z")
ALL = """\
#!/bin/sh
#SBATCH --job-name=script -t 10 --bb="capacity=1GiB"
#SBATCH --bbf=more.bb --begin=16:00 -d afterok:1 -D sub
#SBATCH -o script.out --priority=5 -c 2 -n 1
true
"""


def prepared(
    script: str = "#!/bin/sh\ntrue\n", directory: Path = Path("/data/alice"), export: tuple[str, ...] = (), **given: Any
) -> PreparedSubmit:
    return prepare(
        script.encode(),
        "dir/job.sh",
        given,
        export,
        directory=directory,
        environment={"LANG": "C"},
        now=NOW,
        zone=datetime.UTC,
    )


def submitted(*arguments: Any, **given: Any) -> SubmitRequest:
    return SubmitRequest(command_id="0" * 32, **prepared(*arguments, **given).fields)


def refused(script: str = "#!/bin/sh\ntrue\n", **given: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        prepared(script, **given)
    return caught.value


def test_a_plain_script_gets_the_defaults() -> None:
    found = submitted()
    assert asdict(found) == {
        "command_id": "0" * 32,
        "user": None,
        "script": "#!/bin/sh\ntrue\n",
        "name": "job.sh",
        "time_limit_s": 3_600,
        "workdir": "/data/alice",
        "cpus": 1,
        "hold": False,
        "bb": None,
        "bbf": None,
        "priority": None,
        "begin_at": None,
        "dependencies": (),
        "dependency_any": False,
        "output": None,
        "environment": {},
        "deadline": None,
        "nodes": 1,
        "array": None,
        "account": None,
        "qos": None,
        "licenses": (),
        "reservation": None,
        "partition": None,
        "nice": 0,
        "requeue": True,
        "mail_types": (),
        "mail_user": None,
        "comment": None,
        "error": None,
        "open_mode": None,
        "arguments": (),
        "tasks": 1,
        "exclusive": False,
        "input": None,
        "signal": None,
        "ignored_options": (),
        "if_defined": (),
        "variables": {},
    }


def test_script_options_apply_without_command_line_options(tmp_path: Path) -> None:
    (tmp_path / "more.bb").write_text("#DW jobdw capacity=1GiB\n")
    found = submitted(ALL, tmp_path)
    assert found.name == "script"
    assert found.time_limit_s == 600
    assert found.bb == "capacity=1GiB"
    assert found.bbf == "#DW jobdw capacity=1GiB\n"
    assert found.begin_at == "2026-01-31T16:00:00.000000Z"
    assert found.dependencies == ("afterok:1",)
    assert found.workdir == str(tmp_path / "sub")
    assert (found.output, found.priority, found.cpus, found.hold) == ("script.out", 5, 2, False)


def test_command_line_options_override_script_options(tmp_path: Path) -> None:
    (tmp_path / "more.bb").write_text("script")
    (tmp_path / "mine.bb").write_text("mine")
    found = submitted(
        ALL, tmp_path, name="mine", time_limit_s="20", bb="capacity=2GiB", bbf="mine.bb", begin_at="now",
        dependencies="afterany:2", workdir="/elsewhere", output="mine.out", priority="6", cpus="3", hold=True,
        export=("A=1", "LANG"),
    )  # fmt: skip
    assert found == replace(
        found,
        name="mine", time_limit_s=1_200, bb="capacity=2GiB", bbf="mine", begin_at=None, dependencies=("afterany:2",),
        workdir="/elsewhere", output="mine.out", priority=6, cpus=3, hold=True, environment={"A": "1", "LANG": "C"},
    )  # fmt: skip


@pytest.mark.parametrize(("text", "nodes"), [("1", 1), ("0", 0), ("1-4", 1), ("0-0", 0), ("01", 1)])
def test_a_node_count_is_one_or_a_range_with_one(text: str, nodes: int) -> None:
    assert submitted(f"#!/bin/sh\n#SBATCH -N {text}\n").nodes == nodes


def test_slurm_option_names_are_accepted_in_scripts() -> None:
    found = submitted(
        "#!/bin/sh\n#SBATCH -N0 -a 1-3%2 -A proj -q high -L m:2,n --nice --no-requeue\n"
        "#SBATCH --mail-type=ALL --mail-user=alan --comment='a b' -p debug --reservation=r -d singleton,afterok:01_02\n"
    )
    assert (found.nodes, found.array, found.account, found.qos, found.licenses) == (
        0,
        "1-3%2",
        "proj",
        "high",
        ("m:2", "n"),
    )
    assert (found.nice, found.requeue, found.mail_types, found.mail_user) == (100, False, ("ALL",), "alan")
    assert (found.comment, found.partition, found.reservation) == ("a b", "debug", "r")
    assert found.dependencies == ("singleton", "afterok:1_2")


def test_a_hold_option_in_the_script_holds_the_job() -> None:
    assert submitted("#!/bin/sh\n#SBATCH -H\n").hold


@pytest.mark.parametrize(
    ("given", "place", "remedy"),
    [
        ({"time_limit_s": "1:90"}, "--time-limit", "at most 59"),
        ({"cpus": "0"}, "--cpus", f"1 to {CPUS_MAX}"),
        ({"cpus": str(CPUS_MAX + 1)}, "--cpus", f"1 to {CPUS_MAX}"),
        ({"priority": "-1"}, "--priority", f"0 to {PRIORITY_MAX}"),
        ({"begin_at": "soon"}, "--begin", "16:00"),
        ({"dependencies": "afterok"}, "--dependency", "afterok:42"),
        ({"bbf": "/no/such/file"}, "--bbf", "correct the path"),
        ({"nodes": "2"}, "--nodes", ""),
        ({"nodes": "1-0"}, "--nodes", "--nodes=1"),
        ({"nodes": "n1"}, "--nodes", "0 for persistent"),
        ({"array": "3-1"}, "--array", ""),
        ({"array": "1-3%0"}, "--array", "%4"),
        ({"nice": "x"}, "--nice", "whole number"),
        ({"nice": "9999999999"}, "--nice", "whole number"),
        ({"licenses": "a,,b"}, "--licenses", "single commas"),
        ({"mail_types": "a,"}, "--mail-type", "single commas"),
        ({"deadline": "soon"}, "--deadline", "16:00"),
        ({"export": ("1A=2",)}, "--export", "NAME=VALUE"),
        ({"export": ("UNSET",)}, "--export", "UNSET=VALUE"),
    ],
)
def test_each_option_error_names_the_option_and_remedy(given: dict[str, Any], place: str, remedy: str) -> None:
    failure = refused(**given)
    assert failure.place == place
    assert remedy in failure.remedy


def test_a_bad_script_value_is_reported_with_line_and_column() -> None:
    assert refused("#!/bin/sh\n\n#SBATCH --time=x\n").place == "dir/job.sh line 3, column 16"


def test_a_directive_file_has_a_size_limit(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"#" * (DIRECTIVE_TEXT_BYTES_MAX + 1))
    assert str(DIRECTIVE_TEXT_BYTES_MAX) in refused(bbf=str(tmp_path / "big")).sentence


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("afterok:1", ("afterok:1",)),
        ("afterok:1:2,after:3", ("afterok:1", "afterok:2", "after:3")),
        ("afterany:1,afternotok:2,afterburstbuffer:3", ("afterany:1", "afternotok:2", "afterburstbuffer:3")),
        ("afterok:01,afterok:1", ("afterok:1",)),
    ],
)
def test_dependencies_are_parsed(text: str, expected: tuple[str, ...]) -> None:
    assert parse_dependencies(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "afterok",
        "afterok:",
        "afterok:x",
        "afterok:0",
        "afterok:-1",
        "afterok:1?afterok:2,afterok:3",
        "singleton:1",
        "afterok:1_",
        "after:1+5",
    ]
    + [
        "afterok:1,",
        "AFTEROK:1",
        "afterok:" + "9" * 19,
        ",".join(f"after:{job}" for job in range(1, DEPENDENCIES_MAX + 2)),
    ],
)
def test_an_invalid_dependency_is_rejected_with_a_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="; |at most"):
        parse_dependencies(text)


def test_too_many_exported_variables_are_rejected() -> None:
    with pytest.raises(Failure, match=str(ENVIRONMENT_VARIABLES_MAX + 1)):
        parse_exports([f"V{number}=1" for number in range(ENVIRONMENT_VARIABLES_MAX + 1)], {})
    assert (
        len(parse_exports([f"V{number}=1" for number in range(ENVIRONMENT_VARIABLES_MAX)], {}))
        == ENVIRONMENT_VARIABLES_MAX
    )


@pytest.mark.parametrize(
    ("script", "given", "place", "expected"),
    [
        ("#!/bin/sh\n", {}, "script line 3, column 12", "dir/job.sh line 3, column 12"),
        ("#!/bin/sh\n", {"bb": "x"}, "--bb line 1, column 9", "--bb line 1, column 9"),
        (
            "#!/bin/sh\n#SBATCH --bb=x\n",
            {},
            "--bb line 1, column 9",
            "dir/job.sh line 2, column 14, --bb line 1, column 9",
        ),
        ("#!/bin/sh\n#SBATCH -J x\n", {}, "name", "dir/job.sh line 2, column 12"),
        ("#!/bin/sh\n", {"name": "x"}, "name", "--name"),
        ("#!/bin/sh\n", {}, "begin_at", "begin_at"),
    ],
)
def test_places_in_server_errors_are_translated_for_the_user(
    script: str, given: dict[str, Any], place: str, expected: str
) -> None:
    assert locate(place, prepared(script, **given).sources) == expected


def test_only_variables_of_directives_that_are_set_here_are_sent() -> None:
    script = (
        b"#!/bin/sh\n#DW jobdw capacity=1GiB\n"
        b"#DW stage_in type=file source=$HOME/${SCRATCH}x/$UNSET/$ODD destination=$DW_JOB_STRIPED/x\n"
        b"echo $LANG\n#DW $PATH\n"
    )
    environment = {"HOME": "/home/alice", "SCRATCH": "s", "LANG": "C", "PATH": "/bin", "ODD": "\udc80", "BBF": "b"}

    def sent(home: str | None) -> dict[str, str]:
        found = prepare(
            script, "job.sh", {"bb": "capacity=$BBF"}, directory=Path("/"), environment=environment, home=home, now=NOW
        ).fields["variables"]
        assert isinstance(found, dict)
        return found

    assert sent(None) == {"HOME": "/home/alice", "SCRATCH": "s", "BBF": "b"}
    # A job of another user: that user's home, if it is known here.
    assert sent("/home/bob")["HOME"] == "/home/bob" and "HOME" not in sent("")


def test_a_client_that_does_not_send_a_request_leaves_its_variables_to_the_controller() -> None:
    line = "#DW stage_in type=file source=$NAME/a destination=$DW_JOB_STRIPED/x"
    failure = refused(f"#!/bin/sh\n#SBATCH --time=never\n#DW jobdw capacity=1GiB\n{line}\n")
    assert not failure.others
