"""Every line of the table of requests (SEMANTICS.md), each form of --bb, each provider."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.decide.buffer_request import is_ordinary_buffer
from forebay.replica.grammar.directives import ParsedRequest, read_request
from forebay.replica.grammar.lexer import DirectiveRejected
from forebay.replica.grammar.request import SUGGESTIONS_MAX
from forebay.replica.model.buffers import Access, Transfer, TransferKind
from forebay.replica.model.requests import BufferRequest, CreatePersistent, DestroyPersistent, ListTransfer
from forebay.replica.values.errors import RejectionCode
from forebay.replica.values.limits import DIRECTIVE_TEXT_BYTES_MAX, PERSISTENT_PER_JOB_MAX, TRANSFERS_PER_STAGE_MAX
from forebay.replica.values.units import SIZE_BYTES_MAX
from tests.fuzzing.runner import asked
from tests.replica.reference.printing import format_request

GIB = 1024**3


def read(*lines: str, **more: Any) -> ParsedRequest:
    return read_request("\n".join(["#!/bin/sh", *lines, "true", ""]), **more)


def request_of(*lines: str, **more: Any) -> BufferRequest:
    request = read(*lines, **more).request
    assert request is not None
    return request


def options_of(*lines: str, **more: Any) -> BufferRequest:
    return request_of(*lines, **more)


def refused(*lines: str, **more: Any) -> str:
    with pytest.raises(DirectiveRejected) as caught:
        read(*lines, **more)
    assert caught.value.rejection.remedy
    return str(caught.value)


# Directives ----------------------------------------------------------------------------------------------------------


def test_the_script_of_the_guide_is_read_whole() -> None:
    found = read(
        "#BB create_persistent name=alpha capacity=32GB access=striped type=scratch",
        "#DW jobdw type=scratch capacity=1GB access_mode=striped pfs=/scratch",
        "#DW stage_in type=file source=/home/alice/x destination=$DW_JOB_STRIPED/data",
        "#DW stage_out type=file destination=/home/alice/data.out source=$DW_JOB_STRIPED/data",
    )
    assert found.request is not None
    assert found.request.capacity_bytes == 10**9
    assert found.request.stage_out == (Transfer(TransferKind.FILE, "/home/alice/data.out", "$DW_JOB_STRIPED/data"),)
    assert found.request.creates == (
        CreatePersistent("alpha", 32 * 10**9, "", (Access.STRIPED,), "scratch", "script line 2, column 34"),
    )
    assert found.request.options == ("jobdw pfs=/scratch",)
    assert "pfs= has no effect" in found.warnings[0]


def test_persistent_buffers_are_made_used_and_removed() -> None:
    options = options_of(
        "#BB create_persistent name=alpha capacity=32GB access_mode=private pool=fast",
        "#BB create_persistent capacity=2N name=beta type=scratch",
        "#DW persistentdw name=alpha",
        "#BB destroy_persistent name=gamma hurry",
        "#BB destroy_persistent name=delta",
    )
    assert [(one.name, one.capacity_bytes, one.units) for one in options.creates] == [
        ("alpha", 32 * 10**9, "bytes"),
        ("beta", 2, "count"),
    ]
    assert (options.creates[0].access, options.creates[0].pool) == ((Access.PRIVATE,), "fast")
    assert options.uses == ("alpha",)
    assert options.destroys == (
        DestroyPersistent("gamma", True, "script line 5, column 24"),
        DestroyPersistent("delta", False, "script line 6, column 24"),
    )


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (("#BB destroy_persistent name=a", "#DW persistentdw name=a"), "line 2, column 24: .*and uses it at .* line 3"),
        (("#BB create_persistent name=a capacity=1G", "#BB destroy_persistent name=a"), "line 3.*creates it"),
        (("#DW persistentdw name=a", "#DW persistentdw name=a"), "line 3, column 18: .*second time.*line 2, column 18"),
        (("#BB destroy_persistent name=a",) * 2, "line 3, column 24: .*destroyed a second time"),
        (("#BB create_persistent name=a capacity=1G",) * 2, "line 3, column 23: .*created a second time"),
        (("#DW swap 1G", "#DW swap 1G"), "line 3, column 5: swap is requested a second time"),
        (("#DW swap 1G pool=a", "#DW jobdw capacity=1G pool=b"), "line 2, column 5: .*different pools"),
        (("#DW swap 1G", "#DW jobdw capacity=2N"), "line 2, column 5: .*nodes"),
    ],
)
def test_what_contradicts_itself_is_refused_where_it_stands(lines: tuple[str, ...], says: str) -> None:
    with pytest.raises(DirectiveRejected, match=says):
        read(*lines)


@pytest.mark.parametrize(
    ("text", "size_bytes", "warned"),
    [("2GiB", 2 * GIB, False), ("2", 2 * GIB, True), ("1.5", 3 * GIB // 2, True), ("500MB", 500 * 10**6, False)],
)
def test_swap_counts_gib_without_a_suffix_as_in_slurm(text: str, size_bytes: int, warned: bool) -> None:
    found = read(f"#DW swap {text} pool=fast")
    assert found.request is not None
    assert (found.request.pool, found.request.capacity_bytes, found.request.swap_bytes) == ("fast", 0, size_bytes)
    assert bool(found.warnings) is warned


def test_lists_of_files_are_kept_with_their_direction() -> None:
    options = options_of(
        "#DW jobdw capacity=1G",
        "#DW stage_out type=list source=/in/out.list destination=/out/x",
        "#DW stage_in type=list source=/in/in.list destination=$DW_JOB_STRIPED/x",
    )
    assert options.lists == (
        ListTransfer(False, "/in/in.list", "$DW_JOB_STRIPED/x", "script line 4, column 24"),
        ListTransfer(True, "/in/out.list", "/out/x", "script line 3, column 25"),
    )


def test_an_option_that_is_not_known_is_kept_and_the_submitter_is_warned() -> None:
    found = read(
        "#DW jobdw capacity=1G colour=red", "#DW stage_in type=file source=/a destination=$DW_JOB_STRIPED/a k=v"
    )
    assert found.request is not None
    assert found.request.options == ("jobdw colour=red", "stage_in k=v")
    assert found.warnings == (
        "script line 2, column 23: the option colour= is not known here; it is kept and passed on",
        "script line 3, column 64: the option k= is not known here; it is kept and passed on",
    )


@pytest.mark.parametrize(
    ("capacity", "value", "units"),
    [
        ("10GiB", 10 * GIB, "bytes"),
        ("1.5TB", 1_500_000_000_000, "bytes"),
        ("3", 3, "bare"),
        ("2N", 2, "count"),
        ("4nodes", 4, "count"),
    ],
)
def test_a_capacity_says_what_it_counts(capacity: str, value: int, units: str) -> None:
    found = read(f"#DW jobdw capacity={capacity}")
    assert found.request is not None and found.request.capacity_bytes == value
    assert found.request.units == units


def test_what_needs_nothing_new_has_no_record() -> None:
    found = request_of("#DW jobdw capacity=1G", "#DW stage_in type=file source=/a destination=$DW_JOB_STRIPED/a")
    assert is_ordinary_buffer(found)


# Lines ---------------------------------------------------------------------------------------------------------------


def test_the_scan_ends_at_the_first_command_and_warns_of_what_it_does_not_read() -> None:
    found = read("", "  ", "echo hi", "#DW jobdw capacity=1G")
    assert found.request is None
    assert found.warnings == ("script line 5, column 1: #DW after the first command is not read; move it up",)


def test_an_indented_directive_is_no_directive() -> None:
    assert read(" #DW jobdw capacity=1G", "#DW jobdw capacity=1G").request is None


@pytest.mark.parametrize("head", ["#DWARF", "#BBQ", "#dw", "#BB_LUAX"])
def test_what_only_begins_like_a_directive_is_a_comment_with_a_warning(head: str) -> None:
    found = read(f"{head} jobdw capacity=1G")
    assert found.request is None
    assert found.warnings[0].startswith(f"script line 2, column 1: {head!r} is a comment, not a directive")


@pytest.mark.parametrize("line", ["#SBATCH -n1", "# DW jobdw", "#", "##DW x", "#PBS -l x"])
def test_an_ordinary_comment_is_left_in_peace(line: str) -> None:
    assert read(line) == ParsedRequest(None, ())


def test_continued_lines_are_one_directive_and_keep_their_places() -> None:
    found = request_of("#DW jobdw \\", "#DW  capacity=2GB \\  ", "#DW pool=test_pool")
    assert (found.capacity_bytes, found.pool) == (2 * 10**9, "test_pool")
    assert found.places[:2] == ("script line 4, column 5", "script line 3, column 6")
    assert found.text == "#DW jobdw capacity=2GB pool=test_pool"


def test_two_backslashes_at_the_end_stop_symbols_and_continue_nothing() -> None:
    found = request_of("#DW jobdw capacity=1G", "#DW stage_in type=file source=/a destination=$DW_JOB_STRIPED/a\\\\")
    assert len(found.stage_in) == 1


def test_symbols_are_stopped_to_the_end_of_the_line_not_of_the_word() -> None:
    found = request_of("#DW stage_in type=file source=/a\\\\%j destination=$DW_JOB_STRIPED/%j", "#DW jobdw capacity=1G")
    assert found.stage_in[0] == Transfer(TransferKind.FILE, "/a\\\\%j", "\\\\$DW_JOB_STRIPED/%j")


def test_transfers_and_persistent_buffers_are_bounded() -> None:
    move = "#DW stage_in type=file source=/a destination=$DW_JOB_STRIPED/a"
    assert "more than" in refused(*[move] * (TRANSFERS_PER_STAGE_MAX + 1))
    uses = [f"#DW persistentdw name=p{number}" for number in range(PERSISTENT_PER_JOB_MAX + 1)]
    assert f"script line {PERSISTENT_PER_JOB_MAX + 2}, column 18" in refused(*uses)


# --bb and --bbf ------------------------------------------------------------------------------------------------------

SHORT = [
    ("capacity=1G access=striped type=scratch", "#DW jobdw capacity=1GiB access_mode=striped type=scratch"),
    ("swap=2 capacity=1G pool=test_pool", "#DW swap 2GiB pool=test_pool\n#DW jobdw capacity=1GiB pool=test_pool"),
    ("swap=1.025KB", "#DW swap 1.025KB"),
    ("capacity=2n", "#DW jobdw capacity=2N"),
    ("  capacity=3\taccess=striped,private ", "#DW jobdw capacity=3 access_mode=striped,private"),
]


@pytest.mark.parametrize(("text", "lines"), SHORT)
def test_the_short_form_stands_for_the_lines_that_slurm_writes(text: str, lines: str) -> None:
    found = read(bb=text)
    assert found.request is not None and found.request.text == lines
    written = read(bbf=lines)
    assert asked(found.request) == asked(written.request)


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("nonsense", 1, "'nonsense' is not an option"),
        ("foo=bar", 1, "unknown option 'foo'"),
        ("capacity=zzz", 10, "does not start with a number"),
        ("capacity=1G foo=bar", 13, "unknown option 'foo'"),
        ("pool=fast", 1, "no capacity"),
        ("swap=1 access=striped", 8, "without capacity="),
        ("swap=-1", 6, "sign"),
        ("create_persistent name=a capacity=1G", 1, "--bb may not contain create_persistent"),
        ("#BB create_persistent name=a capacity=1G", 5, "--bb may not contain create_persistent"),
        ("#BB destroy_persistent name=a", 5, "--bb may not contain destroy_persistent"),
        ("#SBATCH -n1", 1, "contains no directive"),
        ("capacity=1\x1bG", 11, "U+001B"),
        ("capacity=1G\npool=", 18, "is empty"),
    ],
)
def test_a_mistake_in_bb_is_named_with_its_column(text: str, column: int, says: str) -> None:
    found = refused(bb=text)
    assert found.startswith(f"--bb line 1, column {column}: ") and says in found


def test_a_number_without_a_unit_in_bb_is_bytes_and_warned_of() -> None:
    found = read(bb="capacity=40")
    assert found.request is not None and found.request.capacity_bytes == 40
    assert found.warnings == (
        "--bb line 1, column 1: 'capacity=40' has no unit: bytes, or units of the pool (compare capacity=10GiB)",
    )


def test_a_file_may_make_persistent_buffers_and_must_hold_a_directive() -> None:
    assert options_of(bbf="#BB create_persistent name=a capacity=1G\n").creates[0].place == "--bbf line 1, column 30"
    assert "--bbf line 1, column 1: the file of --bbf contains no directive" in refused(bbf="echo test_bbf\n")
    with pytest.raises(DirectiveRejected) as caught:
        read(bbf="#DW jobdw capacity=1G\n" + "#" * DIRECTIVE_TEXT_BYTES_MAX)
    assert caught.value.rejection.code is RejectionCode.LIMIT_EXCEEDED


# Spur (SPUR.md) ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size_bytes", "stage_in", "stage_out"),
    [
        ("capacity=40;", 40 * GIB, "", ""),
        ("capacity=40; capacity=60 ", 100 * GIB, "", ""),
        ("capacity=10TB;capacity=100MB", 10 * 10**12 + 100 * 10**6, "", ""),
        ("capacity=0.5;stage_in: cp /a $BB ;stage_out:cp $BB/x /b", GIB // 2, "cp /a $BB", "cp $BB/x /b"),
        ("stage_in:a;stage_in:b=c d", 0, "a\nb=c d", ""),
        ("stage_out:tar c x:y", 0, "", "tar c x:y"),
    ],
)
def test_spurs_form_is_read_with_exact_units(text: str, size_bytes: int, stage_in: str, stage_out: str) -> None:
    found = read(bb=text)
    assert found.request is not None
    assert found.request.capacity_bytes == size_bytes
    assert (found.request.stage_in_command, found.request.stage_out_command) == (stage_in, stage_out)
    assert found.request.directives_kind == "spur"
    assert found.request.text == text.strip()


@pytest.mark.parametrize(
    ("text", "column", "says"),
    [
        ("capacity=abc;", 10, "does not start with a number"),
        ("capacity=40;nonsense", 13, "'nonsense' is not part of a request"),
        ("capacity=40;; stage_in:x", 13, "nothing between the separators"),
        (";", 1, "nothing between"),
        ("stage_in:", 10, "has no command"),
        ("capacity=40; stage_in: ;", 23, "has no command"),
        ("capacity=;", 10, "is empty"),
        ("capacity=9999999999;capacity=8PiB", 10, "overflows"),
        ("capacity=7PiB;" * 1200, 14 * 1170 + 10, "together overflow"),
        ("capacity=2N;", 10, "nodes"),
        ("capacity=1;\npool=x", 12, "U+000A"),
        ("capacity=1;pool=x", 12, "is not part of a request"),
    ],
)
def test_nothing_of_spurs_form_is_silently_no_request(text: str, column: int, says: str) -> None:
    found = refused(bb=text)
    assert says in found and found.startswith(f"--bb line 1, column {column}: ")


def test_spurs_form_adds_to_the_directives_of_the_script_but_not_a_second_capacity() -> None:
    stage = "#DW stage_in type=file source=/a destination=$DW_JOB_STRIPED/a"
    assert len(request_of(stage, bb="capacity=1;").stage_in) == 1
    assert "second time (first at --bb line 1, column 1)" in refused("#DW jobdw capacity=1G", bb="capacity=1;")


# Providers -----------------------------------------------------------------------------------------------------------


def test_a_lua_site_reads_its_own_directive_and_passes_the_rest_on_word_for_word() -> None:
    line = "#BB_LUA pool=pool1  capacity=1K\tsrc=/scratch/%u/%j  anything -x capacity=2K"
    found = read(line, provider="lua")
    assert found.request is not None
    assert (found.request.pool, found.request.capacity_bytes, found.request.text) == ("pool1", 1024, line)
    assert found.request.directives_kind == "lua"
    assert "only the first capacity= of a line is read" in found.warnings[0]


@pytest.mark.parametrize("line", ["#BB_LUA", "#BB_LUA frobnicate=1 whatever", "#BB_LUA pool=pool1"])
def test_a_lua_directive_needs_neither_pool_nor_capacity(line: str) -> None:
    found = request_of(line, provider="lua")
    assert (found.capacity_bytes, found.text) == (0, line)


@pytest.mark.parametrize(
    ("lines", "place", "says"),
    [
        (("#BB_LUA pool=p capacity=0",), "line 2, column 25", "zero"),
        (("#BB_LUA pool=p capacity=-5",), "line 2, column 25", "sign"),
        (("#BB_LUA pool=p capacity=abc",), "line 2, column 25", "number"),
        (("#BB_LUA pool=p capacity=99999999999999999999999",), "line 2, column 25", "overflows"),
        (("#BB_LUA capacity=1GB,pool=p",), "line 2, column 9", "needs pool="),
        (("#BB_LUA pool=a,b capacity=1",), "line 2, column 14", "pool name"),
        (("#BB_LUA capacity=1K",), "line 2, column 9", "needs pool="),
        (("#BB_LUA pool= capacity=1K",), "line 2, column 14", "is empty"),
        (("#BB_LUA pool=p capacity=1K", "#BB_LUA pool=q capacity=1G"), "line 3, column 14", "'p' at script line 2"),
        (("#BB_LUA pool=p capacity=1N", "#BB_LUA pool=p capacity=1G"), "line 3, column 25", "nodes"),
        (("#BB_LUA pool=p capacity=8191PiB",) * 2, "line 3, column 25", "overflow"),
        (("#BB_LUA pool=p \\", "#BB_LU y"), "line 2, column 16", "does not start with #BB_LUA"),
    ],
)
def test_what_is_wrong_in_a_lua_directive_has_its_place(lines: tuple[str, ...], place: str, says: str) -> None:
    found = refused(*lines, provider="lua")
    assert f"script {place}: " in found and says in found


def test_capacities_of_several_lua_directives_of_one_pool_add_up() -> None:
    found = request_of("#BB_LUA pool=p capacity=1K", "#BB_LUA pool=p capacity=2K", provider="lua")
    assert found.capacity_bytes == 3 * 1024


def test_the_word_of_a_lua_directive_is_the_sites() -> None:
    assert request_of("#BB_EXAMPLE pool=p capacity=1K", provider="lua", directive="BB_EXAMPLE").pool == "p"
    assert read("#BB_LUA pool=p capacity=1K", provider="lua", directive="BB_EXAMPLE").request is None


CONDUIT = ("#CONDUIT_PRE cp /archive/%u/in /scratch/in", "#CONDUIT_POST cp /scratch/out /archive/%u/out")


def test_the_directive_of_a_lua_site_is_a_prefix_as_in_slurm() -> None:
    found = read(*CONDUIT, provider="lua", directive="CONDUIT")
    assert found.request is not None and found.warnings == ()
    assert (found.request.text, found.request.pool, found.request.capacity_bytes) == ("\n".join(CONDUIT), "", 0)


@pytest.mark.parametrize("glued", ["", "X", "_PRE", "-x", "/", "#", "=1"])
def test_whatever_follows_the_prefix_pool_and_capacity_of_the_line_are_read(glued: str) -> None:
    found = request_of(f"#BB_LUA{glued} cp a b pool=p capacity=1K", provider="lua")
    assert (found.pool, found.capacity_bytes) == ("p", 1024)


def test_pool_may_follow_the_prefix_without_a_blank() -> None:
    assert request_of("#BB_LUApool=p capacity=1K", provider="lua").pool == "p"
    assert "script line 2, column 13: " in refused("#BB_LUApool=a,b", provider="lua")


def test_a_line_continues_on_a_line_with_the_same_prefix() -> None:
    found = request_of("#CONDUIT_PRE cp \\", "#CONDUIT a b pool=p", provider="lua", directive="CONDUIT")
    assert (found.text, found.pool) == ("#CONDUIT_PRE cp a b pool=p", "p")


def test_the_command_line_may_give_a_directive_by_its_prefix() -> None:
    assert request_of(bb=CONDUIT[0], provider="lua", directive="CONDUIT").text == CONDUIT[0]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (("#conduit_pre cp a b",), "'#conduit_pre' is a comment, not a directive; a directive starts with #CONDUIT"),
        (("true", "#CONDUIT_PRE cp a b"), "#CONDUIT_PRE after the first command is not read; move it up"),
        ((" #CONDUIT_PRE cp a b",), "#CONDUIT_PRE in an indented line is not read"),
    ],
)
def test_a_prefix_that_is_not_read_is_warned_of(lines: tuple[str, ...], says: str) -> None:
    found = read(*lines, provider="lua", directive="CONDUIT")
    assert found.request is None
    assert says in found.warnings[0]


def test_a_directive_that_begins_like_one_of_another_provider_is_the_sites() -> None:
    assert request_of("#BB_LUA pool=p", provider="lua", directive="BB").pool == "p"


@pytest.mark.parametrize("line", ["#DW jobdw capacity=1GiB", "#BB create_persistent name=a capacity=1G"])
def test_directives_of_another_provider_are_comments_as_in_slurm_but_not_in_silence(line: str) -> None:
    found = read(line, provider="lua")
    assert found.request is None
    assert f"{line.split()[0]} is not read by the provider of this cluster, which reads #BB_LUA" in found.warnings[0]
    assert "#BB_LUA is not read" in read("#BB_LUA pool=p", provider="datawarp").warnings[0]


@pytest.mark.parametrize("text", ["capacity=2K", "pool=nosuch", "stage_in:x;capacity=1"])
def test_a_lua_site_has_no_short_form(text: str) -> None:
    assert "--bb line 1, column 1: the text of --bb does not start with #BB_LUA" in refused(bb=text, provider="lua")


def test_datawarp_takes_transfers_and_caches_as_they_are() -> None:
    lines = (
        "#DW jobdw type=cache capacity=1GB access_mode=striped,private pfs=/scratch",
        "#DW stage_in type=file source=/tmp/a destination=/ss/file1",
    )
    found = request_of(*lines, provider="datawarp")
    assert (found.type, found.stage_in, found.text) == ("cache", (), "\n".join(lines))


def test_datawarp_refuses_what_it_refuses_in_slurm() -> None:
    stage = "#DW stage_in type=file source=/a destination=/b"
    assert "script line 2, column 5: stage_in has no buffer to act on" in refused(stage, provider="datawarp")
    assert "script line 2, column 5: unknown directive 'capacity=1G'" in refused("#BB capacity=1G", provider="datawarp")
    assert "the provider datawarp does not support" in refused(bb="capacity=1;", provider="datawarp")


# Writing back --------------------------------------------------------------------------------------------------------

SIZES = st.integers(1, SIZE_BYTES_MAX // 4)
NAMES = st.from_regex(r"[a-z_][A-Za-z0-9_.+-]{0,20}", fullmatch=True)
PATHS = st.from_regex(r"(/[A-Za-z0-9_.=-]*[A-Za-z0-9=-]%?j?){1,3}", fullmatch=True).filter(
    lambda path: "%" not in path.replace("%j", "")
)
MODES = st.lists(st.sampled_from(list(Access)), min_size=1, max_size=3, unique=True).map(tuple)
INSIDE = PATHS.map(lambda path: "$FOREBAY_JOB_DIR/x" + path)
MOVES = st.lists(st.builds(Transfer, st.sampled_from(list(TransferKind)), PATHS, INSIDE), max_size=3).map(tuple)
UNITS = st.sampled_from(["bytes", "bare", "count"])
CREATES = st.builds(
    CreatePersistent,
    NAMES,
    SIZES,
    st.just("") | NAMES,
    st.just(()) | MODES,
    st.sampled_from(["", "scratch"]),
    st.just(""),
    UNITS,
)
OUTGOING_LISTS = st.builds(ListTransfer, st.just(True), PATHS, PATHS)
LISTS = st.builds(ListTransfer, st.just(False), PATHS, INSIDE) | OUTGOING_LISTS


@st.composite
def requests(draw: st.DrawFn) -> BufferRequest:
    """A native request with anything that directives can ask for."""
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    cut = draw(st.integers(0, len(names)))
    capacity = draw(st.just(0) | SIZES)
    units = draw(UNITS) if capacity else "bytes"
    swap = draw(st.just(0) | SIZES) if units != "count" else 0
    pool = draw(st.just("") | NAMES) if capacity or swap else ""
    modes = draw(MODES) if capacity else (Access.STRIPED,)
    moved_in, moved_out = (draw(MOVES), draw(MOVES)) if capacity else ((), ())
    creates = {record.name: record for record in draw(st.lists(CREATES, max_size=2)) if record.name not in names}
    return BufferRequest(
        pool,
        capacity,
        modes,
        "scratch",
        moved_in,
        moved_out,
        "",
        (),
        "dw",
        tuple(creates.values()),
        tuple(DestroyPersistent(name, draw(st.booleans())) for name in names[:cut]),
        tuple(names[cut:]),
        swap,
        tuple(
            f"jobdw {key}={value}"
            for key, value in draw(st.lists(st.tuples(st.sampled_from(["k", "colour"]), NAMES), max_size=2))
        )
        if capacity
        else (),
        lists=tuple(
            sorted(draw(st.lists(LISTS if capacity else OUTGOING_LISTS, max_size=2)), key=lambda one: one.outgoing)
        ),
        units=units,
    )


@given(requests())
def test_a_request_that_is_written_reads_back_as_the_same(made: BufferRequest) -> None:
    bb, bbf = format_request(made)
    assert bb == ""
    if not bbf:
        assert is_ordinary_buffer(made) and not (made.capacity_bytes or made.stage_in or made.stage_out)
        return
    found = read(bbf=bbf)
    assert asked(found.request) == asked(made)


@given(st.integers(1, SIZE_BYTES_MAX), st.sampled_from(["capacity=", "swap="]))
def test_every_size_survives_the_short_form(size_bytes: int, key: str) -> None:
    text = f"{key}{size_bytes // 1000}.{size_bytes % 1000:03}KB"
    found = read(bb=text)
    assert found.request is not None
    again = read(bbf=found.request.text)
    assert asked(found.request) == asked(again.request)
    assert size_bytes in (found.request.capacity_bytes, found.request.swap_bytes)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("#DW jobdw capcity=1GiB type=scratch", "did you mean capacity=?"),
        ("#DW jobdw Capacty=1GiB", "did you mean capacity=?"),
        ("#DW jobwd capacity=1GiB", "did you mean jobdw? use one of "),
        ("#BB create_persistant name=a capacity=1GiB", "did you mean create_persistent? use one of "),
        ("#BB capacity=1GiB poool=fast", "did you mean pool=? write capacity="),
    ],
)
def test_a_misspelt_word_of_a_directive_gets_a_suggestion_at_its_place(line: str, remedy: str) -> None:
    with pytest.raises(DirectiveRejected) as caught:
        read(line)
    rejection = caught.value.rejection
    assert rejection.remedy.startswith(remedy) and "unknown" in rejection.sentence
    assert rejection.place.startswith("script line 2, column ")


def test_an_unknown_option_that_is_kept_gets_a_suggestion_in_its_warning_and_thousands_do_not() -> None:
    found = read("#DW jobdw capacity=1GiB poool=fast colour=blue")
    first, second = found.warnings
    assert first.endswith("the option poool= is not known here; it is kept and passed on (did you mean pool=?)")
    assert second.endswith("the option colour= is not known here; it is kept and passed on")
    many = read("#DW jobdw capacity=1GiB " + " ".join(f"poool{number}=a" for number in range(100)))
    assert sum("did you mean" in one for one in many.warnings) <= SUGGESTIONS_MAX
