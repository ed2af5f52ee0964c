"""Comparison of Slurm's jobs with Forebay's external jobs, and the resulting actions."""

from __future__ import annotations

import itertools
import socket
from pathlib import Path
from typing import cast

import pytest

from forebay.cluster.client import Client
from forebay.cluster.slurm import slurmctld
from forebay.cluster.slurm.metrics import BridgeMetrics
from forebay.cluster.slurm.reconciler import FORGOTTEN, LEFT, Reconciler, stuck_status
from forebay.cluster.slurm.slurmctld import STAGING_OUT, SlurmView, SqueueRow, parsed_buffers, parsed_jobs, parsed_pools
from forebay.cluster.system import SystemClock
from forebay.replica.operations import ExternalJobPhase
from tests.cluster.harness import story
from tests.cluster.slurm.leader import LeaderDouble

NOBODY = SlurmView(frozenset(), {})


class Books:
    """Both sides."""

    def __init__(self) -> None:
        self.leader = LeaderDouble()
        self.slurm: SlurmView | str = NOBODY
        self.metrics = BridgeMetrics()
        self.pools: frozenset[str] | None = None
        self.reconciler = Reconciler(
            cast(Client, self.leader), "token", SystemClock(), self.metrics, self.ask, lambda: self.pools
        )

    async def ask(self) -> SlurmView | str:
        return self.slurm

    def external_job(self, phase: str, job: str = "42", epoch: int = 1) -> None:
        self.leader.external_jobs[job] = {"phase": phase, "epoch": epoch, "size": 1}

    async def looks(self, *answers: SlurmView | str) -> None:
        for answer in answers:
            self.slurm = answer
            await self.reconciler.look()


AT_WORK = [
    "waiting", "set-up", "staging-in", "stage-in-failed", "staged-in", "running", "post-run", "staging-out",
    "stage-out-failed",
]  # fmt: skip
WITH_BUFFER = SlurmView(frozenset({"42"}), {"42": "staged-in"})
OVER = SlurmView(frozenset({"42"}), {"42": "allocated"}, frozenset({"42"}))
PENDING = SlurmView(frozenset({"42"}), {})


@story
@pytest.mark.parametrize("phase", list(ExternalJobPhase))
async def test_an_external_job_unknown_in_two_checks_is_torn_down(phase: ExternalJobPhase) -> None:
    books = Books()
    books.external_job(phase.value)
    await books.looks(NOBODY)
    assert books.leader.forgotten == []
    await books.looks(NOBODY)
    assert books.leader.forgotten == ([("42", FORGOTTEN)] if phase.value in AT_WORK else [])
    await books.looks(NOBODY, NOBODY)
    assert len(books.leader.forgotten) <= 1


@story
@pytest.mark.parametrize("phase", list(ExternalJobPhase))
async def test_a_finished_jobs_buffer_is_torn_down_after_two_checks(phase: ExternalJobPhase) -> None:
    books = Books()
    books.external_job(phase.value)
    await books.looks(WITH_BUFFER, OVER)
    assert books.leader.forgotten == []
    await books.looks(OVER)
    assert books.leader.forgotten == ([("42", LEFT)] if phase.value in AT_WORK else [])


@story
@pytest.mark.parametrize("phase", list(ExternalJobPhase))
@pytest.mark.parametrize("state", ["R", "CG", "SO"])
async def test_unrequested_results_are_exported_after_two_checks(phase: ExternalJobPhase, state: str) -> None:
    books = Books()
    jobs = parsed_jobs(f"42 {state}\n")
    staging_out = frozenset(job for job, shown in jobs.items() if shown.state == STAGING_OUT)
    # Buffer as shown by a restarted slurmctld.
    ended = SlurmView(frozenset(jobs), {"42": "allocated"}, staging_out=staging_out)
    books.external_job(phase.value)
    await books.looks(ended, WITH_BUFFER, ended)
    assert ("stage_out_external_job", "42") not in books.leader.asked
    await books.looks(ended)
    exported = state == "SO" and phase.value in ("running", "post-run")
    assert (("stage_out_external_job", "42") in books.leader.asked) is exported
    assert books.leader.forgotten == []
    # Slurm still counts the buffer, which has ended in Forebay; this is no difference.
    del books.leader.external_jobs["42"]
    believed = SlurmView(frozenset({"42"}), {"42": "post-run"}, staging_out=staging_out)
    await books.looks(believed, believed, believed)
    assert (books.leader.missed == []) is exported


@story
@pytest.mark.parametrize("between", [WITH_BUFFER, PENDING, "slurmctld does not answer"])
async def test_one_check_never_suffices_and_unanswered_checks_do_not_count(between: SlurmView | str) -> None:
    books = Books()
    books.external_job("staged-in")
    await books.looks(NOBODY, between)
    assert books.leader.forgotten == []
    await books.looks(NOBODY)
    # A job that was known in between starts from zero; an unanswered check does not matter.
    assert bool(books.leader.forgotten) is isinstance(between, str)


@story
async def test_no_action_is_taken_while_slurmctld_does_not_answer() -> None:
    books = Books()
    for phase, job in zip(AT_WORK, itertools.count(1)):
        books.external_job(phase, str(job))
    await books.looks(*["slurmctld does not answer"] * 5)
    assert (books.leader.forgotten, books.leader.missed) == ([], [])


@story
async def test_the_next_epoch_counts_as_another_external_job() -> None:
    books = Books()
    books.external_job("staged-in")
    await books.looks(NOBODY)
    books.external_job("staged-in", epoch=2)
    await books.looks(NOBODY)
    assert books.leader.forgotten == []
    await books.looks(NOBODY)
    assert [job for job, _ in books.leader.forgotten] == ["42"]


@story
async def test_a_buffer_without_an_external_job_is_reported_once() -> None:
    books = Books()
    await books.looks(WITH_BUFFER)
    assert books.leader.missed == []
    await books.looks(WITH_BUFFER, WITH_BUFFER)
    assert books.leader.missed == [("42", "staged-in")]
    books.external_job("staged-in")
    await books.looks(WITH_BUFFER)
    del books.leader.external_jobs["42"]
    await books.looks(WITH_BUFFER, WITH_BUFFER)
    assert len(books.leader.missed) == 2  # lost once more


@story
async def test_buffers_in_pools_of_the_sites_script_are_not_reported() -> None:
    books = Books()
    books.pools = frozenset({"fast"})
    await books.looks(*[WITH_BUFFER._replace(pools={"42": "scratch"})] * 3, *[WITH_BUFFER] * 3)
    assert books.leader.missed == []
    await books.looks(*[WITH_BUFFER._replace(pools={"42": "fast"})] * 2)
    assert books.leader.missed == [("42", "staged-in")]


STAGING = SlurmView(frozenset({"42"}), {}, staging_in=frozenset({"42"}), pending=frozenset({"42"}))
"""State after SIGKILL: slurmctld has the job's state, but no record of its buffer."""

RECORDED = STAGING._replace(buffers={"42": "staging-in"})
TEARING_DOWN = SlurmView(frozenset({"42"}), {"42": "teardown"}, pending=frozenset({"42"}))
"""State after a takeover: the teardown has ended, but the new slurmctld does not know this."""


def stuck_in(books: Books, tmp_path: Path) -> bool:
    """Return whether the metric counts job 42 as stuck; `stuck` must agree."""
    books.metrics.write(tmp_path / "forebay.prom")
    counted = "forebay_slurm_jobs_stuck 1.0" in (tmp_path / "forebay.prom").read_text()
    assert counted == (books.reconciler.stuck == {"42"})
    return counted


@story
@pytest.mark.parametrize("phase", list(ExternalJobPhase))
async def test_a_job_with_a_lost_stage_in_is_reported_once_after_two_checks(
    phase: ExternalJobPhase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    books = Books()
    books.external_job(phase.value)
    await books.looks(STAGING, RECORDED._replace(staging_in=frozenset()), STAGING)
    assert not stuck_in(books, tmp_path) and "will never start" not in caplog.text
    await books.looks(STAGING, STAGING, STAGING)
    assert stuck_in(books, tmp_path)
    assert caplog.text.count("job 42 will never start: ") == 1 and "scancel 42" in caplog.text
    # Slurm lists no such buffer, so no action follows.
    assert (books.leader.forgotten, books.leader.missed) == ([], [])
    await books.looks(NOBODY)
    assert not stuck_in(books, tmp_path)


@story
@pytest.mark.parametrize("phase", [*ExternalJobPhase, None])
async def test_a_stage_in_known_to_slurm_is_lost_only_after_it_ended(
    phase: ExternalJobPhase | None, tmp_path: Path
) -> None:
    books = Books()
    if phase is not None:
        books.external_job(phase.value)
    await books.looks(RECORDED, RECORDED)
    ended = phase is not None and phase.value in (
        "stage-in-failed", "lingering", "retained", "teardown", "teardown-failed",
    )  # fmt: skip
    assert stuck_in(books, tmp_path) is ended


@story
@pytest.mark.parametrize("phase", list(ExternalJobPhase))
async def test_a_pending_job_with_a_lost_teardown_is_stuck(phase: ExternalJobPhase, tmp_path: Path) -> None:
    books = Books()
    books.external_job(phase.value)
    await books.looks(TEARING_DOWN, TEARING_DOWN)
    assert stuck_in(books, tmp_path) is (phase.value in ("lingering", "retained"))


@story
async def test_the_service_status_names_stuck_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "manager"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "manager"))
        books = Books()
        await books.looks(STAGING, STAGING)
        assert manager.recv(4096).decode().endswith("scancel 42")
        await books.looks(NOBODY)
        assert manager.recv(4096).decode() == "STATUS=no job is stuck in stage-in"
    assert stuck_status([str(job) for job in range(1, 13)]).endswith("scancel 1 2 3 4 5 6 7 8 9 10 and 2 more")


@story
async def test_the_counters_are_written_for_the_node_exporter(tmp_path: Path) -> None:
    books = Books()
    books.external_job("staged-in")
    books.external_job("running", "43")
    await books.looks(NOBODY, NOBODY, "slurmctld does not answer")
    books.metrics.write(tmp_path / "forebay.prom")
    text = (tmp_path / "forebay.prom").read_text()
    for line in (
        'forebay_slurm_comparisons_total{outcome="compared"} 2.0',
        'forebay_slurm_comparisons_total{outcome="slurm_away"} 1.0',
        'forebay_slurm_external_jobs{phase="staged-in"} 1.0',
        'forebay_slurm_external_jobs_forgotten_total{end="retained"} 1.0',
        'forebay_slurm_external_jobs_forgotten_total{end="removed"} 1.0',
        "forebay_slurm_unknown_to_slurm 2.0",
    ):
        assert line in text, line


def test_finished_jobs_are_skipped_and_staging_out_jobs_are_kept() -> None:
    text = "7 PD BurstBufferStageIn\n8 R\n9 SO burst_buffer/lua: Stage-out in progress\n10 CG\n11 CD\n12 F\n13 CA\n"
    text += "14 TO\n15 S\n\nsqueue: error\n"
    found = parsed_jobs(text)
    assert found.keys() == {"7", "8", "9", "10", "15"}
    assert found["7"] == SqueueRow("PD", "BurstBufferStageIn")
    assert found["9"] == SqueueRow("SO", "burst_buffer/lua: Stage-out in progress") and found["8"].reason == ""


def test_buffers_are_parsed_from_scontrol_output() -> None:
    text = (
        "Name=lua DefaultPool=pool1 Granularity=1K TotalSpace=9M FreeSpace=9M UsedSpace=3K\n"
        "  Flags=DisablePersistent\n"
        "  Allocated Buffers:\n"
        "    JobID=1_3(4) CreateTime=2026-11-20T22:33:48 Pool=pool1 Size=1KiB State=allocated UserID=bbu1(20001)\n"
        "    JobID=12 CreateTime=2026-11-20T22:33:48 Pool=(null) Size=0 State=staged-in UserID=bbu1(20001)\n"
        "    Name=alpha CreateTime=2026-11-20T22:33:48 Pool=pool1 Size=1KiB State=allocated UserID=bbu1(20001)\n"
        "  Per User Buffer Use:\n"
        "    UserID=bbu1(20001) Used=2KiB\n"
    )
    assert parsed_buffers(text) == {"4": "allocated", "12": "staged-in"}
    assert parsed_pools(text) == {"4": "pool1"}


@story
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 1", "exited with code 1"),
        ("exec sleep 1000", "did not answer within"),
        ("exec cat /dev/zero", "printed more than"),
        (None, "cannot be started"),
    ],
)
async def test_an_unparsable_slurmctld_answer_counts_as_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, why: str
) -> None:
    monkeypatch.setattr(slurmctld, "ASK_S", 0.5 if script == "exec sleep 1000" else 60.0)
    monkeypatch.setattr(slurmctld, "SAID_BYTES_MAX", 1_000_000)
    for name in ("scontrol", "squeue"):
        if script is not None:
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    said = await slurmctld.look()
    assert isinstance(said, str) and why in said


@story
async def test_a_view_separates_continuing_finished_and_staging_out_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = "JobID=9 Pool=p Size=1 State=allocated\nJobID=11 Pool=p Size=1 State=allocated\n"
    jobs = "8 R\n9 SO x y\n11 CD\n12 F\n20 PD BurstBufferStageIn\n21 PD BurstBufferStageIn now\n22 PD Resources\n"
    for name, said in (("scontrol", buffers), ("squeue", jobs)):
        (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{said}END\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = await slurmctld.look()
    assert isinstance(found, SlurmView)
    assert (found.jobs, found.over, found.staging_out) == ({"8", "9", "11", "20", "21", "22"}, {"11"}, {"9"})
    assert (found.staging_in, found.pending, found.pools) == ({"20"}, {"20", "21", "22"}, {"9": "p", "11": "p"})
    assert found.buffers == {"9": "allocated", "11": "allocated"}


@pytest.mark.parametrize(
    "said, owner",
    [
        ("echo 1000", 1000),
        ("echo 1000; echo 1000", 1000),
        ("true", "slurmctld does not know job 7"),
        ("echo 1000; echo 1001", "slurmctld does not know job 7"),
        ("echo slurm_load_jobs error: Invalid job id >&2; exit 1", "squeue --noheader --all exited with code 1"),
    ],
)
@story
async def test_only_slurmctld_determines_the_owner_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, owner: int | str
) -> None:
    (tmp_path / "squeue").write_text(f'#!/bin/sh\ncase "$*" in *--jobs=7\\ *) {said};; *) echo 0;; esac\n')
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert await slurmctld.owner_of("7") == owner


@pytest.mark.parametrize(
    ("said", "ended"),
    [
        ("echo 7 CD", True),
        ("echo 7 TO", True),
        ("echo 7 CA", False),
        ("echo 7 PD", False),
        ("echo 8 CD; echo 7 R", False),
        ("echo 8 R; echo 7 F", True),
        ("true", False),
        ("exit 1", False),
        ("test -e once && echo 7 CD || { touch once; echo 7 CG; }", True),
    ],
)
@story
async def test_only_a_job_that_ended_without_a_cancel_has_ended_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, ended: bool
) -> None:
    (tmp_path / "squeue").write_text(f'#!/bin/sh\ncd {tmp_path}\ncase "$*" in *--jobs=7\\ *) {said};; esac\n')
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert await slurmctld.ended_by_itself("7") is ended
