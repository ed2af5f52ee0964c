"""The grammar of burst-buffer requests: `#DW` and `#BB` lines of a script, `--bb` and `--bbf`.

Sources: the burst buffer guides, SEMANTICS.md. What this release accepts is parsed exactly; everything else is refused
with line and column, never ignored. A request is read here without knowing pools, users or job numbers: those are
checked when the job is decided on.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from replica.buffers import Access, BufferRequest, Transfer, TransferKind
from replica.limits import DIRECTIVE_TEXT_BYTES_MAX, DIRECTIVES_MAX, PATH_BYTES_MAX, TRANSFERS_PER_STAGE_MAX
from replica.names import name_fault
from replica.refusals import Refusal, RefusalCode
from replica.units import SizeError, format_size, parse_size

INSIDE_VARIABLES = {
    "DW_JOB_STRIPED": Access.STRIPED,
    "DW_JOB_PRIVATE": Access.PRIVATE,
    "DW_JOB_LDBALANCE": Access.LDBALANCE,
    "FOREBAY_JOB_DIR": None,
}
"""Variables that a path on the buffer may start with, and the access mode that each needs."""

_LATER = {
    "persistentdw": "persistent buffers",
    "swap": "swap",
    "create_persistent": "persistent buffers",
    "destroy_persistent": "persistent buffers",
}


class DirectiveRefused(Exception):
    """A request that cannot be accepted; `refusal.place` is the line and column."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.place}: {refusal.sentence}; {refusal.remedy}")
        self.refusal = refusal


class Word(msgspec.Struct, frozen=True):
    """One word of a directive and where it starts; line and column count from 1."""

    text: str
    source: str
    line: int
    column: int

    def place(self, offset: int = 0) -> str:
        """Return the place for a message, for example `script line 3, column 12`."""
        return f"{self.source} line {self.line}, column {self.column + offset}"

    def refuse(
        self, sentence: str, remedy: str, offset: int = 0, code: RefusalCode = RefusalCode.INVALID_DIRECTIVE
    ) -> DirectiveRefused:
        """Return the exception that names this word's place."""
        return DirectiveRefused(Refusal(code, sentence, remedy, self.place(offset)))


class _Directive(msgspec.Struct, frozen=True):
    prefix: str
    words: tuple[Word, ...]

    @property
    def text(self) -> str:
        return " ".join([self.prefix, *(word.text for word in self.words)])


def parse_request(script: str, bb: str = "", bbf: str = "") -> BufferRequest | None:
    """Return what the three together ask for, or None where none of them asks for anything.

    Raises DirectiveRefused with the place and the remedy.
    """
    directives = list(_directives(script, "script"))
    if bbf:
        found = list(_directives(bbf, "--bbf"))
        if not found:
            raise DirectiveRefused(
                Refusal(
                    RefusalCode.INVALID_DIRECTIVE,
                    "the file of --bbf holds no directive",
                    "start its lines with #DW or #BB",
                    "--bbf line 1, column 1",
                )
            )
        directives = found + directives
    if bb:
        directives = list(_command_line(bb)) + directives
    if not directives:
        return None
    return _Reader().read(directives)


def _words(line: str, source: str, number: int, start: int) -> Iterator[Word]:
    column = start
    while column < len(line):
        if line[column] in " \t":
            column += 1
            continue
        end = column
        while end < len(line) and line[end] not in " \t":
            end += 1
        yield Word(line[column:end], source, number, column + 1)
        column = end


def _directives(text: str, source: str) -> Iterator[_Directive]:
    """Yield the directives at the top of a script: up to the first line that is neither empty nor a comment."""
    if source != "script":
        _bound(text, source)
    open_prefix: str | None = None
    words: list[Word] = []
    last: Word | None = None
    count = 0
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        prefix = _prefix(line)
        if open_prefix is not None:
            if prefix != open_prefix:
                assert last is not None
                raise last.refuse(
                    f"the line after a continuation does not start with {open_prefix}",
                    f"start line {number} with {open_prefix}, or remove the backslash",
                )
        elif prefix is None:
            if line.strip() and not line.startswith("#"):
                return
            continue
        assert prefix is not None
        if prefix == "#BB_LUA":
            raise Word(prefix, source, number, 1).refuse(
                "#BB_LUA is not supported by this release", "use #DW jobdw, #DW stage_in and #DW stage_out"
            )
        found = list(_words(line, source, number, len(prefix)))
        continued = bool(found) and found[-1].text.endswith("\\")
        if continued:
            last = found.pop()
            if last.text != "\\":
                found.append(Word(last.text[:-1], source, number, last.column))
        words.extend(found)
        if continued:
            open_prefix = prefix
            continue
        count += 1
        if count > DIRECTIVES_MAX:
            raise Word(prefix, source, number, 1).refuse(
                f"there are more than {DIRECTIVES_MAX} directives",
                "stage a directory instead of its files",
                code=RefusalCode.LIMIT_EXCEEDED,
            )
        if not words:
            raise Word(prefix, source, number, 1).refuse(
                f"{prefix} is followed by nothing", "write a directive, for example #DW jobdw capacity=10GiB"
            )
        yield _Directive(prefix, tuple(words))
        open_prefix, words = None, []
    if open_prefix is not None:
        assert last is not None
        raise last.refuse("the last directive ends in a continuation", "remove the backslash")


def _prefix(line: str) -> str | None:
    head = line.split(maxsplit=1)[0] if line[:1] == "#" else ""
    return head if head in ("#DW", "#BB", "#BB_LUA") else None


def _bound(text: str, source: str) -> None:
    if len(text.encode("utf-8", "surrogatepass")) > DIRECTIVE_TEXT_BYTES_MAX:
        raise DirectiveRefused(
            Refusal(
                RefusalCode.LIMIT_EXCEEDED,
                f"the text of {source} is longer than {DIRECTIVE_TEXT_BYTES_MAX} bytes",
                "stage a directory instead of its files",
                source,
            )
        )


def _command_line(text: str) -> Iterator[_Directive]:
    """Yield the directives of `--bb`: the lines of a script, or the short form that stands for one `#DW jobdw`."""
    _bound(text, "--bb")
    if text.startswith("#"):
        found = list(_directives(text, "--bb"))
        if not found:
            raise Word(text.split()[0], "--bb", 1, 1).refuse(
                "the text of --bb holds no directive", "start it with #DW or #BB, or write capacity=10GiB"
            )
        yield from found
        return
    words = list(_words(text.replace("\n", " "), "--bb", 1, 0))
    if not words:
        raise Word("", "--bb", 1, 1).refuse("the text of --bb is empty", "write for example capacity=10GiB")
    for word in words:
        if ";" in word.text or word.text.startswith(("stage_in:", "stage_out:")):
            raise word.refuse(
                "the form with ; and stage_in: is not supported by this release",
                "write capacity= pool= access= type=, separated by spaces",
            )
    yield _Directive("#BB", tuple(words))


class _Reader:
    """Puts the directives of one job together."""

    def __init__(self) -> None:
        self.space: dict[str, Word] = {}
        self.capacity_bytes = 0
        self.pool = ""
        self.access: tuple[Access, ...] = ()
        self.type = "scratch"
        self.space_at: Word | None = None
        self.moves: dict[str, list[tuple[Transfer, Word, Word]]] = {"stage_in": [], "stage_out": []}
        self.lines: list[str] = []

    def read(self, directives: list[_Directive]) -> BufferRequest:
        for directive in directives:
            verb = directive.words[0]
            if directive.prefix == "#BB" and "=" in verb.text:
                self._space(directive, directive.words, "access")
                self.lines.append(_translated(directive))
                continue
            self.lines.append(directive.text)
            if verb.text in _LATER:
                raise verb.refuse(
                    f"{_LATER[verb.text]} are not supported by this release"
                    if verb.text != "swap"
                    else "swap is not supported by this release",
                    "remove the directive",
                )
            if directive.prefix == "#DW" and verb.text == "jobdw":
                self._space(directive, directive.words[1:], "access_mode")
            elif directive.prefix == "#DW" and verb.text in self.moves:
                self._move(verb, directive.words[1:])
            elif directive.prefix == "#DW":
                raise verb.refuse(f"unknown directive {verb.text!r} of #DW", "use jobdw, stage_in or stage_out")
            else:
                raise verb.refuse(f"unknown directive {verb.text!r} of #BB", "write capacity= pool= access= type=")
        access = self.access or (Access.STRIPED,)
        for moves in self.moves.values():
            for transfer, _, inside_word in moves:
                self._check_access(transfer, inside_word, access)
        stage_in, stage_out = self.moves["stage_in"], self.moves["stage_out"]
        space_place = self.space_at.place() if self.space_at is not None else ""
        pool_word, capacity_word = self.space.get("pool"), self.space.get("capacity")
        return BufferRequest(
            pool=self.pool,
            capacity_bytes=self.capacity_bytes,
            access=access,
            type=self.type,
            stage_in=tuple(move[0] for move in stage_in),
            stage_out=tuple(move[0] for move in stage_out),
            text="\n".join(self.lines),
            places=(
                pool_word.place() if pool_word is not None else space_place,
                capacity_word.place() if capacity_word is not None else space_place,
                *(move[1].place() for move in stage_in),
                *(move[1].place() for move in stage_out),
            ),
        )

    def _space(self, directive: _Directive, words: tuple[Word, ...], access_key: str) -> None:
        verb = directive.words[0]
        if self.space_at is not None:
            raise verb.refuse(
                f"capacity is asked for a second time (first at {self.space_at.place()})",
                "write one request for the whole job",
            )
        self.space_at = verb
        options = _options(words, ("capacity", "pool", "type", access_key))
        if "capacity" not in options:
            raise verb.refuse(
                "the request has no capacity",
                "add capacity=, for example capacity=10GiB",
                code=RefusalCode.INVALID_CAPACITY,
            )
        word, value, offset = options["capacity"]
        try:
            self.capacity_bytes = parse_size(value)
        except SizeError as error:
            raise word.refuse(
                error.sentence, error.remedy, offset + error.offset, RefusalCode.INVALID_CAPACITY
            ) from None
        self.space["capacity"] = word
        if "pool" in options:
            word, value, offset = options["pool"]
            fault = name_fault(value)
            if fault is not None:
                raise word.refuse(f"the pool name {fault}", "write the name of a pool", offset)
            self.pool = value
            self.space["pool"] = word
        if "type" in options:
            word, value, offset = options["type"]
            if value != "scratch":
                raise word.refuse(f"type {value!r} is not supported by this release", "write type=scratch", offset)
        if access_key in options:
            word, value, offset = options[access_key]
            self.access = _access(word, value, offset)

    def _move(self, verb: Word, words: tuple[Word, ...]) -> None:
        stage = verb.text
        options = _options(words, ("type", "source", "destination"))
        for key in ("type", "source", "destination"):
            if key not in options:
                raise verb.refuse(f"{stage} has no {key}=", f"write {stage} type=file source=… destination=…")
        word, value, offset = options["type"]
        if value not in ("file", "directory"):
            later = " (not supported by this release)" if value == "list" else ""
            raise word.refuse(f"the type of {stage} is {value!r}{later}", "write type=file or type=directory", offset)
        kind = TransferKind.FILE if value == "file" else TransferKind.DIRECTORY
        outside_key, inside_key = ("source", "destination") if stage == "stage_in" else ("destination", "source")
        outside_word, outside, outside_offset = options[outside_key]
        inside_word, inside, inside_offset = options[inside_key]
        _check_outside(outside_word, outside, outside_offset)
        _check_inside(inside_word, inside, inside_offset)
        moves = self.moves[stage]
        if len(moves) >= TRANSFERS_PER_STAGE_MAX:
            raise verb.refuse(
                f"there are more than {TRANSFERS_PER_STAGE_MAX} {stage} directives",
                "stage a directory instead of its files",
                code=RefusalCode.LIMIT_EXCEEDED,
            )
        moves.append((Transfer(kind, outside, inside), outside_word, inside_word))

    @staticmethod
    def _check_access(transfer: Transfer, word: Word, access: tuple[Access, ...]) -> None:
        variable, _ = split_inside(transfer.inside)
        needed = INSIDE_VARIABLES[variable]
        if needed is not None and needed not in access:
            raise word.refuse(
                f"${variable} needs access_mode={needed.name.lower()}",
                f"add {needed.name.lower()} to access_mode= of #DW jobdw",
            )


def split_inside(path: str) -> tuple[str, str]:
    """Return the variable and the relative rest of a path on the buffer: `$DW_JOB_STRIPED/a/b` is (`DW_JOB_STRIPED`,
    `a/b`).

    Raises ValueError where the path does not start with one of INSIDE_VARIABLES.
    """
    head, _, rest = path.partition("/")
    variable = head[2:-1] if head.startswith("${") and head.endswith("}") else head[1:]
    if not head.startswith("$") or variable not in INSIDE_VARIABLES:
        raise ValueError(path)
    return variable, rest


def _options(words: tuple[Word, ...], known: tuple[str, ...]) -> dict[str, tuple[Word, str, int]]:
    """Return key -> (word, value, offset of the value in the word)."""
    options: dict[str, tuple[Word, str, int]] = {}
    for word in words:
        key, equals, value = word.text.partition("=")
        listed = ", ".join(name + "=" for name in known)
        if not equals:
            raise word.refuse(f"{word.text!r} is not an option", f"write {listed}")
        if key not in known:
            raise word.refuse(f"unknown option {key!r}", f"this directive knows {listed}")
        if key in options:
            raise word.refuse(f"{key}= is written twice", "write it once")
        if not value:
            raise word.refuse(f"{key}= is empty", f"write a value after {key}=", len(key) + 1)
        options[key] = (word, value, len(key) + 1)
    return options


def _access(word: Word, value: str, offset: int) -> tuple[Access, ...]:
    modes: list[Access] = []
    for part in value.split(","):
        if part not in ("striped", "private", "ldbalance"):
            raise word.refuse(
                f"unknown access mode {part!r}", "use striped, private, ldbalance, separated by commas", offset
            )
        mode = Access[part.upper()]
        if mode in modes:
            raise word.refuse(f"access mode {part!r} is written twice", "write it once", offset)
        modes.append(mode)
        offset += len(part) + 1
    return tuple(modes)


def path_fault(path: str) -> str | None:
    """Return what is wrong with an absolute path, in words that follow `the path `, or None."""
    if not path.startswith("/"):
        return f"{path!r} is not absolute"
    if len(path.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX:
        return f"is longer than {PATH_BYTES_MAX} bytes"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return f"{path!r} has a control character"
    if ".." in path.split("/"):
        return f"{path!r} goes up with .."
    return None


def _check_outside(word: Word, path: str, offset: int) -> None:
    if path.startswith("%d/"):
        path = "/" + path
    fault = path_fault(path)
    if fault is not None:
        raise word.refuse(
            f"the path {fault}", "write an absolute path without .. (%d is the working directory)", offset
        )


def _check_inside(word: Word, path: str, offset: int) -> None:
    try:
        _, rest = split_inside(path)
    except ValueError:
        listed = ", ".join("$" + name for name in INSIDE_VARIABLES)
        raise word.refuse(f"{path!r} is not on the buffer", f"start it with one of {listed}", offset) from None
    fault = path_fault("/" + rest)
    if fault is not None:
        raise word.refuse(f"the path {fault}", "write a path below the variable, without ..", offset)
    if not rest.strip("/"):
        raise word.refuse(f"{path!r} names the buffer itself", "add a name after it, for example /data", offset)


def _translated(directive: _Directive) -> str:
    """Return the short form as the `#DW jobdw` line it stands for, as Slurm writes it."""
    options = _options(directive.words, ("capacity", "pool", "type", "access"))
    parts = ["#DW jobdw"]
    for key, name in (("capacity", "capacity"), ("pool", "pool"), ("access", "access_mode"), ("type", "type")):
        if key in options:
            value = options[key][1]
            parts.append(f"{name}={format_size(parse_size(value)) if key == 'capacity' else value}")
    return " ".join(parts)
