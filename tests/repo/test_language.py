"""Language of docstrings and names: rules of plain English that a program can check."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repo.tree import modules, text_of

FIRST_WORDS = re.compile(r"(?:What|Who|Whose|How|Whether|All|One|Where|That)\b")
RIDDLES = re.compile(r"\b(?:somebody|nobody|whoever|anybody|everybody|he|his)\b", re.IGNORECASE)
BARE = re.compile(
    r"[a-z]{2,}ed|asked|told|gone|said|held|known|shown|seen|heard|given|sent|made|done|kept|those|that|one"
)
"""Names of functions that are a participle or a pronoun alone."""

CLASS_NAMES_TWICE_MAX = 12
"""Public class names defined in more than one module; only ever lowered."""

LITERALS_ALLOWED = {("cluster/api/web/connections.py", "nobody")}
"""String literals that contain one of the words as the name of an account, with their module."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
NAMED_EXCEPTIONS = {"feed", "need", "seed", "speed", "exceed", "embed", "shared"}


class Text(NamedTuple):
    """Docstring with its position; `owner` is the name of the documented object."""

    place: str
    kind: str
    owner: str
    text: str


class Facts(NamedTuple):
    """Facts about a module, gathered from one syntax tree, which is not kept."""

    docstrings: tuple[Text, ...]
    """Of the module, its classes and functions."""
    public: tuple[tuple[int, str, bool], ...]
    """Line and name of each public definition, and whether it is a class."""
    riddles: tuple[tuple[int, str], ...]
    """Line and text of each string literal with a word of RIDDLES; docstrings are left out."""


@cache
def facts_of(path: Path) -> Facts:
    """Return the facts about a module, parsed once a process."""
    tree = ast.parse(text_of(path))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                owner = getattr(node, "name", path.stem)
                found.append(Text(f"{path}:{getattr(node, 'lineno', 1)}", type(node).__name__, owner, text))
    public = [
        (node.lineno, node.name, isinstance(node, ast.ClassDef))
        for node in tree.body
        if isinstance(node, Definition) and node.name[0] != "_"
    ]
    return Facts(tuple(found), tuple(public), tuple(_riddles_in(tree)))


def _riddles_in(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the string literals, and the literal parts of f-strings, that contain a word of RIDDLES."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents
        if RIDDLES.search(node.value)
    ]


def test_no_docstring_begins_with_a_relative_clause() -> None:
    found = [f"{one.place}: {one.text[:60]}" for path in modules() for one in facts_of(path).docstrings]
    found = [line for line in found if FIRST_WORDS.match(line.partition(": ")[2])]
    assert found == [], "name the thing, or begin with Return"


def test_a_module_s_first_line_is_a_sentence() -> None:
    texts = [one for path in modules() for one in facts_of(path).docstrings if one.kind == "Module"]
    first = [(one.place, one.text.splitlines()[0]) for one in texts]
    found = [f"{place}: {line}" for place, line in first if not line.endswith((".", ":"))]
    assert found == [], "listings show the first line only"


def test_no_docstring_speaks_of_somebody() -> None:
    found = [
        f"{one.place}: {match[0]}"
        for path in modules()
        for one in facts_of(path).docstrings
        if (match := RIDDLES.search(one.text))
    ]
    assert found == [], "say user, operator, caller, client or replica"


def test_no_text_of_the_product_speaks_of_somebody() -> None:
    found = [
        f"{path}:{line}: {text}"
        for path in modules()
        for line, text in facts_of(path).riddles
        if (str(path), text) not in LITERALS_ALLOWED
    ]
    assert found == [], "name the user, operator, process or replica; write it for a thing"


def test_the_rule_of_texts_finds_words_in_parts_of_f_strings_and_leaves_docstrings_to_the_other() -> None:
    source = 'def f(x):\n    """Ask somebody."""\n    return f"{x} asks nobody" + "a body" + "somebody" f"{x}"\n'
    assert sorted(_riddles_in(ast.parse(source))) == [(3, " asks nobody"), (3, "somebody")]


def test_no_public_function_or_class_is_a_bare_participle() -> None:
    found = []
    for path in modules():
        for line, name, is_class in facts_of(path).public:
            word = name[0].lower() + name[1:] if is_class else name
            if BARE.fullmatch(word) and word not in NAMED_EXCEPTIONS:
                found.append(f"{path}:{line}: {name}")
    assert found == [], "give it a verb, or a noun of its role"


def test_few_class_names_occur_twice() -> None:
    names: Counter[str] = Counter()
    for path in modules():
        if "messages" not in path.parts:
            names.update({name for _, name, is_class in facts_of(path).public if is_class})
    twice = sorted(name for name, count in names.items() if count > 1)
    assert len(twice) <= CLASS_NAMES_TWICE_MAX, twice


@pytest.mark.parametrize("text", ["What a replica knows.", "Whether it leads.", "All of them.", "Who leads."])
def test_the_rule_finds_relative_clauses(text: str) -> None:
    assert FIRST_WORDS.match(text)


@pytest.mark.parametrize("text", ["Whatever happens.", "Allocate space.", "Onetime key.", "However."])
def test_the_rule_leaves_other_words_alone(text: str) -> None:
    assert not FIRST_WORDS.match(text)
