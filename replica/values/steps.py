"""Interruptible work: generators that yield the number of steps done and return a result."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")

Steps = Generator[int, None, T]
"""A generator of work in steps of some 20 us: yields the number of steps since the last yield."""


class StepRunner(Generic[T]):
    """Runs a generator in portions. `result` is set once `advance` returns True."""

    def __init__(self, steps: Steps[T]) -> None:
        """Take over a generator without starting it."""
        self._steps = steps
        self.result: T

    def advance(self, steps_max: int) -> bool:
        """Do about `steps_max` more steps; return whether the work is done.

        Exceptions of the work propagate.
        """
        left = steps_max
        try:
            while left > 0:
                left -= next(self._steps)
        except StopIteration as done:
            self.result = done.value
            return True
        return False


def run_to_end(steps: Steps[T]) -> T:
    """Run a generator to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
