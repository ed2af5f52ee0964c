"""Deciding again: the commands of a batch, each on the state on which it was decided first.

What is settled is always what the ledger has, never what was decided here: so one difference does not breed others.
"""

from collections.abc import Callable, Sequence

import msgspec

from cluster.server import Planner
from replica.decide import decide, is_by_key
from replica.fold import SpeculativeState
from replica.messages import Batch, Entry, Event, Request, RunSchedulingPass
from replica.state import State
from replica.values import LedgerViolation, Refusal

Ask = Callable[[SpeculativeState, int], Request | None]
"""The command that the entry at this place of a batch settled, from what is settled of it; None: it is not decided."""


class CommandOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a command leads to: events, or a refusal, or `fault` where deciding it raised."""

    events: tuple[Event, ...] = ()
    refusal: Refusal | None = None
    fault: str = ""


def recorded_outcome(entry: Entry) -> CommandOutcome:
    """Return what the ledger says that a command led to."""
    return CommandOutcome(entry.events, entry.refusal)


class Deciding:
    """A state that goes on batch by batch, on which commands are decided again."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._planner = Planner()

    def settle(self, batch: Batch, ask: Ask) -> list[CommandOutcome | None]:
        """Settle the next batch, and return what each command of it leads to that is asked for.

        The batch must be of the present revision. LedgerViolation where it cannot be settled.
        """
        if batch.at < self.state.at:
            raise LedgerViolation(f"the clock of revision {batch.base} goes back from {self.state.at} to {batch.at}")
        growing = SpeculativeState(self.state, batch.at)
        found: list[CommandOutcome | None] = []
        for place, entry in enumerate(batch.entries):
            request = ask(growing, place)
            found.append(None if request is None else self._decided(growing, request))
            growing.add(entry)
        self._planner.closed(growing)
        self.state = growing.state()
        return found

    def _decided(self, growing: SpeculativeState, request: Request) -> CommandOutcome:
        try:
            if isinstance(request.command, RunSchedulingPass):
                return CommandOutcome(self._planner.events_of_pass(growing))
            facts = growing.facts if is_by_key(request.command) else growing.state()
            decision = decide(facts, request, growing.at)
        except Exception as error:
            # As a leader, which answers such a command and goes on.
            return CommandOutcome(fault=f"{type(error).__name__}: {error}")
        return CommandOutcome(refusal=decision) if isinstance(decision, Refusal) else CommandOutcome(decision.events)


def in_turn(requests: Sequence[Request | None]) -> Ask:
    """Return the requests of a batch, known before, by their places."""
    return lambda _, place: requests[place]
