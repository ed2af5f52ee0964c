"""What docs/operate/operations.md has people type, and a terminal that types it."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.packages.machine import Machine, StepFailed
from tests.repo.tree import text_of

DOCUMENT: Final = Path("docs/operate/operations.md")

USER: Final = "alan"
"""The account that the document calls by a name; whatever it does not say is for root."""

_END_OF_STATEMENT: Final = "-- end of what was typed --"


class Typed(NamedTuple):
    """One statement of a shell, which may have several lines, and whose it is."""

    user: str
    text: str


def documented(block: str) -> Iterator[Typed]:
    """Yield what a block of the document has somebody type: `<!-- begin: block, … -->` to `<!-- end -->`."""
    parts = text_of(DOCUMENT).split(f"<!-- begin: {block}, typed by ")
    assert len(parts) == 2, f"{DOCUMENT} has {len(parts) - 1} blocks {block!r}"
    user, lines = "", list[str]()
    for line in parts[1].partition("<!-- end -->")[0].splitlines():
        if line.startswith(f"And as {USER}"):
            user = USER
        if line.startswith("    "):
            lines.append(line[4:])
            if _is_whole(text := "\n".join(lines)):
                yield Typed(user, text)
                lines.clear()
        else:
            assert not lines, f"{DOCUMENT}, {block}: the end of {lines} is missing"


def sampled(block: str) -> list[str]:
    """Return the names of a table of a block: what is between backticks at the beginning of each of its rows."""
    text = text_of(DOCUMENT).partition(f"<!-- begin: {block}, ")[2].partition("<!-- end -->")[0]
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


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
