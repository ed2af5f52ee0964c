"""`forebay top`: the lines of its view for any terminal size, and the restored terminal."""

import os
import select
import signal
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.cli.top import NEEDS_MAX, POOLS_MAX, Answers, render_view
from forebay.cluster.schemas import (
    MemberView,
    NeedView,
    OverviewAnswer,
    PoolsAnswer,
    PoolView,
    TransfersAnswer,
    TransferView,
)
from forebay.cluster.schemas.overview import TransfersSummary
from tests.cluster.cli.double import Double, forebay, on_a_terminal


def member(name: str, **more: Any) -> MemberView:
    fields: dict[str, Any] = {"role": "follower", "reachable": True, "term": 7, "lag_entries": 0}
    return MemberView(name=name, peer="h:1", api="h:2", **fields | more)


def pool(name: str, held: int = 0) -> PoolView:
    return PoolView(
        name=name, quantity_bytes=1024, granularity_bytes=1, held_bytes=held, free_bytes=1024 - held, revision=9
    )


def transfer(job_id: int, state: Any = "moving", rate_bytes_s: float = 0.0) -> TransferView:
    return TransferView(
        job_id=job_id, attempt=1, node="n1", stage="stage_in", state=state, rate_bytes_s=rate_bytes_s, bytes_total=100
    )


def need(subject: str) -> NeedView:
    return NeedView(kind="node_down", subject=subject, sentence="it is DOWN", remedy="forebay node show n3")


def seen(needs: int = 0, needs_count: int = 0, pools: int = 1, transfers: int = 0, more: int = 0) -> Answers:
    overview = OverviewAnswer(
        revision=9,
        cluster="demo",
        replica="r1",
        leader="r1",
        term=7,
        ready=True,
        members=(
            member("r1", role="leader"),
            member("r2", lag_entries=12),
            member("r3", lag_entries=None, reachable=False),
        ),
        jobs={"PENDING": 4, "RUNNING": 2},
        waiting={"BurstBufferResources": 4},
        nodes={"UP": 2},
        transfers=TransfersSummary(moving=transfers + more, rate_bytes_s=2048.0),
        needs=tuple(need(f"node n{number}") for number in range(needs)),
        needs_count=max(needs, needs_count),
    )
    return Answers(
        overview,
        PoolsAnswer(revision=9, pools=tuple(pool(f"p{number}", 512) for number in range(pools))),
        TransfersAnswer(revision=9, transfers=tuple(transfer(number) for number in range(transfers))),
    )


def test_the_view_shows_replicas_jobs_pools_and_transfers() -> None:
    text = "\n".join(line.text for line in render_view(seen(needs=1, transfers=1), 40))
    for part in ("demo", "leader r1", "4 PENDING   2 RUNNING", "4 BurstBufferResources", "2 UP", "12 entries behind"):
        assert part in text, part
    assert text.count("entries behind") == 2, "nothing is made up where nobody says how far a replica is behind"
    for part in ("SILENT", "! node n0: it is DOWN   -> forebay node show n3", "50.0 %", "512 of 1", "stage_in"):
        assert part in text, part
    assert "NO ANSWER" not in text
    idle = "\n".join(line.text for line in render_view(seen(), 40))
    assert "No action needed." in idle and "No transfers." in idle


def test_failed_transfers_precede_running_and_queued_ones() -> None:
    rows = (transfer(1, "queued"), transfer(2, "moving", 5.0), transfer(3, "moving", 9.0), transfer(4, "failed"))
    made = seen()._replace(transfers=TransfersAnswer(revision=9, transfers=rows))
    assert [line.text.split()[0] for line in render_view(made, 40)[-4:]] == ["4", "3", "2", "1"]


@given(
    height=st.integers(1, 60),
    needs=st.integers(0, 9),
    more_needs=st.integers(0, 50),
    pools=st.integers(0, 30),
    transfers=st.integers(0, 40),
    more=st.integers(0, 1000),
)
def test_the_view_fits_its_terminal_and_counts_omitted_lines(
    height: int, needs: int, more_needs: int, pools: int, transfers: int, more: int
) -> None:
    lines = render_view(seen(needs, needs + more_needs if needs else 0, pools, transfers, more), height)
    assert len(lines) <= height
    if height < 40:
        return
    text = [line.text for line in lines]
    for count, first, what in (
        (needs + more_needs if needs else 0, "! ", "items that need attention"),
        (pools, "p", "pools"),
        (transfers + more, tuple(f"{number:>8} " for number in range(40)), "transfers"),
    ):
        shown = sum(line.startswith(first) for line in text)
        left = next((int(line.split()[1]) for line in text if line.endswith(f" {what} more")), 0)
        assert shown + left == count, (what, text)
    assert sum(line.startswith("! ") for line in text) <= NEEDS_MAX
    assert sum(line.startswith("p") for line in text) <= POOLS_MAX


def test_names_in_the_view_cannot_control_the_terminal() -> None:
    made = seen()
    evil = "\x1b]0;x\x07\x1b[2J"
    rows = (transfer(1),)
    made = made._replace(
        pools=PoolsAnswer(revision=9, pools=(pool(evil),)), transfers=TransfersAnswer(revision=9, transfers=rows)
    )
    assert not any(
        "\x1b" in line.text or "\x07" in line.text for line in render_view(made, 40, trouble=evil, old_s=3.0)
    )


def test_top_needs_a_terminal(double: Double) -> None:
    result = forebay(double.config, "top")
    assert result.exit_code == ExitCode.BAD_INPUT and "forebay status" in result.stderr


@contextmanager
def running(double: Double) -> Iterator[tuple[int, int, "subprocess.Popen[bytes]"]]:
    double.answer("GET", "/v1/overview", seen().overview)
    double.answer("GET", "/v1/pools", seen().pools)
    double.answer("GET", "/v1/transfers.*", seen().transfers)
    with on_a_terminal(double.config, "top", "--every", "0.2") as made:
        yield made


def until(terminal: int, text: bytes, count: int = 1) -> bytes:
    found = b""
    while found.count(text) < count:
        found += os.read(terminal, 65536)
    return found


def ends(terminal: int, process: "subprocess.Popen[bytes]") -> int:
    """Read the terminal until the command ends, so that its output does not block, and return the exit code."""
    while process.poll() is None:
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)
    return process.returncode


@pytest.mark.parametrize("how", ["q", "Ctrl-C"])
def test_top_refreshes_shows_missing_answers_and_restores_the_terminal(double: Double, how: str) -> None:
    with running(double) as (ours, theirs, process):
        before = termios.tcgetattr(theirs)
        until(ours, b"No action needed.", 2)
        assert not termios.tcgetattr(theirs)[3] & termios.ICANON, "keys arrive as they are pressed"
        double.refuse("GET", "/v1/overview", 503, "not_leader", "there is no leader now")
        until(ours, b"NO ANSWER")
        double.answer("GET", "/v1/overview", seen().overview)
        if how == "q":
            os.write(ours, b"xq")
        else:
            process.send_signal(signal.SIGINT)
        assert ends(ours, process) == (ExitCode.OK if how == "q" else ExitCode.INTERRUPTED)
        assert termios.tcgetattr(theirs) == before
