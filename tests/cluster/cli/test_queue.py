"""`forebay queue`: arrays on one line, failures first."""

from __future__ import annotations

from forebay.cluster.schemas import JobDetailsView, JobsAnswer, JobView
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.views import job


def task(number: int, **changes: object) -> JobView:
    return job(job_id=20 + number, details=JobDetailsView(array_job_id=17, array_task_id=number), **changes)


def numbers(double: Double, *words: str) -> list[str]:
    return [line.split()[0] for line in forebay(double.config, "queue", *words).stdout.splitlines()[1:]]


def test_pending_array_tasks_share_a_line_and_running_ones_do_not(double: Double) -> None:
    running = task(1, state="RUNNING", reason="None", node="n1", start_time="2026-01-31T10:57:55.000000Z")
    waiting = [task(number) for number in (2, 3, 4, 7)]
    other = task(9, reason="Dependency")
    answer = JobsAnswer(revision=5, jobs=(running, *waiting, other, job(job_id=40)))
    double.answer("GET", r"/v1/jobs\?.*", answer)
    assert numbers(double) == ["17_1", "17_[2-4,7]", "17_9", "40"]
    assert sorted(numbers(double, "-o", "%i")) == sorted(["17_1", "17_2", "17_3", "17_4", "17_7", "17_9", "40"])


def test_queue_with_all_lists_failed_jobs_first(double: Double) -> None:
    states = {1: "COMPLETED", 2: "FAILED", 3: "RUNNING", 4: "NODE_FAIL", 5: "TIMEOUT", 6: "CANCELLED"}
    jobs = tuple(job(job_id=number, state=state, reason="None") for number, state in states.items())
    double.answer("GET", r"/v1/jobs\?.*", JobsAnswer(revision=5, jobs=jobs))
    assert numbers(double, "--all") == ["2", "4", "5", "1", "3", "6"]
