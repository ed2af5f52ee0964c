"""Documentation: lengths of lines, sentences, paragraphs and pages, and the commands and metrics that it names."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from forebay.cluster.cli.app import cli
from tests.repo.prose import measure
from tests.repo.tree import ROOT, modules, repository_files, text_of

TOP = tuple(Path(name) for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"))
PAGES = [path for path in repository_files() if path.parts[0] == "docs" and path.suffix == ".md"]
UNCONVERTED = tuple(f"docs/reference/{name}.md" for name in ("buffer-states", "lua-provider", "plugin-api"))
"""Pages that do not follow the rules yet; only ever fewer."""

CONVERTED = [path for path in (*TOP, *PAGES) if not str(path).startswith(UNCONVERTED)]
PAGE_LINES_MAX = 150
"""Lines of a page for a task."""

README_LINES_MAX = 120

METRIC = re.compile(r"`(forebay_[a-z_]+?)(?:_total|_bucket|_count)?(?:\{[^`]*\})?`")
OPTION = re.compile(r"--[a-z][a-z0-9-]*")


@pytest.mark.parametrize("path", CONVERTED, ids=str)
def test_a_page_keeps_the_limits_of_lines_sentences_paragraphs_and_cells(path: Path) -> None:
    found = measure(ROOT / path)
    assert found.lines == [], "no line over 100 characters outside of code and tables"
    assert found.sentences == [], "no sentence over 35 words"
    assert found.paragraphs == [], "no paragraph over 5 lines"
    assert found.cells == [], "no table cell over 15 words"


def test_a_page_for_a_task_is_short() -> None:
    lengths = {str(path): len(text_of(path).splitlines()) for path in PAGES if path.parts[1] in ("install", "operate")}
    assert {path: lines for path, lines in lengths.items() if lines > PAGE_LINES_MAX} == {}
    assert len(text_of(Path("README.md")).splitlines()) <= README_LINES_MAX


def test_too_long_a_line_a_sentence_a_paragraph_and_a_cell_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"# Title\n\n{'word ' * 25}end.\n\n{'many ' * 40}words.\n\n"
        + "a\n" * 6
        + f"\n| a |\n|---|\n| {'cell ' * 16}|\n"
        f"\n    {'code ' * 40}\n"
    )
    found = measure(page)
    assert [len(kind) for kind in found] == [2, 1, 1, 1]


def commands(path: Path) -> Iterator[str]:
    """Yield the commands `forebay …` of a page: in code blocks, and in code within a line."""
    text = text_of(path)
    yield from re.findall(r"`(forebay [^`\n]+)`", text)
    for line in re.findall(r"^ {4,}(.*)$", text, re.MULTILINE):
        found = re.match(r"(?:until |runuser -u \w+ -- |exec )?(forebay [^|;<>]*)", line)
        if found:
            yield re.split(r"\s#|\\$|; do", found[1])[0].strip()


def unknown(command: str) -> str:
    """Return what is not known of a command: the word, or the option; or an empty text."""
    words = shlex.split(re.sub(r"[…\[\]()]", " ", command).replace("'", ""))[1:]
    found: click.Command = cli
    context = click.Context(cli, info_name="forebay")
    options = {option for parameter in cli.params for option in parameter.opts}
    while isinstance(found, click.Group) and words:
        if words[0] in ("-h", "--help"):
            return ""
        if words[0].startswith("-"):
            taken = next((one for one in found.params if words[0].partition("=")[0] in one.opts), None)
            if taken is None:
                return words[0]
            flag = isinstance(taken, click.Option) and taken.is_flag
            words = words[1:] if flag or "=" in words[0] else words[2:]
            continue
        following = found.get_command(context, words[0])
        if following is None:
            return "" if words[0].isupper() else words[0]
        found, words = following, words[1:]
        context = click.Context(found, info_name=found.name, parent=context)
    for parameter in found.params:
        options |= {*parameter.opts, *parameter.secondary_opts}
    written = {match for word in words for match in OPTION.findall(word) if word.startswith("--")}
    return ", ".join(sorted(written - options - {"--help", "--json"}))


@pytest.mark.parametrize("path", [*TOP, *PAGES], ids=str)
def test_a_command_that_a_page_names_exists_with_its_options(path: Path) -> None:
    wrong = {command: why for command in commands(path) if (why := unknown(command))}
    assert wrong == {}


def test_metrics_that_pages_name_exist() -> None:
    code = "\n".join(text_of(path) for path in modules("cluster"))
    missing = [
        f"{path}: {name}"
        for path in (*TOP, *PAGES)
        for name in sorted(set(METRIC.findall(text_of(path))))
        if f'"{name}"' not in code and f'"{name}_total"' not in code
    ]
    assert missing == []


def test_the_page_on_monitoring_names_each_alert() -> None:
    rules = re.findall(r"- alert: (\w+)", text_of(Path("packaging/monitoring/forebay.rules.yml")))
    named = re.findall(r"`(Forebay[A-Z]\w+)`", text_of(Path("docs/operate/monitoring.md")))
    assert sorted(named) == sorted(rules)
