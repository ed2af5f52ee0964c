"""Writes the parts of the documents that come from the code: each block gets what its function returns.

<!-- generated: MODULE:FUNCTION -->
...
<!-- end of generated -->

usage: scripts/generate [--check] [--help]      --check: write nothing; exit 1 and name the blocks that are out of date
"""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tests.repo.tree import ROOT

BLOCK = re.compile(
    r"(?P<begin>^<!-- generated: (?P<module>[a-z_][a-z0-9_.]*):(?P<function>[a-z_][a-z0-9_]*) -->\n)"
    r"(?P<body>.*?)"
    r"(?P<end>^<!-- end of generated -->$)",
    re.DOTALL | re.MULTILINE,
)
OPENING = re.compile(r"^<!-- generated: .*$", re.MULTILINE)


class GenerateError(Exception):
    """A mark that is malformed or names nothing; the message names the document and the mark."""


def documents() -> list[Path]:
    """Return the documents that may hold generated blocks: those at the top, in docs/ and in the packages."""
    places = ["*.md", "docs/**/*.md", "replica/*.md", "wal/*.md", "snapshots/*.md", "cluster/**/*.md"]
    return sorted({path for place in places for path in ROOT.glob(place)})


def render(text: str, name: str) -> str:
    """Return a document's text with every block as its function gives it now; GenerateError names what is wrong."""
    if len(OPENING.findall(text)) != len(BLOCK.findall(text)):
        raise GenerateError(f"{name}: a mark is malformed, or a block has no line `<!-- end of generated -->`")

    def block(match: re.Match[str]) -> str:
        body = _function(match["module"], match["function"], name)()
        return match["begin"] + body.strip("\n") + "\n" + match["end"]

    return BLOCK.sub(block, text)


def outdated() -> list[tuple[Path, str]]:
    """Return the documents that differ from what they should be, with the text that they should have."""
    found = []
    for path in documents():
        text = path.read_text(encoding="utf-8")
        fresh = render(text, str(path.relative_to(ROOT)))
        if fresh != text:
            found.append((path, fresh))
    return found


def _function(module: str, function: str, name: str) -> Callable[[], str]:
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise GenerateError(f"{name}: there is no {module}:{function} ({error})") from error
    if not callable(found):
        raise GenerateError(f"{name}: {module}:{function} is not a function")
    return found  # type: ignore[no-any-return]


def main() -> int:
    """Write or check; return the exit code."""
    if any(argument in ("-h", "--help") for argument in sys.argv[1:]):
        print(__doc__)
        return 0
    if sys.argv[1:] not in ([], ["--check"]):
        print(f"scripts/generate: unknown option {' '.join(sys.argv[1:])}; try --help", file=sys.stderr)
        return 2
    try:
        stale = outdated()
    except GenerateError as error:
        print(f"scripts/generate: {error}", file=sys.stderr)
        return 1
    for path, fresh in stale:
        if "--check" not in sys.argv:
            path.write_text(fresh, encoding="utf-8")
        print(f"{'out of date' if '--check' in sys.argv else 'wrote'}: {path.relative_to(ROOT)}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
