"""`forebay job suspend|resume|requeue` and `forebay buffer clear`: what is sent, and what is bad input."""

from __future__ import annotations

import pytest

from cluster.cli.exits import ExitCode
from cluster.client.run_views import PersistentCleared
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.views import PENDING


@pytest.mark.parametrize("word", ["suspend", "resume", "requeue"])
def test_each_job_is_asked_for_by_itself_and_its_standing_is_said(double: Double, word: str) -> None:
    for job in (1, 2):
        double.answer("POST", f"/v1/jobs/{job}/{word}", PENDING)
    result = forebay(double.config, "job", word, "1", "2")
    assert result.exit_code == ExitCode.OK, result.stderr
    assert [asked.target for asked in double.asked] == [f"/v1/jobs/1/{word}", f"/v1/jobs/2/{word}"]
    assert result.stdout.count("JobState=") == 2


def test_a_buffer_is_cleared_by_its_job_or_by_its_name_and_data_is_only_discarded_when_that_is_said(
    double: Double,
) -> None:
    double.answer("POST", "/v1/jobs/1/clear", PENDING)
    double.answer("POST", "/v1/persistent/lake/clear", PersistentCleared(revision=5, name="lake"))
    assert forebay(double.config, "buffer", "clear", "1").exit_code == ExitCode.OK
    assert double.asked[-1].body["discard"] is False
    result = forebay(double.config, "buffer", "clear", "--name", "lake", "--discard")
    assert (result.exit_code, result.stdout) == (ExitCode.OK, "the persistent buffer lake is cleared\n")
    assert double.asked[-1].body["discard"] is True


@pytest.mark.parametrize("words", [(), ("1", "--name", "lake")])
def test_clear_without_a_buffer_or_with_two_kinds_of_them_is_bad_input(double: Double, words: tuple[str, ...]) -> None:
    result = forebay(double.config, "buffer", "clear", *words)
    assert result.exit_code == ExitCode.BAD_INPUT and not double.asked
