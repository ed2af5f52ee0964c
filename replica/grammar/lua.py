"""The directives of a site's Lua script: `pool=` and `capacity=` are read, anything else is the site's."""

from __future__ import annotations

from replica.grammar.lexer import Directive
from replica.grammar.request import Asked
from replica.grammar.values import Value, read_capacity, read_pool
from replica.values import SIZE_BYTES_MAX, Quantity, RefusalCode


def read_lua(directive: Directive, asked: Asked) -> None:
    """Read one directive of the site. Capacities of several lines add up, if they are of one pool (Slurm charges all of
    them to the last one). Raises DirectiveRefused with line and column.
    """
    asked.kind = "lua"
    asked.lines.append(directive.text)
    found: dict[str, Value] = {}
    for word in directive.words:
        key, equals, text = word.text.partition("=")
        if key not in ("pool", "capacity") or not equals:
            continue
        if key in found:
            asked.warnings.add(word.place(), f"only the first {key}= of a line is read; this one is the site's")
            continue
        if not text:
            raise word.refuse(f"{key}= is empty", f"write a value after {key}=", len(key) + 1)
        found[key] = Value(word, text, len(key) + 1)
    pool = found.get("pool")
    if pool is not None:
        _set_pool(pool, asked)
    capacity = found.get("capacity")
    if capacity is None:
        return
    if pool is None:
        raise capacity.word.refuse(
            "capacity= needs pool=: there is no default pool for these directives",
            f"add pool= to this {directive.kind} line",
            code=RefusalCode.NO_DEFAULT_POOL,
        )
    asked.capacity = _sum(asked.capacity, read_capacity(capacity), capacity)
    asked.capacity_at = asked.capacity_at or capacity.word
    asked.space_at = asked.space_at or capacity.word


def _set_pool(pool: Value, asked: Asked) -> None:
    name = read_pool(pool)
    if asked.pool_at is not None and name != asked.pool:
        raise pool.refuse(
            f"the pool is {name!r} here, and {asked.pool!r} at {asked.pool_at.place()}",
            "ask for space of one pool: a job has one buffer",
        )
    if asked.pool_at is None:
        asked.pool, asked.pool_at = name, pool.word


def _sum(before: Quantity | None, more: Quantity, at: Value) -> Quantity:
    if before is None:
        return more
    if (before.unit == "nodes") != (more.unit == "nodes"):
        raise at.refuse("one capacity is in nodes, and another is not", "write both alike", 0, _CAPACITY)
    if before.value + more.value > SIZE_BYTES_MAX:
        raise at.refuse("the capacities together overflow", "ask for less", 0, _CAPACITY)
    unit = "bytes" if "bytes" in (before.unit, more.unit) else more.unit
    return Quantity(before.value + more.value, unit)


_CAPACITY = RefusalCode.INVALID_CAPACITY
