"""A mutant: one function of the product with a piece of its text changed, in this process, while it is entered.

The changed function is compiled from its source, and its code put in the place of the code that is there, so whoever
imported it has the mutant. A text that is not found, or found twice, is an error: the product has changed, and
the mutant has to be written again.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault that a simulator has to find. `place` is `module:function`; `old` and `new` are of its own source."""

    sentence: str
    """What goes wrong in it; unique."""
    place: str
    old: str
    new: str
    hunt: str
    """The world that finds it, a key of `tests.mutants.hunts.HUNTS`."""
    seed: int
    """The first seed of that world that is known to find it."""


class PlantFailed(AssertionError):
    """The text of a mutant does not apply any more."""


def function_at(place: str) -> FunctionType:
    """Return the function itself, also where a property hides it."""
    module_name, _, path = place.partition(":")
    found: object = importlib.import_module(module_name)
    for name in path.split("."):
        found = inspect.getattr_static(found, name)
    if isinstance(found, property):
        found = found.fget
    if not isinstance(found, FunctionType):
        raise PlantFailed(f"{place} is no function")
    return found


def mutated_code(mutant: Mutant) -> CodeType:
    """Compile the changed function. PlantFailed where the text does not apply."""
    function = function_at(mutant.place)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise PlantFailed(f"{mutant.place} has {source.count(mutant.old)} times what is to be changed: {mutant.old!r}")
    changed = source.replace(mutant.old, mutant.new)
    future = __future__.annotations.compiler_flag
    module = compile(changed, inspect.getsourcefile(function) or "", "exec", flags=future, dont_inherit=True)
    code = next(one for one in module.co_consts if isinstance(one, CodeType) and one.co_name == function.__name__)
    if code.co_freevars != function.__code__.co_freevars:
        raise PlantFailed(f"{mutant.place}: the changed function closes over {code.co_freevars}")
    if (code.co_code, code.co_consts, code.co_names) == (
        function.__code__.co_code,
        function.__code__.co_consts,
        function.__code__.co_names,
    ):
        raise PlantFailed(f"{mutant.place}: the change changes nothing")
    return code


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Have the mutant in the code while the block runs."""
    function, code = function_at(mutant.place), mutated_code(mutant)
    sound = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = sound
