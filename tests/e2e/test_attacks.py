"""Attacks on a real cluster, each of which succeeded once: by users, by an operator, by certificates, by a clock.

Each is a small share of what scripts/attacks does with `--size full`.
"""

from typing import Any

import pytest

from tests.e2e.scripts import ScriptEnded, run_script
from tests.faults.attacks.__main__ import ATTACKS, main

pytestmark = pytest.mark.campaign(3, together=True)


@pytest.fixture(scope="module")
def attacked() -> ScriptEnded:
    """All attacks, done once: those on the same kind of cluster share one."""
    return run_script("attacks", "--size", "small")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_that_succeeded_once_fails(attacked: ScriptEnded, name: str) -> None:
    if name in attacked.summary["left_out"]:
        pytest.skip(attacked.summary["left_out"][name])
    found: dict[str, Any] = attacked.summary["attacks"][name]
    assert "succeeded" not in found, attacked.said
    tried = {what: count for what, count in found.items() if what != "seconds"}
    assert tried and all(tried.values()), f"it did nothing: {found}"


def test_an_attack_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["attacks", "nothing"])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
