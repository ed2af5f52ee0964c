"""Transfer limits: the active rules, counts of running transfers, and each node's share of a rate.

`State.moving` counts transfers (stage-ins and stage-outs with a slot) by (user, node); an empty part stands for all. It
is derived, so shares are a function of the State. Agents receive their shares with their orders, and changes at their
next request for orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from forebay.replica.model import (
    NATIVE,
    TRANSFERS,
    MovingKey,
    RateShares,
    Stage,
    TransferRules,
)
from forebay.replica.state import Facts, State


def active_rules(state: Facts) -> TransferRules | None:
    """Return the rules that transfers follow; None if Forebay does not move the data."""
    if state.site.provider != NATIVE:
        return None
    return state.transfer_rules


def longest_transfer_s(state: Facts, stage: Stage) -> int:
    """Return the maximum duration of a transfer with progress timeouts, seconds; 0 without them."""
    if stage not in TRANSFERS:
        return 0
    rules = active_rules(state)
    return rules.hard_cap_s if rules is not None and rules.timeouts == "progress" else 0


def may_begin(state: Facts, begun: Mapping[MovingKey, int], free: int, user: str, node: str) -> bool:
    """Return whether one more transfer of the user may begin on the node.

    `begun` counts transfers that the State does not count yet; `free` slots of the stage are left. A user with more
    transfers than free slots waits, so that one user takes half of the slots and leaves the others one each: slots
    cannot be revoked.
    """
    if load_of(state, begun, user) > free:
        return False
    rules = active_rules(state)
    if rules is None:
        return True
    limits = ((rules.user_at_once, (user, "")), (rules.node_at_once, ("", node)), (rules.cluster_at_once, ("", "")))
    return all(limit is None or state.moving.get(key, 0) + begun.get(key, 0) < limit for limit, key in limits)


def load_of(state: Facts, begun: Mapping[MovingKey, int], user: str) -> int:
    """Return the number of the user's running transfers, including those in `begun`."""
    return state.moving.get((user, ""), 0) + begun.get((user, ""), 0)


def has_shares(rules: TransferRules) -> bool:
    """Return whether the rate of a node depends on other nodes' transfers."""
    return rules.user_bytes_s is not None or rules.cluster_bytes_s is not None


def node_bytes_s(state: State, rules: TransferRules, node: str) -> int | None:
    """Return the rate limit of all transfers of a node together, bytes per second.

    That is the smaller of the node's limit and its share of the cluster's. Users with transfers share the cluster's
    rate evenly, and the nodes share a user's part by their numbers of the user's transfers.
    """
    if not rules.cluster_bytes_s:
        return _smaller(rules.node_bytes_s, rules.cluster_bytes_s)
    users, weight = set(), Fraction(0)
    for (user, on), count in state.moving.items():
        if user and not on:
            users.add(user)
        elif user and on == node:
            weight += Fraction(count, state.moving[user, ""])
    # Never 0, which would pause the transfers.
    share = max(1, int(rules.cluster_bytes_s * weight / len(users))) if weight else rules.cluster_bytes_s
    return _smaller(rules.node_bytes_s, share)


def user_bytes_s(state: State, rules: TransferRules, user: str, node: str) -> int | None:
    """Return the rate limit of all transfers of a user on a node together, bytes per second.

    Nodes share the user's rate by their numbers of the user's transfers.
    """
    here, everywhere = state.moving.get((user, node), 0), state.moving.get((user, ""), 0)
    if not rules.user_bytes_s or not here:
        return rules.user_bytes_s
    return max(1, rules.user_bytes_s * here // everywhere)


def rate_shares(state: State, rules: TransferRules, user: str, node: str, of_node: int | None) -> RateShares:
    """Return the rate limits of one transfer; `of_node` is `node_bytes_s` of its node."""
    return RateShares(rules.transfer_bytes_s, user_bytes_s(state, rules, user, node), of_node)


def _smaller(first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return first if second is None else second
    return min(first, second)
