"""Negative controls of external jobs: planted faults that remove results or leave directories are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forebay.replica.decide import external_jobs as decided
from tests.simulation.world import simulate

SEEDS = range(1, 25)


def found(monkeypatch: pytest.MonkeyPatch, table: dict[Any, Any], key: object, fault: Callable[..., Any]) -> str:
    """Return what the first seed that finds a planted fault says of it."""
    monkeypatch.setitem(table, key, fault)
    return next((said[0] for seed in SEEDS if (said := simulate(seed, profile="external_jobs").violations)), "")


def test_removed_and_unexported_results_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    said = found(monkeypatch, decided._EVENTS, decided.ExternalJobOutcome.RETAIN, decided._discard)
    assert "are removed, and nobody has exported them" in said


def test_leftovers_of_an_epoch_that_never_ran_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    said = found(monkeypatch, decided._EVENTS, decided.ExternalJobOutcome.LINGER, lambda *_: ())
    assert "slurm:" in said
