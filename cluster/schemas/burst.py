"""Response of GET /v1/burst and its text form, identical to `scontrol show burst` in lines and units.

The API (`text`) and the command line share this renderer. Like scontrol, it prints times in the local zone.
Source of the format: transcripts of Slurm 22.05.8 and 26.05, SLURM-OBSERVED.md section 7. `PollInterval=` is a line of
24.11 and newer. Two lines are Forebay's own and appear only if they apply: a pool that is partly out of service, and a
pool that shrank below its use.
"""

import datetime
from collections.abc import Callable, Iterator
from typing import Final

from forebay.cluster.schemas.base import Answer, View
from forebay.cluster.system import parse_instant
from forebay.replica.model import PoolUnit, format_slurm_amount
from forebay.replica.values import MICROSECONDS_PER_SECOND, plain

NO_VALUE: Final = "(null)"
"""Slurm's output for an empty text."""

NO_ID: Final = "unknown"
"""Printed instead of an unknown UID."""


class BurstPoolView(View, frozen=True, kw_only=True):
    """Pool. Amounts count `unit`: bytes, nodes or count."""

    name: str
    unit: str
    granularity: int
    total: int
    free: int
    used: int
    out_of_service: int = 0
    missing: int = 0
    """Excess of use over capacity after the pool shrank. Free is then 0, and holders keep their space."""
    is_default: bool = False


class BurstBufferView(View, frozen=True, kw_only=True):
    """Buffer that holds space: of a job (`job_id`), of an array task, or persistent (`name`)."""

    job_id: int | None
    array_job_id: int | None = None
    array_task_id: int | None = None
    name: str | None = None
    create_time: str | None
    """Time its space was reserved."""
    pool: str | None
    unit: str
    size: int
    state: str
    """State in the terms of Slurm's plugin: allocated, staged-in, teardown, teardown-fail, …"""
    buffer_state: str
    user: str
    uid: int | None = None
    """The user's UID on the responding replica; null if the account is unknown there."""


class BurstUseView(View, frozen=True, kw_only=True):
    """Space held by one user: sizes and counts added as Slurm does, nodes separately."""

    user: str
    uid: int | None = None
    unit: str
    used: int


class BurstAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/burst, printed by `forebay slurm burst`. Unconfigured values are null."""

    name: str
    default_pool: str | None
    granularity: int
    """Granularity of a pool that defines none."""
    pools: tuple[BurstPoolView, ...]
    flags: str
    poll_interval_s: int | None = None
    """Null if the replica does not report it; the line is then omitted."""
    stage_in_timeout_s: int
    stage_out_timeout_s: int
    validate_timeout_s: int
    other_timeout_s: int
    allow_users: tuple[str, ...] = ()
    deny_users: tuple[str, ...] = ()
    create_buffer: str | None = None
    destroy_buffer: str | None = None
    get_sys_state: str | None = None
    get_sys_status: str | None = None
    start_stage_in: str | None = None
    start_stage_out: str | None = None
    stop_stage_in: str | None = None
    stop_stage_out: str | None = None
    buffers: tuple[BurstBufferView, ...] = ()
    uses: tuple[BurstUseView, ...] = ()


Zone = datetime.tzinfo | None


def burst_text(burst: BurstAnswer, *, one_line: bool = False, zone: Zone = None) -> str:
    """Return the output of `scontrol show burst` without the last newline; `one_line` formats it as `scontrol -o`.

    `zone` is the time zone of printed times; None: the local zone.
    """
    text = "\n".join(burst_lines(burst, zone))
    return " ".join(text.split()) if one_line else text


def burst_lines(burst: BurstAnswer, zone: Zone = None) -> Iterator[str]:
    """Yield the lines of `burst_text`."""
    default = next((pool for pool in burst.pools if pool.is_default), None)
    first = BurstPoolView(name="", unit="bytes", granularity=burst.granularity, total=0, free=0, used=0)
    yield f"Name={_word(burst.name)} DefaultPool={_word(burst.default_pool)} {_amounts(default or first)}"
    for number, pool in enumerate(pool for pool in burst.pools if not pool.is_default):
        yield f"  PoolName[{number}]={_word(pool.name)} {_amounts(pool)}"
    for pool in burst.pools:
        shown = _amount(pool.unit)
        if pool.out_of_service:
            yield f"  PoolOutOfService={_word(pool.name)} Space={shown(pool.out_of_service)}"
        if pool.missing:
            usable = shown(pool.used - pool.missing)
            yield (
                f"  PoolShrunk={_word(pool.name)} UsableSpace={usable} UsedSpace={shown(pool.used)} "
                f"MissingSpace={shown(pool.missing)}"
            )
    yield f"  Flags={_text(burst.flags)}"
    if burst.poll_interval_s is not None:
        yield f"  PollInterval={burst.poll_interval_s}"
    yield (
        f"  StageInTimeout={burst.stage_in_timeout_s} StageOutTimeout={burst.stage_out_timeout_s} "
        f"ValidateTimeout={burst.validate_timeout_s} OtherTimeout={burst.other_timeout_s}"
    )
    if burst.allow_users:
        yield f"  AllowUsers={_text(','.join(burst.allow_users))}"
    if burst.deny_users:
        yield f"  DenyUsers={_text(','.join(burst.deny_users))}"
    for name, path in (
        ("CreateBuffer", burst.create_buffer),
        ("DestroyBuffer", burst.destroy_buffer),
        ("GetSysState", burst.get_sys_state or NO_VALUE),
        ("GetSysStatus", burst.get_sys_status or NO_VALUE),
        ("StartStageIn", burst.start_stage_in),
        ("StartStageOut", burst.start_stage_out),
        ("StopStageIn", burst.stop_stage_in),
        ("StopStageOut", burst.stop_stage_out),
    ):
        if path:
            yield f"  {name}={_text(path)}"
    if burst.buffers:
        yield "  Allocated Buffers:"
    for buffer in burst.buffers:
        yield f"    {_buffer(buffer, zone)}"
    if burst.uses:
        yield "  Per User Buffer Use:"
    for use in burst.uses:
        yield f"    UserID={owner(use.user, use.uid)} Used={_amount(use.unit)(use.used)}"


def _amounts(pool: BurstPoolView) -> str:
    shown = _amount(pool.unit)
    return (
        f"Granularity={shown(pool.granularity)} TotalSpace={shown(pool.total)} FreeSpace={shown(pool.free)} "
        f"UsedSpace={shown(pool.used)}"
    )


def _buffer(buffer: BurstBufferView, zone: Zone) -> str:
    return (
        f"{_identity(buffer)} CreateTime={local_time(buffer.create_time, zone)} Pool={_word(buffer.pool)} "
        f"Size={_amount(buffer.unit)(buffer.size)} State={_word(buffer.state)} "
        f"UserID={owner(buffer.user, buffer.uid)}"
    )


def _identity(buffer: BurstBufferView) -> str:
    """Return a buffer's key: `Name=alpha`, `JobID=12`, or `JobID=1_3(1)` for task 3 of array 1, which is job 1."""
    if buffer.job_id is None:
        return f"Name={_word(buffer.name)}"
    if buffer.array_job_id is None:
        return f"JobID={buffer.job_id}"
    return f"JobID={buffer.array_job_id}_{buffer.array_task_id}({buffer.job_id})"


def _amount(unit: str) -> Callable[[int], str]:
    known = PoolUnit[unit.upper()] if unit.upper() in PoolUnit.__members__ else PoolUnit.COUNT
    return lambda amount: format_slurm_amount(amount, known)


def owner(name: str, number: int | None) -> str:
    """Format an account as Slurm does: `alice(1001)`, or `alice(unknown)` without a known UID."""
    return f"{_word(name)}({NO_ID if number is None else number})"


def local_time(iso: str | None, zone: Zone = None) -> str:
    """Format a time as Slurm's commands do: local time to the second, without a zone."""
    if iso is None:
        return "Unknown"
    try:
        since = parse_instant(iso)
    except ValueError:
        return _text(iso)
    moment = datetime.datetime.fromtimestamp(since // MICROSECONDS_PER_SECOND, tz=datetime.UTC)
    return f"{moment.astimezone(zone):%Y-%m-%dT%H:%M:%S}"


def _word(text: str | None) -> str:
    return _text(text) or NO_VALUE


def _text(text: str | None) -> str:
    """Escape terminal control characters, because names and paths come from other users."""
    return plain(text or "")


# ---- response of GET /v1/bbstat


class ProviderStatus(Answer, frozen=True, kw_only=True):
    """Status output of the site's burst-buffer provider."""

    text: str
