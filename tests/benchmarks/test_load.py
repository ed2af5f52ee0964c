"""The parts of scripts/bench that could be wrong without anybody noticing."""

import asyncio
import json
import math
import ssl
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.replica.grammar.directives import parse_request
from tests.benchmarks import load, machine, past, processes, report
from tests.benchmarks.__main__ import main
from tests.benchmarks.forebay import ForebayCluster
from tests.benchmarks.http2 import put_request


class Honest:
    """A server of our own that counts what it accepted; `loses` makes it promise more than it keeps."""

    name = "honest"
    operation = "POST /"

    def __init__(self, *, loses: bool = False, refuses: bool = False, moves: bool = False) -> None:
        self.settled = 0
        self.loses = loses
        self.refuses = refuses
        self.moves = moves
        self.base = ""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.moves and "localhost" not in request.host:
            raise web.HTTPTemporaryRedirect(f"http://localhost:{request.url.port}/")
        if self.refuses:
            return web.json_response({"error": "queue_full"}, status=429)
        self.settled += 0 if self.loses else 1
        return web.json_response({"ok": body["n"]})

    async def start(self) -> None:
        """Nothing to start: the test does."""

    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    async def leader(self, session: aiohttp.ClientSession) -> str:
        return self.base

    def request(self, client: int, number: int) -> tuple[str, Mapping[str, Any]]:
        return "/", {"n": f"{client}-{number}"}

    def accepted(self, status: int, answer: Mapping[str, Any]) -> bool:
        return status == 200 and "ok" in answer

    async def committed(self, session: aiohttp.ClientSession, base: str) -> int:
        return self.settled

    def cpu_s(self) -> float:
        return 0.0

    def check(self) -> None:
        """It runs in this process."""

    def stop(self) -> None:
        """The test does."""


def measured(target: Honest, clients: int) -> load.Measurement:
    """Measure a server of our own for a moment."""

    async def run() -> load.Measurement:
        application = web.Application()
        application.router.add_post("/", target.handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        target.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            return await load.measure(target, clients, warm_up_s=0.05, seconds=0.2)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def test_only_what_was_answered_in_the_measured_time_counts() -> None:
    target = Honest()
    result = measured(target, 3)
    assert result.errors == 0
    assert 0 < result.commits < target.settled, "the warm-up is settled too, and does not count"
    assert result.commits_per_s == pytest.approx(result.commits / 0.2, abs=0.1)
    assert result.p50_ms <= result.p99_ms <= result.max_ms


def test_the_measured_time_begins_when_the_warm_up_is_over_and_every_client_had_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def begun(answers_at: tuple[float, ...], warm_up_s: float) -> float:
        window, began = load.Window(len(answers_at), warm_up_s, 1.0), time.perf_counter()
        for client, at in enumerate(answers_at):
            if at < math.inf:
                asyncio.get_running_loop().call_later(at, window.answered, client)
        await window.wait_begun()
        assert window.end == window.start + 1.0
        return window.start - began

    monkeypatch.setattr(load, "FIRST_ANSWERS_S", 0.3)
    for answers_at, warm_up_s, least, most in (
        ((0.0, 0.0), 0.1, 0.1, 0.25),
        ((0.0, 0.2), 0.05, 0.2, 0.3),
        ((0.0, math.inf), 0.05, 0.35, 1.0),
    ):
        assert least - 0.01 <= asyncio.run(begun(answers_at, warm_up_s)) < most + 1.0, (answers_at, warm_up_s)
    assert load.Window.unbounded().start == 0.0 and load.Window.unbounded().end == math.inf


def test_a_server_that_acknowledges_more_than_it_settled_is_found_out() -> None:
    with pytest.raises(load.VerificationFailed, match="settled only 0"):
        measured(Honest(loses=True), 1)


def test_refusals_are_errors_and_never_commits() -> None:
    result = measured(Honest(refuses=True), 2)
    assert result.commits == 0
    assert result.errors > 0
    assert result.error_examples == ('HTTP 429  {"error": "queue_full"}',)


def test_a_leader_that_moved_is_followed_and_the_redirect_is_counted() -> None:
    result = measured(Honest(moves=True), 1)
    assert result.commits > 0
    assert result.errors == 1
    assert result.error_examples[0].startswith("HTTP 307 http://localhost:")


def test_percentiles_are_nearest_rank() -> None:
    seconds = [number / 1000 for number in range(1, 101)]
    assert load.percentile_ms(seconds, 0.50) == 50
    assert load.percentile_ms(seconds, 0.99) == 99
    assert load.percentile_ms(seconds, 1.0) == 100
    assert load.percentile_ms([], 0.5) == 0


def test_the_job_that_is_measured_is_one_that_the_api_and_the_directive_parser_take() -> None:
    target = ForebayCluster(Path("nowhere"))
    path, body = target.request(3, 4)
    request = msgspec.json.decode(json.dumps(body).encode(), type=SubmitRequest)
    parsed = parse_request(request.script, request.bb or "")
    assert path == "/v1/jobs"
    assert request.command_id != target.request(3, 4)[1]["command_id"], "a retry would be answered from the receipts"
    assert request.hold, "a job that may start would be measured with its start"
    assert parsed is not None
    assert (parsed.pool, parsed.capacity_bytes) == ("fast", 1024 * 1024)


def test_the_disk_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    median_us, p99_us = machine.fdatasync_us(tmp_path)
    assert 0 < median_us <= p99_us
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_ends_by_itself_is_reported_with_its_last_words(tmp_path: Path) -> None:
    servers = processes.Processes()
    servers.start("r1", [sys.executable, "-c", "import sys; sys.exit('no space left')"], tmp_path / "r1.output")
    servers._running[0][1].wait(30)
    with pytest.raises(processes.ServerFailed, match="no space left"):
        servers.check()
    servers.stop()


@pytest.mark.parametrize(
    "options", [["--rounds", "0"], ["--seconds", "-1"], ["--clients", "0"], ["--only", "zookeeper"]], ids=" ".join
)
def test_impossible_options_are_refused_before_anything_starts(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # That scripts/bench hands its options on: tests/repo/test_scripts.py.
    monkeypatch.setattr("sys.argv", ["scripts/bench", *options])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_a_measurement_can_be_written_as_json() -> None:
    result = measured(Honest(), 1)
    assert json.loads(json.dumps(msgspec.to_builtins(result)))["system"] == "honest"


def test_the_ratio_that_is_shown_is_the_median_of_the_pairs_within_a_round() -> None:
    def one(system: str, rate: float) -> load.Measurement:
        return load.Measurement(system, 1, int(rate), 1.0, rate, 1.0, 2.0, 3.0, 0, (), 0.0, 0.0)

    # The second round ran beside something else: both were slow, and the ratio says so little of it as can be.
    results = [one("channel", 300), one("etcd-grpc", 100), one("channel", 20), one("etcd-grpc", 10)]
    results += [one("channel", 330), one("etcd-grpc", 110)]
    medians = report._medians(results, ["channel", "etcd-grpc"], [1], {"channel": "etcd-grpc"})
    assert [median["of_etcd"] for median in medians] == [3.0, None]
    assert [median["commits_per_s"] for median in medians] == [300, 100]


def test_a_put_is_written_as_protocol_buffers_write_it() -> None:
    assert put_request(b"k", b"v" * 300) == b"\x0a\x01k\x12\xac\x02" + b"v" * 300


@pytest.mark.campaign(4)
def test_questions_about_the_past_are_measured_on_a_ledger_that_was_made_for_them(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest: dict[str, Any] = {"QUIET_S": 0.1, "ASKED": 2, "MOMENTS": 3, "REPLAYS": 1, "DIFFERENCE": 50}
    smallest["WAVES"] = {"full": 24, "single": 1}
    for name, value in smallest.items():
        monkeypatch.setattr(past, name, value)
    said: list[str] = []
    found = past.report(fast_path, 200, list(past.WAVES), said.append)
    for kind, at_once in past.WAVES.items():
        figures = found.figures[kind]
        assert figures["events"] >= 200 and figures["index_bytes"] > 0
        assert (figures["entries"] < figures["revisions"] / 4) == (at_once > 1)
        assert [len(took_ms) for took_ms in figures["history_ms"].values()] == [2, 2, 2]
        assert len(figures["why_ms"]) == len(figures["near_ms"]) == 3
        assert len(figures["other_ms"]) == 6 and all(figures["other_ms"].values())
    assert len(found.rows) == 28 and len(said) >= 26
    before = found.figures["single"]
    more = past.report(fast_path, before["events"] + 20, ["single"], said.append).figures["single"]
    assert more["events"] >= before["events"] + 20 and more["entries"] > before["entries"], "it goes on with that one"
    again = past.report(fast_path, 150, ["single"], said.append).figures["single"]
    assert (again["events"], again["made_s"]) == (more["events"], more["made_s"]), "what is there is made no more"
