"""Scripts that are too long for the ledger: packed at the submit and unpacked on the node."""

import base64
import lzma
import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.agent.scripts.record import unpack_script
from forebay.cluster.cli.exits import ExitCode, Failure
from forebay.cluster.cli.submission.request import PreparedSubmit, pack_script, prepare
from forebay.replica.grammar.directives import read_request
from forebay.replica.grammar.lexer import PACKED_MARK, script_bytes_max, split_packed
from forebay.replica.messages import commands as c
from forebay.replica.model.requests import JobRequest
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.limits import (
    BATCH_BYTES_MAX,
    ENVIRONMENT_BYTES_MAX,
    PACKED_HEAD_BYTES_MAX,
    PACKED_SCRIPT_BYTES_MAX,
    SCRIPT_BYTES_MAX,
    SUBMITTED_SCRIPT_BYTES_MAX,
)
from forebay.replica.values.units import Instant
from tests.replica.world import World, user

HEAD = "#!/bin/bash\n#SBATCH -c 2\n\n# text\n#DW jobdw capacity=1GiB access_mode=striped type=scratch\n"
LINES = st.sampled_from(
    ["", "# text", "#DW jobdw", "#BB_LUA x", "#SBATCH -c 2", "echo ü", "  # indented", "\t", "#", "x\r"]
)
SCRIPTS = st.lists(LINES, max_size=12).map(lambda lines: "\n".join(["#!/bin/sh", *lines, "true"]))


def submitted(script: str) -> PreparedSubmit:
    return prepare(script.encode(), "job.sh", {}, directory=Path("/w"), environment={}, now=Instant(0))


def decided(script: str) -> Rejection | int:
    return World().settle(c.SubmitJob(JobRequest("job", "alan", script, "/w", 60)), user())


@given(SCRIPTS)
def test_unpacking_restores_a_script_and_packing_keeps_directives(script: str) -> None:
    found = pack_script(script, "job.sh")
    assert unpack_script(found) == script
    head, rest = split_packed(found) or ("", "")
    assert script.startswith(head.removesuffix("\n")) and found.startswith(head) and rest
    directives = [(at, line) for at, line in enumerate(script.split("\n")) if line.startswith("#DW")]
    top = next((at for at, line in enumerate(script.split("\n")) if line.strip() and not line.startswith("#")), 99)
    assert [(at, line) for at, line in enumerate(head.split("\n")) if line.startswith("#DW")] == [
        (at, line) for at, line in directives if at < top
    ]


@given(SCRIPTS)
def test_short_scripts_are_sent_unpacked(script: str) -> None:
    assert unpack_script(script) == script and script_bytes_max(script) == SCRIPT_BYTES_MAX


@pytest.mark.parametrize(
    "rest",
    ["", "abc", "not base85 \"", base64.b85encode(b"no lzma").decode(), "é",
     base64.b85encode(lzma.compress(b"\xff")).decode(), base64.b85encode(lzma.compress(b"x" * 99)[:-9]).decode()],
)  # fmt: skip
def test_a_script_that_only_looks_packed_runs_unchanged(rest: str) -> None:
    script = f"#!/bin/sh{PACKED_MARK}{rest}\n"
    assert unpack_script(script) == script


@pytest.mark.parametrize("rest", ['"' * 9, "\x01" * 9, "a b", "a\nb"])
def test_scripts_that_grow_when_sent_have_the_ordinary_limit(rest: str) -> None:
    """A packed script is as long in JSON, where it is sent to its agent."""
    script = f"#!/bin/sh{PACKED_MARK}{rest}"
    assert (split_packed(script), script_bytes_max(script)) == (None, SCRIPT_BYTES_MAX)
    assert script_bytes_max(f"#!/bin/sh{PACKED_MARK}abc") == PACKED_SCRIPT_BYTES_MAX


def test_unpacking_is_limited_to_the_submit_size() -> None:
    bomb = base64.b85encode(lzma.compress(bytes(64 * 1024 * 1024))).decode()
    script = f"#!/bin/sh{PACKED_MARK}{bomb}\n"
    assert len(bomb) < PACKED_SCRIPT_BYTES_MAX and unpack_script(script) == script


def long_script() -> str:
    """Return a script of the maximum length with numbered commands."""
    numbers = random.Random(7)
    lines = [HEAD]
    size = len(HEAD)
    while size < SUBMITTED_SCRIPT_BYTES_MAX:
        lines.append(f"srun -n1 ./simulate --seed {numbers.randrange(10**6)} --out results/run_{len(lines):06d}.dat\n")
        size += len(lines[-1])
    return "".join(lines).ljust(SUBMITTED_SCRIPT_BYTES_MAX)[:SUBMITTED_SCRIPT_BYTES_MAX]


def test_a_four_megabyte_script_runs_unchanged() -> None:
    script = long_script()
    prepared = submitted(script)
    sent = prepared.fields["script"]
    assert len(sent) <= PACKED_SCRIPT_BYTES_MAX and prepared.fields["cpus"] == 2
    assert msgspec.json.encode(sent)[1:-1].decode().count("\\") == sent.count("\n"), "nothing of it is escaped"
    assert unpack_script(sent) == script
    assert isinstance(decided(sent), int)
    assert read_request(sent, "").request == read_request(script[:4096], "").request


def test_a_long_script_of_comments_is_accepted() -> None:
    script = "#!/bin/sh\n" + "# text of a generated script\n" * 140_000
    assert unpack_script(submitted(script).fields["script"]) == script


def test_an_incompressible_long_script_is_rejected_with_both_limits() -> None:
    script = "#!/bin/sh\n" + random.Random(7).randbytes(SCRIPT_BYTES_MAX * 2).hex()
    with pytest.raises(Failure) as caught:
        submitted(script)
    assert caught.value.code is ExitCode.BAD_INPUT and caught.value.place == "job.sh"
    assert str(SCRIPT_BYTES_MAX) in caught.value.sentence and str(PACKED_SCRIPT_BYTES_MAX) in caught.value.sentence


def test_too_many_comment_lines_at_the_top_are_rejected_with_a_remedy() -> None:
    script = "#!/bin/sh\n" + "#text\n" * SCRIPT_BYTES_MAX
    with pytest.raises(Failure, match=rf"comment lines .* more than {PACKED_HEAD_BYTES_MAX} bytes"):
        submitted(script)


@pytest.mark.parametrize("excess", [0, 1])
def test_the_controller_accepts_packed_scripts_up_to_its_limit(excess: int) -> None:
    beginning = f"#!/bin/sh{PACKED_MARK}"
    found = decided(beginning.ljust(PACKED_SCRIPT_BYTES_MAX + excess, "x"))
    if excess:
        assert isinstance(found, Rejection) and found.code is RejectionCode.LIMIT_EXCEEDED and found.place == "script"
    else:
        assert isinstance(found, int)


def test_the_longest_script_fits_into_a_batch() -> None:
    assert PACKED_SCRIPT_BYTES_MAX + ENVIRONMENT_BYTES_MAX + 3 * 64 * 1024 < BATCH_BYTES_MAX
