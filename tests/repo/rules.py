"""The rules of style that a machine can check, each as a function from the facts about a module to its violations.

The facts come from text (`parse`), so that test_rules_catch.py can show each rule a violation: a rule that finds
nothing proves nothing until it has found something.
"""

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

BANNED_MODULES = {
    "pickle": "msgspec or forebay.wal.codec (unpickling runs code)",
    "marshal": "msgspec or forebay.wal.codec",
    "shelve": "wal",
    "dill": "msgspec or forebay.wal.codec",
    "multiprocessing": "asyncio.create_subprocess_exec (a forked child inherits sockets and must not touch LMDB)",
    "imp": "importlib",
    "telnetlib": "asyncio streams",
}
"""Modules that no package imports, and what to use instead."""

BANNED_CALLS = {
    "eval": "a parser of your own for what you expect",
    "exec": "a function",
    "__import__": "an import statement",
    "input": "an option of the command (a daemon has no terminal)",
    "breakpoint": "a test",
    "os.system": "asyncio.create_subprocess_exec with a list of arguments",
    "os.popen": "asyncio.create_subprocess_exec with a list of arguments",
    "tempfile.mktemp": "tempfile.mkstemp, or a name beside the target opened with O_EXCL",
    "asyncio.get_event_loop": "asyncio.get_running_loop",
    "hashlib.md5": "hashlib.sha256",
    "hashlib.sha1": "hashlib.sha256",
    "msgpack.unpackb": "msgpack.Unpacker with its size limits, or msgspec.msgpack.decode with a type",
}
"""Calls that no package makes, and what to use instead."""

FORKING_CALLS = {"os.fork": "asyncio.create_subprocess_exec (a forked child inherits sockets and must not touch LMDB)"}
"""Calls that nothing in a replica's process makes; an agent holds neither LMDB nor listening sockets."""

BANNED_ATTRIBUTES = {
    "ssl.CERT_NONE": "forebay.cluster.security.tls: both sides show a certificate",
    "ssl._create_unverified_context": "forebay.cluster.security.tls",
}
"""Names that are wrong wherever they stand."""

CLOCK_ATTRIBUTES = {"now", "utcnow", "today"}
"""Methods of datetime and date that read the clock."""

PURE_BANNED_CALLS = {
    "open": "an argument: replica has no disk",
    "print": "a return value",
    "hash": "hashlib or xxhash of canonical bytes: hash() of text differs between two processes",
    "id": "a revision or a job id: id() differs between two processes",
    "globals": "an argument",
}
"""Builtins that the pure core does not call: what they return or do is not a function of their arguments."""

QUIET_BANNED_CALLS = {"print": "logging, or a return value"}
"""Builtins that wal and snapshots do not call."""

PURE_STANDARD_MODULES = frozenset(
    """
    __future__ abc array base64 binascii bisect collections copy dataclasses decimal difflib enum fractions functools
    graphlib hashlib heapq itertools keyword math numbers operator re string struct textwrap types typing unicodedata
    zlib
    """.split()
)
"""Modules of the standard library whose functions depend on their arguments alone. `datetime` is not one of them."""

PURE_THIRD_PARTY = frozenset({"msgspec", "immutables"})
"""The only other packages that the pure core may import."""


class Code(NamedTuple):
    """The facts about a module that rules need, gathered from one syntax tree, which is not kept."""

    is_documented: bool
    imports: tuple[tuple[str, int], ...]
    """Absolute imports as dotted names (`from a import b` as `a.b`), each with its line."""
    relative: tuple[int, ...]
    """Lines of relative imports."""
    calls: tuple[tuple[str, int], ...]
    """Dotted names of called functions, imports resolved."""
    names: tuple[tuple[str, int], ...]
    """Dotted names of all names and attributes that are read through an import."""
    switches: tuple[tuple[str, bool, int], ...]
    """Keyword arguments of SWITCHES, whether the value is False, and the line."""
    behaviour_lines: int
    """Lines in bodies of functions, docstrings excluded."""
    functions: tuple["Function", ...]


SWITCHES = ("shell", "ssl", "verify_ssl")
"""Keyword arguments that a rule looks at."""


def parse(source: str) -> Code:
    """Return the facts about a module's source."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    known = aliases(nodes)
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Code(
        is_documented=bool(ast.get_docstring(tree)),
        imports=tuple(_imports(nodes)),
        relative=tuple(node.lineno for node in nodes if isinstance(node, ast.ImportFrom) and node.level > 0),
        calls=tuple(
            (name, node.lineno)
            for node in nodes
            if isinstance(node, ast.Call) and (name := full_name(node.func, known))
        ),
        names=tuple(
            (name, node.lineno)
            for node in nodes
            if isinstance(node, ast.Attribute | ast.Name) and "." in (name := full_name(node, known))
        ),
        switches=tuple(
            (node.arg, isinstance(node.value, ast.Constant) and node.value.value is False, node.value.lineno)
            for node in nodes
            if isinstance(node, ast.keyword) and node.arg in SWITCHES
        ),
        behaviour_lines=len(set().union(*map(_body_lines, functions))),
        functions=tuple(
            Function(node.name, node.lineno, proof_of([*node.body, *node.decorator_list])) for node in functions
        ),
    )


def _imports(nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> range:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return range(body[0].lineno, (body[-1].end_lineno or 0) + 1) if body else range(0)


def dotted_name(node: ast.expr) -> str:
    """Return `a.b.c` for a chain of attributes on a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted_name(node.value)):
        return f"{left}.{node.attr}"
    return ""


def aliases(nodes: list[ast.AST]) -> dict[str, str]:
    """Return the full name of each imported name: `import os as o` and `from os import system as s` hide nothing."""
    known: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return known


def full_name(node: ast.expr, known: dict[str, str]) -> str:
    """Return the dotted name of an expression with its imports resolved."""
    name = dotted_name(node)
    first, dot, rest = name.partition(".")
    return known.get(first, first) + dot + rest


def relative_imports(code: Code) -> list[str]:
    """Return relative imports: a moved module would silently mean another one."""
    return [f"line {line}: write the import from the top-level package" for line in code.relative]


def banned_names(code: Code) -> list[str]:
    """Return modules, calls and attributes that are banned in every package, each with its replacement."""
    found = calls_of(code, BANNED_CALLS)
    found += [
        f"line {line}: import of {name}; instead: {BANNED_MODULES[name.split('.')[0]]}"
        for name, line in code.imports
        if name.split(".")[0] in BANNED_MODULES
    ]
    found += [
        f"line {line}: {name}; instead: {BANNED_ATTRIBUTES[name]}"
        for name, line in code.names
        if name in BANNED_ATTRIBUTES
    ]
    for name, is_false, line in code.switches:
        if name == "shell" and not is_false:
            found.append(f"line {line}: shell=True; instead: a list of arguments")
        elif name != "shell" and is_false:
            found.append(f"line {line}: {name}=False; instead: a context of forebay.cluster.security.tls")
    return found


def clock_reads(code: Code) -> list[str]:
    """Return reads of a clock: the module time, and datetime's and date's now, utcnow and today."""
    found = [f"line {line}: import of time" for name, line in code.imports if name.split(".")[0] == "time"]
    for name, line in code.names:
        left, _, attribute = name.rpartition(".")
        if attribute in CLOCK_ATTRIBUTES and left in ("datetime.datetime", "datetime.date"):
            found.append(f"line {line}: {name}")
    return found


def impure_imports(code: Code) -> list[str]:
    """Return imports that the pure core may not have: everything that is not on its short list."""
    allowed = PURE_STANDARD_MODULES | PURE_THIRD_PARTY
    return [
        f"line {line}: import of {name}; the list of what is pure is PURE_STANDARD_MODULES in tests/repo/rules.py"
        for name, line in code.imports
        if name.split(".")[0] not in allowed and not name.startswith("forebay.replica.")
    ]


def calls_of(code: Code, banned: dict[str, str]) -> list[str]:
    """Return banned calls, each with its replacement."""
    return [f"line {line}: {name}(); instead: {banned[name]}" for name, line in code.calls if name in banned]


def forbidden_imports(code: Code, forbidden: frozenset[str], allowed: frozenset[str]) -> list[str]:
    """Return imports under one of the `forbidden` dotted prefixes and under none of the `allowed` ones."""
    return [
        f"line {line}: import of {name}"
        for name, line in code.imports
        if _under(name, forbidden) and not _under(name, allowed)
    ]


def _under(name: str, prefixes: frozenset[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


# ---- tests that prove nothing

PROVING_CALLS = {"raises", "fail", "run_state_machine_as_test"}
"""Names whose call proves something by itself: pytest.raises, pytest.fail, hypothesis' state machines."""


class Proof(NamedTuple):
    """What a piece of code may prove something by."""

    itself: bool
    """Whether it asserts something itself."""
    calls: frozenset[str]

    def holds(self, helpers: frozenset[str]) -> bool:
        """Say whether it asserts something itself or calls a helper that does."""
        return self.itself or not self.calls.isdisjoint(helpers)


class Function(NamedTuple):
    """A function or method of a module."""

    name: str
    line: int
    proof: Proof
    """Of its body and decorators."""


def proof_of(nodes: Iterable[ast.AST]) -> Proof:
    """Return what pieces of code assert and call."""
    itself, calls = False, set()
    for inner in (inner for node in nodes for inner in ast.walk(node)):
        if isinstance(inner, ast.Assert):
            itself = True
        elif isinstance(inner, ast.Call):
            calls.add(inner.func.attr if isinstance(inner.func, ast.Attribute) else dotted_name(inner.func))
        elif isinstance(inner, ast.Raise) and inner.exc is not None:
            itself = itself or "AssertionError" in ast.dump(inner.exc)
    return Proof(itself or not PROVING_CALLS.isdisjoint(calls), frozenset(calls))


def proving_helpers(modules: Iterable[Code]) -> frozenset[str]:
    """Return the names of functions in the tests that assert, themselves or through others of them."""
    known: frozenset[str] = frozenset()
    functions = [function for code in modules for function in code.functions]
    while True:
        more = {function.name for function in functions if function.proof.holds(known)}
        if more <= known:
            return known
        known |= more


def tests_that_prove_nothing(code: Code, helpers: frozenset[str]) -> list[str]:
    """Return the tests of a module that assert nothing."""
    return [
        f"line {function.line}: {function.name} asserts nothing"
        for function in code.functions
        if function.name.startswith("test_") and not function.proof.holds(helpers)
    ]
