"""JSON functions for Lua scripts: slurm.to_json and slurm.from_json, in Slurm since 26.05."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import msgspec

DEPTH_MAX: Final = 16
"""Maximum nesting depth of converted tables: as in Slurm."""

Convert = Callable[[Any], tuple[Any, bytes | None]]
"""Returns the converted value, and an error message or None."""


class _Inconvertible(Exception):
    """The value cannot be expressed in JSON."""


def json_functions(runtime: Any, lua_type: Callable[[Any], str | None]) -> tuple[Convert, Convert]:
    """Return to_json and from_json for an interpreter; `lua_type` names the type of one of its objects."""

    def to_json(value: Any) -> tuple[Any, bytes | None]:
        try:
            return msgspec.json.encode(_from_lua(value, lua_type, 0), order="deterministic"), None
        except (_Inconvertible, UnicodeDecodeError, RecursionError) as error:
            return (
                None,
                f"the value cannot be JSON: {error}; use numbers, strings, booleans and tables of them".encode(),
            )

    def from_json(text: Any) -> tuple[Any, bytes | None]:
        if not isinstance(text, bytes):
            return None, b"slurm.from_json needs a string"
        try:
            return _to_lua(msgspec.json.decode(text), runtime), None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return None, f"the string is not JSON: {error}".encode()

    return to_json, from_json


def _from_lua(value: Any, lua_type: Callable[[Any], str | None], depth: int) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _Inconvertible("a number is not finite")
        return value
    kind = lua_type(value)
    if kind != "table":
        raise _Inconvertible(f"it contains a {kind}")
    if depth >= DEPTH_MAX:
        raise _Inconvertible(f"its tables are nested more than {DEPTH_MAX} deep")
    found = {key: _from_lua(inner, lua_type, depth + 1) for key, inner in value.items()}
    # A key `true` compares equal to 1.
    if all(type(key) is int for key in found) and found.keys() == set(range(1, len(found) + 1)):
        return [found[number] for number in range(1, len(found) + 1)]
    return {_key(key): inner for key, inner in found.items()}


def _key(key: Any) -> str:
    if isinstance(key, bytes):
        return key.decode()
    if isinstance(key, bool) or not isinstance(key, int | float):
        raise _Inconvertible("a key is neither a string nor a number")
    return str(key)


def _to_lua(value: Any, runtime: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict):
        return runtime.table_from({key.encode(): _to_lua(inner, runtime) for key, inner in value.items()})
    if isinstance(value, list):
        return runtime.table_from([_to_lua(inner, runtime) for inner in value])
    # Lua integers are signed 64-bit numbers.
    return float(value) if isinstance(value, int) and not -(2**63) <= value < 2**63 else value
