"""Links of a tree: made again where they stay inside, followed beneath the anchor only, and never a way out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.cluster.agent.files.links import LINKS_MAX, leads_to
from forebay.cluster.agent.transfer.errors import TransferFailed
from forebay.cluster.agent.transfer.options import ItemKind
from forebay.cluster.agent.transfer.plan import stays_inside
from forebay.replica.model.transfers import LeftOut
from tests.cluster.agent.transfer.harness import SMALL, Harness, plant

OUT = replace(SMALL, outgoing=True)

parts = st.sampled_from(["a", "b", "d", "..", ".", ""])
targets = st.lists(parts, min_size=1, max_size=6).map("/".join).filter(bool)


def secret(harness: Harness) -> Path:
    """Make something beside the tree that must not arrive, and return it."""
    plant(harness.directory / "secret", {"key": b"secret"})
    return harness.directory / "secret"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from("abd"), min_size=1, max_size=4).map("/".join), targets)
def test_a_link_stays_inside_exactly_where_no_prefix_of_it_is_above_the_tree(path: str, target: str) -> None:
    level, inside = path.count("/"), True
    for part in target.split("/"):
        level += {"..": -1, ".": 0, "": 0}.get(part, 1)
        inside = inside and level >= 0
    kept = stays_inside(path.encode(), target.encode(), ())
    assert kept == (target.encode() if inside and not target.startswith("/") else None)


@pytest.mark.parametrize(
    ("path", "target", "kept"),
    [
        (b"latest", b"/tree/step", b"step"),
        (b"a/b/latest", b"/tree/step/x", b"../../step/x"),
        (b"top", b"/tree", b"."),
        (b"a/top", b"//tree/./", b".."),
        (b"a", b"/trees/step", None),
        (b"a", b"/tree/../x", None),
        (b"a", b"/", None),
    ],
)
def test_an_absolute_link_into_its_tree_becomes_relative(path: bytes, target: bytes, kept: bytes | None) -> None:
    assert stays_inside(path, target, (("tree",),)) == kept


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.dictionaries(st.sampled_from(["l", "d/l", "d/e/l", "m"]), targets, min_size=1))
def test_whatever_links_say_nothing_from_outside_arrives_and_what_is_kept_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, links: dict[str, str]
) -> None:
    for how in ("keep", "follow"):
        harness = Harness(tmp_path_factory.mktemp("links"))
        plant(harness.source, {"a": b"a", "d": {"b": b"b", "e": {"a": b"deep"}}})
        for name in "abd":
            (harness.directory / name).write_bytes(b"secret")
        for name, target in links.items():
            os.symlink(target, harness.source / name)
        # The tree is all that may be named, as the buffer is of a job.
        anchor = os.open(harness.source, os.O_RDONLY)
        item = harness.item()._replace(links=how)
        item = item._replace(source=item.source._replace(anchor=anchor, shown="$BUFFER", parts=()))
        receipt = harness.carry([item], OUT)
        os.close(anchor)
        found = [path for path in harness.destination.rglob("*") if path.is_file() and not path.is_symlink()]
        assert all(path.read_bytes() in (b"a", b"b", b"deep") for path in found)
        if how == "keep":
            made = {name for name in links if (harness.destination / name).is_symlink()}
            assert all(os.readlink(harness.destination / name) == links[name] for name in made)
            assert (receipt.links, receipt.left_out) == (len(made), len(links) - len(made))
        else:
            assert not any(path.is_symlink() for path in harness.destination.rglob("*"))
        harness.close()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.dictionaries(st.sampled_from(["l", "d/l", "d/e/l", "m"]), targets | st.just("/etc"), min_size=1))
def test_whatever_links_say_all_of_them_are_made_again_and_none_is_followed(
    tmp_path_factory: pytest.TempPathFactory, links: dict[str, str]
) -> None:
    for how, outgoing in (("asis", SMALL), ("asis", OUT), ("keep_all", SMALL), ("keep_all", OUT)):
        harness = Harness(tmp_path_factory.mktemp("links"))
        plant(harness.source, {"a": b"a", "d": {"b": b"b", "e": {"a": b"deep"}}})
        for name in "abd":
            (harness.directory / name).write_bytes(b"secret")
        for name, target in links.items():
            os.symlink(target, harness.source / name)
        receipt = harness.carry([harness.item()._replace(links=how)], outgoing)
        found = {path for path in harness.destination.rglob("*") if path.is_symlink()}
        assert found == {harness.destination / name for name in links}
        assert all(os.readlink(harness.destination / name) == target for name, target in links.items())
        files = [path for path in harness.destination.rglob("*") if path not in found and path.is_file()]
        assert sorted(path.read_bytes() for path in files) == [b"a", b"b", b"deep"]
        nowhere = {name for name in links if not os.path.exists(harness.source / name)}
        assert (receipt.links, receipt.left_out, receipt.dangling) == (len(links), 0, len(nowhere))
        assert {line.path for line in harness.lines() if line.kind == "link" and line.reason} == nowhere
        harness.close()


def test_a_link_is_made_once_and_found_again_by_the_next_attempt(harness: Harness) -> None:
    plant(harness.source, {"step": {"x": b"1"}, "old": b"x"})
    (harness.source / "latest").symlink_to("step")
    os.utime(harness.source / "latest", ns=(5, 7), follow_symlinks=False)
    first = harness.carry()
    made = os.lstat(harness.destination / "latest")
    assert made.st_mtime_ns == 7 and (first.links, first.files) == (1, 2)
    again = harness.carry()
    assert os.lstat(harness.destination / "latest").st_ino == made.st_ino
    assert again.digest == first.digest and [line.target for line in harness.lines() if line.kind == "link"] == ["step"]
    (harness.source / "latest").unlink()
    (harness.source / "latest").symlink_to("old")
    harness.carry()
    assert os.readlink(harness.destination / "latest") == "old"


def test_a_link_replaces_a_file_or_a_link_and_nothing_else_and_only_where_it_may(harness: Harness) -> None:
    (harness.source / "l").symlink_to("x")
    (harness.destination / "l").write_bytes(b"old")
    with pytest.raises(TransferFailed, match="destination/l exists and may not be replaced"):
        harness.carry(options=replace(SMALL, replace=False))
    harness.carry()
    assert os.readlink(harness.destination / "l") == "x"
    (harness.destination / "l").unlink()
    (harness.destination / "l").mkdir()
    with pytest.raises(TransferFailed, match="destination/l exists and is a directory; a link can only replace"):
        harness.carry()
    assert harness.parts() == []


def test_a_link_out_of_the_tree_fails_what_goes_in_and_is_left_out_of_what_goes_out(harness: Harness) -> None:
    (harness.source / "l").symlink_to(secret(harness))
    with pytest.raises(TransferFailed, match="source/l is a symbolic link to .*secret', outside the staged tree"):
        harness.carry()
    receipt = harness.carry(options=OUT)
    why = f"a symbolic link to {harness.directory}/secret, outside the staged tree"
    assert receipt.left_out_first == (LeftOut("l", why),) and os.listdir(harness.destination) == []


def test_links_that_are_followed_arrive_as_what_they_lead_to_and_circles_are_left_out(harness: Harness) -> None:
    plant(secret(harness) / "in", {"f": b"f", "large": bytes(range(256)) * 100})
    plant(harness.source, {"d": {}})
    (harness.source / "data").symlink_to("../secret/in")
    (harness.source / "one").symlink_to(harness.directory / "secret" / "in" / "f")
    (harness.source / "d" / "up").symlink_to("..")
    (harness.source / "gone").symlink_to("nowhere")
    receipt = harness.carry([harness.item()._replace(links="follow")], OUT)
    arrived = harness.destination
    assert (arrived / "data" / "large").read_bytes() == bytes(range(256)) * 100
    assert (arrived / "data" / "f").read_bytes() == (arrived / "one").read_bytes() == b"f"
    assert receipt.files == 3 and not (arrived / "data").is_symlink()
    assert receipt.left_out_first == (
        LeftOut("d/up", "a symbolic link to .., which contains the link itself"),
        LeftOut("gone", "a symbolic link to nowhere, which has no target in the permitted directories"),
    )


def test_a_path_is_followed_beneath_its_anchor_only_and_not_for_ever(harness: Harness) -> None:
    plant(harness.source, {"a": {"f": b"f"}})
    (harness.source / "out").symlink_to("../../etc")
    (harness.source / "circle").symlink_to("circle")
    for number in range(LINKS_MAX + 1):
        (harness.source / f"l{number}").symlink_to(f"l{number - 1}" if number else "a/f")
    target = harness.target(harness.source)
    for parts, found in (
        (("a", "f"), ("source", "a", "f")),
        ((f"l{LINKS_MAX - 1}",), ("source", "a", "f")),
        ((f"l{LINKS_MAX}",), None),
        (("circle",), None),
        (("out", "passwd"), None),
        (("a", "none"), None),
    ):
        led = leads_to(target._replace(parts=(*target.parts, *parts)))
        assert (led and led.parts) == found


def test_links_that_were_moved_go_from_the_source_and_those_that_were_left_out_stay(harness: Harness) -> None:
    plant(harness.source, {"step": b"1"})
    (harness.source / "latest").symlink_to("step")
    (harness.source / "out").symlink_to("/etc")
    receipt = harness.carry([harness.item(move=True)], OUT)
    assert (receipt.removed_files, receipt.links) == (1, 1)
    assert [path.name for path in harness.source.iterdir()] == ["out"]
    assert sorted(os.listdir(harness.destination)) == ["latest", "step"]


def test_what_is_not_there_fails_at_the_end_and_partial_leaves_it_out(harness: Harness) -> None:
    (harness.source / "a").write_bytes(b"a")
    items = [
        harness.item(ItemKind.FILE, harness.source / "gone", harness.destination / "gone"),
        harness.item(move=True),
    ]
    with pytest.raises(TransferFailed, match="source/gone does not exist; everything else is at its destination"):
        harness.carry(items, OUT)
    assert (harness.source / "a").exists() and (harness.destination / "a").read_bytes() == b"a"
    receipt = harness.carry(items, replace(OUT, partial=True))
    assert (receipt.complete, receipt.removed_files) == (True, 1)
    path = str(harness.source / "gone")
    assert receipt.left_out_first == (LeftOut(path, f"{path} does not exist"),)
