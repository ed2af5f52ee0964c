"""Who stands before a job in line, from an agenda: what an estimate asks, without a walk over all jobs.

Of an array only the tasks that have room in it stand in line, so an estimate by an agenda does not wait for those that
its throttle keeps back.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import merge
from itertools import islice, takewhile

from replica.agenda import Agenda
from replica.agenda_parts import Key
from replica.estimates import AHEAD_MAX, Ahead


def ahead_in(agenda: Agenda) -> Ahead:
    """Return who says which candidates are before a job; `agenda` must be prepared, and not change meanwhile."""

    def ahead(place: tuple[int, int], pool: str | None) -> list[int] | None:
        lines = (takewhile(lambda key: key[:2] < place, keys) for keys in _lines(agenda, pool))
        found = [job_id for _, job_id, _ in islice(merge(*lines), AHEAD_MAX + 1)]
        return None if len(found) > AHEAD_MAX else found

    return ahead


def _lines(agenda: Agenda, pool: str | None) -> Iterator[Iterator[Key]]:
    for (kind, name, _, _), keys in agenda.queues.items():
        if (kind in ("any", "node")) if pool is None else (kind == "space" and name == pool):
            yield iter(keys)
        elif pool is not None and kind == "named":
            yield (key for key in keys if _wants(agenda, key[1], pool))


def _wants(agenda: Agenda, job_id: int, pool: str) -> bool:
    buffer = agenda.state.buffers.get(job_id)
    return buffer is not None and buffer.pool == pool and buffer.granted_bytes > 0
