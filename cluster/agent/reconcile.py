"""What to do about the orders that stand: a pure function from orders and activities to steps.

Orders are level-triggered (law 7): whatever was missed in between, comparing all orders with all activities gives the
same steps. There is at most one activity for a job, so what belongs to an older attempt has ended and is cleaned before
a newer one starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from replica.model import Order

RUN = "run"


class Known(NamedTuple):
    """An activity as far as the comparison goes."""

    attempt: int
    stage: str
    finished: bool
    """Its result is in the outbox or acknowledged; it stands until its order is gone, or the order would be done
    again."""
    suspended: bool | None = False
    """Whether the script was told to stand still; None: not known."""


class Start(NamedTuple):
    """Begin what an order says."""

    order: Order


class End(NamedTuple):
    """End an activity that nobody wants any more; what its job needs next starts once it is gone."""

    job: int


class Forget(NamedTuple):
    """Drop an activity that is over and whose order is gone."""

    job: int


class Suspend(NamedTuple):
    """Have the script stand still, or go on; what it does already is no change."""

    job: int
    suspended: bool


class Cancel(NamedTuple):
    """End the script, and report that."""

    job: int


ScriptRun = Start | End | Forget | Cancel | Suspend


def plan(orders: Iterable[Order], known: Mapping[int, Known]) -> list[ScriptRun]:
    """Return what has to be done, endings before beginnings, by job."""
    wanted = {order.job: order for order in orders}
    steps: list[ScriptRun] = []
    for job, activity in sorted(known.items()):
        order = wanted.get(job)
        if order is not None and (order.attempt, order.stage) == (activity.attempt, activity.stage):
            if order.cancel and order.stage == RUN and not activity.finished:
                steps.append(Cancel(job))
            elif order.stage == RUN and not activity.finished and order.suspend != activity.suspended:
                steps.append(Suspend(job, order.suspend))
        elif order is not None and order.attempt < activity.attempt:
            # Attempts only grow, so this answer is older than what is going on.
            continue
        elif activity.finished:
            steps.append(Forget(job))
        else:
            steps.append(End(job))
    going = set(known) - {step.job for step in steps if isinstance(step, Forget)}
    steps.extend(Start(wanted[job]) for job in sorted(wanted) if job not in going)
    return steps
