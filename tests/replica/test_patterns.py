"""Patterns in the sources of transfers: how they are read, resolved and rejected."""

from __future__ import annotations

import pytest

from forebay.replica.grammar import DirectiveRejected, PathVariables, read_request
from forebay.replica.model import Transfer, TransferKind
from forebay.replica.values import Rejection
from tests.replica.world import World

VARIABLES = PathVariables(given=(("HOME", "/homes/ali[c]e"),))


def transfer_of(line: str) -> Transfer:
    found = read_request(f"#!/bin/sh\n#DW jobdw capacity=1GiB\n#DW {line}\n", variables=VARIABLES).request
    assert found is not None
    return (*found.stage_in, *found.stage_out)[0]


@pytest.mark.parametrize(
    ("source", "base", "pattern"),
    [
        ("/data/*.h5", "/data/", "*.h5"),
        ("/data/run-?/[ab]*/x", "/data/", "run-?/[ab]*/x"),
        ("/*", "/", "*"),
        ("*.h5", "%d/", "*.h5"),
        ("./in/*", "%d/in/", "*"),
        ("%d/in/*_%j", "%d/in/", "*_%j"),
        ("$HOME/*", "/homes/ali[c]e/", "*"),
        ("/data/*/$HOME", "/data/", "*//homes/ali[[]c]e"),
        ("/data/*/\\\\[x]%j$HOME", "/data/", "*/[[]x]%%j$HOME"),
        # No patterns: nothing to choose from, or after two backslashes.
        ("/data/a[", "/data/a[", ""),
        ("/data/a]b[", "/data/a]b[", ""),
        ("/data/a[]", "/data/a[]", ""),
        ("/data/\\\\*.h5", "/data/\\\\*.h5", ""),
    ],
)
def test_a_source_is_a_directory_and_a_pattern_below_it(source: str, base: str, pattern: str) -> None:
    found = transfer_of(f"stage_in type=file destination=$DW_JOB_STRIPED/x source={source}")
    assert (found.outside, found.inside, found.pattern) == (base, "$DW_JOB_STRIPED/x", pattern)


def test_the_source_of_a_stage_out_and_directories_may_be_patterns() -> None:
    found = transfer_of("stage_out type=directory source=$DW_JOB_STRIPED/run-* destination=/home/alice/out/")
    assert found == Transfer(TransferKind.DIRECTORY, "/home/alice/out/", "$DW_JOB_STRIPED/", "run-*")
    # A destination is no pattern, and earlier backslashes make every character itself.
    assert not transfer_of("stage_out type=file source=$DW_JOB_STRIPED/a destination=/out/*").pattern
    assert not transfer_of("stage_in type=file destination=$DW_JOB_STRIPED/\\\\a source=/data/*").pattern


@pytest.mark.parametrize(
    ("line", "column", "sentence"),
    [
        ("stage_in type=file source=/data/**/x destination=$DW_JOB_STRIPED/x", 37, "does not descend"),
        ("stage_in type=file source=/data/*/../x destination=$DW_JOB_STRIPED/x", 31, "goes up with .."),
        ("stage_in type=file source=/a/../data/* destination=$DW_JOB_STRIPED/x", 31, "goes up with .."),
        ("stage_in type=file source=$HOME* destination=$DW_JOB_STRIPED/x", 31, "begins in the value of a variable"),
        ("stage_in type=file source=%d* destination=$DW_JOB_STRIPED/x", 31, "without a slash"),
        ("stage_in type=list source=/data/*.txt destination=$DW_JOB_STRIPED/x", 37, "one file holds the list"),
        ("stage_out type=file source=$DW_JOB_STRI*/a destination=/out/x", 32, "is not on the buffer"),
        ("stage_out type=file source=$FOREBAY_JOB_DIR/* destination=/out/x", 32, "directories of Forebay"),
        ("stage_in type=file source=/d/*/$NO destination=$DW_JOB_STRIPED/x", 36, "$NO is not permitted"),
    ],
)
def test_an_invalid_pattern_is_rejected_with_its_place(line: str, column: int, sentence: str) -> None:
    with pytest.raises(DirectiveRejected) as error:
        transfer_of(line)
    assert error.value.rejection.place == f"script line 3, column {column}"
    assert sentence in error.value.rejection.sentence


def world() -> World:
    return World(sources=("/in", "/out"), destinations=("/out",))


def submitted(name: str, *lines: str) -> Rejection | tuple[Transfer, ...]:
    known = world()
    script = "\n".join(["#!/bin/sh", "#DW jobdw capacity=1", *(f"#DW {line}" for line in lines), ""])
    job = known.try_submit(script=script, workdir="/out/[x]", name=name)
    if isinstance(job, Rejection):
        return job
    asked = known.state.jobs[job].request.buffer
    assert asked is not None
    return (*asked.stage_in, *asked.stage_out)


def test_symbols_in_a_pattern_match_their_values_only() -> None:
    found = submitted("a*[b]", "stage_in type=file source=in/*_%x_%j destination=$DW_JOB_STRIPED")
    assert found == (Transfer(TransferKind.FILE, "/out/[x]/in/", "$DW_JOB_STRIPED", "*_a[*][[]b]_1"),)


def test_a_symbol_cannot_lead_out_of_the_directory() -> None:
    found = submitted("../..", "stage_in type=file source=/in/*/%x/a destination=$DW_JOB_STRIPED")
    assert isinstance(found, Rejection) and ".." in found.sentence


def test_the_directory_before_a_pattern_must_be_permitted() -> None:
    found = submitted("a", "stage_in type=file source=/etc/*/a destination=$DW_JOB_STRIPED")
    assert isinstance(found, Rejection) and found.place == "script line 3, column 24"


def test_patterns_may_share_a_destination_with_each_other_and_not_with_a_tree() -> None:
    both = [f"stage_out type=file source=$DW_JOB_STRIPED/{name} destination=/out/all" for name in ("*.a", "b/*.b")]
    assert not isinstance(submitted("a", *both), Rejection)
    tree = "stage_out type=directory source=$DW_JOB_STRIPED/d destination=/out/all"
    found = submitted("a", both[0], tree)
    assert isinstance(found, Rejection) and "overlaps" in found.sentence


def test_copies_may_share_a_directory_that_ends_in_a_slash_and_no_other_destination() -> None:
    copies = [f"copy_out source=$DW_JOB_STRIPED/{name} destination=/out/all" for name in "ab"]
    found = submitted("a", *copies)
    assert isinstance(found, Rejection) and "overlaps" in found.sentence
    assert not isinstance(submitted("a", *(f"{copy}/" for copy in copies)), Rejection)


def test_tasks_of_an_array_have_patterns_of_their_own() -> None:
    known = world()
    line = "#DW stage_in type=file source=/in/*_%a destination=$DW_JOB_STRIPED"
    first = known.submit(script=f"#!/bin/sh\n#DW jobdw capacity=1\n{line}\n", array=(1, 2), output="/out/log")
    patterns = []
    for job in (first, first + 1):
        asked = known.state.jobs[job].request.buffer
        assert asked is not None
        patterns.append(asked.stage_in[0].pattern)
    assert patterns == ["*_1", "*_2"]
