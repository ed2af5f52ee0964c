"""What the documents take from the code is what the code says now."""

import sys

import pytest

from tests.repo import generate
from tests.repo.tree import ROOT


def sample() -> str:
    """Stand in for a generator of a diagram."""
    return "\nfresh\n"


def test_generated_blocks_are_current() -> None:
    stale = [str(path.relative_to(ROOT)) for path, _ in generate.outdated()]
    assert stale == [], "run scripts/generate"


def test_the_diagram_of_the_buffer_states_is_generated_into_the_docs() -> None:
    blocks = [
        match["module"] for path in generate.documents() for match in generate.BLOCK.finditer(path.read_text("utf-8"))
    ]
    assert any("buffer" in module or "diagram" in module for module in blocks), (
        "a document must hold `<!-- generated: MODULE:FUNCTION -->` with the diagram of TRANSITIONS"
    )


def test_a_stale_block_is_replaced_and_the_text_around_it_stays() -> None:
    mark = f"<!-- generated: {__name__}:sample -->\n"
    sys.modules[__name__] = sys.modules.get(__name__) or sys.modules[sample.__module__]
    before = f"above\n{mark}old\n<!-- end of generated -->\nbelow\n"
    assert generate.render(before, "x.md") == f"above\n{mark}fresh\n<!-- end of generated -->\nbelow\n"


@pytest.mark.parametrize(
    "text",
    [
        "<!-- generated: forebay.replica.model.buffers:no_such_function -->\n<!-- end of generated -->\n",
        "<!-- generated: no.such.module:f -->\n<!-- end of generated -->\n",
        "<!-- generated: forebay.replica.model.buffers:x -->\nnever closed\n",
        "<!-- generated: rm -rf -->\n<!-- end of generated -->\n",
    ],
)
def test_a_mark_that_names_nothing_is_refused_by_document(text: str) -> None:
    with pytest.raises(generate.GenerateError, match=r"x\.md"):
        generate.render(text, "x.md")
