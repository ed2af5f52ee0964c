"""Duties of a leader: what the replica that leads does of its own accord, each behind one protocol."""

from __future__ import annotations

from typing import Protocol


class Duty(Protocol):
    """One thing that a leader looks after: mail, pools of a provider, levels, restarts, membership."""

    def poll(self) -> None:
        """Do what is due, and return at once. Asked once a second while this replica leads."""

    def stop(self) -> None:
        """Give up what is under way: somebody else leads, or the replica stops."""
