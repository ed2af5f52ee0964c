"""Known attacks on a real cluster by users, an operator, certificates and a clock.

Each test is a small part of scripts/attacks with `--size full`.
"""

from typing import Any

import pytest

from tests.e2e.scripts import ScriptEnded, run_script
from tests.faults.attacks.__main__ import ATTACKS, main

pytestmark = pytest.mark.campaign(3, together=True)


@pytest.fixture(scope="module")
def attacked() -> ScriptEnded:
    """Run all attacks once; attacks on the same kind of cluster share it."""
    return run_script("attacks", "--size", "small")


@pytest.mark.parametrize("name", ATTACKS)
def test_known_attacks_fail(attacked: ScriptEnded, name: str) -> None:
    if name in attacked.summary["left_out"]:
        pytest.skip(attacked.summary["left_out"][name])
    found: dict[str, Any] = attacked.summary["attacks"][name]
    assert "succeeded" not in found, attacked.said
    tried = {what: count for what, count in found.items() if what != "seconds"}
    assert tried and all(tried.values()), f"it did nothing: {found}"


def test_an_unknown_attack_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["attacks", "nothing"])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
