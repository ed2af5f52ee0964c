"""The seam to PySyncObj: a changed release is noticed, and nothing else touches what is private."""

import hashlib
import inspect
import re
from pathlib import Path

import pysyncobj.syncobj as stock
import pytest
from pysyncobj import SyncObj
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from cluster.consensus import seam
from cluster.consensus.core import Core
from cluster.consensus.elections import Elections
from cluster.consensus.engine import Engine
from cluster.consensus.following import Following
from cluster.consensus.journal_adapter import JournalAdapter
from cluster.consensus.leading import Leading
from cluster.consensus.seam import Seam
from tests.cluster.consensus.rig import Rig
from wal.failures import BrokenInvariant

CONSENSUS = Path(seam.__file__).parent

OVERRIDDEN = {
    "_SyncObj__applyLogEntries": "073db677773b5a2d",
    "_SyncObj__doApplyCommand": "1ea7aa506e950d0a",
    "_SyncObj__doChangeCluster": "247d4d4101b8cd3c",
    "_SyncObj__generateRaftTimeout": "92ed37d3620e781a",
    "_SyncObj__loadDumpFile": "ec66e83905de703b",
    "_SyncObj__onBecomeLeader": "5a3fd97bc17dc1cf",
    "_SyncObj__onMessageReceived": "ddfe34b6c0282179",
    "_SyncObj__sendAppendEntries": "9cb9073128c392fa",
    "_SyncObj__tryLogCompaction": "c2f8a0ec14cc7312",
    "_applyCommand": "827f207d515b2d64",
    "_onTick": "cc9eb08232d005ba",
    "transferLeadership": "c3ac67963962d9aa",
}
"""Stock methods that the seam replaces: a change in one may move a rule to a place that is not replaced."""

RELIED_ON = {
    "__init__": "09df12cd7fd7d727",
    "_SyncObj__setCurrentTerm": "0ad5bf456ac06bd3",
    "_SyncObj__setState": "2c1f239f7bd79b39",
    "_SyncObj__onNodeConnected": "2655afb481b4c69b",
    "_SyncObj__onNodeDisconnected": "a81c0475ba2218cc",
    "_SyncObj__onSetCodeVersion": "17b050edb193c853",
    "setCodeVersion": "a157058e46debd78",
    "doTick": "bef78c2ba06d784b",
    "destroy": "2d032c9fe266b3cd",
    "_doDestroy": "8a6c9f892614a4b9",
    "Node": "08d57d1bfde2aca1",
    "Transport": "9b0212a7af6123e7",
}
"""Stock code that still runs."""


def digest(thing: object) -> str:
    return hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()[:16]  # type: ignore[arg-type]


def test_every_stock_method_that_is_replaced_or_runs_has_the_source_it_had_when_it_was_read() -> None:
    found = {name: digest(vars(SyncObj)[name]) for name in (*OVERRIDDEN, *RELIED_ON) if name in vars(SyncObj)}
    found |= {"Node": digest(Node), "Transport": digest(Transport)}
    assert found == {**OVERRIDDEN, **RELIED_ON}


def test_every_overridden_name_is_known() -> None:
    known = {name for name in vars(SyncObj) if not name.startswith("__") or name == "__init__"}
    for rules in (Seam, Core, Elections, Following, Leading, Engine):
        overridden = {name for name in vars(rules) if name in known} - {"__init__"}
        assert overridden == (set(OVERRIDDEN) if rules is Seam else set()), rules


def test_every_private_name_that_is_used_exists() -> None:
    used = set(re.findall(r"_SyncObj__\w+", Path(seam.__file__).read_text()))
    known = set(vars(SyncObj)) | set(vars(Rig().engine))
    assert used and used <= known


def test_one_module_knows_the_stock_engine() -> None:
    for path in CONSENSUS.glob("*.py"):
        if path.name != "seam.py":
            text = path.read_text()
            assert "_SyncObj__" not in text, path
            assert not re.search(r"^\s*(import|from) pysyncobj", text, re.MULTILINE), path


def test_no_method_of_the_stock_engine_is_replicated_by_the_way() -> None:
    assert not [name for name in dir(Engine) if getattr(getattr(Engine, name, None), "replicated", False)]


def test_the_stock_constructor_finds_our_journal_and_afterwards_its_own_again() -> None:
    before = stock.createJournal, stock.createPoller
    rig = Rig()
    assert (stock.createJournal, stock.createPoller) == before
    assert isinstance(rig.engine._SyncObj__raftLog, JournalAdapter)
    assert rig.journal.last_index == 0, "the stock constructor adds a first entry to an empty journal"


def test_the_bridge_sends_nothing_that_is_not_a_message_of_ours() -> None:
    rig = Rig()
    with pytest.raises(BrokenInvariant, match="dict"):
        rig.engine._bridge.send(Node("r2"), {"type": "append_entries"})  # type: ignore[arg-type]
    assert rig.out == []
