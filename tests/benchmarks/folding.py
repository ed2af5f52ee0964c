"""Measure the state machine alone, with many jobs in the state: events folded per second, a snapshot made and loaded.

`python -m tests.benchmarks.folding --jobs N` prints one line of JSON. Figures are of processor time, so that other
processes of the machine change them little. To compare two trees, or two libraries of persistent maps on `PYTHONPATH`,
run them alternately.
"""

import argparse
import gc
import itertools
import json
import time
from collections.abc import Iterator
from typing import Final

from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages import events as e
from forebay.replica.messages.commands import Actor, ActorRole
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.model.buffers import Access, Transfer, TransferKind
from forebay.replica.model.configuration import Site
from forebay.replica.model.job_states import JobState
from forebay.replica.model.pools import Pool
from forebay.replica.model.requests import BufferRequest, JobRequest
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.units import Instant
from forebay.snapshots.image import Assembly, Image, to_sections

MIB: Final = 1024 * 1024

JOBS_MAX: Final = 1_000_000

USERS: Final = 100

NODES: Final = 64

CYCLE_JOBS: Final = 2_000
"""Jobs whose whole life is folded while all others wait, count."""

ENTRIES: Final = {"full": 256, "single": 1}
"""Kind of batch -> entries in each: a busy leader's, and those of one client who waits for each reply."""

_CONTROLLER: Final = Actor(ActorRole.CONTROLLER, "leader")


def _submission(job: int) -> Entry:
    user = f"user{job % USERS}"
    staged = (Transfer(TransferKind.FILE, "/a", "$b"),)
    asked = BufferRequest("fast", MIB, (Access.STRIPED,), "scratch", staged, (), "#DW x")
    request = JobRequest(f"job{job}", user, "#!/bin/sh\n" * 20, "/home", 3600, buffer=asked)
    submitted = e.JobSubmitted(job, request, "fast", MIB)
    return Entry(job.to_bytes(16, "big"), Actor(ActorRole.USER, user), "submit_job", (submitted,))


def _life(job: int) -> Iterator[tuple[e.Event, ...]]:
    """Yield the events of a job's life after its submission, an entry each."""
    yield (e.BufferAllocated(job, f"n{job % NODES}", 1),)
    yield e.StagedIn(job, 1, 4096, "d"), e.RunOrdered(job, f"n{job % NODES}", 1)
    yield (e.RunStarted(job),)
    yield (e.RunEnded(job, JobState.COMPLETED, 0, 0, 4),)
    yield (e.StageOutStarted(job, 2),)
    yield e.StagedOut(job, 1, 10), e.TeardownStarted(job, 3, JobState.COMPLETED, False)
    yield (e.TornDown(job),)


def _fold(state: State, entries: Iterator[Entry], size: int) -> tuple[State, int, float]:
    """Return the state after the entries, the events folded, and the seconds that took, with every state kept."""
    count, seconds, kept = 0, 0.0, [state]
    while taken := tuple(itertools.islice(entries, size)):
        batch = Batch(state.revision, Instant(state.at + 1), taken)
        count += sum(len(entry.events) for entry in taken)
        began = time.process_time()
        after = apply_batch(state, batch)
        seconds += time.process_time() - began
        if after is None:
            raise AssertionError(f"the batch at revision {state.revision} was not applied")
        state = after
        kept.append(state)
        del kept[:-8]  # the snapshot in writing, reads and the history service hold some
    return state, count, seconds


def measure(jobs: int) -> dict[str, float]:
    """Return the figures with `jobs` jobs in the state: events per second, and seconds of a snapshot."""
    founded = e.ClusterFounded("c1", "demo", Site(), (Pool("fast", 2**60, MIB, True),))
    nodes = [e.NodeRegistered(f"n{number}", 4, "i", "s") for number in range(NODES)]
    state, _, _ = _fold(EMPTY, iter((Entry(b"", _CONTROLLER, "found_cluster", (founded, *nodes)),)), 1)
    found: dict[str, float] = {"jobs": jobs}
    gc.collect()
    gc.freeze()  # as a controller does with what it has loaded
    state, events, seconds = _fold(state, (_submission(job) for job in range(1, jobs + 1)), ENTRIES["full"])
    found["submit_events_per_s"] = round(events / seconds)
    first = jobs // 3
    for kind, size in ENTRIES.items():
        lives = [_life(job) for job in range(first, first + CYCLE_JOBS)]
        first += CYCLE_JOBS
        entries = (
            Entry(b"", _CONTROLLER, "report", step) for together in zip(*lives, strict=True) for step in together
        )
        state, events, seconds = _fold(state, entries, size)
        found[f"{kind}_events_per_s"] = round(events / seconds)
    image = Image(state, 1, 1, bytes(32))
    began = time.process_time()
    slices = list(to_sections(image))
    found["snapshot_make_s"] = round(time.process_time() - began, 4)
    assembly = Assembly()
    began = time.process_time()
    for piece in slices:
        assembly.add(piece.section, piece.payload)
    loaded = assembly.image()
    found["snapshot_load_s"] = round(time.process_time() - began, 4)
    if loaded.state != state:
        raise AssertionError("the loaded state differs from the folded one")
    return found


def main() -> None:
    """Measure once and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.folding", description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=10_000, help="Jobs in the state (default: 10,000).")
    jobs = parser.parse_args().jobs
    if not 6 * CYCLE_JOBS // 2 <= jobs <= JOBS_MAX:
        parser.error(f"--jobs {jobs}: give {6 * CYCLE_JOBS // 2} to {JOBS_MAX}")
    print(json.dumps(measure(jobs)))


if __name__ == "__main__":
    main()
