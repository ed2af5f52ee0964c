"""Transfer limits: the rules that hold, who has how many under way, and what share of a rate each node has.

`State.moving` counts transfers (stage-ins and stage-outs that have their slot) by (user, node), where an empty part
stands for all. It is derived, so shares are a function of the State: each agent gets its own with its orders, and
a change when its orders are next asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from replica.model import (
    NATIVE,
    TRANSFERS,
    MovingKey,
    RateShares,
    Stage,
    TransferRules,
)
from replica.state import Facts, State


def active_rules(state: Facts) -> TransferRules | None:
    """Return the rules that transfers follow; None where Forebay does not move the data."""
    if state.site.provider != NATIVE:
        return None
    return state.transfer_rules


def longest_transfer_s(state: Facts, stage: Stage) -> int:
    """Return how long a transfer may take at the most where it is late by its progress, seconds; 0 where it is not."""
    if stage not in TRANSFERS:
        return 0
    rules = active_rules(state)
    return rules.hard_cap_s if rules is not None and rules.timeouts == "progress" else 0


def may_begin(state: Facts, begun: Mapping[MovingKey, int], free: int, user: str, node: str) -> bool:
    """Return whether one more transfer of the user may begin on the node.

    `begun` counts those that the State does not count yet; `free` slots of its stage are left. A user who has more
    transfers under way than slots are free waits, so that one user takes half of the slots and leaves the others one
    each: a slot cannot be taken back from a transfer that has it.
    """
    if load_of(state, begun, user) > free:
        return False
    rules = active_rules(state)
    if rules is None:
        return True
    limits = ((rules.user_at_once, (user, "")), (rules.node_at_once, ("", node)), (rules.cluster_at_once, ("", "")))
    return all(limit is None or state.moving.get(key, 0) + begun.get(key, 0) < limit for limit, key in limits)


def load_of(state: Facts, begun: Mapping[MovingKey, int], user: str) -> int:
    """Return how many transfers of the user are under way, with those that `begun` counts."""
    return state.moving.get((user, ""), 0) + begun.get((user, ""), 0)


def has_shares(rules: TransferRules) -> bool:
    """Return whether the rate of a node depends on other nodes' transfers."""
    return rules.user_bytes_s is not None or rules.cluster_bytes_s is not None


def node_bytes_s(state: State, rules: TransferRules, node: str) -> int | None:
    """Return what all transfers of a node may do together, bytes per second: the smaller of the node's limit and its
    share of the cluster's. The cluster's is shared evenly by the users who move data, and what a user has of it by the
    nodes where that user's transfers are, by their number.
    """
    if not rules.cluster_bytes_s:
        return _smaller(rules.node_bytes_s, rules.cluster_bytes_s)
    users, weight = set(), Fraction(0)
    for (user, on), count in state.moving.items():
        if user and not on:
            users.add(user)
        elif user and on == node:
            weight += Fraction(count, state.moving[user, ""])
    # Never 0, which would be a pause: even one byte a second is a rate.
    share = max(1, int(rules.cluster_bytes_s * weight / len(users))) if weight else rules.cluster_bytes_s
    return _smaller(rules.node_bytes_s, share)


def user_bytes_s(state: State, rules: TransferRules, user: str, node: str) -> int | None:
    """Return what all transfers of a user on a node may do together, bytes per second: the user's rate, shared by the
    nodes where the user's transfers are, by their number.
    """
    here, everywhere = state.moving.get((user, node), 0), state.moving.get((user, ""), 0)
    if not rules.user_bytes_s or not here:
        return rules.user_bytes_s
    return max(1, rules.user_bytes_s * here // everywhere)


def rate_shares(state: State, rules: TransferRules, user: str, node: str, of_node: int | None) -> RateShares:
    """Return what one transfer may do; `of_node` is `node_bytes_s` of its node."""
    return RateShares(rules.transfer_bytes_s, user_bytes_s(state, rules, user, node), of_node)


def _smaller(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return first if second is None else second
    return min(first, second)
