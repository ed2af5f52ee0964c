"""Listings and answers made comparable."""

import re

from tests.conformance.replayer.compare import Outcome
from tests.conformance.replayer.differences import Difference, Differences, Kind, Situation
from tests.conformance.replayer.texts import answer_lines, compare_texts, is_burst_line, normal_line, says

NONE = Differences(())


def where(line: str) -> Situation:
    return Situation("lua", "show", "scontrol show burst")


JOB = "    JobID=4 CreateTime=2026-11-20T22:12:00 Pool=p Size=1GiB State=allocated UserID=ann(20001)"


def test_times_user_numbers_places_and_job_numbers_make_no_difference() -> None:
    there = JOB.replace("JobID=4", "JobID=9").replace("22:12:00", "01:02:03").replace("20001", "7")
    assert normal_line(JOB) == normal_line(there, {"9": "4"})
    assert normal_line("  GetSysState=$HERE/bin/dw") == normal_line("  GetSysState=/elsewhere/dw")


def test_a_size_makes_a_difference() -> None:
    steps = compare_texts(3, [normal_line(JOB)], [[normal_line(JOB.replace("1GiB", "2GiB"))]], where, NONE)
    assert {step.outcome for step in steps} == {Outcome.FAILED}


def test_a_listing_must_have_been_true_at_one_moment_of_its_time() -> None:
    first, second = ["a", "b"], ["a", "c"]
    assert all(step.outcome is Outcome.MATCHED for step in compare_texts(1, second, [first, second], where, NONE))
    mixed = compare_texts(1, ["b", "c"], [first, second], where, NONE)
    assert Outcome.FAILED in {step.outcome for step in mixed}


def test_lines_of_a_refused_job_and_the_sums_with_it_are_not_compared() -> None:
    expected = [
        "Name=lua DefaultPool=(null) FreeSpace=1",
        "  Allocated Buffers:",
        normal_line(JOB),
        "    UserID=ann(N) Used=1",
    ]
    got = ["Name=lua DefaultPool=(null) FreeSpace=2"]
    assert compare_texts(1, expected, [got], where, NONE, refused=frozenset({"4"})) == []
    assert Outcome.FAILED in {step.outcome for step in compare_texts(1, expected, [got], where, NONE)}


def test_a_row_declares_a_line() -> None:
    row = Difference(
        "x", Kind.LINE, "w", "SEMANTICS", *(re.compile(text) for text in (".*", "", "  Flags=A", "  Flags=B"))
    )
    steps = compare_texts(1, ["  Flags=A"], [["  Flags=B"]], where, Differences((row,)))
    assert [step.outcome for step in steps] == [Outcome.DECLARED]


def test_lines_of_show_burst_are_told_from_others() -> None:
    assert is_burst_line(JOB) and is_burst_line("  Per User Buffer Use:")
    assert not is_burst_line("   JobState=PENDING Reason=None Dependency=(null)")


def test_an_answer_is_compared_without_the_names_of_programs() -> None:
    said = ["sbatch: error: burst_buffer/lua: no quota", "sbatch: error: Batch job submission failed: It is invalid"]
    assert answer_lines(said) == ["burst_buffer/lua: no quota", "It is invalid"]
    assert says("It is invalid", ["forebay: line 2: It is invalid"]) and not says("It is invalid", ["It is valid"])
