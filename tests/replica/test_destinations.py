"""Destinations of transfers: the root of a buffer, files that go into directories, and overlaps."""

from __future__ import annotations

import itertools

import pytest

from forebay.replica.model.buffers import Transfer
from forebay.replica.values.errors import Rejection, RejectionCode
from tests.replica.world import World

SPACE = "#!/bin/sh\n#DW jobdw capacity=1\n"


def submitted(*directives: str) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]] | Rejection:
    """Submit a job with these directives; return its stage-in and stage-out, or the rejection."""
    world = World()
    found = world.try_submit(script=SPACE + "\n".join(f"#DW {line}" for line in directives) + "\n")
    if isinstance(found, Rejection):
        return found
    request = world.state.jobs[found].request.buffer
    assert request is not None
    return request.stage_in, request.stage_out


@pytest.mark.parametrize(
    ("directive", "outside", "inside"),
    [
        ("stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/", "/in/a", "$DW_JOB_STRIPED/a"),
        ("stage_in type=file source=/in/a destination=$DW_JOB_STRIPED", "/in/a", "$DW_JOB_STRIPED/a"),
        ("stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/sub/", "/in/a", "$DW_JOB_STRIPED/sub/a"),
        ("stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/sub", "/in/a", "$DW_JOB_STRIPED/sub"),
        ("stage_in type=file source=/in/%j destination=$DW_JOB_STRIPED/", "/in/1", "$DW_JOB_STRIPED/1"),
        ("stage_out type=file source=$DW_JOB_STRIPED/b destination=/out/sub/", "/out/sub/b", "$DW_JOB_STRIPED/b"),
        ("stage_out type=file source=$DW_JOB_STRIPED/b destination=/out/sub", "/out/sub", "$DW_JOB_STRIPED/b"),
        ("stage_in type=directory source=/in/a/ destination=$DW_JOB_STRIPED/", "/in/a/", "$DW_JOB_STRIPED/"),
        ("stage_out type=directory source=$DW_JOB_STRIPED destination=/out/r/", "/out/r/", "$DW_JOB_STRIPED"),
    ],
)
def test_a_file_goes_into_a_directory_as_with_cp(directive: str, outside: str, inside: str) -> None:
    found = submitted(directive)
    assert not isinstance(found, Rejection), found
    (transfer,) = found[0] + found[1]
    assert (transfer.outside, transfer.inside) == (outside, inside)


SOURCES = ("$DW_JOB_STRIPED", "$DW_JOB_STRIPED/a", "$DW_JOB_STRIPED/a/x", "$DW_JOB_STRIPED/b")
DESTINATIONS = ("/out/r", "/out/r/", "/out/r/x", "/out//r/./x/y", "/out/s")


def files_written(kind: str, source: str, destination: str) -> dict[str, str]:
    """Return which file of a model buffer each destination path gets."""
    files = ["a/x/y", "a/x/z", "a/y", "b/x/y", "b/y", "x/y", "r", "s", "a/x", "b"]
    base = "/".join(part for part in destination.split("/") if part != ".").replace("//", "/").rstrip("/")
    below = source.removeprefix("$DW_JOB_STRIPED").strip("/")
    if kind == "file":
        name = base + "/" + below.rpartition("/")[2] if destination.endswith("/") else base
        return {name: below}
    prefix = below + "/" if below else ""
    return {f"{base}/{path.removeprefix(prefix)}": path for path in files if path.startswith(prefix)}


def test_stage_outs_that_lose_a_file_are_rejected_and_others_are_not() -> None:
    rows = list(itertools.product(("file", "directory"), SOURCES, DESTINATIONS))
    rows = [row for row in rows if not (row[0] == "file" and row[1] == "$DW_JOB_STRIPED")]
    accepted = 0
    for one, other in itertools.product(rows, repeat=2):
        lines = [f"stage_out type={kind} source={source} destination={to}" for kind, source, to in (one, other)]
        found = submitted(*lines)
        first, second = files_written(*one), files_written(*other)
        loses = any(second.get(path, source) != source for path, source in first.items())
        if isinstance(found, Rejection):
            assert found.code is RejectionCode.INVALID_DIRECTIVE and "overlaps" in found.sentence
            assert found.place.startswith("script line 4, column ")
        else:
            assert not loses, lines
            accepted += 1
    assert accepted > len(rows)


@pytest.mark.parametrize(
    ("lines", "is_accepted"),
    [
        # One file, copied by its name and with the directory that it lies in.
        (("directory $DW_JOB_STRIPED/a /out/r", "file $DW_JOB_STRIPED/a/log /out/r/log"), True),
        (("directory $DW_JOB_STRIPED/a /out/r", "file $DW_JOB_STRIPED/log /out/r/log"), False),
        (("file $DW_JOB_STRIPED/a /out/r/", "file $DW_JOB_STRIPED/b /out/r/"), True),
        (("list /in/l /out/r", "list /in/m /out/r"), True),
        (("list /in/l /out/r", "directory $DW_JOB_STRIPED/a /out/r"), False),
        (("list /in/l /out/r/x", "directory $DW_JOB_STRIPED/a /out/r"), False),
        (("list /in/l /out/r", "directory $DW_JOB_STRIPED/a /out/r/sub"), True),
    ],
)
def test_overlaps_of_stage_outs(lines: tuple[str, ...], is_accepted: bool) -> None:
    found = submitted(*("stage_out type={} source={} destination={}".format(*line.split()) for line in lines))
    assert isinstance(found, Rejection) is not is_accepted, found


def test_stage_ins_may_merge_directories_but_not_replace_each_others_file() -> None:
    merged = submitted(
        "stage_in type=directory source=/in/a destination=$DW_JOB_STRIPED/",
        "stage_in type=directory source=/in/b destination=$DW_JOB_STRIPED/",
        "stage_in type=file source=/in/c destination=$DW_JOB_STRIPED/",
    )
    assert not isinstance(merged, Rejection)
    for destination in ("$DW_JOB_STRIPED/c", "$FOREBAY_JOB_DIR/striped/c", "${DW_JOB_STRIPED}/./c"):
        found = submitted(
            "stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/c",
            f"stage_in type=file source=/in/b destination={destination}",
        )
        assert isinstance(found, Rejection) and "overlaps" in found.sentence
