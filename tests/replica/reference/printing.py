"""A request written back: the text that, read again, gives the same request.

For the provider native: the lines of others are passed on as they were written, so their text is what they print.
"""

from __future__ import annotations

from msgspec.structs import replace

from forebay.replica.grammar.bb import format_bytes, format_quantity
from forebay.replica.grammar.values import STOP
from forebay.replica.model.buffers import Access, Transfer, TransferKind
from forebay.replica.model.requests import BufferRequest, CreatePersistent
from forebay.replica.model.transfers import choice_prefix
from forebay.replica.values.units import Quantity


def format_request(request: BufferRequest) -> tuple[str, str]:
    """Return the text for `--bb` and the text for a `--bbf` file that together ask for this; each may be empty."""
    rest = list(request.options)
    lines: list[str] = []
    spur = request.directives_kind == "spur"
    alone = spur and not request.stage_in_command and not request.stage_out_command
    if request.capacity_bytes and not alone:
        whole, names = request.capacity_bytes, request.names or ("",)
        for place, name in enumerate(names):
            size = whole - len(names) + 1 if place == 0 else 1
            lines.append(_line(rest, "jobdw", "#DW jobdw", _space(replace(request, capacity_bytes=size), name)))
    if request.swap_bytes:
        pool = f" pool={request.pool}" if request.pool else ""
        lines.append(_line(rest, "swap", "#DW swap", f"{format_bytes(request.swap_bytes)}{pool}"))
    lines += [_line(rest, "persistentdw", "#DW persistentdw", f"name={name}") for name in request.uses]
    for stage, transfers in (("stage_in", request.stage_in), ("stage_out", request.stage_out)):
        lists = [transfer for transfer in request.lists if transfer.outgoing == (stage == "stage_out")]
        for listed, texts in (
            (False, [_move(transfer, stage) for transfer in transfers]),
            (True, ["type=list" + _paths(transfer.source, transfer.destination) for transfer in lists]),
        ):
            for index, text in enumerate(texts):
                verb = stage if text.startswith("type=") else stage.replace("stage", "copy")
                chosen = _line(rest, choice_prefix(stage, index, listed=listed), f"#DW {verb}", text)
                lines.append(_line(rest, stage, chosen))
    lines += [_line(rest, "create_persistent", "#BB create_persistent", _create(record)) for record in request.creates]
    lines += [
        _line(
            rest,
            "destroy_persistent",
            "#BB destroy_persistent",
            f"name={record.name}{' hurry' if record.hurry else ''}",
        )
        for record in request.destroys
    ]
    return _spur(request, alone) if spur else "", "\n".join(lines)


def _line(rest: list[str], verb: str, *texts: str) -> str:
    """Return one directive, with all the options that were passed on with directives of its kind."""
    mine = [option for option in rest if option.startswith(verb + " ")]
    for option in mine:
        rest.remove(option)
    return " ".join([*texts, *(option.removeprefix(verb + " ") for option in mine)])


def _access(modes: tuple[Access, ...]) -> str:
    return ",".join(mode.name.lower() for mode in modes)


def _space(request: BufferRequest, name: str) -> str:
    named = f" name={name}" if name else ""
    pool = f" pool={request.pool}" if request.pool else ""
    capacity = _capacity(request.capacity_bytes, request.units)
    return f"capacity={capacity}{pool} access_mode={_access(request.access)} type={request.type}{named}"


def _capacity(value: int, units: str) -> str:
    return format_quantity(Quantity(value, "nodes" if units == "count" else units))


def _create(record: CreatePersistent) -> str:
    parts = [f"name={record.name}", f"capacity={_capacity(record.capacity_bytes, record.units)}"]
    parts += [f"access={_access(record.access)}"] if record.access else []
    parts += [f"pool={record.pool}"] if record.pool else []
    parts += [f"type={record.type}"] if record.type else []
    return " ".join(parts)


def _move(transfer: Transfer, stage: str) -> str:
    source, destination = transfer.outside, transfer.inside
    if stage == "stage_out":
        source, destination = destination, source
    paths = _paths(source + transfer.pattern, destination)
    return paths.lstrip() if transfer.kind is TransferKind.EITHER else f"type={transfer.kind.name.lower()}{paths}"


def _paths(source: str, destination: str) -> str:
    """Return both in the order in which they read back.

    What stops symbols stops them to the line's end, so the path that stops them comes last, and one whose symbols were
    stopped before it (it begins so) after one that stops them itself.
    """
    pair = [("source", source), ("destination", destination)]
    pair.sort(key=lambda row: (row[1].startswith(STOP), STOP in row[1]))
    return "".join(f" {key}={path}" for key, path in pair)


def _spur(request: BufferRequest, alone: bool) -> str:
    parts = [f"capacity={format_bytes(request.capacity_bytes)}"] if alone else []
    parts += [f"stage_in:{command}" for command in request.stage_in_command.splitlines()]
    parts += [f"stage_out:{command}" for command in request.stage_out_command.splitlines()]
    return "; ".join(parts) + ";"
