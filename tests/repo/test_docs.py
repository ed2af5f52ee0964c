"""Pictures of the documentation, and the check that a built page loads nothing from another host."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.repo.build_docs import loaded_from_elsewhere
from tests.repo.tree import repository_files, text_of

PICTURES = [path for path in repository_files() if path.parts[:2] == ("docs", "images") and path.suffix == ".svg"]


@pytest.mark.parametrize("path", PICTURES, ids=str)
def test_a_picture_has_a_title_and_loads_nothing(path: Path) -> None:
    text = text_of(path)
    root = ElementTree.fromstring(text)
    assert [child.tag.rpartition("}")[2] for child in root][0] == "title"
    assert "script" not in {element.tag.rpartition("}")[2] for element in root.iter()}
    assert text.count("http") == 1, "the name space alone"


def test_the_recording_ends_with_everything_held() -> None:
    assert "All checks passed, in" in text_of(Path("docs/images/demo.svg"))


def test_a_recording_shows_complete_screens_only() -> None:
    recorder = pytest.importorskip("tests.repo.record_demo", reason="scripts/docs installs pyte", exc_type=ImportError)
    outputs = [(0.0, b"one\r\n"), (1.0, b"two"), (1.01, b" \x1b[32mgreen\x1b[0m"), (9.0, b"\x1b[2J\x1b[Hend")]
    found = recorder.frames(outputs)
    assert [frame.at_s for frame in found] == [0.0, 1.01, 9.0]
    assert found[1].lines[:2] == (
        ((0, "one", recorder.COLOURS["default"], False),),
        ((0, "two", recorder.COLOURS["default"], False), (4, "green", recorder.COLOURS["green"], False)),
    )
    drawn = ElementTree.fromstring(recorder.draw(found))
    assert "end" in [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]


def test_what_a_page_loads_from_another_host_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<a href="https://a.example">a</a><script src="//b.example/x.js"></script><img src="c.png">')
    assert loaded_from_elsewhere(page) == ["//b.example/x.js"]
