"""What a fence leaves behind when the power goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.cluster.agent.transfer import fence
from forebay.cluster.agent.transfer.fence import Claimant
from forebay.cluster.system.descriptors import open_directory


def test_a_claim_that_was_given_back_does_not_come_back_with_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by scripts/transfers cuts: the removed directory was there again, and nobody looked for it any more."""
    directory, claimant = open_directory(tmp_path), Claimant("alone-7", 1, "0" * 32)
    os.close(fence.claim(directory, str(tmp_path), claimant))
    synced: list[list[str]] = []
    usual = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), os.fstat(directory)):
            synced.append(os.listdir(directory))
        usual(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    fence.sweep(directory, str(tmp_path), claimant)
    os.close(directory)
    assert os.listdir(tmp_path) == []
    assert synced[-1:] == [[]], "the directory is synced once nothing of the claim is in it"
