"""Directives of a site's Lua script: `pool=` and `capacity=` are read; everything else is for the script."""

from __future__ import annotations

from forebay.replica.grammar.lexer import Directive
from forebay.replica.grammar.request import RequestBuilder
from forebay.replica.grammar.values import OptionValue, read_capacity, read_pool
from forebay.replica.values import SIZE_BYTES_MAX, Quantity, RejectionCode


def read_lua(directive: Directive, builder: RequestBuilder) -> None:
    """Read one directive of the site.

    Capacities of several lines add up if they are of one pool (Slurm charges all of them to the last pool).

    Raises:
        DirectiveRejected: the directive is invalid; with line and column.
    """
    builder.kind = "lua"
    builder.lines.append(directive.text)
    found: dict[str, OptionValue] = {}
    for word in directive.words:
        key, equals, text = word.text.partition("=")
        if key not in ("pool", "capacity") or not equals:
            continue
        if key in found:
            builder.warnings.add(word.place(), f"only the first {key}= of a line is read; this one is the site's")
            continue
        if not text:
            raise word.rejection(f"{key}= is empty", f"write a value after {key}=", len(key) + 1)
        found[key] = OptionValue(word, text, len(key) + 1)
    pool = found.get("pool")
    if pool is not None:
        _set_pool(pool, builder)
    capacity = found.get("capacity")
    if capacity is None:
        return
    if pool is None:
        raise capacity.word.rejection(
            "capacity= needs pool=: there is no default pool for these directives",
            f"add pool= to this {directive.kind} line",
            code=RejectionCode.NO_DEFAULT_POOL,
        )
    builder.capacity = _sum(builder.capacity, read_capacity(capacity), capacity)
    builder.capacity_at = builder.capacity_at or capacity.word
    builder.space_at = builder.space_at or capacity.word


def _set_pool(pool: OptionValue, builder: RequestBuilder) -> None:
    name = read_pool(pool)
    if builder.pool_at is not None and name != builder.pool:
        raise pool.rejection(
            f"the pool is {name!r} here, and {builder.pool!r} at {builder.pool_at.place()}",
            "request space of one pool: a job has one buffer",
        )
    if builder.pool_at is None:
        builder.pool, builder.pool_at = name, pool.word


def _sum(before: Quantity | None, more: Quantity, at: OptionValue) -> Quantity:
    if before is None:
        return more
    if (before.unit == "nodes") != (more.unit == "nodes"):
        raise at.rejection("one capacity is in nodes, and another is not", "use the same unit for both", 0, _CAPACITY)
    if before.value + more.value > SIZE_BYTES_MAX:
        raise at.rejection("the capacities together overflow", "request less", 0, _CAPACITY)
    unit = "bytes" if "bytes" in (before.unit, more.unit) else more.unit
    return Quantity(before.value + more.value, unit)


_CAPACITY = RejectionCode.INVALID_CAPACITY
