"""Commands that the documentation has people type, and a terminal that types them."""

import re
import subprocess
from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.packages.machine import Machine, StepFailed
from tests.repo.tree import ROOT, text_of

PAGES: Final = ("docs/install/*.md", "docs/operate/*.md")
"""Pages with blocks of commands that are typed, from `<!-- begin: BLOCK, … -->` to `<!-- end -->`."""

USER: Final = "alan"
"""Account that the pages name; everything else is typed as root."""

_END_OF_STATEMENT: Final = "-- end of what was typed --"


class Typed(NamedTuple):
    """One statement of a shell, which may have several lines, and whose it is."""

    user: str
    text: str


def documented(block: str) -> Iterator[Typed]:
    """Yield the statements of a block, in the order in which they are typed."""
    user, lines = "", list[str]()
    for line in _block(block).splitlines():
        if line.startswith(f"And as {USER}"):
            user = USER
        if line.startswith("    "):
            lines.append(line[4:])
            if _is_whole(text := "\n".join(lines)):
                yield Typed(user, text)
                lines.clear()
        else:
            assert not lines, f"{block}: the end of {lines} is missing"


def sampled(block: str) -> list[str]:
    """Return the names of a table of a block: what is between backticks at the beginning of each of its rows."""
    return re.findall(r"^\| `([^`]+)`", _block(block), re.MULTILINE)


def _block(name: str) -> str:
    """Return the text of a block, which is in exactly one page."""
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    found = [
        part.partition("<!-- end -->")[0]
        for path in pages
        for part in text_of(path.relative_to(ROOT)).split(f"<!-- begin: {name}, typed by ")[1:]
    ]
    assert len(found) == 1, f"the pages have {len(found)} blocks {name!r}"
    return found[0]


def _is_whole(text: str) -> bool:
    """Whether a shell would wait for no other line."""
    return subprocess.run(("bash", "-n", "-c", text), capture_output=True, check=False).returncode == 0


class Terminal:
    """A shell on a machine that goes on from statement to statement; the first that fails ends it."""

    def __init__(self, machine: Machine, user: str = "") -> None:
        """Begin at a login of `user`, root if it is empty."""
        # A step that fails inside of a loop is to be seen, too.
        self._shell = machine.started("bash", "-e", user=user)

    def type(self, text: str) -> str:
        """Type one statement and return what is printed, errors too; StepFailed."""
        assert self._shell.stdin is not None and self._shell.stdout is not None
        # What is typed reads nothing of what is typed next, as ssh would.
        self._shell.stdin.write(f"{{\n{text}\n}} </dev/null 2>&1\necho\necho '{_END_OF_STATEMENT}'\n")
        self._shell.stdin.flush()
        printed = list[str]()
        for line in self._shell.stdout:
            if line.strip() == _END_OF_STATEMENT:
                return "".join(printed).removesuffix("\n")
            printed.append(line)
        raise StepFailed(f"{text}\nended with {self._shell.wait()}:\n{''.join(printed)[-3000:]}")

    def close(self) -> None:
        """End the shell."""
        with self._shell:  # which closes both pipes and waits
            pass
