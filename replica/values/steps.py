"""Work that can be done in pieces: a generator that yields what it has done, in steps, and returns what came out."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")

Steps = Generator[int, None, T]
"""Work in steps of some 20 us each: yields how many it has done since it yielded last."""


class StepRunner(Generic[T]):
    """Work under way: `advance` it until it is done, then `result` is there."""

    def __init__(self, steps: Steps[T]) -> None:
        """Take over the work; nothing of it is done yet."""
        self._steps = steps
        self.result: T

    def advance(self, steps_max: int) -> bool:
        """Do about so many steps more; return whether that was the last of it. Raises what the work raises."""
        left = steps_max
        try:
            while left > 0:
                left -= next(self._steps)
        except StopIteration as done:
            self.result = done.value
            return True
        return False


def run_to_end(steps: Steps[T]) -> T:
    """Do all of it at once, and return what came out."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
