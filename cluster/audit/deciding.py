"""Deciding recorded commands again, each on the state of its original decision.

The outcome in the ledger is settled, never the new outcome, so that one difference does not cause others.
"""

from collections.abc import Callable, Sequence

import msgspec

from forebay.cluster.server import Planner
from forebay.replica.decide import decide, is_by_key
from forebay.replica.fold import SpeculativeState
from forebay.replica.messages import Batch, Entry, Event, Request, RunSchedulingCycle
from forebay.replica.state import State
from forebay.replica.values import LedgerViolation, Rejection

Ask = Callable[[SpeculativeState, int], Request | None]
"""Returns the command of the entry at this position of a batch, given the state so far; None to skip it."""


class CommandOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Outcome of a command: events, a rejection, or `fault` if the decision raised an exception."""

    events: tuple[Event, ...] = ()
    rejection: Rejection | None = None
    fault: str = ""


def recorded_outcome(entry: Entry) -> CommandOutcome:
    """Return the outcome of a command recorded in the ledger."""
    return CommandOutcome(entry.events, entry.rejection)


class Deciding:
    """State that advances batch by batch while commands are decided again."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._planner = Planner()

    def settle(self, batch: Batch, ask: Ask) -> list[CommandOutcome | None]:
        """Settle the next batch, and return the new outcome of each requested command.

        The batch must be based on the present revision.

        Raises:
            LedgerViolation: The batch cannot be settled.
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
            if isinstance(request.command, RunSchedulingCycle):
                return CommandOutcome(self._planner.run_cycle(growing))
            facts = growing.facts if is_by_key(request.command) else growing.state()
            decision = decide(facts, request, growing.at)
        except Exception as error:
            # A leader also answers such a command with an error and continues.
            return CommandOutcome(fault=f"{type(error).__name__}: {error}")
        return (
            CommandOutcome(rejection=decision) if isinstance(decision, Rejection) else CommandOutcome(decision.events)
        )


def ask_by_position(requests: Sequence[Request | None]) -> Ask:
    """Return an `Ask` for the known requests of a batch, by position."""
    return lambda _, place: requests[place]
