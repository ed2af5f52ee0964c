"""What a request may say, and where each mistake is named."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.grammar import directives
from forebay.replica.grammar.directives import (
    REMEMBERED_CHARACTERS_MAX,
    REQUESTS_REMEMBERED,
    parse_request,
    read_request,
)
from forebay.replica.grammar.lexer import REJECTIONS_MAX, DirectiveRejected
from forebay.replica.model.buffers import Access, TransferKind
from forebay.replica.values.errors import RejectionCode

FULL = """#!/bin/bash
#SBATCH --job-name=x
#DW jobdw type=scratch capacity=1GB access_mode=striped,private pool=fast

#DW stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/a
# a comment
#DW stage_out type=directory \\
#DW   source=${DW_JOB_PRIVATE}/out destination=/out/%j
srun application
#DW stage_in type=file source=/late destination=$DW_JOB_STRIPED/late
"""


def test_directives_at_the_top_of_a_script_are_read_and_later_ones_are_comments() -> None:
    request = parse_request(FULL)
    assert request is not None
    assert (request.pool, request.capacity_bytes) == ("fast", 10**9)
    assert request.access == (Access.STRIPED, Access.PRIVATE)
    assert [(t.kind, t.outside, t.inside) for t in request.stage_in] == [
        (TransferKind.FILE, "/in/a", "$DW_JOB_STRIPED/a")
    ]
    assert [(t.kind, t.outside, t.inside) for t in request.stage_out] == [
        (TransferKind.DIRECTORY, "/out/%j", "${DW_JOB_PRIVATE}/out")
    ]
    assert request.places[:2] == ("script line 3, column 65", "script line 3, column 24")
    assert request.places[3] == "script line 8, column 36"


def test_a_script_without_directives_asks_for_nothing() -> None:
    assert parse_request("#!/bin/sh\n#BBQ\n#DWARF x\necho\n") is None


def test_the_short_form_of_bb_stands_for_the_line_that_slurm_writes() -> None:
    request = parse_request("#!/bin/sh\n", bb="capacity=1G access=striped type=scratch")
    assert request is not None
    assert request.text == "#DW jobdw capacity=1GiB access_mode=striped type=scratch"
    assert request.capacity_bytes == 2**30


def test_directives_of_the_command_line_and_of_a_file_are_added_to_those_of_the_script() -> None:
    script = "#!/bin/sh\n#DW stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/a\n"
    file = "#DW stage_in type=file source=/in/b destination=$DW_JOB_STRIPED/b\n"
    request = parse_request(script, bb="capacity=1G", bbf=file)
    assert request is not None
    assert [transfer.outside for transfer in request.stage_in] == ["/in/b", "/in/a"]
    assert request.places[2] == "--bbf line 1, column 24"


DIRECTIVE, CAPACITY = RejectionCode.INVALID_DIRECTIVE, RejectionCode.INVALID_CAPACITY
REFUSED = [
    ("#DW jobdw capacity=0", 11 + 9, "zero", CAPACITY),
    ("#DW jobdw capacity=-5", 20, "sign", CAPACITY),
    ("#DW jobdw capacity=10QB", 22, "unknown suffix", CAPACITY),
    ("#DW jobdw capacity=99999999999PiB", 20, "overflows", CAPACITY),
    ("#DW jobdw capacity=", 20, "is empty", DIRECTIVE),
    ("#DW jobdw type=scratch", 5, "no capacity", CAPACITY),
    ("#DW jobdw capacity=1G type=cache", 28, "not supported", DIRECTIVE),
    ("#DW jobdw capacity=1G type=tape", 28, "unknown type 'tape'", DIRECTIVE),
    ("#DW jobdw capacity=abc", 20, "does not start with a number", CAPACITY),
    ("#DW jobdw capacity=+5", 20, "sign", CAPACITY),
    ("#DW jobdw capacity=1KX", 21, "unknown suffix 'KX'", CAPACITY),
    ("#DW jobdw capacity=1GB,pool=p", 23, "unexpected character ','", CAPACITY),
    ("#DW jobdw capacity=1.5N", 21, "fraction of a node", CAPACITY),
    ("#DW jobdw capacity=0N", 20, "zero", CAPACITY),
    ("#DW jobdw capacity=1G hurry", 23, "'hurry' is not an option", DIRECTIVE),
    ("#DW jobdw capacity=1G k=a\\ pool=x", 26, "ends in a backslash that continues nothing", DIRECTIVE),
    ("#DW jobdw capacity=1G k=a\\ \\\n#DW", 23, "ends in a backslash, but no line follows", DIRECTIVE),
    ("#DW jobdw capacity=1G =x", 23, "is not an option", DIRECTIVE),
    ("#DW jobdw capacity=1G access_mode=striped,striped", 43, "written twice", DIRECTIVE),
    ("#DW jobdw capacity=1G access_mode=", 35, "is empty", DIRECTIVE),
    ("#DW jobdw capacity=1G pool=" + "x" * 65, 28, "longer than 64", DIRECTIVE),
    ("#DW jobdw", 5, "no capacity", CAPACITY),
    ("#DW jobdw capacity=1G \x1b[2J", 23, "U+001B", DIRECTIVE),
    ("#DW jobdw capacity=1G capacity=2G", 23, "twice", DIRECTIVE),
    ("#DW jobdw capacity=1G access_mode=striped,shared", 43, "unknown access mode 'shared'", DIRECTIVE),
    ("#DW jobdw capacity=1G pool=no/pe", 28, "pool name", DIRECTIVE),
    ("#DW", 1, "has no directive after it", DIRECTIVE),
    ("#DW # jobdw capacity=1G", 1, "has no directive after it", DIRECTIVE),
    ("#DW jobdw capacity=1G type=swap", 28, "type=swap is not supported by the provider native", DIRECTIVE),
    ("#DW jobdw capacity=1G access_mode=striped(a", 35, "not enclosed in one pair of ( )", DIRECTIVE),
    ("#DW jobdw capacity=1G access_mode=striped,private(a)b", 43, "not enclosed in one pair of ( )", DIRECTIVE),
    ("#DW jobdw capacity=1G access_mode=striped()", 42, "empty options", DIRECTIVE),
    ("#DW jobdw capacity=1G access_mode=shared(a=b)", 35, "unknown access mode 'shared'", DIRECTIVE),
    ("#DW jobdw capacity=1G # why \\\n#DW pool=fast", 23, "continues after the line of this comment", DIRECTIVE),
    ("#DW stage_sideways x", 5, "unknown directive 'stage_sideways'", DIRECTIVE),
    ("#BB frobnicate", 5, "unknown directive 'frobnicate'", DIRECTIVE),
    ("#BB frob", 5, "unknown directive 'frob' of #BB", DIRECTIVE),
    ("#DW create_persistent name=abc capacity=1GB", 5, "is a directive of #BB, not of #DW", DIRECTIVE),
    ("#BB create_persistent name=1abc capacity=1GB", 28, "starts with a digit", DIRECTIVE),
    ("#BB create_persistent name=abc", 5, "no capacity=", CAPACITY),
    ("#BB create_persistent capacity=1GB", 5, "no name=", DIRECTIVE),
    ("#BB create_persistent name=a capacity=0", 39, "zero", CAPACITY),
    ("#BB create_persistent name=a capacity=1G access=shared", 49, "unknown access mode", DIRECTIVE),
    ("#BB create_persistent name=a capacity=1G access=striped access_mode=private", 57, "both written", DIRECTIVE),
    ("#BB create_persistent name=a/b capacity=1G", 28, "the name", DIRECTIVE),
    ("#BB destroy_persistent hurry", 5, "no name=", DIRECTIVE),
    ("#BB destroy_persistent name=a hurry hurry", 37, "hurry is written twice", DIRECTIVE),
    ("#DW persistentdw", 5, "no name=", DIRECTIVE),
    ("#DW persistentdw name=", 23, "is empty", DIRECTIVE),
    ("#DW persistentdw name=1", 23, "starts with a digit", DIRECTIVE),
    ("#DW swap", 5, "swap has no size", CAPACITY),
    ("#DW swap pool=fast", 5, "swap has no size", CAPACITY),
    ("#DW swap 2N", 10, "number of nodes", CAPACITY),
    ("#DW swap 2GX", 11, "unknown suffix", CAPACITY),
    ("#BB_LUA pool=a", 1, "#BB_LUA is not read on this cluster", DIRECTIVE),
    ("#BB capacity=1G colour=red", 17, "unknown option 'colour'", DIRECTIVE),
    ("#DW stage_in type=file source=/a", 5, "no destination=", DIRECTIVE),
    ("#DW stage_in type=tape source=/a destination=$DW_JOB_STRIPED/a", 19, "the type of stage_in is", DIRECTIVE),
    ("#DW stage_in type=list source=~/a destination=$DW_JOB_STRIPED/a", 31, "starts with ~", DIRECTIVE),
    ("#DW stage_in type=list source=/a destination=/b", 46, "not on the buffer", DIRECTIVE),
    ("#DW stage_in type=list source=/a destination=$DW_PERSISTENT_STRIPED_x/b", 34, "does not use the", DIRECTIVE),
    ("#DW stage_out type=file source=${DW_PERSISTENT_STRIPED_x}/b destination=/a", 25, "does not use the", DIRECTIVE),
    ("#DW stage_in type=file source=/a destination=$DW_PERSISTENT_STRIPED_/b", 46, "not on the buffer", DIRECTIVE),
    ("#DW stage_in type=list source=/a destination=$DW_JOB_PRIVATE/a", 34, "needs access_mode=private", DIRECTIVE),
    ("#DW stage_out type=list source=/a destination=../b", 47, "goes up with ..", DIRECTIVE),
    ("#DW stage_in type=file source=$NAME/a destination=$DW_JOB_STRIPED/a", 31, "$NAME is not permitted", DIRECTIVE),
    ("#DW stage_in type=file source=/a/../b destination=$DW_JOB_STRIPED/a", 31, "goes up", DIRECTIVE),
    ("#DW stage_in type=file source=/a destination=/b", 46, "not on the buffer", DIRECTIVE),
    ("#DW stage_in type=directory source=/a destination=$FOREBAY_JOB_DIR/", 51, "also contains directories", DIRECTIVE),
    ("#DW stage_out type=file source=$DW_JOB_STRIPED destination=/a", 32, "is the root of the buffer", DIRECTIVE),
    ("#DW stage_in type=file source=/a destination=$DW_JOB_STRIPED/a", 34, "has no buffer for", DIRECTIVE),
    ("#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/a", 25, "has no buffer for", DIRECTIVE),
    ("#DW stage_in type=list source=/a destination=$FOREBAY_JOB_DIR/a", 34, "has no buffer for", DIRECTIVE),
    ("#DW stage_in type=file source=/a destination=$DW_JOB_STRIPED/../x", 46, "goes up", DIRECTIVE),
    ("#DW stage_in type=file source=/a destination=$DW_JOB_PRIVATE/x", 34, "needs access_mode=private", DIRECTIVE),
    ("#DW jobdw capacity=1G \\", 23, "line after a continuation does not start with #DW", DIRECTIVE),
]  # fmt: skip


@pytest.mark.parametrize(("line", "column", "says", "code"), REFUSED, ids=[row[0] for row in REFUSED])
def test_a_mistake_is_named_with_line_and_column(line: str, column: int, says: str, code: RejectionCode) -> None:
    with pytest.raises(DirectiveRejected) as caught:
        read_request(f"#!/bin/sh\n#SBATCH -J x\n{line}\n")
    rejection = caught.value.rejection
    assert says in rejection.sentence
    assert rejection.place == f"script line 3, column {column}"
    assert rejection.code is code
    assert rejection.remedy


def test_two_requests_for_capacity_are_refused_at_the_second() -> None:
    with pytest.raises(DirectiveRejected, match="script line 2, column 5.*second time.*--bb line 1, column 1"):
        parse_request("#!/bin/sh\n#DW jobdw capacity=1G\n", bb="capacity=1G")


@pytest.mark.parametrize("text", ["nonsense", "capacity=abc", "capacity=1;stage_in cp a", "   ", "#DWX", "pool=fast"])
def test_bb_text_that_is_no_request_is_refused_never_ignored(text: str) -> None:
    with pytest.raises(DirectiveRejected):
        parse_request("#!/bin/sh\n", bb=text)


def test_a_continuation_with_nothing_after_it_is_refused() -> None:
    with pytest.raises(DirectiveRejected, match="line 1, column 23: the last directive ends in a continuation"):
        parse_request("#DW jobdw capacity=1G \\")


def test_a_mixed_continuation_is_refused() -> None:
    with pytest.raises(DirectiveRejected, match="line after a continuation does not start with #DW"):
        parse_request("#!/bin/sh\n#DW jobdw \\\n#BB capacity=1G\n")


@given(
    st.text(st.sampled_from("#DWB jobdw\n\\=capacity1G/ stage_in$ATRIPD%sourcedestination;-é\t\0\r"), max_size=120),
    st.booleans(),
)
def test_any_text_is_a_request_or_is_refused_with_a_place(text: str, in_bb: bool) -> None:
    try:
        reading = read_request("" if in_bb else text, bb=text if in_bb else "")
    except DirectiveRejected as refused:
        assert refused.rejection.sentence and refused.rejection.remedy and refused.rejection.place
    else:
        request = reading.request
        assert request is None or request.capacity_bytes or request.stage_in or request.stage_out or reading.request


LINES = st.lists(st.sampled_from([row[0] for row in REFUSED] + FULL.splitlines()), max_size=8)


@given(LINES)
def test_any_mix_of_lines_is_a_request_or_is_refused_with_a_place(lines: list[str]) -> None:
    try:
        read_request("\n".join(lines))
    except DirectiveRejected as refused:
        assert "line" in refused.rejection.place and "column" in refused.rejection.place


CRAY = (
    "access_mode=striped(client_cache=yes)",
    "access_mode=private(MFS=1GiB)",
    "access_mode=striped(client_cache=no),private(MFS=1GiB,max=2),ldbalance",
    "type=swap",
    "# a comment, with capacity=5TB in it",
    "debug",
    "#",
)


@pytest.mark.parametrize("provider", ["datawarp", "generic"])
@pytest.mark.parametrize("words", [*CRAY, " ".join((CRAY[2], *CRAY[3:][::-1]))])
def test_what_crays_requests_have_is_taken_and_kept_as_it_is_written(provider: str, words: str) -> None:
    line = f"#DW jobdw capacity=1GB {words}"
    request = read_request(f"#!/bin/sh\n{line}\ntrue\n", provider=provider).request
    assert request is not None and (request.text, request.capacity_bytes) == (line, 10**9)
    named = [way.name.lower() for way in request.access]
    assert named == re.findall("striped|private|ldbalance", words.partition("#")[0]) or named == ["striped"]


@pytest.mark.parametrize("words", CRAY)
def test_what_crays_requests_have_is_no_matter_to_a_persistent_buffer_either(words: str) -> None:
    access = words.replace("access_mode", "access")
    script = f"#!/bin/sh\n#BB create_persistent name=a capacity=1GB {access}\ntrue\n"
    request = read_request(script, provider="datawarp").request
    assert request is not None
    (made,) = request.creates
    assert made.access_text == (access.partition("=")[2] if access.startswith("access") else "")
    assert made.type == ("swap" if words == "type=swap" else "")


@pytest.mark.parametrize("words", [*CRAY[:3], CRAY[4]])
def test_options_of_access_modes_and_comments_are_read_by_the_provider_native_too(words: str) -> None:
    reading = read_request(f"#!/bin/sh\n#DW jobdw capacity=1GB {words}\ntrue\n")
    assert reading.request is not None and reading.request.capacity_bytes == 10**9
    assert ["have no effect with the provider native" in line for line in reading.warnings] == [True] * ("(" in words)


def test_a_request_that_was_read_lately_is_not_read_again_and_what_is_remembered_is_bounded() -> None:
    directives._read_request_cached.cache_clear()
    first = read_request(FULL)
    assert read_request("".join(FULL)) == first and directives._read_request_cached.cache_info().hits == 1
    for number in range(2 * REQUESTS_REMEMBERED):
        read_request(FULL + f"# {number}\n")
    read_request(FULL + "#" * REMEMBERED_CHARACTERS_MAX)
    info = directives._read_request_cached.cache_info()
    assert info.currsize == REQUESTS_REMEMBERED and info.misses == 1 + 2 * REQUESTS_REMEMBERED
    # The site's grammar is part of the question.
    with pytest.raises(DirectiveRejected, match="#BB_LUA is not read"):
        read_request("#!/bin/sh\n#BB_LUA pool=fast capacity=1GB\n")
    assert read_request("#!/bin/sh\n#BB_LUA pool=fast capacity=1GB\n", provider="lua").request is not None


@pytest.mark.parametrize(
    ("script", "place", "says"),
    [
        ("#!/bin/sh\n  #DW jobdw capacity=1G\n", "script line 2, column 3", "indented line is not read"),
        ("#!/bin/sh\n\t#DW jobdw capacity=1G\n#DW jobdw capacity=1G\n", "script line 2, column 2", "indented"),
        ("#!/bin/sh\ntrue\n #DW jobdw capacity=1G\n", "script line 3, column 2", "indented"),
        ("#!/bin/sh\ntrue\n#DW jobdw capacity=1G\n", "script line 3, column 1", "after the first command"),
    ],
)
def test_a_directive_that_is_not_read_is_warned_of(script: str, place: str, says: str) -> None:
    reading = read_request(script)
    assert reading.request is None
    (warning,) = reading.warnings
    assert warning.startswith(f"{place}: #DW ") and says in warning


@given(st.lists(st.sampled_from(["#DW wobble", "#DW jobdw capacity=many", "#BB wobble", "#DW", "# text"]), max_size=80))
def test_every_wrong_directive_is_refused_at_its_line_in_order(lines: list[str]) -> None:
    wrong = [number for number, line in enumerate(lines, start=2) if line != "# text"]
    if not wrong:
        return
    with pytest.raises(DirectiveRejected) as caught:
        parse_request("\n".join(["#!/bin/sh", *lines, "true"]))
    found = [caught.value.rejection, *caught.value.others]
    assert [int(one.place.split()[2].rstrip(",")) for one in found] == wrong[:REJECTIONS_MAX]


def test_a_right_directive_after_a_wrong_one_is_not_refused() -> None:
    right = (
        "#DW stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/a\n#BB create_persistent name=a capacity=1G"
    )
    with pytest.raises(DirectiveRejected) as caught:
        parse_request(f"#!/bin/sh\n#DW jobdw capacity=many\n{right}\n#DW wobble\ntrue\n")
    assert [one.place for one in (caught.value.rejection, *caught.value.others)] == [
        "script line 2, column 20",
        "script line 5, column 5",
    ]
