"""What was asked of a job: its request, with that for burst buffers in it, and what may change while it waits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from replica.model.buffers import Access, Transfer
from replica.values import NEVER, Instant, Pattern, expand_symbols


class DependencyKind(IntEnum):
    """What a job waits for in another job."""

    AFTER = 1
    AFTER_ANY = 2
    AFTER_OK = 3
    AFTER_NOT_OK = 4
    AFTER_BURST_BUFFER = 5
    # The same for a whole array (feature level 3): `job` is the array, whose first task has the same number.
    ALL_AFTER = 11
    ALL_AFTER_ANY = 12
    ALL_AFTER_OK = 13
    ALL_AFTER_NOT_OK = 14
    ALL_AFTER_BURST_BUFFER = 15

    @property
    def word(self) -> str:
        """As in `--dependency`, for example `afterok`."""
        return self.name.removeprefix("ALL_").lower().replace("_", "")

    @property
    def is_for_array(self) -> bool:
        """Return whether it is about all tasks of an array."""
        return self > 10

    @property
    def for_job(self) -> DependencyKind:
        """The same kind about one job."""
        return DependencyKind(self - 10) if self > 10 else self

    @property
    def for_array(self) -> DependencyKind:
        """The same kind about all tasks of an array."""
        return self if self > 10 else DependencyKind(self + 10)


class Dependency(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Condition on one other job; all of a job's dependencies must hold."""

    kind: DependencyKind
    job: int


class CreatePersistent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `create_persistent`. `capacity_bytes` counts units where the pool does; `pool` empty: the default pool."""

    name: str
    capacity_bytes: int
    pool: str = ""
    access: tuple[Access, ...] = ()
    type: str = ""
    place: str = ""
    """Where in what the user wrote it stands, for example `line 3, column 1`."""
    units: str = "bytes"
    """As in BufferRequest."""
    access_text: str = ""
    """The access as it was written, with the options of its modes: for a provider that is told it."""


class DestroyPersistent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `destroy_persistent`; `hurry`: without its stage-out."""

    name: str
    hurry: bool = False
    place: str = ""


class ListTransfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `stage_in` or `stage_out` (`outgoing`) with `type=list`: `source` is the file that lists what to move."""

    outgoing: bool
    source: str
    destination: str
    place: str = ""


class BufferRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a job asked of burst buffers. `capacity_bytes` 0: nothing is reserved, data is staged all the same."""

    pool: str
    """Empty: the default pool."""
    capacity_bytes: int
    access: tuple[Access, ...]
    type: str
    stage_in: tuple[Transfer, ...]
    stage_out: tuple[Transfer, ...]
    text: str
    """The directives as the user wrote them, one a line: what `BurstBuffer=` shows."""
    places: tuple[str, ...] = ()
    """Where in what was written each thing stands: pool, capacity, each stage_in, each stage_out, and swap if any."""
    directives_kind: str = ""
    """dw, bb, lua, spur, or empty where nothing was written."""
    creates: tuple[CreatePersistent, ...] = ()
    destroys: tuple[DestroyPersistent, ...] = ()
    uses: tuple[str, ...] = ()
    """Names of persistent buffers that the job works with (`persistentdw name=`)."""
    swap_bytes: int = 0
    """Swap for each node, bytes."""
    options: tuple[str, ...] = ()
    """Options that are not known here, as they were written: they go to the provider."""
    stage_in_command: str = ""
    stage_out_command: str = ""
    """Spur's commands, run instead of transfers."""
    lists: tuple[ListTransfer, ...] = ()
    units: str = "bytes"
    """What capacity counts: bytes, or count for units of the pool. While it is not decided, `bare`: a number without a
    suffix, which is one or the other by its pool."""


class JobOptions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What few jobs ask for; every field has the value of a job that did not ask."""

    nodes: int = 1
    """0: the job runs no script, and only creates or destroys persistent buffers (`-N0`)."""
    account: str = ""
    qos: str = ""
    licenses: tuple[tuple[str, int], ...] = ()
    reservation: str = ""
    nice: int = 0
    singleton: bool = False
    any_of: bool = False
    """Whether one of its dependencies is enough (`?`); otherwise all must hold."""
    requeue: bool = True
    mail_types: tuple[str, ...] = ()
    mail_user: str = ""
    comment: str = ""
    partition: str = ""
    gid: int = 0
    groups: tuple[int, ...] = ()
    by_operator: bool = False
    """Whether an operator submitted a job that destroys persistent buffers: then it may destroy other users'. Decided
    from who asks, never taken from what is asked.
    """
    error: str = ""
    """Where standard error goes, as it was asked for (`error_path`); empty: where standard output goes."""
    open_mode: str = ""
    """`append` or `truncate`: what becomes of what its output files hold before it begins; empty: truncate."""
    arguments: tuple[str, ...] = ()
    """Of its script, in their order."""
    tasks: int = 1
    """Tasks that the script will start, count: they share its CPUs (`--ntasks`)."""
    exclusive: bool = False
    """Whether the job asked for all CPUs of its node; how many that are is decided at submit."""
    input: str = ""
    """The file for standard input, as it was asked for (`input_path`); empty: none."""
    signal: str = ""
    """The signal that the job gets before its time limit, such as `B:USR1@120` (`parse_signal`); empty: none."""


OPEN_MODES = ("append", "truncate")
"""What `open_mode` may say."""

NO_OPTIONS = JobOptions()
"""The options of a job that asked for none of them: its request has None instead."""


class ArrayTask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The array that a job is a task of, the task's number, and how many tasks may be active at once (0: all)."""

    job: int
    task: int
    throttle: int = 0


DEFAULT_PRIORITY = 1
"""The priority of a job that asks for none: what its user may lower, and an operator raise."""


class JobRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was asked of a job, as it was decided. Durations are whole seconds."""

    name: str
    user: str
    script: str
    workdir: str
    time_limit_s: int
    cpus: int = 1
    priority: int = DEFAULT_PRIORITY
    begin_at: Instant = NEVER
    deadline: Instant = NEVER
    dependencies: tuple[Dependency, ...] = ()
    output: str = ""
    """Where standard output and error go, relative to `workdir`; empty: `forebay-%j.out`."""
    environment: tuple[tuple[str, str], ...] = ()
    buffer: BufferRequest | None = None
    """None: the job works without a burst buffer."""
    array: ArrayTask | None = None
    """None: the job is no task of an array."""
    options: JobOptions | None = None
    """None, which most have: NO_OPTIONS."""

    @property
    def effective_options(self) -> JobOptions:
        """The options, NO_OPTIONS where there are none."""
        return NO_OPTIONS if self.options is None else self.options


def with_options(request: JobRequest, options: JobOptions) -> JobRequest:
    """Return the request with these options."""
    return msgspec.structs.replace(request, options=None if options == NO_OPTIONS else options)


def expand_job_symbols(text: str, request: JobRequest, job_id: int | str, node: str | None = None) -> str:
    """Return `text` with the job's symbols replaced; UnknownSymbol for one that means nothing here.

    With `node`, the symbols are those of a file name, and `%N` is the node.
    """
    array = request.array
    return expand_symbols(
        text,
        job=job_id,
        user=request.user,
        name=request.name,
        workdir=request.workdir,
        array_job=0 if array is None else array.job,
        array_task=0 if array is None else array.task,
        node=node,
    )


def format_dependencies(request: JobRequest, dependencies: Iterable[Dependency]) -> str:
    """Return these conditions of a job as in `--dependency`, and `singleton` if it asked for that."""
    words = [f"{one.kind.word}:{one.job}" for one in dependencies]
    return ("?" if request.effective_options.any_of else ",").join(
        [*words, "singleton"] if request.effective_options.singleton else words
    )


NODE_SYMBOL = "%N"
"""The node in the name of a file, while it is not known which one that is. Nothing else stands for itself there."""


def output_path(request: JobRequest, node: str) -> str:
    """Return the path of the file for standard output; `node` empty: the job has none yet."""
    return request.output.replace(NODE_SYMBOL, node) if node else request.output


def error_path(request: JobRequest, job_id: int, node: str) -> str:
    """Return the absolute path of the file for standard error; empty: it goes where standard output goes.

    UnknownSymbol for one that means nothing here. `node` empty: the job has none yet.
    """
    return _path(request.effective_options.error, request, job_id, node)


def input_path(request: JobRequest, job_id: int, node: str) -> str:
    """Return the absolute path of the file for standard input, empty for none; otherwise as `error_path`."""
    return _path(request.effective_options.input, request, job_id, node)


def _path(written: str, request: JobRequest, job_id: int, node: str) -> str:
    if not written:
        return ""
    path = expand_job_symbols(written, request, job_id, node or NODE_SYMBOL)
    return path if path.startswith("/") else f"{request.workdir.rstrip('/')}/{path}"


# ---- the signal before the time limit


SIGNAL_NAMES = {
    "HUP": 1, "INT": 2, "QUIT": 3, "ABRT": 6, "KILL": 9, "USR1": 10, "SEGV": 11, "USR2": 12, "PIPE": 13, "ALRM": 14,
    "TERM": 15, "CHLD": 17, "CONT": 18, "STOP": 19, "TSTP": 20, "TTIN": 21, "TTOU": 22, "URG": 23, "XCPU": 24,
}  # fmt: skip
"""Signals by name, as Linux numbers them."""

SIGNAL_NUMBER_MAX = 64
SIGNAL_BEFORE_S_MAX = 65_535
SIGNAL_BEFORE_S_DEFAULT = 60
"""The largest signal, and seconds before the time limit at which it is sent: the most, and the default (sbatch)."""

_SIGNAL = Pattern(r"(?:([RB]{1,2}):)?(?:SIG)?([A-Z0-9]{1,6})(?:@([0-9]{1,5}))?", re.ASCII)


class WarningSignal(msgspec.Struct, frozen=True):
    """A signal that a job gets before its time limit."""

    number: int
    before_s: int
    to_script: bool
    """Whether the script's own process gets it; otherwise, the processes that the script has started."""


def parse_signal(text: str) -> WarningSignal:
    """Return what `--signal=[{R|B}:]SIGNAL[@SECONDS]` says; ValueError is a sentence with the remedy."""
    found = _SIGNAL.fullmatch(text.upper())
    number = 0 if found is None else int(found[2]) if found[2].isdigit() else SIGNAL_NAMES.get(found[2], 0)
    if found is None or not 1 <= number <= SIGNAL_NUMBER_MAX:
        raise ValueError(f"the signal {text[:24]!r} cannot be used; write for example USR1@120 or B:TERM@60")
    before_s = SIGNAL_BEFORE_S_DEFAULT if found[3] is None else int(found[3])
    if before_s > SIGNAL_BEFORE_S_MAX:
        raise ValueError(f"{before_s} seconds before the time limit are too many; write at most {SIGNAL_BEFORE_S_MAX}")
    return WarningSignal(number, before_s, "B" in (found[1] or ""))


def persistent_names(request: BufferRequest | None) -> frozenset[str]:
    """Return the names of the persistent buffers that a job creates, destroys or uses."""
    if request is None:
        return frozenset()
    return frozenset(
        (*(one.name for one in request.creates), *(one.name for one in request.destroys), *request.uses)
    )  # fmt: skip


def destinations_of(request: JobRequest) -> tuple[str, ...]:
    """Return the paths outside that a job stages out to, each once."""
    asked = request.buffer
    if asked is None or not (asked.stage_out or asked.lists):
        return ()
    listed = (transfer.destination for transfer in asked.lists if transfer.outgoing)
    paths = (*(transfer.outside for transfer in asked.stage_out), *listed)
    if len(paths) == 1:
        return (_plain(paths[0]),)
    return tuple(dict.fromkeys(map(_plain, paths)))


def _plain(path: str) -> str:
    """Return an absolute path without what means nothing in it."""
    if path.startswith("/") and "//" not in path and not path.endswith("/"):
        return path
    return "/" + "/".join(part for part in path.split("/") if part)


# ---- what may change of a job while it waits


class JobChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What of a waiting job is to be as it is here; None: it stays as it is. Durations are whole seconds."""

    name: str | None = None
    time_limit_s: int | None = None
    priority: int | None = None
    begin_at: Instant | None = None
    deadline: Instant | None = None
    """NEVER: none any more."""
    dependencies: tuple[Dependency, ...] | None = None
    singleton: bool | None = None
    any_of: bool | None = None
    nice: int | None = None
    account: str | None = None
    qos: str | None = None
    licenses: tuple[tuple[str, int], ...] | None = None
    reservation: str | None = None
    partition: str | None = None
    """Empty, as for the four before it: none any more."""
    comment: str | None = None
    requeue: bool | None = None
    mail_types: tuple[str, ...] | None = None
    mail_user: str | None = None


NO_CHANGE = JobChange()

_OF_REQUEST = tuple(field for field in JobChange.__struct_fields__ if field in JobRequest.__struct_fields__)
_OF_OPTIONS = tuple(field for field in JobChange.__struct_fields__ if field in JobOptions.__struct_fields__)
"""Fields of a change that are fields of JobRequest, and of JobOptions: each is in one of both."""


def apply_change(request: JobRequest, change: JobChange) -> JobRequest:
    """Return the request with what the change is about as it is there."""
    own, options = _named(change, _OF_REQUEST), _named(change, _OF_OPTIONS)
    if own:
        request = msgspec.structs.replace(request, **own)
    return with_options(request, msgspec.structs.replace(request.effective_options, **options)) if options else request


def effective_change(request: JobRequest, change: JobChange) -> JobChange:
    """Return what of the change is not so already."""
    same = [field for field in _OF_REQUEST if getattr(change, field) == getattr(request, field)]
    same += [field for field in _OF_OPTIONS if getattr(change, field) == getattr(request.effective_options, field)]
    return msgspec.structs.replace(change, **dict.fromkeys(same))


def _named(change: JobChange, fields: tuple[str, ...]) -> dict[str, object]:
    found = ((field, getattr(change, field)) for field in fields)
    return {field: value for field, value in found if value is not None}


class AfterTask(msgspec.Struct, frozen=True, array_like=True):
    """A dependency on one task of an array, as it is asked for: `afterok:1_3`."""

    kind: DependencyKind
    array: int
    task: int
