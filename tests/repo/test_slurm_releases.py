"""Releases of Slurm that exercises run with: their roots, what is drawn of them, and the table of their results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm import releases
from tests.slurm.__main__ import CI_ROWS, CI_SIZES, main
from tests.slurm.exercises import EXERCISES, ROWS
from tests.slurm.releases import chosen_runs
from tests.slurm.results import FEATURES, FILE, Result, load, record, table
from tests.slurm.roots import RELEASES, Root, RootError, release_of
from tests.slurm.site import Site


def _result(row: str = "arrays", release: str = "24.11", **more: object) -> Result:
    fields = {"plugin": "lua", "version": "24.11.5-4", "date": "2026-11-27", "outcome": "passed", "size": 1, **more}
    return Result(row=row, release=release, **fields)  # type: ignore[arg-type]


def test_a_release_is_read_from_a_version_of_debian() -> None:
    versions = {"22.05.8-4+deb12u3": "22.05", "24.11.5-4": "24.11", "1:26.05.5-1": "26.05", "none": ""}
    assert {version: release_of(version) for version in versions} == versions


def test_all_releases_with_both_plugins_are_six_runs() -> None:
    runs = chosen_runs("all", "both", [["ci"]], None)
    assert runs == [(release, plugin, ("ci",)) for release in RELEASES for plugin in ("lua", "datawarp")]
    assert chosen_runs("24.11", "lua", [["ci"]], None) == [("24.11", "lua", ("ci",))]


def test_six_days_run_all_of_ci_with_each_release_and_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    days: list[list[releases.Run]] = []
    monkeypatch.setattr("tests.slurm.__main__.exercise", lambda chosen, runs: days.append(runs))
    for day in range(20785, 20791):
        main(["exercise", "ci", "--release", "all", "--turn", str(day)])
    assert all(len({run.release for run in runs}) == 1 for runs in days)  # so that one root is built
    halves = (("lifecycle", "arrays", "--rounds", "0"), ("refusals", "--rows", ",".join(CI_ROWS)))
    expected = {(release, plugin, half) for release in RELEASES for plugin in ("lua", "datawarp") for half in halves}
    assert {run for runs in days for run in runs} == expected


def test_what_ci_is_short_for_exists_and_shares_a_site() -> None:
    assert set(CI_SIZES) <= set(EXERCISES) and set(CI_ROWS) <= set(ROWS)
    assert len({json.dumps(EXERCISES[name].site(size)) for name, size in CI_SIZES.items()}) == 1


@pytest.mark.parametrize(
    "words", [["ci", "--rounds", "3"], ["ci", "arrays"], ["arrays", "--record"], ["arrays", "--turn", "0"]]
)
def test_options_that_do_not_fit_are_rejected(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["exercise", *words])
    assert "ci" in capsys.readouterr().err


def test_a_root_that_is_not_built_has_no_version(tmp_path: Path) -> None:
    assert Root("24.11", tmp_path).version == ""


def test_a_root_reports_that_its_suite_has_a_newer_slurm(tmp_path: Path) -> None:
    root = Root("26.05", tmp_path)
    (tmp_path / "26.05").mkdir()
    for name, version in (("version", "26.05.5-1"), ("moved", "26.05.6-1")):
        (tmp_path / "26.05" / name).write_text(f"{version}\n")
    assert root.moved() == "26.05.6-1"
    (tmp_path / "26.05" / "moved").write_text("26.05.5-1\n")
    assert root.moved() == ""


def test_a_row_that_fails_inside_an_exercise_is_recorded_once(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with pytest.raises(ValueError, match="held"), site.recorded("refusals"):
        with site.recorded("refusals requests"):
            pass
        with site.recorded("refusals quota"):
            raise ValueError("held")
    with site.recorded("arrays"):
        pass
    assert site.outcomes == [("refusals requests", ""), ("refusals quota", "held"), ("arrays", "")]


def test_a_later_result_replaces_that_of_the_same_row_release_and_plugin(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    record([_result(), _result("lifecycle")], file)
    record([_result(outcome="failed", cause="job 3 is held"), _result(release="26.05")], file)
    kept = load(file)
    assert [(one.row, one.release, one.outcome) for one in kept] == [
        ("lifecycle", "24.11", "passed"),
        ("arrays", "24.11", "failed"),
        ("arrays", "26.05", "passed"),
    ]


def test_the_table_tells_passed_from_failed_and_from_not_run() -> None:
    shown = table(
        [
            _result("mass", size=1000),
            _result("mass", "26.05", version="26.05.5-1", outcome="failed", cause="job 3\nis held"),
        ]
    )
    *_, row = (line for line in shown.splitlines() if line.startswith("| mass "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    failed = "failed, 2026-11-27 (1)"
    assert cells == ["mass", "not run", "not run", "2026-11-27 (1000)", "not run", failed, "not run"]
    assert shown.endswith("\nFailures:\n\n- mass, 26.05 lua: `job 3 is held`\n")
    assert (
        "- 24.11: 24.11.5-4 (Debian trixie, SlurmUser root)\n- 26.05: 26.05.5-1 (Debian sid, SlurmUser root)\n" in shown
    )


def test_the_table_shows_which_plugin_an_exercise_is_not_for() -> None:
    shown = table([_result("datawarp-scripts", plugin="datawarp")])
    row = next(line for line in shown.splitlines() if line.startswith("| datawarp-scripts "))
    assert [cell.strip() for cell in row.strip("|").split("|")][1::2] == ["n/a", "n/a", "n/a"]


def test_the_results_that_are_kept_are_of_rows_that_exist() -> None:
    results = load(FILE)
    assert results and all(one.row in FEATURES and one.release in RELEASES for one in results)
    assert [one.key for one in results] == sorted({one.key for one in results})
    assert all(release_of(one.version) == one.release for one in results)


def test_a_release_whose_root_cannot_be_built_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def build(root: Root, *, renew: bool = False) -> None:
        raise RootError(f"Slurm {root.release}: the Debian {root.suite} could not be built (no network)")

    monkeypatch.setattr(Root, "build", build)
    monkeypatch.setattr(releases, "unable", lambda: "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["exercise", "ci", "--release", "26.05"]) == releases.UNABLE
    said = capsys.readouterr()
    assert "skipped: Slurm 26.05: the Debian sid could not be built (no network)" in said.err
    assert said.out == ""


def test_a_release_whose_root_cannot_be_built_is_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def build(self: Root) -> None:
        raise RootError(f"Slurm {self.release}: no mirror answers")

    monkeypatch.setattr(releases, "unable", lambda: "")
    monkeypatch.setattr(Root, "build", build)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["exercise", "ci", "--release", "24.11"]) == releases.UNABLE
    assert "skipped: Slurm 24.11: no mirror answers" in capsys.readouterr().err
