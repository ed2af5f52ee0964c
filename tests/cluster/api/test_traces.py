"""Traces of jobs: spans that follow from the ledger alone, and a collector that costs nothing whatever it does."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.cluster.api.traces import __main__ as process
from forebay.cluster.api.traces.__main__ import AT_ONCE, TRIES_MAX, WAITING_MAX, Sender
from forebay.cluster.api.traces.finished_jobs import LATE_US, FinishedJob, FinishedJobReader
from forebay.cluster.api.traces.spans import SUBMIT, JobSpan, JobStep, spans_of, trace_id
from forebay.cluster.config.config import Config, TracesConfig
from forebay.cluster.config.toml import InvalidValue
from forebay.replica.messages.events import JobCancelled, JobSubmitted
from forebay.replica.model.buffers import BufferState
from forebay.replica.model.job_states import ENDED, JobState
from forebay.replica.model.requests import JobRequest
from forebay.replica.values.units import Instant
from forebay.wal.ledger import Ledger
from tests.cluster.harness import PLAIN, Harness, story, until
from tests.collector import collecting, needs_otel, values

CLUSTER = "c1"


def submitted(job: int = 1, at: int = 10) -> JobStep:
    request = JobRequest("name", "ada", "#!/bin/sh\n", "/work", 60)
    return JobStep(1, Instant(at), JobState.PENDING, None, 0, (JobSubmitted(job, request),))


def cancelled(job: int = 1, at: int = 20) -> JobStep:
    return JobStep(2, Instant(at), JobState.CANCELLED, None, 0, (JobCancelled(job),))


def over(job: int, at: int = 20) -> FinishedJob:
    return FinishedJob(job, 2, Instant(at), (submitted(job), cancelled(job, at)))


# Spans --------------------------------------------------------------------------------------------------------------


def test_ids_follow_from_cluster_and_job_alone() -> None:
    first, again = (spans_of(CLUSTER, 1, (submitted(), cancelled())) for _ in range(2))
    assert first == again
    others = [spans_of(CLUSTER, 2, (submitted(2), cancelled(2))), spans_of("c2", 1, (submitted(), cancelled()))]
    ids = [{span.span_id for span in spans} for spans in (first, *others)]
    assert set.union(*ids) and sum(map(len, ids)) == len(set.union(*ids))
    assert len({trace_id(CLUSTER, 1), trace_id(CLUSTER, 2), trace_id("c2", 1)}) == 3


def test_a_job_without_its_submit_or_not_over_has_no_trace() -> None:
    assert spans_of(CLUSTER, 1, (cancelled(),)) == []
    assert spans_of(CLUSTER, 1, (submitted(),)) == []


def test_no_span_ends_before_it_begins_where_the_clock_was_set_back() -> None:
    spans = spans_of(CLUSTER, 1, (submitted(at=30), cancelled(at=20)))
    assert all(span.began_at <= span.ended_at for span in spans)


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("buffer", [None, *BufferState])
def test_in_whatever_state_a_job_is_it_is_over_or_something_is_done_for_it(
    state: JobState, buffer: BufferState | None
) -> None:
    step = JobStep(1, Instant(1), state, buffer, 0, ())
    persistent = buffer in (BufferState.DELETING, BufferState.DELETED)
    assert bool(step.phase) is not (step.is_over or persistent or (buffer is BufferState.COMPLETE))
    assert not (step.is_over and step.state not in ENDED)


# What was, of real replicas -------------------------------------------------------------------------------------------


def traced(spans: list[JobSpan]) -> None:
    """Hold that the spans of a job are what a trace is made of."""
    whole, submit, *others = spans
    assert (whole.parent_id, submit.name) == (None, SUBMIT)
    assert {span.parent_id for span in (submit, *others)} == {whole.span_id}
    edges = [submit.began_at, *(span.began_at for span in others), whole.ended_at]
    assert edges == sorted(edges) and whole.began_at == submit.began_at


@story
async def test_each_job_that_is_over_is_read_once_with_all_that_concerned_it(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config) as harness:
        index = config.storage.directory / "r1" / "index"
        jobs = FinishedJobReader(Ledger(harness.storage.environment), index)
        expected = []
        for number in range(5):
            job = (await harness.submit(script=PLAIN, hold=True)).body["job_id"]
            if number % 2:
                verbs = ("release", "hold", "cancel")
                expected.append(job)
            else:
                verbs = ("release",)
            for verb in verbs:
                await harness.ask("POST", f"/v1/jobs/{job}/{verb}", {"command_id": harness.new_id()})
        # Whoever asks has the historian started, which writes the index.
        assert (await harness.ask("GET", f"/v1/jobs/{job}/history")).status == 200
        found: list[FinishedJob] = []

        def all_of_them() -> bool:
            found.extend(jobs.read()[0])
            return len(found) >= len(expected)

        await until(all_of_them)
        assert [one.job for one in found] == expected
        for one in found:
            traced(spans_of(CLUSTER, one.job, one.steps))
        assert jobs.read() == ([], False)
        # Who begins later looks back, but not for long.
        again = FinishedJobReader(Ledger(harness.storage.environment), index)
        assert [one.job for one in again.read()[0]] == expected
        monkeypatch.setattr("forebay.cluster.api.traces.finished_jobs.LATE_US", -1)
        assert FinishedJobReader(Ledger(harness.storage.environment), index).read()[0] == []


# A collector --------------------------------------------------------------------------------------------------------


class Taking:
    """A collector that takes what it is told to, and a clock."""

    def __init__(self) -> None:
        self.takes = True
        self.now_s = 0.0
        self.came: list[bytes] = []
        self.asked = 0

    def send(self, traces: list[tuple[bytes, list[JobSpan]]]) -> bool:
        self.asked += 1
        if self.takes:
            self.came += [one for one, _ in traces]
        return self.takes


def sender_to(taking: Taking, *, leads: bool = True) -> Sender:
    sender = Sender(CLUSTER, taking.send, lambda: taking.now_s)
    sender.leads = leads
    return sender


def test_what_waits_for_a_dead_collector_is_bounded_and_what_is_dropped_is_counted() -> None:
    taking = Taking()
    taking.takes = False
    sender = sender_to(taking)
    for job in range(1, 2 * WAITING_MAX + 1):
        sender.take([over(job)])
        sender.step()
        assert sender.waiting <= WAITING_MAX
    assert sender.waiting + sender.dropped == 2 * WAITING_MAX
    assert taking.asked == 1, "it is not asked again before a pause"


def test_the_spans_that_wait_are_bounded_however_many_one_job_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SPANS_WAITING_MAX", 12)
    taking = Taking()
    taking.takes = False
    sender = sender_to(taking)
    each = len(spans_of(CLUSTER, 1, over(1).steps))
    sender.take([over(job) for job in range(1, 11)])
    assert (sender.waiting, sender.dropped) == (12 // each, 10 - 12 // each)


def test_each_request_is_tried_again_after_longer_pauses_and_given_up_at_last() -> None:
    taking = Taking()
    taking.takes = False
    sender = sender_to(taking)
    sender.take([over(job) for job in range(1, AT_ONCE + 3)])
    pauses_s = []
    while sender.dropped == 0:
        began_s, asked = taking.now_s, taking.asked
        while taking.asked == asked:
            taking.now_s += 0.5
            sender.step()
        pauses_s.append(taking.now_s - began_s)
    assert len(pauses_s) == TRIES_MAX and pauses_s[1:] == sorted(pauses_s[1:])
    assert (sender.dropped, sender.waiting) == (AT_ONCE, 2)
    taking.takes, taking.now_s = True, taking.now_s + 1_000
    sender.step()
    assert taking.came == [trace_id(CLUSTER, AT_ONCE + 1), trace_id(CLUSTER, AT_ONCE + 2)]
    assert (sender.sent, sender.waiting) == (2, 0)


def test_who_does_not_lead_sends_nothing_and_who_leads_next_sends_the_last_half_minute() -> None:
    taking = Taking()
    sender = sender_to(taking, leads=False)
    sender.take([over(1, at=100), over(2, at=100 + LATE_US), over(3, at=100 + 2 * LATE_US)])
    assert not sender.step() and taking.asked == 0 and sender.waiting == 0
    sender.leads = True
    while sender.step():
        pass
    assert taking.came == [trace_id(CLUSTER, 2), trace_id(CLUSTER, 3)]
    assert sender.dropped == 0


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server of one connection at a time that answers as it likes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    if not stop.is_set():
                        try:
                            answer(connection)
                        except OSError:
                            continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
        finally:
            stop.set()
            socket.create_connection(listener.getsockname()).close()
            thread.join()


def one_trace() -> list[tuple[bytes, list[JobSpan]]]:
    return [(trace_id(CLUSTER, 1), spans_of(CLUSTER, 1, (submitted(), cancelled())))]


@needs_otel
def test_a_collector_that_answers_a_byte_at_a_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.cluster.api.traces import exporter

    pause = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not pause.wait(0.02):
            connection.sendall(b"x")

    monkeypatch.setattr(exporter, "LATE_S", 0.5)
    with answering(drip) as url:
        assert not exporter.Exporter(url, CLUSTER).send(one_trace())
        pause.set()


@needs_otel
def test_a_collector_that_sends_elsewhere_is_not_followed() -> None:
    from forebay.cluster.api.traces.exporter import Exporter

    with collecting() as elsewhere:
        redirect = f"HTTP/1.1 307 Away\r\nLocation: {elsewhere.endpoint}/v1/traces\r\nContent-Length: 0\r\n\r\n"
        with answering(lambda connection: connection.sendall(redirect.encode())) as url:
            assert not Exporter(url, CLUSTER).send(one_trace())
        assert elsewhere.requests == 0
        assert Exporter(f"{elsewhere.endpoint}/v1/traces", CLUSTER).send(one_trace())
        assert {values(span.attributes)["forebay.user"] for span in elsewhere.spans} == {"ada"}


def test_a_replica_without_opentelemetry_says_what_to_install_and_asks_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "forebay.cluster.api.traces.exporter", None)
    monkeypatch.setattr(process, "begin_child", lambda words, niceness: (None, words[2:]))
    monkeypatch.setattr(process.resource, "setrlimit", lambda *words: None)
    assert process.main(["0", "1", str(tmp_path), "http://127.0.0.1:1"]) == 78
    assert "pip install forebay[otel]" in caplog.text


# Configuration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
        ("https://otel.example.org/tempo/v1/traces", "https://otel.example.org/tempo/v1/traces"),
    ],
)
def test_without_a_path_a_collector_is_asked_where_otlp_has_it(endpoint: str, url: str) -> None:
    assert TracesConfig(endpoint).url == url


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://a", "http://ada:secret@a", "http://a/b?c", "http://"])
def test_what_is_no_address_of_a_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidValue):
        TracesConfig(endpoint)
