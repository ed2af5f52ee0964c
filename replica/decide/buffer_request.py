"""Whether what a job asks for beyond its JobSpec can be had, and what of it only the state can say.

A job of no nodes, persistent buffers, swap, lists, what a capacity counts: decided here against pools and site, before
the job is submitted. Sources: SEMANTICS.md ("Refused at submit"), the burst buffer guides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from replica.decide.submit import Unfit, check_beneath, expand, pool_of
from replica.grammar import path_fault, persistent_name, split_inside
from replica.messages import TRANSFERS_AND_PARTITIONS, level_refusal
from replica.messages import commands as c
from replica.model import (
    DEFAULT_TRANSFER_RULES,
    MAIL_TYPES,
    NATIVE,
    NO_CHOICE,
    NO_OPTIONS,
    TRANSFER_RULES_KEY,
    BufferOptions,
    BufferRequest,
    CreatePersistent,
    JobOptions,
    ListTransfer,
    Pool,
    PoolUnit,
    TransferChoice,
    choices_of,
    format_amount,
    persistent_refusal,
)
from replica.state import Facts
from replica.values import (
    ARRAY_SIZE_MAX,
    MAIL_USER_CHARACTERS_MAX,
    MESSAGE_CHARACTERS_MAX,
    Refusal,
    RefusalCode,
    name_fault,
    round_up,
)

_OF_ONE_TASK = re.compile("%[aj]")


def with_options_decided(state: Facts, actor: c.Actor, command: c.SubmitJob) -> c.SubmitJob | Refusal:
    """Return the command with everything in its options decided, or why it is refused."""
    options = command.options
    if options == NO_OPTIONS and not state.pool_units:
        return command
    try:
        check_plain_options(options)
        _check_nodes(command.request, options)
        buffer = options.buffer
        if command.request is None:
            return command
        if buffer is None:
            _units(state, command.request, "bytes")
            return command
        _check_persistent(state, actor, buffer)
        units = _units(state, command.request, buffer.units)
        creates = tuple(_with_units(state, record) for record in buffer.creates)
        if buffer.swap_bytes and _unit(state, command.request.pool, _pool_place(command.request)) is not PoolUnit.BYTES:
            raise Unfit(
                RefusalCode.INVALID_CAPACITY,
                "swap is asked of a pool that does not count bytes",
                "name a pool that does",
                _pool_place(command.request),
            )
        lists = tuple(_decided_list(state, command, transfer) for transfer in buffer.lists)
        _check_carried_out(state, command.request, buffer)
    except Unfit as unfit:
        return unfit.refusal
    decided: BufferOptions | None = replace(buffer, units=units, creates=creates, lists=lists)
    if decided == BufferOptions(directives_kind=buffer.directives_kind) and buffer.directives_kind in ("dw", "bb"):
        decided = None
    return replace(command, options=replace(options, buffer=decided))


def check_plain_options(options: JobOptions) -> None:
    """Raise Unfit for an option whose value can never be. Accounts, QOS, licences and nice are checked elsewhere."""
    fault = name_fault(options.partition) if options.partition else None
    if fault is not None:
        raise Unfit(RefusalCode.INVALID_FIELD, f"the partition {fault}", "write the name of a partition", "partition")
    unknown = [word for word in options.mail_types if word.strip().lower() not in MAIL_TYPES]
    if unknown:
        raise Unfit(
            RefusalCode.INVALID_FIELD,
            f"the mail type {unknown[0][:48]!r} is unknown",
            f"use some of {', '.join(MAIL_TYPES)}",
            "mail_types",
        )
    for field, text, most in (
        ("mail_user", options.mail_user, MAIL_USER_CHARACTERS_MAX),
        ("comment", options.comment, MESSAGE_CHARACTERS_MAX),
    ):
        if len(text) > most:
            raise Unfit(
                RefusalCode.LIMIT_EXCEEDED, f"{field} has {len(text)} characters", f"write at most {most}", field
            )
        if any(ord(character) < 32 or ord(character) == 127 for character in text):
            raise Unfit(RefusalCode.INVALID_FIELD, f"{field} has a control character", "write one line of text", field)
    if options.mail_user.startswith("-") or " " in options.mail_user:
        raise Unfit(
            RefusalCode.INVALID_FIELD,
            f"{options.mail_user[:48]!r} is no address",
            "write a user or an address",
            "mail_user",
        )
    if not 0 <= options.array_throttle <= ARRAY_SIZE_MAX:
        raise Unfit(
            RefusalCode.INVALID_FIELD,
            f"the throttle of the array is {options.array_throttle}",
            f"use a number from 1 to {ARRAY_SIZE_MAX}",
            "array",
        )


def _check_nodes(request: BufferRequest | None, options: JobOptions) -> None:
    if options.nodes > 1 or options.nodes < 0:
        raise Unfit(
            RefusalCode.INVALID_FIELD,
            f"the job asks for {options.nodes} nodes; a job of Forebay runs on one",
            "ask for one node, or for none to create or destroy persistent buffers only",
            "nodes",
        )
    if options.nodes:
        return
    if request is None:
        raise Unfit(
            RefusalCode.INVALID_FIELD,
            "Node count specification invalid",
            "only a job that creates or destroys persistent buffers may have no nodes",
            "nodes",
        )
    buffer = options.buffer
    only_persistent = buffer is not None and bool(buffer.creates or buffer.destroys)
    own = bool(request.capacity_bytes or request.stage_in or request.stage_out)
    if buffer is not None:
        own = own or bool(buffer.uses or buffer.swap_bytes or buffer.lists or buffer.stage_in_command)
        own = own or bool(buffer.stage_out_command) or buffer.directives_kind == "lua"
    if own or not only_persistent:
        raise Unfit(
            RefusalCode.INVALID_DIRECTIVE,
            "a job of no nodes may only create or destroy persistent buffers",
            "ask for a node, or leave the job's own buffer out",
            request.places[1] if len(request.places) > 1 and request.places[1] else "nodes",
        )


def _check_persistent(state: Facts, actor: c.Actor, buffer: BufferOptions) -> None:
    touched = [record.place for record in buffer.creates] + [record.place for record in buffer.destroys]
    if not touched:
        return
    is_operator = actor.role is c.ActorRole.OPERATOR
    refusal = persistent_refusal(state.site, is_operator=is_operator, place=touched[0])
    if refusal is not None:
        raise Unfit(refusal.code, refusal.sentence, refusal.remedy, refusal.place)
    for record in buffer.creates:
        pool = pool_of(state, record.pool, record.place)
        if round_up(record.capacity_bytes, pool.granularity_bytes) > pool.usable_bytes:
            raise _over_total(state, record.capacity_bytes, pool, record.place)


def _check_carried_out(state: Facts, request: BufferRequest, buffer: BufferOptions) -> None:
    """Raise Unfit for what the grammar reads and Forebay's own agents do not do: such a job would run without it."""
    if state.site.provider != NATIVE:
        return
    if buffer.swap_bytes:
        raise Unfit(
            RefusalCode.INVALID_DIRECTIVE,
            "swap is not set up by the provider native: Linux gives swap to everything on a node, and nodes are shared",
            "leave it out, and ask for the memory that the job needs",
            request.places[-1] if len(request.places) > 2 else "swap",
        )
    asked = _asked_of_agents(request, buffer)
    if asked is None:
        return
    what, place = asked
    refusal = level_refusal(state.feature_level, TRANSFERS_AND_PARTITIONS, what, place)
    if refusal is not None:
        raise Unfit(refusal.code, refusal.sentence, refusal.remedy, refusal.place)
    if buffer.stage_in_command or buffer.stage_out_command:
        _check_backend(state, "command", "--bb")
    for choice, place in _choices(request, buffer):
        if choice.backend:
            _check_backend(state, choice.backend, place)


def _asked_of_agents(request: BufferRequest, buffer: BufferOptions) -> tuple[str, str] | None:
    """Return what agents of earlier releases would leave out, and where it stands; None if there is no such thing."""
    if buffer.lists:
        return "staging what a file lists (type=list)", buffer.lists[0].place
    if buffer.stage_in_command or buffer.stage_out_command:
        return "a command that stages", "--bb"
    for count, transfer in enumerate((*request.stage_in, *request.stage_out), start=2):
        if persistent_name(split_inside(transfer.inside.removeprefix("\\\\"))[0]):
            return "staging to and from a persistent buffer", request.places[count] if request.places else ""
    for choice, place in _choices(request, buffer):
        if choice != NO_CHOICE:
            return "backend= and move=", place
    return None


def _choices(request: BufferRequest, buffer: BufferOptions) -> Iterator[tuple[TransferChoice, str]]:
    """Yield what is special about each transfer that has something special, and where it stands."""
    places = [*request.places[2:], *[""] * (len(request.stage_in) + len(request.stage_out))]
    for stage, moves, first in (
        ("stage_in", request.stage_in, 0),
        ("stage_out", request.stage_out, len(request.stage_in)),
    ):
        yield from zip(choices_of(buffer, stage, len(moves), listed=False), places[first:], strict=False)
        lists = [transfer for transfer in buffer.lists if transfer.outgoing == (stage == "stage_out")]
        chosen = choices_of(buffer, stage, len(lists), listed=True)
        yield from zip(chosen, (transfer.place for transfer in lists), strict=False)


def _check_backend(state: Facts, backend: str, place: str) -> None:
    """Raise Unfit for a backend that the site does not allow."""
    allowed = state.transfer_rules.get(TRANSFER_RULES_KEY, DEFAULT_TRANSFER_RULES).backends
    if backend in allowed:
        return
    what = "a command that stages" if backend == "command" else f"backend={backend}"
    raise Unfit(
        RefusalCode.INVALID_DIRECTIVE,
        f"{what} is not allowed on this cluster",
        f"use one of {', '.join(allowed)}, or have an operator add {backend} to the backends of transfers",
        place,
    )


def _over_total(state: Facts, asked: int, pool: Pool, place: str) -> Unfit:
    unit = state.pool_units.get(pool.name, PoolUnit.BYTES)
    most = format_amount(pool.usable_bytes, unit)
    return Unfit(
        RefusalCode.CAPACITY_OVER_TOTAL,
        f"{format_amount(asked, unit)} is more than pool {pool.name} has in all, {most}",
        f"ask for at most {most}, or for another pool",
        place,
    )


def _pool_place(request: BufferRequest) -> str:
    return request.places[0] if request.places else "pool"


def _unit(state: Facts, pool: str, place: str) -> PoolUnit:
    return state.pool_units.get(pool_of(state, pool, place).name, PoolUnit.BYTES)


def _units(state: Facts, request: BufferRequest, written: str) -> str:
    if not request.capacity_bytes:
        return "bytes"
    place = request.places[1] if len(request.places) > 1 else "capacity"
    return decided_units(written, _unit(state, request.pool, _pool_place(request)), place)


def _with_units(state: Facts, record: CreatePersistent) -> CreatePersistent:
    return replace(record, units=decided_units(record.units, _unit(state, record.pool, record.place), record.place))


def decided_units(written: str, unit: PoolUnit, place: str) -> str:
    """Return what a capacity counts, from how it was `written` and what its pool counts; Unfit where they differ."""
    if written == "count" and unit is not PoolUnit.NODES:
        raise Unfit(
            RefusalCode.INVALID_CAPACITY,
            f"the capacity is a number of nodes (N), and its pool counts {_counts(unit)}",
            "write it without N, or name a pool of nodes",
            place,
        )
    if written == "bytes" and unit is not PoolUnit.BYTES:
        raise Unfit(
            RefusalCode.INVALID_CAPACITY,
            f"the capacity is a size in bytes, and its pool counts {_counts(unit)}",
            "write a number without a suffix" + (" or with N" if unit is PoolUnit.NODES else ""),
            place,
        )
    return "bytes" if unit is PoolUnit.BYTES else "count"


def _counts(unit: PoolUnit) -> str:
    return "plain units" if unit is PoolUnit.COUNT else unit.word


def _decided_list(state: Facts, command: c.SubmitJob, transfer: ListTransfer) -> ListTransfer:
    """Return a list with its symbols replaced and its paths checked, as those of the other transfers are."""
    job_id, spec, place = state.next_job, command.spec, transfer.place
    if command.array and _OF_ONE_TASK.search(transfer.source + transfer.destination):
        raise Unfit(
            RefusalCode.INVALID_DIRECTIVE,
            "the tasks of an array share their lists, so %a and %j mean nothing in them",
            "stage a directory for each task, or leave them out",
            place,
        )
    source = expand(transfer.source, spec, job_id, place, command.options)
    destination = expand(transfer.destination, spec, job_id, place, command.options)
    check_beneath(state.policy.sources, spec.user, source, "sources", place)
    if transfer.outgoing:
        check_beneath(state.policy.destinations, spec.user, destination, "destinations", place)
    else:
        _, rest = split_inside(destination)
        fault = path_fault("/" + rest)
        if fault is not None:
            raise Unfit(
                RefusalCode.PATH_NOT_ALLOWED, f"the path {fault}", "write a path below the variable, without ..", place
            )
    return replace(transfer, source=source, destination=destination)
