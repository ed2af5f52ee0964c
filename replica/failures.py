"""What no correct leader can have agreed on: not refused as a command is, but a reason to stop (law 10)."""


class LedgerViolation(Exception):
    """An event that no ledger can hold: a broken invariant, so the replica stops (law 10)."""
