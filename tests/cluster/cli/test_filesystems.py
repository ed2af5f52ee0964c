"""`forebay pool filesystem …`: what is sent, what is printed, and the exit codes of a check."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forebay.cluster.agent.files import filesystems
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.jobs import FilesystemsAnswer, FilesystemView
from tests.cluster.cli.double import Double, forebay

MIB = 1024**2


def view(path: Path | str = "/bb", identity: str = "", quota: str = "lustre", layout: str = "lustre") -> FilesystemView:
    return FilesystemView(
        name="bb", path=str(path), identity=identity, movers=("m1", "m2"), movers_up=("m1",), pools=("fast",),
        quota=quota, layout=layout, stripe_count=4 * (layout != "none"), stripe_bytes=MIB * (layout != "none"),
        stripe_pool="", revision=9,
    )  # fmt: skip


def answer(*views: FilesystemView) -> FilesystemsAnswer:
    return FilesystemsAnswer(revision=9, filesystems=views)


LAYOUT = {"adapter": "lustre", "stripe_count": -1, "stripe_bytes": MIB, "pool": "flash"}


def test_adapters_are_sent_and_shown(double: Double) -> None:
    double.answer("POST", "/v1/filesystems/bb/add", answer(view()))
    stripes = ("--stripe-count", "-1", "--stripe-size", "1MiB", "--stripe-pool", "flash")
    words = ("add", "bb", "/bb", "--quota", "lustre", "--layout", "lustre", *stripes)
    result = forebay(double.config, "pool", "filesystem", *words)
    assert result.exit_code == ExitCode.OK, result.stderr
    body = double.asked[0].body
    assert (body["path"], body["quota"], body["layout"]) == ("/bb", "lustre", LAYOUT)
    assert "lustre 4x1MiB" in result.stdout


def test_a_change_sends_only_what_was_given(double: Double) -> None:
    double.answer("GET", "/v1/filesystems", answer(view()))
    double.answer("POST", "/v1/filesystems/bb/add", answer(view()))
    result = forebay(double.config, "pool", "filesystem", "set", "bb", "--quota", "none")
    assert result.exit_code == ExitCode.OK, result.stderr
    body = double.asked[-1].body
    assert (body["path"], body["quota"]) == ("/bb", "none") and "layout" not in body


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("set", "bb"), ExitCode.BAD_INPUT),
        (("set", "bb", "--stripe-count", "4"), ExitCode.BAD_INPUT),
        (("set", "bb", "--quota", "zfs"), ExitCode.BAD_INPUT),
        (("set", "bb", "--layout", "lustre", "--stripe-size", "x"), ExitCode.BAD_INPUT),
        (("set", "cc", "--quota", "none"), ExitCode.NOT_FOUND),
        (("check",), ExitCode.BAD_INPUT),
        (("check", "bb", "--path", "/"), ExitCode.BAD_INPUT),
        (("check", "cc"), ExitCode.NOT_FOUND),
        (("check", "--path", "/nowhere"), ExitCode.REFUSED),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_changed(
    double: Double, words: tuple[str, ...], code: ExitCode
) -> None:
    double.answer("GET", "/v1/filesystems", answer(view()))
    result = forebay(double.config, "pool", "filesystem", *words)
    assert result.exit_code == code, result.stderr
    assert all(asked.method == "GET" for asked in double.asked)


def test_a_check_by_name_uses_the_clusters_adapters_and_identity(double: Double, tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    identity = filesystems.mark(str(tmp_path))
    double.answer("GET", "/v1/filesystems", answer(view(tmp_path, identity, "auto", "none")))
    result = forebay(double.config, "pool", "filesystem", "check", "bb", "--json")
    assert result.exit_code == ExitCode.OK, result.stderr
    report = json.loads(result.stdout)
    assert report["usable"] and report["path"] == str(tmp_path)
    assert {one["status"] for one in report["checks"] if one["needed"]} == {"ok"}
    assert os.listdir(tmp_path) == [".forebay-filesystem"]
    double.answer("GET", "/v1/filesystems", answer(view(tmp_path, "0" * 32, "auto", "none")))
    assert forebay(double.config, "pool", "filesystem", "check", "bb").exit_code == ExitCode.REFUSED


def test_the_exit_code_says_that_something_needed_does_not_work(double: Double, tmp_path: Path) -> None:
    (tmp_path / "fs").mkdir()
    # No lfs is installed here.
    result = forebay(double.config, "pool", "filesystem", "check", "--path", tmp_path / "fs", "--quota", "lustre")
    assert result.exit_code == ExitCode.REFUSED and "quota" in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["rename", "ok", "yes", "-"] in rows and any(row[:3] == ["quota", "failed", "yes"] for row in rows)
