"""`forebay config …`: reading of files, requests, output, and exit codes."""

import json
import os
import pwd
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.cli.commands.config import FILE_BYTES_MAX, INCLUDES_MAX
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.configuration import CompareAnswer, ConfigurationAnswer, DifferenceView, SettingView
from tests.cluster.cli.double import Double, forebay

PATH = "/v1/configuration"
DIFF = "/v1/configuration/diff"
COMPARED = CompareAnswer(
    revision=40,
    changed_revision=30,
    feature_level=3,
    differences=(
        DifferenceView(key="AllowUsers", before="", after="alan,brenda"),
        DifferenceView(key="OtherTimeout", before="300", after="9"),
    ),
)
PRESENT = ConfigurationAnswer(
    revision=41,
    changed_revision=41,
    settings=(SettingView(key="OtherTimeout", value="9", default="300", slurm=True, about="for setup"),),
    text="OtherTimeout=9\nMaxPasses=3\n",
    burst_buffer_conf="OtherTimeout=9\n",
)


@pytest.fixture
def answering(double: Double) -> Double:
    double.answer("GET", PATH, PRESENT)
    double.answer("POST", PATH, PRESENT)
    double.answer("POST", DIFF, COMPARED)
    return double


def written(directory: Path, text: str, name: str = "burst_buffer.conf") -> str:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_printed_configuration_can_be_applied_again(answering: Double) -> None:
    result = forebay(answering.config, "config", "show")
    assert (result.exit_code, result.stdout) == (ExitCode.OK, PRESENT.text)
    assert "last changed at revision 41" in result.stderr
    result = forebay(answering.config, "config", "show", "--as", "burst_buffer.conf")
    assert result.stdout == PRESENT.burst_buffer_conf
    result = forebay(answering.config, "config", "show", "--json")
    assert json.loads(result.stdout)["settings"][0]["key"] == "OtherTimeout" and result.stderr == ""
    result = forebay(answering.config, "config", "show", "--json", "--as", "burst_buffer.conf")
    assert result.exit_code == ExitCode.BAD_INPUT


def test_apply_sends_the_file_with_the_compared_revision(answering: Double, tmp_path: Path) -> None:
    file = written(tmp_path, "# site\nallowusers=alan,brenda\nOtherTimeout=9\n")
    result = forebay(answering.config, "config", "apply", file)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout.splitlines() == ["AllowUsers: (nothing) -> alan,brenda", "OtherTimeout: 300 -> 9"]
    compared, applied = answering.asked
    assert (compared.target, applied.target) == (DIFF, PATH)
    assert (
        applied.body["settings"]
        == compared.body["settings"]
        == [
            {"key": "AllowUsers", "value": "alan,brenda", "file": file, "line": 2, "column": 12},
            {"key": "OtherTimeout", "value": "9", "file": file, "line": 3, "column": 14},
        ]
    )
    assert applied.body["expect_revision"] == COMPARED.revision and "partial" not in applied.body


def test_dry_run_and_diff_change_nothing(answering: Double, tmp_path: Path) -> None:
    file = written(tmp_path, "OtherTimeout=9\n")
    result = forebay(answering.config, "config", "apply", file, "--dry-run")
    assert result.exit_code == ExitCode.OK and "nothing was changed" in result.stderr
    result = forebay(answering.config, "config", "diff", file, "--json")
    assert json.loads(result.stdout)["differences"][1] == {"key": "OtherTimeout", "before": "300", "after": "9"}
    assert [asked.target for asked in answering.asked] == [DIFF, DIFF]
    answering.answer("POST", DIFF, msgspec.structs.replace(COMPARED, differences=()))
    assert "no difference" in forebay(answering.config, "config", "diff", file).stderr


def test_a_given_revision_is_sent_as_the_expected_one(answering: Double, tmp_path: Path) -> None:
    file = written(tmp_path, "OtherTimeout=9\n")
    forebay(answering.config, "config", "apply", file, "--expect-revision", "7")
    assert [asked.body["expect_revision"] for asked in answering.asked] == [7, 7]


def test_setting_keys_leaves_other_keys_unchanged(answering: Double) -> None:
    result = forebay(answering.config, "config", "set", "OtherTimeout=9", "Flags=PrivateData")
    assert result.exit_code == ExitCode.OK
    body = answering.asked[-1].body
    assert body["partial"] and [row["key"] for row in body["settings"]] == ["OtherTimeout", "Flags"]
    result = forebay(answering.config, "config", "set", "OtherTimeout")
    assert result.exit_code == ExitCode.BAD_INPUT and "has no equals sign" in result.stderr


def test_every_fault_of_a_file_is_reported_with_its_place_before_any_request(answering: Double, tmp_path: Path) -> None:
    file = written(tmp_path, "OtherTimeout=soon\nNonsense=1\nFlags=Foo\n")
    for command in (("apply", file), ("apply", file, "--dry-run"), ("diff", file)):
        result = forebay(answering.config, "config", *command)
        assert result.exit_code == ExitCode.BAD_INPUT and result.stdout == ""
        for place in ("line 1, column 14", "line 2, column 1", "line 3, column 7"):
            assert f"{file} {place}: " in result.stderr
    assert answering.asked == []


def test_a_rejection_by_the_leader_is_reported_with_its_place(answering: Double, tmp_path: Path) -> None:
    answering.refuse(
        "POST", DIFF, 400, "unknown_pool", "there is no pool 'ssd'", place="burst_buffer.conf line 1, column 13"
    )
    result = forebay(answering.config, "config", "apply", written(tmp_path, "DefaultPool=ssd\n"))
    assert result.exit_code == ExitCode.BAD_INPUT and "line 1, column 13: there is no pool 'ssd'" in result.stderr
    assert [asked.target for asked in answering.asked] == [DIFF]


def test_included_files_are_relative_to_the_including_file(answering: Double, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    written(tmp_path / "sub", "OtherTimeout=9\n", "more.conf")
    file = written(tmp_path, "Flags=PrivateData\nInclude sub/more.conf\n")
    forebay(answering.config, "config", "diff", file)
    assert [row["file"] for row in answering.asked[-1].body["settings"]] == [file, str(tmp_path / "sub/more.conf")]
    written(tmp_path / "sub", "Oops=9\n", "more.conf")
    assert "sub/more.conf line 1, column 1: the key 'Oops'" in forebay(answering.config, "config", "diff", file).stderr


def test_unreadable_files_are_named_and_reads_are_bounded(answering: Double, tmp_path: Path) -> None:
    gone = forebay(answering.config, "config", "apply", str(tmp_path / "gone.conf"))
    assert gone.exit_code == ExitCode.NOT_FOUND and "gone.conf" in gone.stderr
    of_itself = written(tmp_path, "Include burst_buffer.conf\n")
    result = forebay(answering.config, "config", "apply", of_itself)
    assert f"more than {INCLUDES_MAX} levels of include" in result.stderr
    missing = forebay(answering.config, "config", "apply", written(tmp_path, "\nInclude gone.conf\n", "a.conf"))
    assert "a.conf line 2: " in missing.stderr and missing.exit_code == ExitCode.NOT_FOUND
    large = written(tmp_path, "#" * (FILE_BYTES_MAX + 1), "large.conf")
    assert "has more than" in forebay(answering.config, "config", "apply", large).stderr
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in forebay(answering.config, "config", "apply", str(tmp_path / "pipe")).stderr
    assert forebay(answering.config, "config", "apply", str(tmp_path)).exit_code == ExitCode.BAD_INPUT
    (tmp_path / "latin.conf").write_bytes(b"\n# \xe9\n")
    result = forebay(answering.config, "config", "apply", str(tmp_path / "latin.conf"))
    assert "latin.conf line 2: the line is not UTF-8 text" in result.stderr
    assert answering.asked == []


def test_user_ids_become_names_on_the_machine_of_the_file(answering: Double, tmp_path: Path) -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    unknown = "4294967000"
    file = written(tmp_path, f"DenyUsers=alan:{os.getuid()}:{unknown}\n")
    result = forebay(answering.config, "config", "diff", file)
    assert answering.asked[-1].body["settings"][0]["value"] == f"alan,{me},{unknown}"
    assert f"ID {os.getuid()} is replaced by user {me}" in result.stderr
    assert f"no user of this machine has the ID {unknown}" in result.stderr
