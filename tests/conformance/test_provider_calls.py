"""What a provider is told: each way of telling it something else is found beside the log of a transcript."""

import re
from collections.abc import Callable

import pytest

from tests.conformance.replayer.compare import Outcome
from tests.conformance.replayer.differences import Difference, Differences, Kind, Situation
from tests.conformance.replayer.provider_calls import Call, compare_calls, read_calls, recorded_calls, without_repeats
from tests.conformance.replayer.transcript import parse

LUA = """
    10:00:00.100 process start $RUN/state/hash.7/job.7/script nil nil
    10:00:00.110 process end rc=0 $RUN/state/hash.7/job.7/script nil nil
    10:00:01.000 setup start 7 20001 65534 near 8192 $RUN/state/hash.7/job.7/script
    10:00:02.000 setup end rc=0 7 20001 65534 near 8192 $RUN/state/hash.7/job.7/script
    10:00:02.100 data_in start 7 /proc/8/fd/9
    10:00:02.200 data_in end rc=1 7 /proc/8/fd/9
    10:00:03.100 data_in start 7 /proc/8/fd/9
    10:00:03.200 data_in end rc=0 helper-status=1 7 /proc/8/fd/9
    10:00:03.300 real_size start 7
    10:00:04.000 paths start 7 $RUN/script $RUN/state/hash.7/job.7/path
    10:00:04.100 paths end rc=0 7 $RUN/script $RUN/state/hash.7/job.7/path
    10:00:05.000 teardown start 7 $RUN/state/hash.7/job.7/script hurry=true
    10:00:06.000 teardown end rc=0 7 $RUN/state/hash.7/job.7/script hurry=true
"""
DATAWARP = """
    10:00:00.100 start --function job_process --job $RUN/script
    10:00:00.110 end   rc=0 job_process
    10:00:01.000 start --function create_persistent -c CLI -t lake -u 20001 -C wlm:1048576 -a striped -T scratch
    10:00:01.100 end   rc=0 create_persistent lake
    10:00:02 start --function setup --token 7 --caller SLURM --user 20001 --groupid 65534 --capacity wlm:1MiB --job /s
    10:00:02.100 end   rc=0 setup 7
    10:00:03.000 start --function data_in --token 7 --job $RUN/script
    10:00:04.000 start --function teardown --token 7 --job $RUN/script --hurry
    10:00:04.100 end   rc=1 teardown 7
"""
NONE = Differences(())
WHERE = Situation("lua")


def named(what: str, number: str, about: str) -> str:
    return f"uid(ann{number})" if what == "uid" else "gid"


def calls(text: str) -> list[Call]:
    return read_calls(enumerate(text.strip("\n").splitlines(), start=1), named)


def failures(seen: list[Call], made: list[Call], rows: Differences = NONE, *, whole: bool = True) -> list[str]:
    steps = compare_calls(without_repeats(seen), without_repeats(made), rows, WHERE, whole=whole)
    return [f"{step.expected} -> {step.got}" for step in steps if step.outcome is Outcome.FAILED]


def test_the_calls_of_a_job_are_read_without_what_differs_from_machine_to_machine() -> None:
    assert [call.text for call in without_repeats(calls(LUA))] == [
        "setup JOB uid(ann20001) gid near 8192 PATH",
        "data_in JOB PATH",
        "real_size JOB",
        "paths JOB PATH PATH",
        "teardown JOB PATH hurry=true",
    ]
    assert [(call.about, call.text, call.code) for call in calls(DATAWARP)] == [
        ("lake", "create_persistent --function create_persistent -c CLI -t lake -u uid(ann20001) -C wlm:1048576 "
                 "-a striped -T scratch", 0),
        ("7", "setup --function setup --token JOB --caller SLURM --user uid(ann20001) --groupid gid "
              "--capacity wlm:1MiB --job PATH", 0),
        ("7", "data_in --function data_in --token JOB --job PATH", None),
        ("7", "teardown --function teardown --token JOB --job PATH --hurry", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("log", [LUA, DATAWARP])
def test_the_same_calls_differ_in_nothing_wherever_their_files_are_and_whatever_the_job_is_called(log: str) -> None:
    elsewhere = log.replace("$RUN/", "/tmp/other/").replace("10:", "23:")
    assert failures(calls(log), calls(elsewhere)) == []


PLANTED: dict[str, tuple[str, Callable[[str], str]]] = {
    "hurry is always false": (LUA, lambda text: text.replace("hurry=true", "hurry=false")),
    "hurry is never said": (DATAWARP, lambda text: text.replace(" --hurry", "")),
    "the buffer is not torn down": (LUA, lambda text: re.sub(r".* teardown .*\n", "", text)),
    "it is torn down twice": (LUA, lambda text: text + "    10:00:07.000 teardown start 7 /x hurry=true\n"),
    "it is torn down first": (LUA, lambda text: "    09:00:00.000 teardown start 7 /x hurry=true\n" + re.sub(
        r".* teardown .*\n", "", text)),
    "data_out is called though nothing ran": (LUA, lambda text: text.replace("real_size", "data_out")),
    "another pool": (LUA, lambda text: text.replace(" near ", " far ")),
    "a size that is not rounded up": (LUA, lambda text: text.replace(" 8192 ", " 5000 ")),
    "another user's id": (LUA, lambda text: text.replace(" 20001 ", " 0 ")),
    "a size in other words": (DATAWARP, lambda text: text.replace("wlm:1MiB", "wlm:1048576")),
    "without its access": (DATAWARP, lambda text: text.replace(" -a striped", "")),
    "another name": (DATAWARP, lambda text: text.replace("-t lake", "-t pond")),
    "a retry of what had succeeded": (LUA, lambda text: text.replace("rc=1", "rc=0")),
}  # fmt: skip
"""A wrong implementation in each way -> the log that it would have made."""


@pytest.mark.parametrize("bug", PLANTED)
def test_what_a_provider_is_told_wrongly_is_found(bug: str) -> None:
    log, planted = PLANTED[bug]
    assert planted(log) != log
    assert failures(calls(log), calls(planted(log)))


def test_what_comes_after_the_last_line_of_a_log_is_aside_only_where_the_log_ends_before_the_job() -> None:
    cut = calls(LUA)[:2]
    assert failures(cut, calls(LUA), whole=False) == []
    assert len(failures(cut, calls(LUA), whole=True)) == 3
    assert failures(calls(LUA), cut, whole=False), "what Slurm told its provider must be told"


def test_a_row_may_say_that_a_call_differs() -> None:
    pattern = re.compile
    row = Difference(
        "paths", Kind.CALL, "what", "SEMANTICS", pattern(".*"), pattern(""), pattern(""), pattern("paths .*")
    )
    without = [call for call in calls(LUA) if not call.text.startswith("paths")]
    assert failures(without, calls(LUA), Differences((row,))) == []
    assert failures(calls(LUA), without, Differences((row,)))


def test_the_logs_of_a_transcript_are_read_with_the_names_that_its_listings_have() -> None:
    head = "[   0.000] # trace here  wall 2026-11-20T22:10:45.054\n"
    listing = "[   0.100] $ scontrol show burst\n    UserID=ann(20001) Used=1\n"
    (transcript,) = parse(f"{head}{listing}[   0.200] calls.log:{LUA.rstrip()}\n", "a.txt")
    found = recorded_calls(transcript)
    assert found[0].text == "setup JOB uid(ann) gid near 8192 PATH" and found[0].line == 7


def test_of_a_log_that_begins_in_the_middle_of_a_job_only_what_it_has_is_compared() -> None:
    lines = LUA.strip("\n").splitlines()
    rest = next(number for number, line in enumerate(lines) if "paths end" in line)
    seen, made = calls("\n".join(lines[rest:])), calls(LUA)
    assert [call.text for call in seen] == ["teardown JOB PATH hurry=true"]
    assert failures(seen, made) == []
    assert failures(seen, calls(LUA.replace("hurry=true", "hurry=false"))) != []
    assert failures(calls(LUA), made[1:]) != [], "a log that has all of it is held to all of it"
