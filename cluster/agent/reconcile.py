"""Comparison of orders with activities: a pure function that returns the steps to take.

Orders are level-triggered (law 7): comparing all orders with all activities gives the same steps, whatever was missed
in between. A job has at most one activity, so an older attempt has ended and been cleaned up before a newer one starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from forebay.replica.model import Order

RUN = "run"


class KnownActivity(NamedTuple):
    """State of an activity for the comparison."""

    attempt: int
    stage: str
    finished: bool
    """Result is in the outbox or acknowledged. Kept until the order disappears, since otherwise it would be repeated.
    """
    suspended: bool | None = False
    """Last suspend state sent to the script; None if unknown."""


class StartActivity(NamedTuple):
    """Begin an order."""

    order: Order


class EndActivity(NamedTuple):
    """End an activity without an order; its job's next activity starts afterwards."""

    job: int


class ForgetActivity(NamedTuple):
    """Drop a finished activity whose order has disappeared."""

    job: int


class SuspendScript(NamedTuple):
    """Suspend or resume the script; idempotent."""

    job: int
    suspended: bool


class CancelScript(NamedTuple):
    """End the script and report it as cancelled."""

    job: int


Step = StartActivity | EndActivity | ForgetActivity | CancelScript | SuspendScript


def plan(orders: Iterable[Order], known: Mapping[int, KnownActivity]) -> list[Step]:
    """Return the steps to take, by job, endings before beginnings."""
    wanted = {order.job: order for order in orders}
    steps: list[Step] = []
    for job, activity in sorted(known.items()):
        order = wanted.get(job)
        if order is not None and (order.attempt, order.stage) == (activity.attempt, activity.stage):
            if order.cancel and order.stage == RUN and not activity.finished:
                steps.append(CancelScript(job))
            elif order.stage == RUN and not activity.finished and order.suspend != activity.suspended:
                steps.append(SuspendScript(job, order.suspend))
        elif order is not None and order.attempt < activity.attempt:
            # Attempts only increase, so these orders are older than the activity.
            continue
        elif activity.finished:
            steps.append(ForgetActivity(job))
        else:
            steps.append(EndActivity(job))
    going = set(known) - {step.job for step in steps if isinstance(step, ForgetActivity)}
    steps.extend(StartActivity(wanted[job]) for job in sorted(wanted) if job not in going)
    return steps
