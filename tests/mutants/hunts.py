"""The worlds in which mutants are looked for: each runs one seed, and says what was found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from tests.cluster.consensus import deep, restless, test_membership_simulation, test_simulation
from tests.simulation.runner import replicas_of
from tests.simulation.test_planted_bugs import told
from tests.simulation.world import simulate


def _raft(seed: int) -> str:
    with test_simulation.scenario(seed, replicas=5 if seed % 5 == 4 else 3):
        return ""


def _members(seed: int) -> str:
    schedule = test_membership_simulation.Schedule(seed)
    with schedule.sim:
        schedule.run()
    return ""


def _restless(seed: int) -> str:
    with restless.world(seed):
        return ""


def _deep(seed: int) -> str:
    with deep.world(seed):
        return ""


def _whole(seed: int, profile: str) -> str:
    return "; ".join(simulate(seed, replicas=replicas_of(seed, None), profile=profile).violations)


def _story(seed: int, story: str) -> str:
    return "; ".join(told(story, seed))


HUNTS: Final[dict[str, Callable[[int], str]]] = {
    "raft": _raft,
    "restless": _restless,
    "members": _members,
    "deep": _deep,
    "net": partial(_whole, profile="net"),
    "all": partial(_whole, profile="all"),
    "crash": partial(_whole, profile="crash"),
    "half_hour": partial(_whole, profile="deep"),
    "membership": partial(_whole, profile="membership"),
    "a_batch_in_the_place_of_another": partial(_story, story="a_batch_in_the_place_of_another"),
    "figure_8": partial(_story, story="figure_8"),
    "a_late_answer": partial(_story, story="a_late_answer"),
    "a_late_leader_of_a_minority": partial(_story, story="a_late_leader_of_a_minority"),
}
"""Name -> runs one seed and returns the broken promises, empty if there are none. A story has one seed."""


def hunt(name: str, seed: int) -> str:
    """Return what one seed of a world finds; empty if nothing is wrong."""
    logging.disable(logging.CRITICAL)
    try:
        return HUNTS[name](seed)
    except Exception as failure:
        # Also what the rules of Raft themselves refuse: a replica that stops was found.
        return f"{type(failure).__name__}: {failure}"
    finally:
        logging.disable(logging.NOTSET)
