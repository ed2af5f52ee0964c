"""The rules of style that a machine can check, each as a function from a module's source to what is wrong with it.

They are functions of text, so that test_rules_catch.py can show each of them a violation: a rule that finds nothing
proves nothing until it has found something.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

BANNED_MODULES = {
    "pickle": "msgspec or wal.codec (unpickling runs code)",
    "marshal": "msgspec or wal.codec",
    "shelve": "wal",
    "dill": "msgspec or wal.codec",
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
    "ssl.CERT_NONE": "cluster.security.tls: both sides show a certificate",
    "ssl._create_unverified_context": "cluster.security.tls",
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


def parse(source: str) -> ast.Module:
    """Return the syntax tree of a module's source."""
    return ast.parse(source)


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield every absolute import as a dotted name (`from a import b` as `a.b`) with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def dotted_name(node: ast.expr) -> str:
    """Return `a.b.c` for a chain of attributes on a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted_name(node.value)):
        return f"{left}.{node.attr}"
    return ""


def aliases(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name stands for: `import os as o` and `from os import system as s` hide nothing."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
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


def relative_imports(source: str) -> list[str]:
    """Relative imports: a moved module would silently mean another one."""
    return [
        f"line {node.lineno}: write the import from the top-level package"
        for node in ast.walk(parse(source))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]


def banned_names(source: str) -> list[str]:
    """Modules, calls and attributes that are banned in every package, each with its replacement."""
    tree = parse(source)
    known = aliases(tree)
    found = calls_of(source, BANNED_CALLS)
    found += [
        f"line {line}: import of {name}; instead: {BANNED_MODULES[name.split('.')[0]]}"
        for name, line in imports(tree)
        if name.split(".")[0] in BANNED_MODULES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and (name := full_name(node, known)) in BANNED_ATTRIBUTES:
            found.append(f"line {node.lineno}: {name}; instead: {BANNED_ATTRIBUTES[name]}")
        if isinstance(node, ast.keyword) and node.arg == "shell" and not _is_false(node.value):
            found.append(f"line {node.value.lineno}: shell=True; instead: a list of arguments")
        if isinstance(node, ast.keyword) and node.arg in ("ssl", "verify_ssl") and _is_false(node.value):
            found.append(f"line {node.value.lineno}: {node.arg}=False; instead: a context of cluster.security.tls")
    return found


def clock_reads(source: str) -> list[str]:
    """Whatever reads a clock: the module time, and datetime's and date's now, utcnow and today."""
    tree = parse(source)
    known = aliases(tree)
    found = [f"line {line}: import of time" for name, line in imports(tree) if name.split(".")[0] == "time"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in CLOCK_ATTRIBUTES:
            left = full_name(node.value, known)
            if left in ("datetime.datetime", "datetime.date"):
                found.append(f"line {node.lineno}: {left}.{node.attr}")
    return found


def impure_imports(source: str) -> list[str]:
    """Imports that the pure core may not have: everything that is not on its short list."""
    allowed = PURE_STANDARD_MODULES | PURE_THIRD_PARTY | {"replica"}
    return [
        f"line {line}: import of {name}; the list of what is pure is PURE_STANDARD_MODULES in tests/repo/rules.py"
        for name, line in imports(parse(source))
        if name.split(".")[0] not in allowed
    ]


def calls_of(source: str, banned: dict[str, str]) -> list[str]:
    """Calls of what is banned here, each with its replacement."""
    tree = parse(source)
    known = aliases(tree)
    return [
        f"line {node.lineno}: {name}(); instead: {banned[name]}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (name := full_name(node.func, known)) in banned
    ]


def forbidden_imports(source: str, forbidden: frozenset[str], allowed: frozenset[str]) -> list[str]:
    """Imports under one of the `forbidden` dotted prefixes and under none of the `allowed` ones."""
    return [
        f"line {line}: import of {name}"
        for name, line in imports(parse(source))
        if _under(name, forbidden) and not _under(name, allowed)
    ]


def _under(name: str, prefixes: frozenset[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


# ---- tests that prove nothing

PROVING_CALLS = {"raises", "fail", "run_state_machine_as_test"}
"""Names whose call proves something by itself: pytest.raises, pytest.fail, hypothesis' state machines."""


def functions(tree: ast.AST) -> dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Return every function and method of a module by name."""
    found: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


class Proof(NamedTuple):
    """What a piece of code may prove something by."""

    itself: bool
    """Whether it asserts something itself."""
    calls: frozenset[str]

    def holds(self, helpers: frozenset[str]) -> bool:
        """Say whether it asserts something itself or calls a helper that does."""
        return self.itself or not self.calls.isdisjoint(helpers)


def proof_of(node: ast.AST) -> Proof:
    """Return what a piece of code asserts and calls."""
    itself, calls = False, set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assert):
            itself = True
        elif isinstance(inner, ast.Call):
            calls.add(inner.func.attr if isinstance(inner.func, ast.Attribute) else dotted_name(inner.func))
        elif isinstance(inner, ast.Raise) and inner.exc is not None:
            itself = itself or "AssertionError" in ast.dump(inner.exc)
    return Proof(itself or not PROVING_CALLS.isdisjoint(calls), frozenset(calls))


def proves(node: ast.AST, helpers: frozenset[str]) -> bool:
    """Say whether a piece of code asserts something itself or calls a helper that does."""
    return proof_of(node).holds(helpers)


def proving_helpers(trees: list[ast.Module]) -> frozenset[str]:
    """Return the names of functions in the tests that assert, themselves or through others of them."""
    known: frozenset[str] = frozenset()
    proofs = [(name, proof_of(node)) for tree in trees for name, nodes in functions(tree).items() for node in nodes]
    while True:
        more = {name for name, proof in proofs if proof.holds(known)}
        if more <= known:
            return known
        known |= more


def tests_that_prove_nothing(tree: ast.Module, helpers: frozenset[str]) -> list[str]:
    """Return the tests of a module that assert nothing."""
    return [
        f"line {node.lineno}: {name} asserts nothing"
        for name, nodes in functions(tree).items()
        if name.startswith("test_")
        for node in nodes
        if not any(proves(statement, helpers) for statement in [*node.body, *node.decorator_list])
    ]
