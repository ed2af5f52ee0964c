"""A worker that is ended between any two of its own steps, in the modules that hold what must not be left behind."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
import pytest

from forebay.cluster.agent.transfer import fence, helpers, record_paths
from forebay.cluster.agent.transfer.progress import SharedCounters
from forebay.cluster.agent.transfer.rate_limit import TransferControl
from forebay.cluster.agent.worker import staging, worker
from forebay.cluster.agent.worker.task import WorkerTask
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.orders import Order

MODULES: Final = {str(module.__file__) for module in (staging, fence, record_paths, helpers)}

Line = tuple[str, int]


class Bench:
    """Results of one job, and where they go."""

    def __init__(self, directory: Path) -> None:
        self.outside = directory / "outside"
        self.home = directory / "home"
        self.results = self.home / "buffers" / "7" / "striped"
        self.outside.mkdir()
        self.results.mkdir(parents=True)
        for name in "ab":
            (self.results / name).write_bytes(name.encode() * 5000)
        self._control = TransferControl()
        self._progress = SharedCounters.create()

    def close(self) -> None:
        self._control.close()
        os.close(self._progress)

    def work(self) -> WorkerTask:
        transfers = tuple(
            Transfer(TransferKind.FILE, str(self.outside / name), f"$DW_JOB_STRIPED/{name}") for name in "ab"
        )
        order = Order(
            job=7,
            attempt=1,
            stage="stage_out",
            user="alice",
            name="x",
            workdir="/",
            transfers=transfers,
            roots=(str(self.outside),),
        )
        return WorkerTask(
            order=order,
            home=str(self.home),
            storage_id="0123456789abcdef",
            accounts="own",
            progress=self._progress,
            control=self._control.descriptor,
            agent=os.getpid(),
        )

    def run(self, traced: Callable[[Line], None]) -> int:
        """Run a worker as a child that says before each line of MODULES which one comes; return its exit code."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            given.write(msgspec.json.encode(self.work()))
            given.seek(0)
            child = os.fork()
            if child == 0:
                code = 99
                try:
                    os.dup2(given.fileno(), 0)
                    os.dup2(said.fileno(), 1)
                    os.dup2(said.fileno(), 2)
                    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
                    sys.settrace(tracer(traced))
                    code = worker.main([])
                finally:
                    sys.settrace(None)
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            said.seek(0)
            self.said = said.read().decode()
            return os.waitstatus_to_exitcode(status)


def tracer(traced: Callable[[Line], None]) -> Callable[[FrameType, str, object], object]:
    """Return what Python calls before each line."""

    def local(frame: FrameType, event: str, _: object) -> object:
        if event == "line":
            traced((frame.f_code.co_filename, frame.f_lineno))
        return local

    return lambda frame, event, argument: local if frame.f_code.co_filename in MODULES else None


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory that is synced for nothing: there are many transfers here, and none of them is about disks."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        yield Path(name)


def test_a_worker_told_to_end_before_any_line_leaves_nothing_at_the_destination_and_says_nothing(
    in_memory: Path,
) -> None:
    tmp_path = in_memory
    (tmp_path / "seen").mkdir()
    seen_file = tmp_path / "lines"
    with open(seen_file, "w") as out:
        first = Bench(tmp_path / "seen")
        assert first.run(lambda line: print(*line, sep="\t", file=out, flush=True)) == 0, first.said
        first.close()
    lines = list(dict.fromkeys(tuple(line.split("\t")) for line in seen_file.read_text().splitlines()))
    assert {name for name, _ in lines} == MODULES
    ended = 0
    for number, (name, at) in enumerate(lines):
        (tmp_path / str(number)).mkdir()
        bench = Bench(tmp_path / str(number))
        wanted = name, int(at)

        def end(line: Line, wanted: Line = wanted) -> None:
            if line == wanted:
                os.kill(os.getpid(), signal.SIGTERM)

        code = bench.run(end)
        bench.close()
        assert code in (0, worker.EXIT_ENDED), (wanted, bench.said)
        assert "Traceback" not in bench.said, (wanted, bench.said)
        left = {path.name: path.read_bytes() for path in bench.outside.iterdir() if path.is_file()}
        assert set(os.listdir(bench.outside)) == set(left), (wanted, bench.said)
        assert left.items() <= {name: name.encode() * 5000 for name in "ab"}.items()
        ended += code == worker.EXIT_ENDED
    assert ended == len(lines)
