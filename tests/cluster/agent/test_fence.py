"""Only the newest attempt can put anything in place, whatever the others still hold and however late they come."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.agent.transfer import fence
from forebay.cluster.agent.transfer.fence import Claimant, FenceFailed, WriterFenced, claim, sweep, tidy

A, B = "a" * 32, "b" * 32


class Attempt:
    """One that has claimed a destination."""

    def __init__(self, destination: Path, attempt: int, owner: str) -> None:
        self.directory = os.open(destination, os.O_RDONLY | os.O_DIRECTORY)
        self.who = Claimant("0123abcd-7", attempt, owner)
        try:
            self.staging = claim(self.directory, str(destination), self.who)
        except BaseException:
            os.close(self.directory)
            raise

    def write(self, name: str, text: str) -> None:
        """Make a temporary file."""
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.staging)
        os.write(descriptor, text.encode())
        os.close(descriptor)

    def publish(self, name: str) -> None:
        os.rename(name, "result", src_dir_fd=self.staging, dst_dir_fd=self.directory)

    @property
    def home(self) -> Path:
        """The directory for all attempts that this one's is in."""
        return Path(os.readlink(f"/proc/self/fd/{self.staging}")).parent

    def close(self) -> None:
        os.close(self.staging)
        os.close(self.directory)


PRIVATE, SHARED = 0o755, 0o1777


@pytest.fixture(params=[PRIVATE, SHARED], ids=["private", "shared"])
def destination(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    place = tmp_path / "out"
    place.mkdir()
    place.chmod(request.param)
    yield place


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside another agent's"])
def test_what_is_swept_does_not_come_back_in_a_power_cut(
    destination: Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    attempt = Attempt(destination, 3, A)
    attempt.write("half", "x")
    home = attempt.home
    if other:
        (home / f"2.{B}").mkdir()
    real, synced = os.fsync, list[tuple[int, bool, bool]]()

    def fsync(descriptor: int) -> None:
        real(descriptor)
        synced.append((os.fstat(descriptor).st_ino, (home / attempt.who.place).exists(), home.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    kept = home.stat().st_ino
    assert sweep(attempt.directory, str(destination), attempt.who) == 1
    assert (destination.stat().st_ino, False, other) in synced
    # What stays is what the removal has to be durable in.
    assert ((kept, False, True) in synced) is other
    attempt.close()


def test_a_late_agent_can_neither_write_nor_put_in_place_what_it_wrote(destination: Path) -> None:
    late = Attempt(destination, 3, A)
    late.write("half", "old")
    newest = Attempt(destination, 4, B)
    for act in (lambda: late.write("more", "old"), lambda: late.publish("half")):
        with pytest.raises(FileNotFoundError):
            act()
    assert fence.is_removed(late.staging) and not fence.is_removed(newest.staging)
    newest.write("half", "new")
    newest.publish("half")
    assert not fence.is_removed(newest.staging)
    assert (destination / "result").read_text() == "new"
    with pytest.raises(WriterFenced, match="attempt 4 writes to .*attempt 3 is no longer the newest"):
        Attempt(destination, 3, A)
    assert sweep(newest.directory, "out", newest.who) == 0
    assert os.listdir(destination) == ["result"]
    late.close()
    newest.close()


def test_of_two_agents_with_the_same_attempt_the_second_gives_way(destination: Path) -> None:
    first = Attempt(destination, 3, B)
    with pytest.raises(WriterFenced, match="another agent carries out the same attempt 3"):
        Attempt(destination, 3, A)
    first.write("half", "first")
    first.publish("half")
    # It may come again, though: the lock on its own disk says that nobody else works for it.
    again = Attempt(destination, 3, B)
    assert not fence.is_removed(first.staging)
    again.close()
    first.close()


def test_the_next_attempt_of_the_same_agent_goes_on_with_what_is_half_done(destination: Path) -> None:
    former = Attempt(destination, 3, A)
    former.write("half", "most of it")
    newest = Attempt(destination, 5, A)
    assert os.listdir(newest.staging) == ["half"] and fence.is_removed(former.staging)
    newest.publish("half")
    assert (destination / "result").read_text() == "most of it"
    former.close()
    newest.close()


@pytest.mark.parametrize("order", list(itertools.permutations([(3, A), (4, B), (5, A), (5, B)])))
def test_in_whatever_order_attempts_come_the_first_of_the_newest_is_the_only_one_that_can_write(
    destination: Path, order: tuple[tuple[int, str], ...]
) -> None:
    alive: list[Attempt] = []
    for attempt, owner in order:
        try:
            alive.append(Attempt(destination, attempt, owner))
        except WriterFenced:
            continue
    able = {(one.who.attempt, one.who.owner) for one in alive if not fence.is_removed(one.staging)}
    first_of_newest = next(owner for attempt, owner in order if attempt == 5)
    assert able == {(5, first_of_newest)}
    for one in alive:
        one.close()


def race(place: Path, barrier: threading.Barrier, claimed: list[Attempt], attempt: int, owner: str) -> None:
    """Claim at the same moment as others."""
    barrier.wait()
    with contextlib.suppress(WriterFenced):
        claimed.append(Attempt(place, attempt, owner))


@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize(("one", "other"), [(A, B), (B, A)])
def test_an_agent_that_claims_between_anothers_looks_is_not_joined_by_it(
    destination: Path, monkeypatch: pytest.MonkeyPatch, looks: int, one: str, other: str
) -> None:
    """Of the same attempt, whatever their names: who is done claiming never looks again."""
    look, count = fence._present, itertools.count(1)
    between: list[Attempt] = []

    def looked(*directory: Any) -> list[Any]:
        found = look(*directory)
        if next(count) == looks:
            with contextlib.suppress(WriterFenced):
                between.append(Attempt(destination, 4, other))
        return found

    monkeypatch.setattr(fence, "_present", looked)
    alive: list[Attempt] = []
    with contextlib.suppress(WriterFenced):
        alive.append(Attempt(destination, 4, one))
    alive += between
    assert len([each for each in alive if not fence.is_removed(each.staging)]) == 1
    for each in alive:
        each.close()


def test_attempts_that_claim_at_the_same_moment_leave_one_that_can_write(destination: Path) -> None:
    for round_number in range(20):
        place = destination / str(round_number)
        place.mkdir()
        barrier = threading.Barrier(4)
        claimed: list[Attempt] = []
        threads = [
            threading.Thread(target=race, args=(place, barrier, claimed, *who))
            for who in ((3, A), (4, B), (4, "c" * 32), (4, "d" * 32))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        able = [one for one in claimed if not fence.is_removed(one.staging)]
        # The older attempt, where the newer ones were three and all gave way.
        assert len(able) <= 1
        # Whoever gave way may come again, as the next attempt.
        last = Attempt(place, 5, B)
        assert not fence.is_removed(last.staging)
        for one in [*claimed, last]:
            one.close()


def test_an_agent_that_goes_on_making_files_is_fenced_all_the_same(destination: Path) -> None:
    late = Attempt(destination, 3, A)
    made, over = [0], threading.Event()

    def go_on() -> None:
        try:
            while True:
                late.write(str(made[0]), "x")
                made[0] += 1
        except FileNotFoundError:
            over.set()

    thread = threading.Thread(target=go_on)
    thread.start()
    while made[0] < 100:
        os.sched_yield()
    newest = Attempt(destination, 4, B)
    assert over.wait(10)
    thread.join()
    assert fence.is_removed(late.staging)
    late.close()
    newest.close()


def plant_unusable(what: str, home: Path, tmp_path: Path) -> None:
    """Put something in the place of a directory for all attempts that is none of ours."""
    if what == "a link":
        (tmp_path / "elsewhere").mkdir()
        home.symlink_to(tmp_path / "elsewhere")
    elif what == "a file":
        home.write_text("x")
    else:
        home.mkdir(mode=0o700)
        if what == "open to others":
            home.chmod(0o777)
        elif os.geteuid() == 0:
            shutil.chown(home, "nobody")
        else:
            pytest.skip("giving a directory away needs root")


@pytest.mark.parametrize("destination", [PRIVATE], indirect=True)
@pytest.mark.parametrize("what", ["a link", "a file", "open to others", "somebody else's"])
def test_a_directory_that_others_could_change_is_not_used(destination: Path, tmp_path: Path, what: str) -> None:
    plant_unusable(what, destination / ".forebay-0123abcd-7", tmp_path)
    with pytest.raises(FenceFailed, match="remove it, because Forebay reserves the name"):
        Attempt(destination, 3, A)
    assert not (tmp_path / "elsewhere").exists() or not os.listdir(tmp_path / "elsewhere")


def test_sweeping_removes_ones_own_and_tidying_what_is_empty(destination: Path) -> None:
    mine = Attempt(destination, 3, A)
    mine.write("half", "x")
    (Path(f"/proc/self/fd/{mine.staging}") / "scratch" / "deep").mkdir(parents=True)
    tidy(mine.directory, mine.who)
    assert not fence.is_removed(mine.staging)
    other = mine.who._replace(owner=B)
    assert sweep(mine.directory, "out", other) == 0 and not fence.is_removed(mine.staging)
    assert sweep(mine.directory, "out", mine.who._replace(attempt=9)) == 2
    assert os.listdir(destination) == []
    again = Attempt(destination, 3, A)
    tidy(again.directory, again.who)
    assert os.listdir(destination) == [] and sweep(again.directory, "out", again.who) == 0
    mine.close()
    again.close()


def test_a_destination_is_fenced_between_machines_and_not_only_between_descriptors(destination: Path) -> None:
    """A process that shares nothing with this one but the file system."""
    late = Attempt(destination, 3, A)
    late.write("half", "old")
    staging = next(late.home.iterdir())
    newest = Attempt(destination, 4, B)
    ended = subprocess.run(["mv", staging / "half", destination / "result"], capture_output=True)
    assert ended.returncode != 0 and not (destination / "result").exists()
    late.close()
    newest.close()


@pytest.mark.parametrize("destination", [SHARED], indirect=True)
@pytest.mark.parametrize("what", ["a link", "a file", "open to others", "somebody else's"])
def test_nobody_blocks_a_shared_destination_by_a_name_that_can_be_guessed(
    destination: Path, tmp_path: Path, what: str
) -> None:
    names = (".forebay-0123abcd-7", ".forebay-0123abcd-7-" + 16 * "0", ".forebay-0123abcd-7-" + 16 * "f")
    for number, name in enumerate(names):
        (tmp_path / str(number)).mkdir()
        plant_unusable(what, destination / name, tmp_path / str(number))
    late = Attempt(destination, 3, A)
    late.write("half", "old")
    newest = Attempt(destination, 4, B)
    assert fence.is_removed(late.staging)
    newest.write("half", "new")
    newest.publish("half")
    assert sweep(newest.directory, "out", newest.who) == 0
    tidy(newest.directory, newest.who)
    assert set(os.listdir(destination)) == {"result", *names}
    late.close()
    newest.close()


@pytest.mark.parametrize("destination", [SHARED], indirect=True)
def test_in_a_shared_destination_no_name_is_used_twice(destination: Path) -> None:
    seen = set()
    for attempt in range(1, 20):
        made = Attempt(destination, attempt, A)
        seen.add(made.home.name)
        assert sweep(made.directory, "out", made.who) == 0
        made.close()
    assert len(seen) == 19 and os.listdir(destination) == []


@pytest.mark.parametrize("modes", list(itertools.product((PRIVATE, SHARED), repeat=3)))
def test_attempts_find_each_other_whatever_the_mode_of_the_destination_was_meanwhile(
    tmp_path: Path, modes: tuple[int, ...]
) -> None:
    alive = []
    for attempt, (mode, owner) in enumerate(zip(modes, (A, A, B), strict=True), start=1):
        tmp_path.chmod(mode)
        alive.append(Attempt(tmp_path, attempt, owner))
        if attempt == 1:
            alive[0].write("half", "most of it")
    assert [fence.is_removed(one.staging) for one in alive] == [True, True, False]
    for attempt, owner in ((1, A), (2, B), (3, A)):
        with pytest.raises(WriterFenced):
            Attempt(tmp_path, attempt, owner)
    assert sweep(alive[2].directory, "out", alive[2].who) == 0
    assert os.listdir(tmp_path) == []
    for one in alive:
        one.close()


@pytest.mark.parametrize("destination", [SHARED], indirect=True)
def test_what_a_killed_attempt_left_in_a_shared_destination_is_swept_by_its_owner(destination: Path) -> None:
    left = Attempt(destination, 3, A)
    left.write("half", "x")
    # Killed between the two directories that it makes.
    (destination / (left.who.home + "-" + 16 * "0")).mkdir(mode=0o700)
    assert sweep(left.directory, "out", left.who) == 1 and os.listdir(destination) == []
    left.close()
