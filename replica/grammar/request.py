"""Builder of a job's buffer request from its directives; rejects contradictions with their place."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from forebay.replica.grammar.lexer import DirectiveWord, RequestWarnings, quoted_text
from forebay.replica.grammar.paths import INSIDE_VARIABLES, check_access
from forebay.replica.grammar.values import (
    STOP,
    OptionValue,
    did_you_mean,
    read_access,
    read_persistent_name,
    read_pool,
    read_type,
)
from forebay.replica.grammar.variables import NO_VARIABLES, PathReader, PathVariables, is_named
from forebay.replica.model import (
    NATIVE,
    Access,
    BufferRequest,
    CreatePersistent,
    DestroyPersistent,
    ListTransfer,
    Transfer,
    choice_prefix,
    named_path,
    named_variables,
    persistent_variable,
    provider_facts,
)
from forebay.replica.values import (
    PERSISTENT_PER_JOB_MAX,
    SIZE_BYTES_MAX,
    TRANSFERS_PER_STAGE_MAX,
    Quantity,
    RejectionCode,
)

STAGES = ("stage_in", "stage_out")
_ORDER_OF_OPTIONS = ("jobdw", "swap", "persistentdw", *STAGES, "create_persistent", "destroy_persistent")
"""Order of options that are passed on, by their directive."""

NAMES_PER_JOB_MAX = 16
"""Named buffers of one job, count: each is a directory and some variables of the script."""

RABBIT_TYPES = ("xfs", "gfs2", "lustre")
"""Filesystems of Rabbit's `jobdw`."""

OPTION_NAMES = ("capacity", "pool", "type", "access_mode", "access", "name", "source", "destination")
"""Known options, for suggestions."""

SUGGESTIONS_MAX = 8
"""Unknown words of a request that get a suggestion, count: a comparison takes 50 µs, and 16,384 words are possible."""


class _Move(NamedTuple):
    transfer: Transfer
    outside: DirectiveWord
    inside: DirectiveWord


class RequestBuilder:
    """Collects the directives of one job into a request; `provider` is the site's."""

    def __init__(self, provider: str, warnings: RequestWarnings, variables: PathVariables = NO_VARIABLES) -> None:
        self.provider = provider
        self.facts = provider_facts(provider)
        self.warnings = warnings
        self.paths = PathReader(variables)
        self._unknown = 0
        """Number of unknown words."""
        self.kind = ""
        self.word = "#DW"
        """Directive word used in remedies."""
        self.lines: list[str] = []
        self.capacity: Quantity | None = None
        self.capacity_at: DirectiveWord | None = None
        self.pool = ""
        self.pool_at: DirectiveWord | None = None
        self.space_at: DirectiveWord | None = None
        self.names: list[str] = []
        self.access: tuple[Access, ...] = ()
        self.type = "scratch"
        self.swap_bytes = 0
        self.swap_at: DirectiveWord | None = None
        self.swap_pool = ""
        self.moves: dict[str, list[_Move]] = {stage: [] for stage in STAGES}
        self.opaque_at: DirectiveWord | None = None
        self.lists: list[ListTransfer] = []
        self.list_insides: list[tuple[DirectiveWord, str]] = []
        self.commands: dict[str, list[str]] = {stage: [] for stage in STAGES}
        self.uses: dict[str, DirectiveWord] = {}
        self.creates: dict[str, tuple[CreatePersistent, DirectiveWord]] = {}
        self.destroys: dict[str, tuple[DestroyPersistent, DirectiveWord]] = {}
        self.options: list[tuple[str, str]] = []
        """(directive, option)."""

    @property
    def native(self) -> bool:
        """Return whether Forebay's agents do the work, which limits the supported transfers and types."""
        return self.provider == NATIVE

    def begin_space(self, at: DirectiveWord, name: OptionValue | None = None) -> None:
        """Record a request for the job's own capacity, which has a name if there are several.

        Raises:
            DirectiveRejected: capacity was requested before, and one of both has no name, or the name is not possible.
        """
        if self.space_at is not None and (name is None or not self.names):
            raise at.rejection(
                f"capacity is requested a second time (first at {self.space_at.place()})",
                "write one request for the whole job"
                + (", or give each buffer a name=" if self.paths.allows_names else ""),
            )
        self.space_at = self.space_at or at
        if name is None:
            return
        text = read_persistent_name(name)
        if len(self.names) >= NAMES_PER_JOB_MAX:
            raise at.rejection(
                f"the job has more than {NAMES_PER_JOB_MAX} buffers",
                "use directories",
                code=RejectionCode.LIMIT_EXCEEDED,
            )
        variables = named_variables(text, tuple(Access)).keys()
        for other in self.names:
            if not variables.isdisjoint(named_variables(other, tuple(Access))):
                raise name.rejection(f"{text!r} and {other!r} have the same variables", "choose another name")
        if not variables.isdisjoint(INSIDE_VARIABLES):
            raise name.rejection(f"the name {text!r} is that of an access mode", "choose another name")
        self.names.append(text)

    def add_capacity(self, capacity: Quantity, value: OptionValue) -> None:
        """Add the capacity of a buffer; those of several buffers add up.

        Raises:
            DirectiveRejected: the units differ, or the sum overflows.
        """
        before = self.capacity
        if before is not None:
            if before.unit != capacity.unit:
                raise value.rejection(
                    "the capacities of the job's buffers have different units", "write sizes", code=_CAPACITY
                )
            if before.value > SIZE_BYTES_MAX - capacity.value:
                raise value.rejection("the capacities of the job's buffers overflow", "request less", code=_CAPACITY)
            capacity = replace(capacity, value=before.value + capacity.value)
        self.capacity, self.capacity_at = capacity, self.capacity_at or value.word

    def set_pool(self, value: OptionValue | None, at: DirectiveWord) -> None:
        """Set the pool of the job's buffers.

        Raises:
            DirectiveRejected: an earlier buffer is in another pool.
        """
        pool = "" if value is None else read_pool(value)
        if len(self.names) > 1 and pool != self.pool:
            raise (at if value is None else value.word).rejection(
                "the buffers of a job are in different pools",
                "write the same pool= for all, or use a persistent buffer",
            )
        if value is not None:
            self.pool, self.pool_at = pool, self.pool_at or value.word

    def read_type(self, value: OptionValue) -> str:
        """Return the type of a buffer; those of Rabbit are scratch, too."""
        if self.native and value.text in RABBIT_TYPES:
            self.warnings.add(
                value.word.place(value.offset), f"type={value.text} is read as scratch: a pool has one filesystem"
            )
            return "scratch"
        return read_type(value, self.native)

    def begin_swap(self, at: DirectiveWord) -> None:
        """Record the request for swap.

        Raises:
            DirectiveRejected: swap was requested before.
        """
        if self.swap_at is not None:
            raise at.rejection(
                f"swap is requested a second time (first at {self.swap_at.place()})", "write one swap for the whole job"
            )
        self.swap_at = at

    def move(
        self, stage: str, verb: DirectiveWord, transfer: Transfer, outside: DirectiveWord, inside: DirectiveWord
    ) -> None:
        """Add a transfer of a file or a directory."""
        self._bound_moves(stage, verb)
        self.moves[stage].append(_Move(transfer, outside, inside))

    def move_list(self, stage: str, verb: DirectiveWord, transfer: ListTransfer) -> None:
        """Add a transfer of the files in a list."""
        self._bound_moves(stage, verb)
        self.lists.append(transfer)

    def choose(self, stage: str, text: str, *, listed: bool) -> None:
        """Add an option to the last transfer of the stage."""
        lists = [transfer for transfer in self.lists if transfer.outgoing == (stage == "stage_out")]
        index = len(lists if listed else self.moves[stage]) - 1
        self.options.append((choice_prefix(stage, index, listed=listed), text))

    def _bound_moves(self, stage: str, verb: DirectiveWord) -> None:
        listed = sum(transfer.outgoing == (stage == "stage_out") for transfer in self.lists)
        if len(self.moves[stage]) + listed >= TRANSFERS_PER_STAGE_MAX:
            raise verb.rejection(
                f"the job has more than {TRANSFERS_PER_STAGE_MAX} {stage} directives",
                "stage a directory instead of its files",
                code=RejectionCode.LIMIT_EXCEEDED,
            )

    def use(self, name: str, at: DirectiveWord) -> None:
        """Add a persistent buffer that the job uses."""
        self._once(name, at, self.uses, "used")
        for other, word in self.uses.items():
            if persistent_variable(other) == persistent_variable(name):
                raise at.rejection(
                    f"the persistent buffers {other!r} (at {word.place()}) and {name!r} have the same variable "
                    f"${persistent_variable(name)}",
                    "use them in two jobs, or rename one",
                )
        self.uses[name] = at

    def create(self, record: CreatePersistent, at: DirectiveWord) -> None:
        """Add a persistent buffer that the job creates."""
        self._once(record.name, at, {name: word for name, (_, word) in self.creates.items()}, "created")
        self.creates[record.name] = (record, at)

    def destroy(self, record: DestroyPersistent, at: DirectiveWord) -> None:
        """Add a persistent buffer that the job destroys."""
        self._once(record.name, at, {name: word for name, (_, word) in self.destroys.items()}, "destroyed")
        self.destroys[record.name] = (record, at)

    @staticmethod
    def _once(name: str, at: DirectiveWord, known: dict[str, DirectiveWord], done: str) -> None:
        if name in known:
            raise at.rejection(
                f"the persistent buffer {name!r} is {done} a second time (first at {known[name].place()})",
                "write it once",
            )
        if len(known) >= PERSISTENT_PER_JOB_MAX:
            raise at.rejection(
                f"more than {PERSISTENT_PER_JOB_MAX} persistent buffers are {done}",
                "use several jobs",
                code=RejectionCode.LIMIT_EXCEEDED,
            )

    def access_modes(self, value: OptionValue) -> tuple[Access, ...]:
        """Return the access modes of an option."""
        found = read_access(value)
        if found.has_options and self.native:
            sentence = "the options of an access mode have no effect with the provider native"
            self.warnings.add(value.word.place(value.offset), sentence)
        return found.modes

    def pass_on(self, verb: str, words: tuple[DirectiveWord, ...]) -> None:
        """Keep unknown options of a directive for the provider, and warn of them."""
        for word in words:
            self.options.append((verb, word.text))
            key, equals, _ = word.text.partition("=")
            what = f"option {key[:48]}=" if equals else f"word {quoted_text(key)}"
            self._unknown += 1
            compared = equals and self._unknown <= SUGGESTIONS_MAX
            near = did_you_mean(key, OPTION_NAMES, "=").strip() if compared else ""
            hint = f" ({near})" if near else ""
            self.warnings.add(word.place(), f"the {what} is not known here; it is kept and passed on{hint}")

    def finish(self) -> BufferRequest:
        """Return the request.

        Raises:
            DirectiveRejected: directives contradict each other.
        """
        access = self.access or (Access.STRIPED,)
        self._find_named(access)
        for moves in self.moves.values():
            for move in moves:
                check_access(move.inside, move.transfer.inside, access, self.uses, self.word, has_space=self._has_space)
        for word, path in self.list_insides:
            check_access(word, path, access, self.uses, self.word, has_space=self._has_space)
        self._check_names()
        self._check_swap()
        self._check_staged()
        stage_in, stage_out = self.moves["stage_in"], self.moves["stage_out"]
        space = self.space_at or self.swap_at
        fallback = space.place() if space is not None else ""
        return BufferRequest(
            pool=self.pool or self.swap_pool,
            capacity_bytes=0 if self.capacity is None else self.capacity.value,
            access=access,
            type=self.type,
            stage_in=tuple(move.transfer for move in stage_in),
            stage_out=tuple(move.transfer for move in stage_out),
            text="\n".join(self.lines),
            places=(
                self.pool_at.place() if self.pool_at is not None else fallback,
                self.capacity_at.place() if self.capacity_at is not None else fallback,
                *(move.outside.place() for move in stage_in),
                *(move.outside.place() for move in stage_out),
                *(() if self.swap_at is None else (self.swap_at.place(),)),
            ),
            directives_kind=self.kind,
            creates=tuple(record for record, _ in self.creates.values()),
            destroys=tuple(record for record, _ in self.destroys.values()),
            uses=tuple(self.uses),
            swap_bytes=self.swap_bytes,
            options=tuple(
                f"{verb} {text}"
                for verb, text in sorted(
                    self.options, key=lambda row: (_ORDER_OF_OPTIONS.index(row[0].partition(":")[0]), row[0])
                )
            ),
            stage_in_command="\n".join(self.commands["stage_in"]),
            stage_out_command="\n".join(self.commands["stage_out"]),
            lists=tuple(sorted(self.lists, key=lambda transfer: transfer.outgoing)),
            units=self._units(),
            names=tuple(self.names),
            variables=tuple(sorted(self.paths.used.items())),
        )

    def _find_named(self, access: tuple[Access, ...]) -> None:
        """Replace the variables of named buffers by those of access modes.

        Raises:
            DirectiveRejected: the job has no buffer of this name.
        """
        for moves in self.moves.values():
            for index, move in enumerate(moves):
                inside = self._named(move.inside, move.transfer.inside, access)
                if inside is not move.transfer.inside:
                    moves[index] = move._replace(transfer=replace(move.transfer, inside=inside))
        self.list_insides = [(word, self._named(word, path, access)) for word, path in self.list_insides]
        insides = iter(self.list_insides)
        self.lists = [
            listed if listed.outgoing else replace(listed, destination=next(insides)[1]) for listed in self.lists
        ]

    def _named(self, at: DirectiveWord, path: str, access: tuple[Access, ...]) -> str:
        if not is_named(path):
            return path
        found = named_path(path.removeprefix(STOP), self.names, access)
        if found is None:
            names = ", ".join(f"name={name}" for name in self.names)
            raise at.rejection(
                f"{quoted_text(path)} is not on a buffer of the job" + (f", which has {names}" if names else ""),
                f"write $DW_JOB_STRIPED/…, or give a buffer this name: {self.word} jobdw name=… capacity=…",
            )
        return STOP + found if path.startswith(STOP) else found

    @property
    def _has_space(self) -> bool:
        """Return whether the job requests a buffer of its own."""
        return self.space_at is not None

    def _units(self) -> str:
        unit = "bytes" if self.capacity is None else self.capacity.unit
        return "count" if unit == "nodes" else unit

    def _check_names(self) -> None:
        for name, (_, at) in self.destroys.items():
            other = self.creates[name][1] if name in self.creates else self.uses.get(name)
            if other is not None:
                does = "creates" if name in self.creates else "uses"
                raise at.rejection(
                    f"the job destroys the persistent buffer {name!r}, and {does} it at {other.place()}",
                    "destroy it in a separate job",
                )

    def _check_swap(self) -> None:
        if self.swap_at is None:
            return
        if self.space_at is not None and self.swap_pool != self.pool:
            raise self.swap_at.rejection(
                "swap and capacity are requested from different pools", "write the same pool= for both", code=_CAPACITY
            )
        if self.capacity is not None and self.capacity.unit == "nodes":
            raise self.swap_at.rejection("swap is requested beside a capacity in nodes", "write sizes", code=_CAPACITY)
        if self.swap_bytes > SIZE_BYTES_MAX - (0 if self.capacity is None else self.capacity.value):
            raise self.swap_at.rejection("swap and capacity together overflow", "request less", code=_CAPACITY)

    def _check_staged(self) -> None:
        if self.opaque_at is not None and self.space_at is None and not self.uses:
            raise self.opaque_at.rejection(
                f"{self.opaque_at.text} has no buffer to act on", "add #DW jobdw capacity= or #DW persistentdw name="
            )


_CAPACITY = RejectionCode.INVALID_CAPACITY
