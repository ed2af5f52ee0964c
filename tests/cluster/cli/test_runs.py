"""`forebay job suspend|resume|requeue` and `forebay buffer clear`: requests and bad input."""

from __future__ import annotations

import msgspec
import pytest

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.job_fields import JobDetailsView
from forebay.cluster.schemas.jobs import BuffersAnswer, BufferView, JobsAnswer, JobView, WhyView
from forebay.cluster.schemas.requests import PersistentClearedAnswer
from forebay.cluster.schemas.transfers import TransfersAnswer
from tests.clocks import local_zone
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.transfer_views import OF_A_JOB, TRANSFERS
from tests.cluster.cli.views import HISTORY, PENDING, job


@pytest.mark.parametrize("word", ["suspend", "resume", "requeue"])
def test_one_job_is_requested_by_its_path(double: Double, word: str) -> None:
    double.answer("POST", f"/v1/jobs/1/{word}", PENDING)
    result = forebay(double.config, "job", word, "1")
    assert result.exit_code == ExitCode.OK, result.stderr
    assert [asked.target for asked in double.asked] == [f"/v1/jobs/1/{word}"]
    assert result.stdout.count("JobState=") == 1


def test_clear_takes_a_job_or_a_name_and_discards_only_on_request(
    double: Double,
) -> None:
    double.answer("POST", "/v1/jobs/1/clear", PENDING)
    double.answer("POST", "/v1/persistent/lake/clear", PersistentClearedAnswer(revision=5, name="lake"))
    assert forebay(double.config, "buffer", "clear", "1", "--yes").exit_code == ExitCode.OK
    assert "discard" not in double.asked[-1].body
    result = forebay(double.config, "buffer", "clear", "--name", "lake", "--discard", "--yes")
    assert (result.exit_code, result.stdout) == (ExitCode.OK, "Cleared persistent buffer lake.\n")
    assert double.asked[-1].body["discard"] is True


@pytest.mark.parametrize("words", [(), ("1", "--name", "lake")])
def test_clear_without_a_buffer_or_with_both_kinds_is_bad_input(double: Double, words: tuple[str, ...]) -> None:
    result = forebay(double.config, "buffer", "clear", *words)
    assert result.exit_code == ExitCode.BAD_INPUT and not double.asked


def task(number: int, state: str = "CANCELLED", reason: str = "None") -> JobView:
    """Return a task of array 10."""
    details = JobDetailsView(array_job_id=10, array_task_id=number)
    return job(job_id=9 + number, state=state, reason=reason, burst_buffer_state=None, details=details)


def test_changed_array_tasks_in_the_same_state_share_a_line(double: Double) -> None:
    double.answer("POST", "/v1/jobs/10/cancel", task(1))
    tasks = (task(1), task(2), task(3, "RUNNING"), task(4), task(5, "COMPLETED"))
    double.answer("GET", r"/v1/jobs\?job=10&.*after=0", JobsAnswer(revision=9, jobs=tasks[:3], truncated=True))
    double.answer("GET", r"/v1/jobs\?job=10&.*after=12", JobsAnswer(revision=9, jobs=tasks[3:]))
    result = forebay(double.config, "cancel", "10")
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout.splitlines() == [
        "JobId=10_[1-2,4] JobState=CANCELLED Reason=None",
        "JobId=10_3 JobState=RUNNING Reason=None",
        "JobId=10_5 JobState=COMPLETED Reason=None",
    ]


def test_a_successful_change_is_no_failure_if_tasks_cannot_be_listed(double: Double) -> None:
    double.answer("POST", "/v1/jobs/10/cancel", task(1))
    double.refuse("GET", r"/v1/jobs\?.*", 400, "unknown_query", "the query parameter 'job' is unknown here")
    result = forebay(double.config, "cancel", "10")
    assert (result.exit_code, result.stdout) == (ExitCode.OK, "JobId=10_1 JobState=CANCELLED Reason=None\n")


def test_a_change_of_one_task_prints_it_without_further_requests(double: Double) -> None:
    double.answer("POST", "/v1/jobs/10_3/hold", task(3, "PENDING", "JobHeldUser"))
    result = forebay(double.config, "job", "hold", "10_3")
    assert (result.stdout, len(double.asked)) == ("JobId=10_3 JobState=PENDING Reason=JobHeldUser\n", 1)


def test_a_job_with_the_id_of_an_arrays_first_task_is_printed_alone(double: Double) -> None:
    double.answer("POST", "/v1/jobs/12/hold", task(3, "PENDING", "JobHeldUser"))
    result = forebay(double.config, "job", "hold", "12")
    assert (result.stdout, len(double.asked)) == ("JobId=10_3 JobState=PENDING Reason=JobHeldUser\n", 1)


def test_tasks_are_listed_and_explained_by_their_array_names(double: Double) -> None:
    double.answer("GET", r"/v1/jobs\?.*", JobsAnswer(revision=9, jobs=(PENDING, task(3, "PENDING", "Dependency"))))
    lines = forebay(double.config, "queue").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["42", "10_3"]
    why = WhyView(
        revision=9, at="2026-01-01T00:00:00Z", job_id=12, name="10_3", state="PENDING", reason="Dependency",
        sentence="it waits", blockers=(10, 11), blocking=("10_1", "10_2"),
    )  # fmt: skip
    double.answer("GET", r"/v1/jobs/12/why", why)
    said = forebay(double.config, "job", "why", "12").stdout
    assert said.startswith("Job 10_3: ") and "Waiting for jobs 10_1, 10_2." in said


def test_a_pending_job_is_shown_with_its_expected_start(double: Double) -> None:
    waiting = job(expected_start="2026-11-20T22:13:17.5Z", expected_after=("space", "cpus"), time_limit_s=60)
    double.answer("GET", "/v1/jobs/42", waiting)
    with local_zone("UTC"):
        said = forebay(double.config, "job", "show", "42").stdout
    assert "   StartTime=2026-11-20T22:13:17 EndTime=2026-11-20T22:14:17 Deadline=N/A\n" in said
    assert said.endswith(" WaitsFor=space,cpus\n")
    double.answer("GET", "/v1/jobs/42", job(expected_after=("hold",)))
    said = forebay(double.config, "job", "show", "42").stdout
    assert "   StartTime=Unknown EndTime=Unknown Deadline=N/A\n" in said
    assert said.endswith(" WaitsFor=hold\n")


def test_listings_and_timelines_name_tasks_by_array(double: Double) -> None:
    history = msgspec.structs.replace(HISTORY, task="10_3")
    double.answer("GET", "/v1/jobs/10_3/history", history)
    assert "Job 10_3: " in forebay(double.config, "job", "history", "10_3").stdout
    row = msgspec.structs.replace(TRANSFERS[0], task="10_3")
    double.answer("GET", "/v1/transfers.*", TransfersAnswer(revision=5, transfers=(row,)))
    assert "10_3 " in forebay(double.config, "transfer", "list").stdout
    double.answer("GET", "/v1/transfers/10_3", msgspec.structs.replace(OF_A_JOB, task="10_3"))
    assert forebay(double.config, "transfer", "show", "10_3").stdout.startswith("JobId=10_3\n")
    buffer = BufferView(
        job_id=12, task="10_3", user="alice", state="running", pool="fast", capacity_bytes=1, requested_bytes=1,
        held_bytes=1, node="n1", revision=5,
    )  # fmt: skip
    double.answer("GET", "/v1/buffers.*", BuffersAnswer(revision=5, buffers=(buffer,)))
    assert "10_3 " in forebay(double.config, "buffer", "list").stdout
