"""Resolve the buffer request of a job against the pools and the site, before the job is submitted or changed.

This covers jobs without nodes, persistent buffers, swap, transfer lists, capacity units, paths and the pool. Sources:
SEMANTICS.md ("Refused at submit"), the burst buffer guides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from forebay.replica.decide.checks import (
    NODE_COUNT_INVALID,
    RejectionError,
    check_beneath,
    check_inside,
    check_path,
    expand,
    names_remedy,
    require,
)
from forebay.replica.grammar import find_overlap, match_literally, with_file_name
from forebay.replica.messages import commands as c
from forebay.replica.model import (
    NATIVE,
    NO_OPTIONS,
    BufferRequest,
    CreatePersistent,
    JobRequest,
    ListTransfer,
    Pool,
    PoolUnit,
    Transfer,
    TransferChoice,
    check_persistent_allowed,
    check_user_lists,
    format_amount,
    persistent_variable,
    transfer_choices,
)
from forebay.replica.operations import filesystem_of_pool
from forebay.replica.state import Facts
from forebay.replica.values import SIZE_BYTES_MAX, Rejection, RejectionCode, limits, name_fault, round_up

_TASK_SYMBOL = re.compile("%[aj]")


def resolve_buffer(
    state: Facts, actor: c.Actor, request: JobRequest, *, of_array: bool, number: str = ""
) -> JobRequest:
    """Return the request with its buffer request resolved, except paths and pool (`resolve_space`).

    `number` replaces `%j` in lists; empty: the job's ID.

    Raises:
        RejectionError: The request is invalid or not supported.
    """
    if is_ordinary(request) and all(pool.unit is PoolUnit.BYTES for pool in state.pools.values()):
        return request
    asked = request.buffer
    _check_nodes(request)
    if asked is None:
        return request
    _check_persistent(state, actor, asked)
    units = _buffer_units(state, asked, asked.units)
    creates = tuple(_with_units(state, record) for record in asked.creates)
    if asked.swap_bytes and _pool_unit(state, asked.pool, _pool_place(asked)) is not PoolUnit.BYTES:
        raise RejectionError(
            RejectionCode.INVALID_CAPACITY,
            "swap requires a pool that counts bytes",
            "use such a pool",
            _pool_place(asked),
        )
    lists = tuple(_resolve_list(state, request, transfer, number, of_array=of_array) for transfer in asked.lists)
    _check_supported(state, asked)
    return replace(request, buffer=replace(asked, units=units, creates=creates, lists=lists))


def is_ordinary(request: JobRequest) -> bool:
    """Return whether a request has no options and an ordinary buffer request, if any (`is_ordinary_buffer`)."""
    options, asked = request.options, request.buffer
    if request.array is not None or (options is not None and replace(options, any_of=False) != NO_OPTIONS):
        return False
    return asked is None or is_ordinary_buffer(asked)


def is_ordinary_buffer(asked: BufferRequest) -> bool:
    """Return whether a buffer request has only a capacity in bytes, and transfers of files and directories."""
    special = asked.creates or asked.destroys or asked.uses or asked.swap_bytes or asked.options or asked.lists
    commands = asked.stage_in_command or asked.stage_out_command
    return not (special or commands) and asked.units == "bytes" and asked.directives_kind in ("", "dw", "bb")


def resolve_space(
    state: Facts, request: JobRequest, asked: BufferRequest, job_id: int | str
) -> tuple[BufferRequest, str, int]:
    """Return the buffer request with its paths resolved, its pool, and the space it will hold (in the pool's unit).

    Raises:
        RejectionError: A path is not allowed, or the pool cannot satisfy the request.
    """
    _check_together(state, asked)
    asked = _resolve_paths(state, request, asked, job_id)
    return asked, *_resolve_pool(state, asked, asked.swap_bytes * max(1, request.effective_options.nodes))


def check_buffer_user(state: Facts, user: str) -> None:
    """Check that AllowUsers and DenyUsers permit the user to have buffers.

    Raises:
        RejectionError: They do not.
    """
    require(check_user_lists(state.site, user))


def persistent_fault(buffer: BufferRequest | None) -> Rejection | None:
    """Return the rejection of a job whose persistent buffers are too many, misnamed or contradictory, or None."""
    if buffer is None or not (buffer.creates or buffer.destroys or buffer.uses):
        return None
    kinds = {
        "create_persistent": [(one.name, one.place) for one in buffer.creates],
        "destroy_persistent": [(one.name, one.place) for one in buffer.destroys],
        "persistentdw": [(name, "") for name in buffer.uses],
    }
    for kind, named in kinds.items():
        if len(named) > limits.PERSISTENT_PER_JOB_MAX:
            most = limits.PERSISTENT_PER_JOB_MAX
            sentence = f"the job has {len(named)} {kind} directives"
            return Rejection(
                RejectionCode.LIMIT_EXCEEDED, sentence, f"request at most {most} in one job", named[most][1]
            )
        seen: set[str] = set()
        for name, place in named:
            fault = "starts with a digit" if name[:1].isdigit() else name_fault(name)
            if fault is not None:
                sentence = f"persistent buffer name {name!r} {fault}"
                return Rejection(RejectionCode.INVALID_DIRECTIVE, sentence, "choose another", place)
            if name in seen and kind != "persistentdw":
                sentence = f"{kind} names {name} twice"
                return Rejection(RejectionCode.INVALID_DIRECTIVE, sentence, "name each once", place)
            seen.add(name)
    wanted = {*(one.name for one in buffer.creates), *buffer.uses}
    for destroy in buffer.destroys:
        if destroy.name in wanted:
            sentence = f"the job destroys persistent buffer {destroy.name}, which it also creates or uses"
            return Rejection(RejectionCode.INVALID_DIRECTIVE, sentence, "destroy it in a separate job", destroy.place)
    return None


def _check_nodes(request: JobRequest) -> None:
    nodes, asked = request.effective_options.nodes, request.buffer
    if nodes > 1 or nodes < 0:
        raise RejectionError(
            RejectionCode.INVALID_FIELD,
            f"the job requests {nodes} nodes, but jobs run on one node",
            "request one node, or 0 to only create or destroy persistent buffers",
            "nodes",
        )
    if nodes:
        return
    if asked is None:
        raise RejectionError(
            RejectionCode.INVALID_FIELD,
            NODE_COUNT_INVALID,
            "only a job that creates or destroys persistent buffers may have no nodes",
            "nodes",
        )
    own = asked.capacity_bytes or asked.stage_in or asked.stage_out or asked.uses or asked.swap_bytes or asked.lists
    commands = asked.stage_in_command or asked.stage_out_command or asked.directives_kind == "lua"
    if own or commands or not (asked.creates or asked.destroys):
        raise RejectionError(
            RejectionCode.INVALID_DIRECTIVE,
            "a job without nodes may only create or destroy persistent buffers",
            "request a node, or remove the job's own buffer",
            asked.places[1] if len(asked.places) > 1 and asked.places[1] else "nodes",
        )


def _check_persistent(state: Facts, actor: c.Actor, asked: BufferRequest) -> None:
    touched = [record.place for record in asked.creates] + [record.place for record in asked.destroys]
    if not touched:
        return
    is_operator = actor.role is c.ActorRole.OPERATOR
    require(check_persistent_allowed(state.site, is_operator=is_operator, place=touched[0]))
    for record in asked.creates:
        pool = find_pool(state, record.pool, record.place)
        if round_up(record.capacity_bytes, pool.granularity_bytes) > pool.usable_bytes:
            raise _over_capacity(state, record.capacity_bytes, pool, record.place)
        _check_variable(state, asked, record)


def _check_variable(state: Facts, asked: BufferRequest, record: CreatePersistent) -> None:
    """Check that no other persistent buffer has the same environment variable, which scripts could not tell apart.

    Raises:
        RejectionError: Another one has.
    """
    variable = persistent_variable(record.name)
    created = (other.name for other in asked.creates)
    for other in (*created, *state.persistent):
        if other != record.name and len(other) == len(record.name) and persistent_variable(other) == variable:
            raise RejectionError(
                RejectionCode.INVALID_DIRECTIVE,
                f"persistent buffers {record.name!r} and {other!r} have the same variable ${variable}",
                "choose a name that differs in letters or digits",
                record.place,
            )


def _check_together(state: Facts, asked: BufferRequest) -> None:
    """Check that a job's buffers are not partly in a shared filesystem and partly on a node: no agent reaches both.

    Raises:
        RejectionError: They are.
    """
    if not (asked.creates or asked.destroys or asked.uses):
        return
    found: list[tuple[str, str, str]] = []
    if asked.capacity_bytes:
        pool = find_pool(state, asked.pool, _pool_place(asked))
        found.append((pool.name, f"pool {pool.name} has its buffers", _pool_place(asked)))
    for record in asked.creates:
        if record.name not in state.persistent:
            pool = find_pool(state, record.pool, record.place)
            found.append((pool.name, f"persistent buffer {record.name} is created", record.place))
    named = [(made.name, made.place) for made in asked.creates] + [(gone.name, gone.place) for gone in asked.destroys]
    for name, place in (*named, *((used, "") for used in asked.uses)):
        known = state.persistent.get(name)
        if known is not None:
            found.append((known.pool, f"persistent buffer {name} is", place or f"persistentdw name={name}"))
    placed: dict[bool, tuple[str, str]] = {}
    for pool_name, what, place in found:
        lies_in = filesystem_of_pool(state, pool_name)
        where = "on one node" if lies_in is None else f"in shared filesystem {lies_in.name}"
        placed.setdefault(lies_in is None, (f"{what} {where}", place))
    if len(placed) > 1:
        (first, _), (second, place) = placed.values()
        raise RejectionError(
            RejectionCode.INVALID_DIRECTIVE,
            f"{first}, and {second}: no job can use both",
            "use pools of the same kind: `forebay pool list` shows which use a shared filesystem",
            place,
        )


def _check_supported(state: Facts, asked: BufferRequest) -> None:
    """Check that Forebay's agents support the request. The grammar accepts more than they do.

    Raises:
        RejectionError: They do not; the job would run without a part of its request.
    """
    if state.site.provider != NATIVE:
        return
    if asked.swap_bytes:
        raise RejectionError(
            RejectionCode.INVALID_DIRECTIVE,
            "swap is not supported by the provider native, because all jobs on a node share its swap space",
            "omit it, and request the memory that the job needs",
            asked.places[-1] if len(asked.places) > 2 else "swap",
        )
    if asked.stage_in_command or asked.stage_out_command:
        _check_backend(state, "command", "--bb")
    for choice, place in _choices(asked):
        if choice.backend:
            _check_backend(state, choice.backend, place)


def _choices(asked: BufferRequest) -> Iterator[tuple[TransferChoice, str]]:
    """Yield the choice of each transfer that has one, with its place in the script."""
    if not (asked.stage_in or asked.stage_out or asked.lists):
        return
    places = [*asked.places[2:], *[""] * (len(asked.stage_in) + len(asked.stage_out))]
    for stage, moves, first in (
        ("stage_in", asked.stage_in, 0),
        ("stage_out", asked.stage_out, len(asked.stage_in)),
    ):
        yield from zip(transfer_choices(asked, stage, len(moves), listed=False), places[first:], strict=False)
        lists = [transfer for transfer in asked.lists if transfer.outgoing == (stage == "stage_out")]
        chosen = transfer_choices(asked, stage, len(lists), listed=True)
        yield from zip(chosen, (transfer.place for transfer in lists), strict=False)


def _check_backend(state: Facts, backend: str, place: str) -> None:
    """Check that the site allows a transfer backend.

    Raises:
        RejectionError: It does not.
    """
    allowed = state.transfer_rules.backends
    if backend in allowed:
        return
    what = "a stage command" if backend == "command" else f"backend={backend}"
    raise RejectionError(
        RejectionCode.INVALID_DIRECTIVE,
        f"{what} is not allowed on this cluster",
        f"use one of {', '.join(allowed)}, or ask an operator to permit {backend}",
        place,
    )


def _over_capacity(state: Facts, size: int, pool: Pool, place: str) -> RejectionError:
    if not pool.usable_bytes:
        return RejectionError(
            RejectionCode.CAPACITY_OVER_TOTAL,
            f"pool {pool.name} is out of service",
            "use another pool, or submit without a buffer",
            place,
        )
    unit = pool.unit
    most = format_amount(pool.usable_bytes, unit)
    return RejectionError(
        RejectionCode.CAPACITY_OVER_TOTAL,
        f"{format_amount(size, unit)} exceeds the capacity of pool {pool.name}, {most}",
        f"request at most {most}, or use another pool",
        place,
    )


def _pool_place(asked: BufferRequest) -> str:
    return asked.places[0] if asked.places else "pool"


def _capacity_place(asked: BufferRequest) -> str:
    return asked.places[1] if len(asked.places) > 1 else "capacity"


def _pool_unit(state: Facts, pool: str, place: str) -> PoolUnit:
    return find_pool(state, pool, place).unit


def _buffer_units(state: Facts, asked: BufferRequest, written: str) -> str:
    if not asked.capacity_bytes:
        return "bytes"
    return resolve_units(written, _pool_unit(state, asked.pool, _pool_place(asked)), _capacity_place(asked))


def _with_units(state: Facts, record: CreatePersistent) -> CreatePersistent:
    return replace(
        record, units=resolve_units(record.units, _pool_unit(state, record.pool, record.place), record.place)
    )


def resolve_units(written: str, unit: PoolUnit, place: str) -> str:
    """Return the units of a capacity: `bytes` or `count`.

    `written` is the form in the script: `bytes` (with a suffix), `count` (N) or a plain number. `unit` is the pool's.

    Raises:
        RejectionError: The form does not fit the pool.
    """
    if written == "count" and unit is not PoolUnit.NODES:
        raise RejectionError(
            RejectionCode.INVALID_CAPACITY,
            f"the capacity is a number of nodes (N), but the pool counts {_unit_label(unit)}",
            "write it without N, or use a pool that counts nodes",
            place,
        )
    if written == "bytes" and unit is not PoolUnit.BYTES:
        raise RejectionError(
            RejectionCode.INVALID_CAPACITY,
            f"the capacity is a size in bytes, but the pool counts {_unit_label(unit)}",
            "write a number without a suffix" + (" or with N" if unit is PoolUnit.NODES else ""),
            place,
        )
    return "bytes" if unit is PoolUnit.BYTES else "count"


def _unit_label(unit: PoolUnit) -> str:
    return "plain units" if unit is PoolUnit.COUNT else unit.word


def _resolve_list(
    state: Facts, request: JobRequest, transfer: ListTransfer, number: str, *, of_array: bool
) -> ListTransfer:
    """Return a transfer list with its symbols replaced and its paths checked."""
    job_id, place = number or state.next_job, transfer.place
    if of_array and _TASK_SYMBOL.search(transfer.source + transfer.destination):
        raise RejectionError(
            RejectionCode.INVALID_DIRECTIVE,
            "%a and %j cannot be used in the file lists of a job array, because its tasks share them",
            "stage a directory for each task, or omit the symbols",
            place,
        )
    source = expand(transfer.source, request, job_id, place)
    destination = expand(transfer.destination, request, job_id, place)
    check_beneath(state.site.sources, request.user, source, "sources", place)
    if transfer.outgoing:
        check_beneath(state.site.destinations, request.user, destination, "destinations", place)
    else:
        check_inside(destination, place)
    return replace(transfer, source=source, destination=destination)


def _resolve_paths(state: Facts, request: JobRequest, asked: BufferRequest, job_id: int | str) -> BufferRequest:
    places = iter(asked.places[2:])
    moved: dict[str, tuple[Transfer, ...]] = {}
    for stage, roots, key in (
        ("stage_in", state.site.sources, "sources"),
        ("stage_out", state.site.destinations, "destinations"),
    ):
        outgoing = stage == "stage_out"
        transfers = []
        for transfer in getattr(asked, stage):
            place = next(places, stage)
            outside = expand(transfer.outside, request, job_id, place)
            inside = expand(transfer.inside, request, job_id, place)
            check_inside(inside, place)
            pattern = _resolve_pattern(request, transfer.pattern, job_id, place) if transfer.pattern else ""
            if outside is not transfer.outside or inside is not transfer.inside or pattern != transfer.pattern:
                transfer = Transfer(transfer.kind, outside, inside, pattern)
            transfer = with_file_name(transfer, outgoing=outgoing)
            check_beneath(roots, request.user, transfer.outside, key, place)
            transfers.append((transfer, place))
        require(find_overlap(transfers, asked.lists, outgoing=outgoing))
        moved[stage] = tuple(transfer for transfer, _ in transfers)
    return replace(asked, stage_in=moved["stage_in"], stage_out=moved["stage_out"])


def _resolve_pattern(request: JobRequest, pattern: str, job_id: int | str, place: str) -> str:
    """Return a pattern with its symbols replaced; their values match themselves."""
    named = replace(request, name=match_literally(request.name), workdir=match_literally(request.workdir))
    found = expand(pattern, named, job_id, place)
    check_path("/" + found, place)
    return found


def _resolve_pool(state: Facts, asked: BufferRequest, swap_bytes: int) -> tuple[str, int]:
    """Return the request's pool, empty for none, and the space it will hold in the pool's unit."""
    pool_place, capacity_place = _pool_place(asked), _capacity_place(asked)
    if not asked.capacity_bytes and not swap_bytes:
        if asked.pool:
            find_pool(state, asked.pool, pool_place)
        return "", 0
    pool = find_pool(state, asked.pool, pool_place)
    granted = round_up(asked.capacity_bytes, pool.granularity_bytes) + round_up(swap_bytes, pool.granularity_bytes)
    if granted > SIZE_BYTES_MAX:
        raise RejectionError(
            RejectionCode.INVALID_CAPACITY, "the requested size overflows", "request less", capacity_place
        )
    if granted > pool.usable_bytes and not state.site.hold_oversized:
        raise _over_capacity(state, asked.capacity_bytes + swap_bytes, pool, capacity_place)
    return pool.name, granted


def find_pool(state: Facts, name: str, place: str) -> Pool:
    """Return the pool with this name, or the default pool if the name is empty.

    Raises:
        RejectionError: There is none.
    """
    if name:
        pool = state.pools.get(name)
        if pool is None:
            remedy = names_remedy(
                state.pools, "this site has no pools: ask an operator to create one with `forebay pool create`"
            )
            raise RejectionError(RejectionCode.UNKNOWN_POOL, f"pool {name!r} does not exist", remedy, place)
        return pool
    for pool in state.pools.values():
        if pool.is_default:
            return pool
    raise RejectionError(
        RejectionCode.NO_DEFAULT_POOL,
        "the request names no pool, and the site has no default pool",
        f"add pool=, one of: {', '.join(sorted(state.pools))}",
        place,
    )
