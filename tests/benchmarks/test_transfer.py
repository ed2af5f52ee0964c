"""What scripts/bench says about transfers: that a copy is one, and that a process ends when it is told to."""

import os
import signal
from pathlib import Path

import pytest

from forebay.cluster.agent.transfer.options import TransferOptions
from tests.benchmarks import transfer
from tests.benchmarks.carried import EXIT_ENDED
from tests.benchmarks.processes import ServerFailed

SMALL = TransferOptions(chunk_bytes=4096, large_bytes=16384)


def test_a_transfer_that_is_measured_copies_what_it_says_and_a_difference_is_found(tmp_path: Path) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    transfer.make_small(source, 30, 100)
    transfer.make_large(source / "large.dat", 100_001)
    with transfer._carrying(source, destination, tmp_path / "home", 1, SMALL) as running:
        receipt = running.receipt()
        assert transfer._memory_kib(running.process.pid) == 0
    assert (receipt["files"], receipt["size_bytes"]) == (31, 30 * 100 + 100_001)
    transfer.checked(source, destination)
    assert not list(destination.glob(".forebay-*"))
    with (destination / "large.dat").open("r+b") as file:
        file.seek(50_000)
        (byte,) = file.read(1)
        file.seek(50_000)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ServerFailed, match="is not what"):
        transfer.checked(source, destination)


def test_a_transfer_that_stands_still_at_rate_0_is_counted_and_ends_when_it_is_told(tmp_path: Path) -> None:
    source, destination = tmp_path / "source.dat", tmp_path / "destination.dat"
    transfer.make_large(source, 3 * 1024 * 1024)
    with transfer._carrying(source, destination, tmp_path / "home", 1, SMALL) as running:
        running.control.rate_bytes_s = 0
        while running.counters().bytes_total == 0:
            assert running.process.poll() is None
            os.sched_yield()
        assert transfer._memory_kib(running.process.pid) > 0
        running.control.stop()
        os.kill(running.process.pid, signal.SIGTERM)
        assert running.process.wait(timeout=60) == EXIT_ENDED
    assert not destination.exists()
    assert transfer._written_bytes(os.getpid()) >= 0


def test_the_disks_own_speed_is_a_time_and_leaves_nothing(tmp_path: Path) -> None:
    assert transfer.disk_s(tmp_path, 2 * transfer.DISK_BLOCK_BYTES) > 0
    assert list(tmp_path.iterdir()) == []
