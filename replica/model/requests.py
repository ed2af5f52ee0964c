"""Requests of jobs, including their buffer requests, and changes to waiting jobs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum

import msgspec

from forebay.replica.model.buffers import Access, Transfer
from forebay.replica.values import NEVER, Instant, Pattern, expand_symbols


class DependencyKind(IntEnum):
    """Kinds of dependencies on another job."""

    AFTER = 1
    AFTER_ANY = 2
    AFTER_OK = 3
    AFTER_NOT_OK = 4
    AFTER_BURST_BUFFER = 5
    # The same for a whole array (feature level 3): `job` is the array's ID, which is that of its first task.
    ALL_AFTER = 11
    ALL_AFTER_ANY = 12
    ALL_AFTER_OK = 13
    ALL_AFTER_NOT_OK = 14
    ALL_AFTER_BURST_BUFFER = 15

    @property
    def word(self) -> str:
        """Return the kind as in `--dependency`, for example `afterok`."""
        return self.name.removeprefix("ALL_").lower().replace("_", "")

    @property
    def is_for_array(self) -> bool:
        """Return whether the dependency is on all tasks of an array."""
        return self > 10

    @property
    def for_job(self) -> DependencyKind:
        """Return the same kind for a single job."""
        return DependencyKind(self - 10) if self > 10 else self

    @property
    def for_array(self) -> DependencyKind:
        """Return the same kind for all tasks of an array."""
        return self if self > 10 else DependencyKind(self + 10)


class Dependency(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A condition on one other job."""

    kind: DependencyKind
    job: int


class CreatePersistent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `create_persistent`. `capacity_bytes` is in the unit of `units`; an empty `pool` is the default pool."""

    name: str
    capacity_bytes: int
    pool: str = ""
    access: tuple[Access, ...] = ()
    type: str = ""
    place: str = ""
    """Place of the directive in the request, for example `line 3, column 1`."""
    units: str = "bytes"
    """As in BufferRequest."""
    access_text: str = ""
    """The access modes as written, with their options, for providers that receive them."""


class DestroyPersistent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `destroy_persistent`; `hurry` skips its stage-out."""

    name: str
    hurry: bool = False
    place: str = ""


class ListTransfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `stage_in` or `stage_out` (`outgoing`) with `type=list`. `source` is the file that lists the paths to move."""

    outgoing: bool
    source: str
    destination: str
    place: str = ""


class BufferRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Buffer request of a job. With `capacity_bytes` 0 nothing is reserved, but data is staged."""

    pool: str
    """Empty: the default pool."""
    capacity_bytes: int
    access: tuple[Access, ...]
    type: str
    stage_in: tuple[Transfer, ...]
    stage_out: tuple[Transfer, ...]
    text: str
    """The directives as written, one per line; shown by `BurstBuffer=`."""
    places: tuple[str, ...] = ()
    """Places in the request of: pool, capacity, each stage_in, each stage_out, and swap if any."""
    directives_kind: str = ""
    """dw, bb, lua, spur, or empty without directives."""
    creates: tuple[CreatePersistent, ...] = ()
    destroys: tuple[DestroyPersistent, ...] = ()
    uses: tuple[str, ...] = ()
    """Names of persistent buffers that the job uses (`persistentdw name=`)."""
    swap_bytes: int = 0
    """Swap of each node, bytes."""
    options: tuple[str, ...] = ()
    """Unknown options as written, passed on to the provider."""
    stage_in_command: str = ""
    stage_out_command: str = ""
    """Spur's commands, run instead of transfers."""
    lists: tuple[ListTransfer, ...] = ()
    units: str = "bytes"
    """Unit of the capacity: bytes, count (units of the pool), or bare: a number without a suffix before the pool is
    known.
    """
    names: tuple[str, ...] = ()
    """Names of the job's own buffers (`jobdw name=`): directories that share its capacity."""
    variables: tuple[tuple[str, str], ...] = ()
    """Variables of the submit's environment that its paths contain, with their values; the paths have them replaced."""


class JobOptions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Options that few jobs set. Each default is the value for jobs without the option."""

    nodes: int = 1
    """0: the job runs no script, and only creates or destroys persistent buffers (`-N0`)."""
    account: str = ""
    qos: str = ""
    licenses: tuple[tuple[str, int], ...] = ()
    reservation: str = ""
    nice: int = 0
    singleton: bool = False
    any_of: bool = False
    """True if one of its dependencies suffices (`?`); otherwise all must hold."""
    requeue: bool = True
    mail_types: tuple[str, ...] = ()
    mail_user: str = ""
    comment: str = ""
    partition: str = ""
    gid: int = 0
    groups: tuple[int, ...] = ()
    by_operator: bool = False
    """True if an operator submitted a job that destroys persistent buffers, which may then be those of other users.

    Set from the requester's role, never from the request.
    """
    error: str = ""
    """File for standard error as requested (`error_path`); empty: that of standard output."""
    open_mode: str = ""
    """`append` or `truncate` existing output files; empty: truncate."""
    arguments: tuple[str, ...] = ()
    """Arguments of its script, in order."""
    tasks: int = 1
    """Tasks that the script will start, count; they share its CPUs (`--ntasks`)."""
    exclusive: bool = False
    """True if the job requests all CPUs of its node; their number is decided at submit."""
    input: str = ""
    """File for standard input as requested (`input_path`); empty: none."""
    signal: str = ""
    """Signal before the time limit, such as `B:USR1@120` (`parse_signal`); empty: none."""


OPEN_MODES = ("append", "truncate")
"""Values of `open_mode`."""

NO_OPTIONS = JobOptions()
"""Default options; a request with these stores None instead."""


class ArrayTask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Array and task number of a job, and the maximum of active tasks (0: unlimited)."""

    job: int
    task: int
    throttle: int = 0


DEFAULT_PRIORITY = 1
"""Priority of jobs that request none; users may lower it, operators raise it."""


class JobRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Request of a job, as decided. Durations are whole seconds."""

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
    """File for standard output and error, relative to `workdir`; empty: `forebay-%j.out`."""
    environment: tuple[tuple[str, str], ...] = ()
    buffer: BufferRequest | None = None
    """None: the job uses no burst buffer."""
    array: ArrayTask | None = None
    """None: the job is not a task of an array."""
    options: JobOptions | None = None
    """None, as for most jobs, means NO_OPTIONS."""

    @property
    def effective_options(self) -> JobOptions:
        """Return the options, NO_OPTIONS if there are none."""
        return NO_OPTIONS if self.options is None else self.options


def with_options(request: JobRequest, options: JobOptions) -> JobRequest:
    """Return the request with these options."""
    return msgspec.structs.replace(request, options=None if options == NO_OPTIONS else options)


def expand_job_symbols(text: str, request: JobRequest, job_id: int | str, node: str | None = None) -> str:
    """Return `text` with the job's symbols replaced.

    With `node`, the symbols are those of file names, and `%N` is the node.

    Raises:
        UnknownSymbol: the text has a symbol that does not exist here.
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
    """Format conditions of a job as in `--dependency`, with `singleton` if it requested that."""
    words = [f"{one.kind.word}:{one.job}" for one in dependencies]
    return ("?" if request.effective_options.any_of else ",").join(
        [*words, "singleton"] if request.effective_options.singleton else words
    )


NODE_SYMBOL = "%N"
"""Symbol of the node in a file name, kept while the node is unknown. No other symbol stays unexpanded."""


def output_path(request: JobRequest, node: str) -> str:
    """Return the path of the file for standard output; `node` is empty while the job has none."""
    return request.output.replace(NODE_SYMBOL, node) if node else request.output


def error_path(request: JobRequest, job_id: int, node: str) -> str:
    """Return the absolute path of the file for standard error; empty: that of standard output.

    `node` is empty while the job has none.

    Raises:
        UnknownSymbol: the path has a symbol that does not exist here.
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
"""Linux signal numbers by name."""

SIGNAL_NUMBER_MAX = 64
SIGNAL_BEFORE_S_MAX = 65_535
SIGNAL_BEFORE_S_DEFAULT = 60
"""Largest signal number; largest and default number of seconds before the time limit (sbatch)."""

_SIGNAL = Pattern(r"(?:([RB]{1,2}):)?(?:SIG)?([A-Z0-9]{1,6})(?:@([0-9]{1,5}))?", re.ASCII)


class WarningSignal(msgspec.Struct, frozen=True):
    """A signal sent to a job before its time limit."""

    number: int
    before_s: int
    to_script: bool
    """True if the script's own process gets it; otherwise the processes that the script has started."""


def parse_signal(text: str) -> WarningSignal:
    """Return the signal in `--signal=[{R|B}:]SIGNAL[@SECONDS]`.

    Raises:
        ValueError: the text is not a signal; the message includes the remedy.
    """
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
    """Return the outside paths that a job stages out to, without duplicates."""
    asked = request.buffer
    if asked is None or not (asked.stage_out or asked.lists):
        return ()
    listed = (transfer.destination for transfer in asked.lists if transfer.outgoing)
    paths = (*(transfer.outside for transfer in asked.stage_out), *listed)
    if len(paths) == 1:
        return (_plain(paths[0]),)
    return tuple(dict.fromkeys(map(_plain, paths)))


def _plain(path: str) -> str:
    """Return an absolute path without redundant slashes."""
    if path.startswith("/") and "//" not in path and not path.endswith("/"):
        return path
    return "/" + "/".join(part for part in path.split("/") if part)


# ---- changes to waiting jobs


class JobChange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A change to a waiting job; fields with None stay as they are. Durations are whole seconds."""

    name: str | None = None
    time_limit_s: int | None = None
    priority: int | None = None
    begin_at: Instant | None = None
    deadline: Instant | None = None
    """NEVER removes the deadline."""
    dependencies: tuple[Dependency, ...] | None = None
    singleton: bool | None = None
    any_of: bool | None = None
    nice: int | None = None
    account: str | None = None
    qos: str | None = None
    licenses: tuple[tuple[str, int], ...] | None = None
    reservation: str | None = None
    partition: str | None = None
    """An empty text removes it, as for the four fields before it."""
    comment: str | None = None
    requeue: bool | None = None
    mail_types: tuple[str, ...] | None = None
    mail_user: str | None = None


NO_CHANGE = JobChange()

_OF_REQUEST = tuple(field for field in JobChange.__struct_fields__ if field in JobRequest.__struct_fields__)
_OF_OPTIONS = tuple(field for field in JobChange.__struct_fields__ if field in JobOptions.__struct_fields__)
"""Fields of a change that belong to JobRequest, and those that belong to JobOptions."""


def apply_change(request: JobRequest, change: JobChange) -> JobRequest:
    """Return the request with the change applied."""
    own, options = _named(change, _OF_REQUEST), _named(change, _OF_OPTIONS)
    if own:
        request = msgspec.structs.replace(request, **own)
    return with_options(request, msgspec.structs.replace(request.effective_options, **options)) if options else request


def effective_change(request: JobRequest, change: JobChange) -> JobChange:
    """Return the fields the change would modify."""
    same = [field for field in _OF_REQUEST if getattr(change, field) == getattr(request, field)]
    same += [field for field in _OF_OPTIONS if getattr(change, field) == getattr(request.effective_options, field)]
    return msgspec.structs.replace(change, **dict.fromkeys(same))


def _named(change: JobChange, fields: tuple[str, ...]) -> dict[str, object]:
    found = ((field, getattr(change, field)) for field in fields)
    return {field: value for field, value in found if value is not None}


class AfterTask(msgspec.Struct, frozen=True, array_like=True):
    """A requested dependency on one task of an array: `afterok:1_3`."""

    kind: DependencyKind
    array: int
    task: int
