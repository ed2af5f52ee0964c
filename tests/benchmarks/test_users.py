"""The parts of scripts/bench that say what users do: what computes, and a tiny run of each section."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.replica.grammar.directives import parse_request
from tests.benchmarks import load, processes
from tests.benchmarks.users import commands, jobs, rows, slurm, storm, submits
from tests.benchmarks.users.site import FILE_BYTES, REAPER, Files, job_script

BURN_S = 0.3
"""Processor time that a process of these tests uses up, seconds: well above the hundredths that the kernel counts."""

WAIT_S = 60.0
"""Seconds until what must come has come."""

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""How finely the kernel counts processor time, seconds: user and system of a process each lose less than that."""

BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass"

BURNING_ORPHAN = f"""
import os, subprocess, sys
if os.fork() == 0:
    subprocess.Popen([sys.executable, "-c", {BURN!r}], start_new_session=True)
    os._exit(0)
os.wait()
os.read(0, 1)
"""
"""A server whose child starts what burns and ends before it: nobody of the server's waits for that."""


def until(is_so: Callable[[], bool], what: str) -> None:
    """Return when something is so."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, what


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has reaped yet does not."""
    try:
        return not processes.parse_stat(Path(f"/proc/{pid}/stat").read_text()).zombie
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that any account may pass, as the jobs' user must."""
    directory = Path(tempfile.mkdtemp(prefix="forebay-bench-test-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where none is installed."""
    monkeypatch.setattr(slurm, "missing", lambda: "Slurm is not installed")


def test_a_process_is_read_whatever_it_is_called() -> None:
    line = f"7 (a ) R 1 (b) S 42 7 7 0 -1 4194304 1 2 3 4 {' '.join(['100', '50', '25', '25'])} 20 0 1 0 5"
    hertz = os.sysconf("SC_CLK_TCK")
    assert processes.parse_stat(line) == processes.Stat(42, False, 200 / hertz)


def test_processor_time_of_what_outlived_its_parent_and_ended_counts_below_the_reaper() -> None:
    server = subprocess.Popen([*REAPER, sys.executable, "-c", BURNING_ORPHAN], stdin=subprocess.PIPE)
    assert server.stdin is not None
    try:
        until(lambda: len(processes.tree([server.pid])) >= 3, "reaper, server and what burns")
        until(lambda: processes.tree_cpu_s([server.pid]) > BURN_S - 2 * TICK_S, "its processor time")
        until(lambda: len(processes.tree([server.pid])) == 2, "the end of what burns, reaped")
        assert processes.tree_cpu_s([server.pid]) > BURN_S - 2 * TICK_S
    finally:
        server.stdin.close()
        server.wait()


def test_all_that_a_server_started_ends_with_it() -> None:
    server = subprocess.Popen([*REAPER, "sh", "-c", "setsid sleep 100 & setsid sleep 100 & wait"])
    try:
        until(lambda: len(processes.tree([server.pid])) == 4, "reaper, shell and two that sleep")
        below = processes.tree([server.pid])
    finally:
        processes.end_trees([server.pid])
        server.wait()
    until(lambda: not any(is_alive(pid) for pid in below), "the end of all of them")


def test_memory_counts_what_is_there_and_nothing_of_what_is_gone() -> None:
    assert processes.pss_bytes(os.getpid()) > 1024 * 1024
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert processes.pss_bytes(ended.pid) == 0


def test_a_client_that_starves_shows_as_a_share_of_the_mean() -> None:
    assert load.slowest_share([10, 10, 10]) == 1.0
    assert load.slowest_share([15, 15, 0]) == 0.0
    assert load.slowest_share([15, 10, 5]) == 0.5
    assert load.slowest_share([0, 0]) is None
    assert load.slowest_share([]) is None


def test_a_call_costs_what_its_process_and_those_it_waited_for_took() -> None:
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
    wall_s, cpu_s = commands.timed(commands.Call("burn", [sys.executable, "-c", inner]))
    assert wall_s >= BURN_S
    assert cpu_s >= BURN_S


def test_a_call_that_fails_is_no_measurement() -> None:
    with pytest.raises(processes.ServerFailed, match="`deny` exited 3: no such job"):
        commands.timed(commands.Call("deny", ["sh", "-c", "echo no such job >&2; exit 3"]))


def test_commands_go_in_turn_and_the_first_of_each_does_not_count(place: Path) -> None:
    log = place / "log"
    calls = [commands.Call(name, ["sh", "-c", f"echo {name} >> {log}"]) for name in ("a", "b")]
    found = commands.in_turn(calls, 2)
    assert log.read_text().split() == ["b", "a", "a", "b", "b", "a"]
    assert set(found) == {"a", "b"}
    assert found["a"]["wall_min_ms"] <= found["a"]["wall_ms"]


def test_only_status_200_answers_a_connection_of_the_storm() -> None:
    assert storm.is_answered(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    assert not storm.is_answered(b"HTTP/1.1 503 Service Unavailable\r\n\r\n200")
    assert not storm.is_answered(b"HTTP/1.1 200 OK\r\nContent-Le")
    assert not storm.is_answered(b"")


def test_the_storm_asks_each_system_in_its_own_words_and_says_how_much_it_sends() -> None:
    assert storm.request_bytes("channel", 1).startswith(b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1:1\r\n")
    head, _, body = storm.request_bytes("etcd-grpc", 1).partition(b"\r\n\r\n")
    assert b"Content-Length: %d" % len(body) in head


def test_submits_that_are_measured_are_all_different_and_real_requests() -> None:
    scripts = [submits.script(Path("/data"), client, number) for client in range(20) for number in range(20)]
    assert len(set(scripts)) == len(scripts)
    parsed = parse_request(scripts[7], "")
    assert parsed is not None
    assert (len(parsed.stage_in), len(parsed.stage_out)) == (1, 1)


def test_a_result_counts_when_all_of_it_is_there(place: Path) -> None:
    files = Files(place / "files")
    (files.results / "half").write_bytes(b"x" * (FILE_BYTES // 2))
    assert files.finished() == 0
    assert not files.is_finished("half")
    assert not files.is_finished("none")
    (files.results / "whole").write_bytes(b"x" * FILE_BYTES)
    assert files.finished() == 1
    assert files.is_finished("whole")


def test_both_systems_are_given_the_same_files_and_the_same_work(place: Path) -> None:
    files = Files(place / "files")
    for text in (job_script(files, "one"), slurm.job_script(files, "one")):
        assert str(files.source) in text
        assert f"{files.results}/one" in text
        assert text.splitlines()[-1].startswith("cp ")


def test_rows_are_printed_as_the_page_has_them() -> None:
    table = rows.markdown([rows.Row("a thing", "1 s"), rows.Row("another", "2 s", "3 s")]).splitlines()
    assert table[0] == "| what a user does | Forebay | beside it |"
    assert table[2:] == ["| a thing | 1 s | |", "| another | 2 s | 3 s |"]
    assert rows.spread([3.0, 1.0, 2.0]) == "2.0 (1.0 to 3.0)"
    assert rows.spread([3.0], 0) == "3"


@pytest.mark.usefixtures("no_slurm")
def test_jobs_are_run_and_say_that_there_is_no_slurm(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(jobs, "TRANSFERS", 1)
    monkeypatch.setattr(jobs, "QUIET_S", 0.0)
    found = jobs.report(place, 1, 2, said.append, idle_jobs=0)
    [one] = found.figures["runs"]["forebay"]
    assert one["jobs"] == 2
    assert one["processor_ms_per_job"] > 0
    assert found.figures["memory"]["transfers"] == 1
    assert found.figures["memory"]["pss_bytes"] > found.figures["memory"]["quiet_bytes"] > 0
    assert "Slurm is not installed" in said
    assert all(not row.beside for row in found.rows)


@pytest.mark.usefixtures("no_slurm")
def test_commands_are_called(place: Path) -> None:
    found = commands.report(place, 1, lambda _: None, only_forebay=True)
    names = ["queue", "job show", "submit", "--help"]
    assert [row.what for row in found.rows] == [f"`forebay {name}`, one call at p50" for name in names]


@pytest.mark.campaign(4)
@pytest.mark.usefixtures("no_slurm")
def test_submits_are_taken_over_both_doors(place: Path) -> None:
    found = submits.report(place, 1, [2], 0.3, 0.1, lambda _: None)
    assert found.whole
    assert [one["system"] for one in found.figures["measurements"]] == ["channel", "http"]
    assert all(one["commits"] and one["slowest_share"] is not None for one in found.figures["measurements"])


@pytest.mark.campaign(4)
def test_a_storm_is_answered(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("SPREAD_S", "CALM_S", "HELD_S"):
        monkeypatch.setattr(storm, pause, 0.1)
    found = storm.report(place, 20, 1, lambda _: None, only_forebay=True)
    [one] = found.figures["storms"]["channel"]
    assert (one["connection_errors"], found.whole) == (0, True)
    assert one["writes"] > 0
