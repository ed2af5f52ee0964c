"""The ledger as a transparency log, through the API."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from forebay.cluster.api.history_service import ProofUnavailable
from forebay.cluster.config.config import Config
from forebay.cluster.security.proofs import EMPTY_ROOT, Tile, leaf_hash, leaves_in
from forebay.cluster.server.tlog import LedgerTree, disclosure_key_of
from tests.auditing import audit
from tests.cluster.harness import PLAIN, Harness, story, until


@story
async def test_the_key_that_proofs_are_salted_with_is_in_the_ledger_and_nobody_is_shown_it(config: Config) -> None:
    async with Harness(config) as harness:
        harness.controller.journal.flush_hints()
        key = disclosure_key_of(harness.controller.ledger)
        assert len(key) == 32 and len(set(key)) > 8
        shown = [(await harness.ask("GET", f"/v1/ledger?from=1&limit={limit}")).body for limit in (1, 1000)]
        async with harness.session("operator").get(f"{harness.url}/v1/events?from=0") as feed:
            shown.append((await feed.content.readuntil(b"disclosure_key_drawn")).decode())
            shown.append((await feed.content.readuntil(b"\n\n")).decode())
    directory = config.storage.directory / "r1"
    dumped = audit("audit", "dump", "--data", str(directory))
    assert "disclosure_key_drawn" in dumped.stdout
    for text in (*map(str, shown), dumped.stdout):
        assert key.hex() not in text and repr(key) not in text and repr(key)[2:12] not in text


def home(config: Config) -> Path:
    """The directory of r1."""
    return config.storage.directory / "r1"


async def busy(harness: Harness, jobs: int = 8) -> int:
    """Have some jobs submitted; return the last entry."""
    for _ in range(jobs):
        await harness.submit(script=PLAIN)
    return harness.controller.applied_index


def derived(harness: Harness, config: Config) -> LedgerTree:
    """The tree by the replica's own view of its ledger, without any files."""
    harness.controller.journal.flush_hints()
    tree = LedgerTree(harness.controller.ledger.as_stored, home(config) / "nothing", readonly=True)
    while tree.step():
        pass
    return tree


@story
async def test_the_historian_derives_the_tree_of_what_is_committed(config: Config) -> None:
    async with Harness(config) as harness:
        size = await busy(harness)
        found = {one: await harness.service.past.root(one) for one in range(1, size + 1)}
        tree = derived(harness, config)
        assert found == {one: tree.root(one) for one in found} and EMPTY_ROOT not in found.values()
        bundle = await harness.service.past.tile(Tile(None, 0, size).path, "somebody")
        hashes = await harness.service.past.tile(Tile(0, 0, size).path, "somebody")
        assert b"".join(map(leaf_hash, leaves_in(bundle))) == hashes
        for path in (Tile(0, 0, size + 50).path, "tile/0/001", "tile/../key"):
            with pytest.raises(ProofUnavailable):
                await harness.service.past.tile(path, "somebody")


@story
async def test_a_historian_that_is_killed_goes_on_with_the_same_tree(config: Config) -> None:
    async with Harness(config) as harness:
        size = await busy(harness)
        before = await harness.service.past.root(size)
        pid = harness.service.past.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: harness.service.past.process.pid not in {None, pid})
        assert await harness.service.past.root(size) == before
        later = await busy(harness)
        assert await harness.service.past.root(later) == derived(harness, config).root(later)


@story
async def test_the_metrics_say_how_far_the_tree_is(config: Config) -> None:
    async with Harness(config) as harness:
        size = await busy(harness)
        await harness.service.past.root(size)
        await until(lambda: harness.service.past.progress.tree_size >= size)
        shown = (await harness.ask("GET", "/metrics")).body
        assert f"forebay_proofs_entry {float(size)}" in str(shown)
