"""Adapter of PySyncObj: a changed release is detected, and no other module uses private names."""

import hashlib
import importlib
import inspect
import re
from pathlib import Path

import pysyncobj.syncobj as syncobj
import pytest
from pysyncobj import SyncObj
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from forebay.cluster.consensus import stock
from forebay.cluster.consensus.interface import Role
from forebay.cluster.consensus.stock import JournalAdapter, StockNode
from forebay.wal.failures import BrokenInvariant
from tests.cluster.consensus.harness import Harness, StockHarness
from tests.cluster.consensus.memory_journal import Disk

CONSENSUS = Path(stock.__file__).resolve().parent

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
"""Stock methods that the adapter replaces. A change in one may move a rule to a method that is not replaced."""

RELIED_ON = {
    "__init__": "09df12cd7fd7d727",
    "_SyncObj__setCurrentTerm": "0ad5bf456ac06bd3",
    "_SyncObj__setState": "2c1f239f7bd79b39",
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


def test_replaced_or_used_stock_methods_have_the_reviewed_source() -> None:
    found = {name: digest(vars(SyncObj)[name]) for name in (*OVERRIDDEN, *RELIED_ON) if name in vars(SyncObj)}
    found |= {"Node": digest(Node), "Transport": digest(Transport)}
    assert found == {**OVERRIDDEN, **RELIED_ON}


def test_every_overridden_name_is_known() -> None:
    known = {name for name in vars(SyncObj) if not name.startswith("__")}
    assert {name for name in vars(StockNode) if name in known} == set(OVERRIDDEN)


def test_every_used_private_name_exists() -> None:
    used = set(re.findall(r"_SyncObj__\w+", Path(stock.__file__).read_text()))
    known = set(vars(SyncObj)) | set(vars(StockHarness().engine))
    assert used and used <= known


def test_only_one_module_uses_the_stock_engine() -> None:
    for path in CONSENSUS.glob("*.py"):
        if path.name != "stock.py":
            text = path.read_text()
            assert "_SyncObj__" not in text, path
            assert not re.search(r"^\s*(import|from) pysyncobj", text, re.MULTILINE), path


def test_only_the_adapter_derives_from_the_stock_engine() -> None:
    modules = [importlib.import_module(f"forebay.cluster.consensus.{path.stem}") for path in CONSENSUS.glob("*.py")]
    classes = {thing for module in modules for thing in vars(module).values() if inspect.isclass(thing)}
    ours = {one for one in classes if one.__module__.startswith("forebay.")}
    assert {one for one in ours if issubclass(one, SyncObj)} == {StockNode}


def test_no_stock_method_is_replicated_by_accident() -> None:
    assert not [name for name in dir(StockNode) if getattr(getattr(StockNode, name, None), "replicated", False)]


def test_stock_constructor_gets_our_journal_and_its_functions_are_restored() -> None:
    before = syncobj.createJournal, syncobj.createPoller
    harness = Harness()
    assert (syncobj.createJournal, syncobj.createPoller) == before
    assert isinstance(harness.engine.stock._SyncObj__raftLog, JournalAdapter)
    assert harness.journal.last_index == 0, "the stock constructor adds a first entry to an empty journal"


def test_stock_variables_are_views_of_the_state_from_the_start() -> None:
    disk = Disk()
    disk.hard = (7, "r2")
    harness = Harness(disk=disk)
    raft, node = harness.engine.raft, harness.engine.stock
    assert (raft.term, raft.voted_for) == (7, "r2"), "restored from the journal"
    harness.lead()
    assert (raft.term, raft.voted_for, raft.role) == (8, "r1", Role.LEADER)
    assert (harness.journal.term, harness.journal.voted_for) == (8, "r1")
    assert node._isLeader() and (node.raftCurrentTerm, node.raftCommitIndex) == (8, raft.commit_index)
    assert node._SyncObj__votedForNodeId == "r1"


def test_stock_engine_sends_nothing() -> None:
    harness = Harness()
    with pytest.raises(BrokenInvariant, match="dict"):
        harness.engine.stock._inlet.send(Node("r2"), {"type": "append_entries"})
    assert harness.out == []
