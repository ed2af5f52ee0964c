"""Forebay's mover beside cp and rsync: the same files, the same disk, one run; resuming, cancelling and memory.

What each of them promises when it ends: `cp -a` and `rsync -a` leave what they wrote in memory and sync nothing; their
second figure has a `sync` of the destination's file system after them, in the measured time. `rsync` compares a
checksum of what it sent with one of what it received, before it is on the disk. Forebay's process is measured from its
start to its end, Python's own start included: a digest was taken of the very bytes written, every file was synced
before it got its name, the names are synced, and so are its records."""

import contextlib
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from forebay.cluster.agent.transfer.options import TransferOptions, Verify, chunk_bytes_of
from forebay.cluster.agent.transfer.progress import Counters, SharedCounters
from forebay.cluster.agent.transfer.rate_limit import TransferControl
from tests.benchmarks.carried import EXIT_ENDED, Wanted
from tests.benchmarks.processes import ServerFailed
from tests.repo.tree import ROOT

GIB = 1024**3

SMALL_BYTES = 4096
"""Bytes of each small file: one page, the size of the issue's goal."""

DIRECTORY_FILES = 1000
"""Small files in one directory, count."""

TINY_BYTES = 64
"""Bytes of each file where only their number matters."""

DISK_BLOCK_BYTES = 4 * 1024 * 1024
DISK_STREAMS = 2
"""How the disk's own speed is taken: so much at once past the page cache, by so many threads."""

RESUMED_AT = 0.5
"""Share of the large file that is there when its transfer is killed."""

RECORDS_BYTES_MAX = 1024 * 1024
"""Bytes of a transfer's own records, which the kernel counts among what its process wrote, at most."""

CANCEL_GOAL_S = 1.0
MEMORY_GOAL_MIB = 200
"""What issue 5 asks for."""

SAMPLE_S = 0.1
"""Seconds between two polls at the memory of a transfer's processes."""

WAIT_S = 1800.0
"""Seconds after which a transfer that is measured has failed."""


class _Running:
    """A transfer under way."""

    def __init__(self, source: Path, destination: Path, home: Path, attempt: int, options: TransferOptions) -> None:
        self._counters = SharedCounters.create()
        self.control = TransferControl()
        wanted = Wanted(
            source=str(source),
            destination=str(destination),
            home=str(home),
            directory=source.is_dir(),
            attempt=attempt,
            counters=self._counters,
            control=self.control.descriptor,
            options=options,
        )
        self._shared = SharedCounters(self._counters)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.benchmarks.carried", msgspec.json.encode(wanted).decode()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            pass_fds=(self._counters, self.control.descriptor),
            process_group=0,
        )

    def counters(self) -> Counters:
        """Return how far it is."""
        return self._shared.read()

    def receipt(self) -> dict[str, Any]:
        """Wait for its end and return what it says. ServerFailed if it failed."""
        output, errors = self.process.communicate(timeout=WAIT_S)
        if self.process.returncode != 0:
            raise ServerFailed(f"a transfer failed: {errors.decode(errors='replace')[-1500:]}")
        found: dict[str, Any] = json.loads(output)
        return found

    def end(self) -> None:
        """Kill what still runs, and close everything."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self._shared.close()
        os.close(self._counters)
        self.control.close()


@contextlib.contextmanager
def _carrying(
    source: Path, destination: Path, home: Path, attempt: int, options: TransferOptions
) -> Iterator[_Running]:
    home.mkdir(exist_ok=True)
    running = _Running(source, destination, home, attempt, options)
    try:
        yield running
    finally:
        running.end()


def rsync() -> str:
    """Return rsync's executable; Debian's package is installed if there is none. ServerFailed says what to run."""
    for command in ([], ["apt-get", "install", "-y", "-q", "--no-install-recommends", "rsync"]):
        if command:
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False)
                subprocess.run(command, env=environment, capture_output=True, check=False)
        if (found := shutil.which("rsync")) is not None:
            return found
    raise ServerFailed("rsync is not installed; as root: apt-get update && apt-get install rsync")


# What is copied.


def make_large(path: Path, size_bytes: int) -> None:
    """Write a file that cannot be compressed, durably."""
    block = os.urandom(DISK_BLOCK_BYTES)
    with path.open("wb") as file:
        for number in range(-(-size_bytes // len(block))):
            # No two blocks are alike.
            file.write(number.to_bytes(8, "big") + block[8:])
        file.truncate(size_bytes)
        os.fsync(file.fileno())


def make_small(path: Path, files: int, size_bytes: int) -> None:
    """Write a tree of small files, durably."""
    content = os.urandom(size_bytes)
    path.mkdir()
    for number in range(files):
        name, place = divmod(number, DIRECTORY_FILES)
        directory = path / f"{name:04}"
        if place == 0:
            directory.mkdir()
        descriptor = os.open(directory / f"{place:04}.dat", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(descriptor, number.to_bytes(8, "big") + content[8:])
        os.close(descriptor)
    os.sync()


def read_all(path: Path) -> None:
    """Read everything once, so that every system finds the source in memory alike."""
    for file in [path] if path.is_file() else sorted(path.rglob("*.dat")):
        with file.open("rb", buffering=0) as opened:
            while opened.read(DISK_BLOCK_BYTES):
                pass


def checked(source: Path, destination: Path) -> None:
    """See that the destination is what the source is. ServerFailed if not."""
    if subprocess.run(["diff", "-rq", source, destination], capture_output=True, check=False).returncode != 0:
        raise ServerFailed(f"{destination} is not what {source} is")


# Who copies it.


def _timed(work: Callable[[Path], object], destination: Path) -> float:
    started = time.perf_counter()
    work(destination)
    return time.perf_counter() - started


def _run(*command: str | Path) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ServerFailed(f"{command[0]}: {done.stderr[-500:]}")


def _sync(destination: Path) -> None:
    _run("sync", "-f", destination)


def _forebay(source: Path, destination: Path, home: Path, options: TransferOptions) -> None:
    with _carrying(source, destination, home, 1, options) as running:
        running.receipt()


def disk_s(directory: Path, size_bytes: int) -> float:
    """Return the seconds for writing so much past the page cache, durably, and doing nothing else."""
    path = directory / "disk.probe"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        with mmap.mmap(-1, DISK_BLOCK_BYTES) as block, ThreadPoolExecutor(DISK_STREAMS) as pool:
            block.write(os.urandom(DISK_BLOCK_BYTES))
            started = time.perf_counter()
            list(pool.map(lambda at: os.pwrite(descriptor, block, at), range(0, size_bytes, DISK_BLOCK_BYTES)))
            os.fdatasync(descriptor)
            return time.perf_counter() - started
    finally:
        os.close(descriptor)
        path.unlink()


def compared(
    directory: Path, source: Path, rounds: int, say: Callable[[str], None], *, blake3: bool = False
) -> dict[str, dict[str, float]]:
    """Copy `source` with each of them, `rounds` times in changing order; return medians and best times, seconds."""
    program = rsync()
    inner = source.is_dir()

    def forebay(options: TransferOptions) -> Callable[[Path], None]:
        return lambda to: _forebay(source, to, to.with_name(f"{to.name}.home"), options)

    # A slash after a directory's name: rsync then copies what is in it, as the others do.
    systems: dict[str, Callable[[Path], None]] = {
        "cp -a": lambda to: _run("cp", "-a", source, to),
        "rsync -a": lambda to: _run(program, "-a", f"{source}/" if inner else source, to),
        "forebay": forebay(TransferOptions()),
        "forebay read_back": forebay(TransferOptions(verify=Verify.READ_BACK)),
    }
    if blake3:
        systems["forebay blake3"] = forebay(TransferOptions(algorithm="blake3"))
    synced = {"cp -a", "rsync -a"}
    taken: dict[str, list[float]] = {}
    order = list(systems)
    left: list[Path] = []
    for number in range(rounds):
        for name in order[number % len(order) :] + order[: number % len(order)]:
            destination = directory / f"to-{source.name}-{number}-{name.replace(' ', '')}"
            left += [destination, destination.with_name(f"{destination.name}.home")]
            read_all(source)
            os.sync()
            own_s = _timed(systems[name], destination)
            taken.setdefault(name, []).append(own_s)
            if name in synced:
                sync_s = _timed(_sync, destination)
                taken.setdefault(f"{name} + sync", []).append(own_s + sync_s)
            if number == 0:
                checked(source, destination)
            if not inner:
                _remove(left)
    # Small files only now: where many were just removed, ext4 takes long to find places for new ones.
    _remove(left)
    for name, times in taken.items():
        best, middle = min(times), statistics.median(times)
        say(f"  {name:<18} {middle:8.2f} s   best {best:8.2f} s   all {', '.join(f'{one:.2f}' for one in times)}")
    return {
        name: {"median_s": round(statistics.median(times), 3), "best_s": round(min(times), 3)}
        for name, times in taken.items()
    }


def _remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    paths.clear()
    os.sync()


# What else is asked of it.


def resumed(directory: Path, source: Path) -> dict[str, int]:
    """Kill a transfer of one large file half way, let the next attempt end it; return what was written twice, bytes."""
    destination, home = directory / "resumed", directory / "resumed.home"
    size_bytes, options = source.stat().st_size, TransferOptions()
    with _carrying(source, destination, home, 1, options) as running:
        while running.counters().bytes_done < size_bytes * RESUMED_AT:
            if running.process.poll() is not None:
                raise ServerFailed("the transfer ended before it could be killed: take a larger file")
            time.sleep(0.005)
        # Stopped first, so that nothing is written between looking and killing.
        os.killpg(running.process.pid, signal.SIGSTOP)
        before = _written_bytes(running.process.pid)
        os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait()
    with _carrying(source, destination, home, 2, options) as running:
        receipt = running.receipt()
    checked(source, destination)
    _remove([destination])
    shutil.rmtree(home)
    chunk_bytes = chunk_bytes_of(size_bytes, options)
    found = {
        "written_before_kill_bytes": before,
        "written_after_bytes": receipt["written_bytes"],
        "resumed_bytes": receipt["resumed_bytes"],
        "twice_bytes": max(0, before + receipt["written_bytes"] - size_bytes),
        "chunk_bytes": chunk_bytes,
        "streams": options.streams,
    }
    if found["twice_bytes"] > chunk_bytes * options.streams + RECORDS_BYTES_MAX:
        raise ServerFailed(f"more than a chunk per stream was copied twice: {found}")
    return found


def _written_bytes(process: int) -> int:
    """Return what a process had written to disks, bytes (proc(5): write_bytes)."""
    for line in Path(f"/proc/{process}/io").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(": ")
        if name == "write_bytes":
            return int(value)
    raise ServerFailed("this kernel does not count what processes write")


def cancelled(directory: Path, source: Path) -> float:
    """Return the seconds from the word to stop until a transfer at full speed is gone, all of its processes."""
    destination, home = directory / "cancelled", directory / "cancelled.home"
    with _carrying(source, destination, home, 1, TransferOptions()) as running:
        while not running.counters().bytes_done:
            if running.process.poll() is not None:
                raise ServerFailed("the transfer ended before it could be cancelled: take more or larger files")
            time.sleep(0.005)
        # As the agent does it: the page says stop, and SIGTERM wakes whoever does not look.
        started = time.perf_counter()
        running.control.stop()
        os.kill(running.process.pid, signal.SIGTERM)
        running.process.wait(timeout=WAIT_S)
        while _alive_in(running.process.pid):
            time.sleep(0.002)
        taken_s = time.perf_counter() - started
        if running.process.returncode != EXIT_ENDED:
            raise ServerFailed(f"a cancelled transfer ended with code {running.process.returncode}")
    if destination.is_file():
        raise ServerFailed("a cancelled transfer gave a file that was not complete its name")
    _remove([destination, home, *directory.glob(".forebay-*")])
    return taken_s


def _alive_in(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def memory(directory: Path, source: Path) -> dict[str, float]:
    """Return the most memory that all processes of one transfer had together, MiB: what is shared counts once."""
    destination, home = directory / "remembered", directory / "remembered.home"
    most, ended = [0], threading.Event()
    with _carrying(source, destination, home, 1, TransferOptions()) as running:

        def watch() -> None:
            while not ended.wait(SAMPLE_S):
                most[0] = max(most[0], _memory_kib(running.process.pid))

        watching = threading.Thread(target=watch)
        watching.start()
        started = time.perf_counter()
        try:
            receipt = running.receipt()
        finally:
            ended.set()
            watching.join()
        taken_s = time.perf_counter() - started
    _remove([destination, home])
    return {"files": receipt["files"], "seconds": round(taken_s, 2), "most_mib": round(most[0] / 1024, 1)}


def _memory_kib(group: int) -> int:
    """Return the proportional memory of the processes of a group, KiB (proc(5): Pss of smaps_rollup)."""
    total = 0
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry)) != group:
                continue
            for line in Path(f"/proc/{entry}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total


# The section.


def report(
    directory: Path, rounds: int, large_bytes: int, small_files: int, memory_files: int, say: Callable[[str], None]
) -> dict[str, object]:
    """Measure all of it, print it, and return the figures. ServerFailed if something is not as it has to be."""
    say("Transfers: the same files, the same disk; cp and rsync sync nothing by themselves, forebay everything")
    found: dict[str, object] = {}
    place = directory / "transfer"
    place.mkdir()
    large = place / "large.dat"
    make_large(large, large_bytes)
    say(f" One file of {large_bytes / GIB:g} GiB, in memory at the source; medians of {rounds}")
    disk = statistics.median(disk_s(place, large_bytes) for _ in range(rounds))
    say(f"  {'the disk itself':<18} {disk:8.2f} s   written past the page cache by {DISK_STREAMS} threads")
    times = compared(place, large, rounds, say, blake3=True)
    found["large"] = {"bytes": large_bytes, "disk_s": round(disk, 3), "systems": times, **_ratios(times, disk, say)}
    found["resumed"] = resumed(place, large)
    say(f"  killed half way and resumed: {found['resumed']}")
    found["cancel_large_s"] = round(cancelled(place, large), 3)
    say(f"  cancelled at full speed: gone after {found['cancel_large_s']} s (goal: {CANCEL_GOAL_S:g})")
    large.unlink()
    small = place / "small"
    make_small(small, small_files, SMALL_BYTES)
    say(f" {small_files:,} files of {SMALL_BYTES} bytes, in memory at the source; medians of {rounds}")
    times = compared(place, small, rounds, say)
    found["small"] = {"files": small_files, "bytes": SMALL_BYTES, "systems": times, **_ratios(times, None, say)}
    found["cancel_small_s"] = round(cancelled(place, small), 3)
    say(f"  cancelled at full speed: gone after {found['cancel_small_s']} s (goal: {CANCEL_GOAL_S:g})")
    if memory_files != small_files:
        shutil.rmtree(small)
        make_small(small, memory_files, TINY_BYTES)
    found["memory"] = remembered = memory(place, small)
    say(f"  {remembered['files']:,} files: {remembered['most_mib']} MiB in all processes (goal: {MEMORY_GOAL_MIB})")
    shutil.rmtree(place)
    return found


def _ratios(times: dict[str, dict[str, float]], disk: float | None, say: Callable[[str], None]) -> dict[str, float]:
    own = times["forebay"]["median_s"]
    found = {f"times_{name}": round(times[name]["median_s"] / own, 2) for name in times if "forebay" not in name}
    if disk is not None:
        found["share_of_disk"] = round(disk / own, 2)
    say("  forebay: " + ", ".join(f"{value} {name.replace('_', ' ', 1)}" for name, value in found.items()))
    return found
