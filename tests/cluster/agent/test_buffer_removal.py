"""A process of the user moves things into a buffer while root removes it: nothing of other users is deleted."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.cluster.agent.files.filesystems import mark
from forebay.cluster.agent.processes import UnixAccount, account_for, acting_as
from forebay.cluster.agent.worker import buffer_removal, worker
from forebay.cluster.agent.worker.external_provider import PERSISTENT_CHANGE
from forebay.cluster.agent.worker.task import Outcome, WorkerTask
from forebay.cluster.system import closing, open_directory
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.orders import OrderFilesystem
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent, JobOptions
from tests.cluster.agent.test_operations import Node, shared

__all__ = ["shared"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")

USER: Final = "nobody"
VICTIM: Final = "daemon"

RACER: Final = """
import os, sys
buffer, gid, uid = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
os.setgroups([]); os.setgid(gid); os.setuid(uid)
outside = os.open(sys.argv[4], os.O_RDONLY)
print("ready", flush=True)
while os.listdir(buffer):
    pass
try:
    os.rename("moved", "moved", src_dir_fd=outside, dst_dir_fd=buffer)
except OSError:
    pass
"""


TEARDOWN: Final = "teardown"
PLACED_TEARDOWN: Final = "teardown on a shared file system"
DESTROY: Final = "destroy"
PLACED_DESTROY: Final = "destroy on a shared file system"
BY_OPERATOR: Final = "destroy by an operator"
CLEAR: Final = "buffer clear"
KINDS: Final = (TEARDOWN, PLACED_TEARDOWN, DESTROY, PLACED_DESTROY, BY_OPERATOR, CLEAR)

ROUNDS: Final = 6
"""Buffers that are removed under a race, count."""

FILES: Final = 50
"""Files of the user's in each of them, count: the pass takes as long."""


class Attack:
    """One buffer of a user, a directory of the user's beside it with a victim's private one in it, and the removal."""

    def __init__(self, node: Node, kind: str) -> None:
        self.node, self.kind = node, kind
        self.user: UnixAccount = account_for("switch", USER)
        top = node.directory / "bb"
        top.mkdir()
        top.chmod(0o711)
        filesystem = OrderFilesystem(
            "bb", str(top), mark(str(top)), "test/7.1" if kind == PLACED_TEARDOWN else "test/lake.7.1"
        )
        own: dict[str, Any] = {"filesystem": filesystem} if kind == PLACED_TEARDOWN else {}
        lake: dict[str, Any] = {"persistent": (("lake", filesystem),)} if kind == PLACED_DESTROY else {}
        creates: dict[str, Any] = {"creates": (CreatePersistent("lake", 1 << 20),)}
        destroys: dict[str, Any] = {"destroys": (DestroyPersistent("lake"),), **lake}
        stage, self.buffer = PERSISTENT_CHANGE, node.home.path / "persistent" / "lake"
        if own or lake:
            self.buffer = top / filesystem.directory
        if kind in (TEARDOWN, PLACED_TEARDOWN):
            assert isinstance(node.operate("stage_in", **own), OperationDone)
            stage, self._fields = "teardown", own
            self.buffer = self.buffer if own else node.home.path / "buffers" / "7"
        else:
            assert isinstance(self._perform(PERSISTENT_CHANGE, creates | lake), OperationDone)
            by_operator = {"options": JobOptions(by_operator=kind == BY_OPERATOR)}
            self._fields = creates | {"job": 8} if kind == CLEAR else destroys | by_operator
        self._stage = stage
        self.outside = node.directory / "outside"
        self.moved = self.outside / "moved"
        (self.moved / "private").mkdir(parents=True)
        (self.moved / "private" / "thesis").write_text("the only copy")
        for path, owner in ((self.outside, USER), (self.moved, USER), (self.moved / "private", VICTIM)):
            path.chmod(0o700)
            shutil.chown(path, owner)

    def remove(self) -> Outcome:
        """Have the buffer removed, in this process, as a worker does."""
        return self._perform(self._stage, self._fields)

    def _perform(self, stage: str, fields: dict[str, Any]) -> Outcome:
        order = self.node.order(stage, **fields)
        home = str(self.node.home.path)
        return worker.perform(
            WorkerTask(order=order, home=home, storage_id="0" * 32, accounts="switch", progress=-1, agent=os.getppid())
        )

    def move_in(self, buffer: int) -> str:
        """Move the directory into the open buffer with the user's rights; return why the kernel refuses it."""
        with acting_as(self.user.uid, self.user.gid), closing(open_directory(self.outside)) as outside:
            try:
                os.rename("moved", "moved", src_dir_fd=outside, dst_dir_fd=buffer)
            except OSError as error:
                return os.strerror(error.errno)
        return ""

    def theses(self) -> list[Path]:
        """Return what is left of the victim's file, wherever it is."""
        return list(self.node.directory.rglob("thesis"))


@pytest.fixture
def attack(shared: Node, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attack:
    # The process of the tests outlives whatever is its parent.
    for module in (buffer_removal, worker):
        monkeypatch.setattr(module, "die_with_parent", lambda agent: None)
    return Attack(shared, request.param)


@pytest.mark.parametrize("attack", [kind for kind in KINDS if kind != BY_OPERATOR], indirect=True)
def test_what_is_moved_in_after_the_users_pass_is_kept_and_named(
    attack: Attack, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    really, moved = buffer_removal.remove_removable, []

    def pass_and_attack(directory: int, *, shown: str) -> list[str]:
        kept = really(directory, shown=shown)
        if not moved:
            moved.append(attack.move_in(directory))
        return kept

    monkeypatch.setattr(buffer_removal, "remove_removable", pass_and_attack)
    (attack.buffer / "mine").write_text("x")
    shutil.chown(attack.buffer / "mine", USER)
    result = attack.remove()
    assert moved == [""] and not attack.moved.exists()
    (thesis,) = attack.theses()
    if attack.kind == CLEAR:
        assert isinstance(result, OperationDone)
        (kept,) = (attack.node.home.path / "persistent").glob(".cleared-*")
        said = capfd.readouterr().err
    else:
        assert isinstance(result, OperationFailed) and result.final
        kept, said = attack.buffer, result.message
    # Nobody but root gets there, and the message says where that is and whose it is.
    assert thesis.is_relative_to(kept)
    assert (kept.stat().st_uid, stat.S_IMODE(kept.stat().st_mode)) == (0, 0o700)
    assert str(kept) in said and f"private (of user {pwd.getpwnam(VICTIM).pw_uid})" in said

    # Whatever is tried again, and by an agent that was started again, keeps it; until an operator has taken it away.
    assert isinstance(attack.remove(), OperationDone if attack.kind == CLEAR else OperationFailed)
    (thesis,) = attack.theses()
    shutil.rmtree(thesis.parent)
    assert isinstance(attack.remove(), OperationDone)
    assert not kept.exists() or attack.kind == CLEAR


@pytest.mark.parametrize("attack", KINDS, indirect=True)
def test_nothing_can_be_moved_in_once_root_removes(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    really, refused = buffer_removal._take_away, []
    with acting_as(attack.user.uid, attack.user.gid):
        held = open_directory(attack.buffer) if attack.kind != CLEAR else -1

    def take_and_attack(work: WorkerTask, directory: int) -> None:
        really(work, directory)
        # A process that has had it open all the time, and one that gets at it anew.
        refused.extend(attack.move_in(buffer) for buffer in (held, directory) if buffer >= 0)

    monkeypatch.setattr(buffer_removal, "_take_away", take_and_attack)
    assert isinstance(attack.remove(), OperationDone)
    assert set(refused) == {"Permission denied"}
    assert attack.theses() == [attack.moved / "private" / "thesis"]
    if held >= 0:
        os.close(held)


@pytest.mark.parametrize("attack", [TEARDOWN, DESTROY], indirect=True)
def test_a_buffer_that_was_taken_away_when_its_remover_was_killed_is_emptied_as_its_user(attack: Attack) -> None:
    with closing(open_directory(attack.buffer)) as buffer:
        assert attack.move_in(buffer) == ""
    (attack.buffer / "late").write_text("x")
    shutil.chown(attack.buffer / "late", USER)
    os.chown(attack.buffer, 0, 0)
    attack.buffer.chmod(0o700)
    result = attack.remove()
    assert isinstance(result, OperationFailed) and "may not remove" in result.message
    assert len(attack.theses()) == 1 and not (attack.buffer / "late").exists()


@pytest.mark.parametrize("attack", [TEARDOWN], indirect=True)
def test_a_buffer_that_is_filled_all_the_time_is_left_and_tried_again(
    attack: Attack, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = buffer_removal.remove_removable

    def pass_and_fill(directory: int, *, shown: str) -> list[str]:
        kept = really(directory, shown=shown)
        os.close(os.open("late", os.O_CREAT | os.O_WRONLY, dir_fd=directory))
        return kept

    monkeypatch.setattr(buffer_removal, "remove_removable", pass_and_fill)
    (attack.buffer / "mine").write_text("x")
    result = attack.remove()
    assert isinstance(result, OperationFailed) and not result.final and "end the processes" in result.message
    monkeypatch.setattr(buffer_removal, "remove_removable", really)
    assert isinstance(attack.remove(), OperationDone) and not attack.buffer.exists()


def racing(attack: Attack) -> subprocess.Popen[str]:
    """Start a process of the user that moves the directory into the buffer as soon as it sees that it is empty."""
    with closing(open_directory(attack.buffer)) as buffer:
        arguments = (str(buffer), str(attack.user.gid), str(attack.user.uid), str(attack.outside))
        process = subprocess.Popen(
            [sys.executable, "-c", RACER, *arguments], pass_fds=(buffer,), stdout=subprocess.PIPE, text=True
        )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_real_race_of_a_process_outside_the_job_deletes_nothing(shared: Node) -> None:
    attack = Attack(shared, TEARDOWN)
    for attempt in range(1, ROUNDS + 1):
        if attempt > 1:
            assert isinstance(shared.operate("stage_in", attempt=2 * attempt), OperationDone)
        for number in range(FILES):
            (attack.buffer / f"{number}").touch()
            shutil.chown(attack.buffer / f"{number}", USER)
        with racing(attack) as process:
            try:
                result = shared.operate("teardown", attempt=2 * attempt + 1)
            finally:
                process.kill()
        (thesis,) = attack.theses()
        assert thesis.read_text() == "the only copy"
        if not isinstance(result, OperationDone):
            assert isinstance(result, OperationFailed) and str(attack.buffer) in result.message
            thesis.parent.parent.rename(attack.moved)
            assert isinstance(shared.operate("teardown", attempt=2 * attempt + 1), OperationDone)
        assert not attack.buffer.exists()
