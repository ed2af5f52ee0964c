"""Build the documentation into build/docs, as HTML that needs no network.

A dead link, a dead anchor or any other warning of Sphinx is an error, and so is a page that would
load something from another host.

usage: scripts/docs [--record] [--help]      --record: record scripts/demo into docs/images/demo.svg first
"""

import argparse
import html.parser
import sys
import time
from pathlib import Path
from typing import Final

from tests.repo.tree import ROOT

OUTPUT: Final = ROOT / "build" / "docs"

LOADED: Final = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""Elements that a browser loads without being asked, with the attribute that says what."""


class Loads(html.parser.HTMLParser):
    """Collects the addresses that a page loads from other hosts."""

    def __init__(self) -> None:
        """Start without any."""
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element loads."""
        address = dict(attrs).get(LOADED.get(tag, ""))
        if address and address.startswith(("http:", "https:", "//")):
            self.found.append(address)


def loaded_from_elsewhere(page: Path) -> list[str]:
    """Return the addresses on other hosts that a built page loads."""
    parser = Loads()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.found


def build() -> int:
    """Build all pages; return the exit code."""
    # Not a package of the project: scripts/docs installs it first.
    from sphinx.cmd.build import main as sphinx

    started = time.monotonic()
    options = ["-W", "-n", "--keep-going", "-E", "-a", "-q", "-b", "html", "-d", str(ROOT / "build" / "doctrees")]
    if code := sphinx([*options, str(ROOT / "docs"), str(OUTPUT)]):
        return code
    pages = sorted(OUTPUT.rglob("*.html"))
    loads = [f"{page.relative_to(OUTPUT)} loads {address}" for page in pages for address in loaded_from_elsewhere(page)]
    for line in loads:
        print(f"docs: {line}", file=sys.stderr)
    if not loads:
        print(f"docs: {len(pages)} pages in {OUTPUT.relative_to(ROOT)}, {time.monotonic() - started:.0f} s")
    return 1 if loads else 0


def main() -> int:
    """Record if asked to, and build; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description=(__doc__ or "").partition("usage:")[0])
    parser.add_argument("--record", action="store_true", help="record scripts/demo into docs/images/demo.svg first")
    if parser.parse_args().record:
        # Its terminal emulator is installed by scripts/docs too.
        from tests.repo.record_demo import record_demo

        record_demo(ROOT / "docs" / "images" / "demo.svg")
    return build()


if __name__ == "__main__":
    sys.exit(main())
