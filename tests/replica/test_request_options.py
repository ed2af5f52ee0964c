"""What only the state can say of a request: pools and what they count, no nodes, who may, swap, symbols in arrays."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.grammar.directives import read_request
from forebay.replica.messages import commands as c
from forebay.replica.model.pools import PoolUnit
from forebay.replica.model.requests import JobOptions, JobRequest, error_path, with_options
from forebay.replica.model.transfers import TransferRules
from forebay.replica.values.errors import Rejection, RejectionCode
from tests.replica.world import OPERATOR, World, user

MIB = 1024**2


def world(**settings: str) -> World:
    """A site with a pool of bytes (the default), one of nodes and one of plain units."""
    made = World(pools={"fast": 100 * MIB}, granularity=MIB)
    for name, unit in (("racks", PoolUnit.NODES), ("slots", PoolUnit.COUNT)):
        added = c.ChangePool(name, exists=False, quantity=8, granularity=2, unit=unit)
        assert not isinstance(made.settle(added), Rejection)
    if settings:
        wanted = tuple(ConfSetting(key, value) for key, value in settings.items())
        assert not isinstance(made.settle(c.ConfigureSite(wanted, partial=True)), Rejection)
    return made


def submit(
    made: World, *lines: str, bb: str = "", who: str = "alan", actor: c.Actor | None = None,
    tasks: tuple[int, ...] = (), throttle: int = 0, workdir: str = "/out", output: str = "", **options: Any,
) -> Rejection | int:  # fmt: skip
    script = "\n".join(["#!/bin/sh", *lines, "true", ""])
    site = made.state.site
    reading = read_request(script, bb, provider=site.provider, directive=site.directive)
    plain = JobRequest("job", who, script, workdir, 60, output=output, buffer=reading.request)
    asked = with_options(plain, JobOptions(**options))
    return made.settle(c.SubmitJob(asked, tasks=tasks, throttle=throttle), actor or user(who))


def refused(made: World, *lines: str, **more: Any) -> Rejection:
    found = submit(made, *lines, **more)
    assert isinstance(found, Rejection) and found.remedy
    return found


def taken(made: World, *lines: str, **more: Any) -> int:
    found = submit(made, *lines, **more)
    assert isinstance(found, int), found
    return found


@pytest.mark.parametrize(
    ("line", "code", "column", "says"),
    [
        ("#DW jobdw capacity=1M pool=nope", RejectionCode.UNKNOWN_POOL, 23, "pool 'nope' does not exist"),
        ("#DW jobdw capacity=101M", RejectionCode.CAPACITY_OVER_TOTAL, 11, "101MiB exceeds the capacity of pool fast"),
        ("#DW jobdw capacity=9 pool=slots", RejectionCode.CAPACITY_OVER_TOTAL, 11, "9 exceeds the capacity of pool"),
        ("#DW jobdw capacity=9N pool=racks", RejectionCode.CAPACITY_OVER_TOTAL, 11, "9N exceeds the capacity of pool"),
        ("#DW jobdw capacity=2N", RejectionCode.INVALID_CAPACITY, 11, "the pool counts bytes"),
        ("#DW jobdw capacity=2N pool=slots", RejectionCode.INVALID_CAPACITY, 11, "the pool counts plain units"),
        ("#DW jobdw capacity=2K pool=slots", RejectionCode.INVALID_CAPACITY, 11, "the pool counts plain units"),
        ("#DW jobdw capacity=2K pool=racks", RejectionCode.INVALID_CAPACITY, 11, "the pool counts nodes"),
        ("#DW swap 1M pool=slots", RejectionCode.INVALID_CAPACITY, 13, "swap requires a pool that counts"),
        ("#DW swap 3M", RejectionCode.INVALID_DIRECTIVE, 5, "swap is not supported"),
    ],
)  # fmt: skip
def test_what_no_pool_can_give_is_refused_where_it_stands(
    line: str, code: RejectionCode, column: int, says: str
) -> None:
    found = refused(world(), line)
    assert (found.code, found.place) == (code, f"script line 2, column {column}")
    assert says in found.sentence


@pytest.mark.parametrize(
    ("line", "pool", "granted", "units"),
    [
        ("#DW jobdw capacity=1025K", "fast", 2 * MIB, "bytes"),
        ("#DW jobdw capacity=3", "fast", MIB, "bytes"),
        ("#DW jobdw capacity=3 pool=slots", "slots", 4, "count"),
        ("#DW jobdw capacity=3N pool=racks", "racks", 4, "count"),
        ("#DW jobdw capacity=3 pool=racks", "racks", 4, "count"),
    ],
)
def test_a_request_is_rounded_up_in_what_its_pool_counts(line: str, pool: str, granted: int, units: str) -> None:
    made = world()
    job = taken(made, line)
    buffer, asked = made.state.buffers[job], made.state.jobs[job].request.buffer
    assert (buffer.pool, buffer.granted_bytes) == (pool, granted)
    assert asked is not None and asked.units == units


def test_swap_and_capacity_are_held_together() -> None:
    made = world(BurstBufferType="datawarp")
    job = taken(made, "#DW swap 3M", "#DW jobdw capacity=5M")
    assert made.state.buffers[job].granted_bytes == 8 * MIB
    alone = taken(made, "#DW swap 3M")
    options = made.state.jobs[alone].request.buffer
    assert (made.state.buffers[alone].granted_bytes, options and options.units) == (3 * MIB, "bytes")
    assert "not supported" in refused(world(), "#DW swap 3M").sentence


def test_swap_is_refused_at_its_own_place_whatever_else_is_asked_for() -> None:
    move = "#DW stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/a"
    rejection = refused(world(), "#DW jobdw capacity=5M", move, "#DW swap 3M")
    assert (rejection.place, rejection.code) == ("script line 4, column 5", RejectionCode.INVALID_DIRECTIVE)
    assert refused(world(), "#DW swap 3M", "#DW jobdw capacity=5M").place == "script line 2, column 5"


def test_a_bare_number_needs_no_record() -> None:
    made = World(pools={"fast": 100})
    job = taken(made, "#DW jobdw capacity=40")
    assert made.state.jobs[job].request.options is None


CREATE = "#BB create_persistent name=alpha capacity=10M"


@pytest.mark.parametrize(
    ("lines", "options", "place", "says"),
    [
        ((), {}, "nodes", "Node count specification invalid"),
        (("#DW jobdw capacity=1M",), {}, "script line 2, column 11", "may only create or destroy persistent buffers"),
        ((CREATE, "#DW jobdw capacity=1M"), {}, "script line 3, column 11", "may only create or destroy"),
        ((CREATE, "#DW persistentdw name=beta"), {}, "nodes", "may only create or destroy"),
        ((CREATE, "#DW swap 1M"), {}, "script line 3, column 5", "may only create or destroy"),
        ((CREATE,), {"tasks": (1, 2)}, "array", "Node count specification invalid"),
    ],
)
def test_a_job_of_no_nodes_may_only_make_or_remove_persistent_buffers(
    lines: tuple[str, ...], options: dict[str, Any], place: str, says: str
) -> None:
    found = refused(world(Flags="EnablePersistent"), *lines, nodes=0, **options)
    assert says in found.sentence and found.place == place


def test_a_job_of_no_nodes_that_makes_a_persistent_buffer_is_taken() -> None:
    made = world(Flags="EnablePersistent")
    job = taken(made, CREATE, nodes=0)
    assert made.state.jobs[job].request.options.nodes == 0


@pytest.mark.parametrize("nodes", [-1, 2])
def test_a_job_runs_on_one_node(nodes: int) -> None:
    found = refused(world(), nodes=nodes)
    assert found.place == "nodes" and "run on one" in found.sentence


def test_a_lua_job_of_no_nodes_is_refused_as_in_slurm() -> None:
    made = world(BurstBufferType="burst_buffer/lua")
    assert refused(made, "#BB_LUA pool=fast capacity=1K", nodes=0).code is RejectionCode.INVALID_DIRECTIVE


@pytest.mark.parametrize("line", [CREATE, "#BB destroy_persistent name=alpha"])
def test_only_operators_touch_persistent_buffers_unless_the_site_says_so(line: str) -> None:
    made = world()
    found = refused(made, line)
    assert (found.code, found.sentence) == (RejectionCode.PERMISSION_DENIED, "Burst Buffer permission denied")
    assert found.place.startswith("script line 2, column ")
    assert taken(made, line, actor=OPERATOR)
    assert taken(world(Flags="EnablePersistent"), line)


@pytest.mark.parametrize(
    ("line", "column", "says"),
    [
        ("#BB create_persistent name=a capacity=1M pool=nope", 30, "pool '"),
        ("#BB create_persistent name=a capacity=101M", 30, "the capacity of pool fast"),
        ("#BB create_persistent name=a capacity=2N", 30, "counts bytes"),
    ],
)
def test_a_persistent_buffer_that_no_pool_can_hold_is_refused(line: str, column: int, says: str) -> None:
    found = refused(world(Flags="EnablePersistent"), line)
    assert says in found.sentence and found.place == f"script line 2, column {column}"


@pytest.mark.parametrize(
    ("key", "users", "sentence"),
    [("AllowUsers", "brenda", "User not found in AllowUsers"), ("DenyUsers", "alan", "User found in DenyUsers")],
)
def test_a_user_who_is_not_allowed_is_refused_a_buffer_and_nothing_else(key: str, users: str, sentence: str) -> None:
    made = world(**{key: users})
    assert refused(made, "#DW jobdw capacity=1M").sentence == sentence
    assert taken(made)


def test_root_is_refused_with_slurms_sentence() -> None:
    found = refused(world(), "#DW jobdw capacity=1M", who="root", actor=OPERATOR)
    assert (found.code, found.sentence) == (
        RejectionCode.ROOT_NOT_ALLOWED, "User root can not allocate burst buffers",
    )  # fmt: skip


def test_a_lua_pool_is_looked_at_even_where_nothing_is_asked_of_it() -> None:
    made = world(BurstBufferType="burst_buffer/lua")
    assert refused(made, "#BB_LUA pool=nosuch").code is RejectionCode.UNKNOWN_POOL
    job = taken(made, "#BB_LUA pool=fast")
    assert (made.state.buffers[job].pool, made.state.buffers[job].granted_bytes) == ("", 0)


def test_an_oversized_request_waits_where_the_site_wants_that() -> None:
    assert taken(world(HoldOversized="yes"), "#DW jobdw capacity=101M")


SPACE = "#DW jobdw capacity=1M\n"
STAGE = SPACE + "#DW stage_in type=file source=/in/%A/%a/%j/%u/%x destination=$FOREBAY_JOB_DIR/%%%a"


def test_every_symbol_is_replaced_in_an_array_and_a_task_has_none_outside_of_one() -> None:
    made = world()
    array = taken(made, STAGE, tasks=(3, 5))
    for number, task in enumerate((3, 5)):
        transfer = made.state.jobs[array + number].request.buffer.stage_in[0]
        assert transfer.outside == f"/in/{array}/{task}/{array + number}/alan/job"
        assert transfer.inside == f"$FOREBAY_JOB_DIR/%{task}"
    found = refused(made, STAGE)
    assert "the unknown symbol %a" in found.sentence and found.place == "script line 3, column 24"


def test_two_backslashes_keep_the_symbols_of_the_rest_of_the_line() -> None:
    made = world()
    job = taken(made, SPACE + r"#DW stage_in type=file source=/in/%u\\%j destination=$FOREBAY_JOB_DIR/%j")
    transfer = made.state.jobs[job].request.buffer.stage_in[0]
    assert (transfer.outside, transfer.inside) == ("/in/alan%j", "$FOREBAY_JOB_DIR/%j")


SPECIAL = (
    ("#DW stage_in type=list source=/in/%u/list destination=$FOREBAY_JOB_DIR/%j", "", "script line 2, column 24"),
    ("#DW stage_out type=list source=/in/list destination=/out/x", "", "script line 2, column 25"),
    ("", "capacity=0.01;stage_in:cp /in/a $X", "--bb"),
    ("", "stage_out:rm -r x", "--bb"),
    ("#DW persistentdw name=lake\n#DW stage_in type=file source=/in/a destination=$DW_PERSISTENT_STRIPED_lake/a", "",
     "script line 3, column 24"),
    ("#DW jobdw capacity=1M\n#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/out/a move=yes", "",
     "script line 3, column 50"),
)  # fmt: skip


def test_a_backend_that_the_site_does_not_allow_is_refused_by_name() -> None:
    made = world()
    line = "#DW jobdw capacity=1M\n#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/out/a backend=rsync"
    found = refused(made, line)
    assert "backend=rsync is not allowed on this cluster" in found.sentence and "native, command" in found.remedy
    made.state = replace(made.state, transfer_rules=TransferRules(backends=("native", "rsync")))
    assert taken(made, line)
    assert "a stage command is not allowed" in refused(made, bb="stage_out:rm -r x").sentence


def test_spurs_form_without_commands_is_taken() -> None:
    made = world()
    job = taken(made, bb="capacity=0.01;capacity=0.02;")
    assert made.state.buffers[job].granted_bytes == 31 * MIB


def test_a_list_stays_beneath_the_roots() -> None:
    made = world()
    for line in (
        "#DW stage_in type=list source=/etc/list destination=$FOREBAY_JOB_DIR/x",
        "#DW stage_out type=list source=/in/list destination=/etc/x",
    ):
        assert refused(made, SPACE + line).code is RejectionCode.PATH_NOT_ALLOWED
    line = "#DW stage_in type=list source=/in/%j/list destination=$FOREBAY_JOB_DIR/x"
    rejection = refused(made, SPACE + line, tasks=(1, 2))
    assert rejection.code is RejectionCode.INVALID_DIRECTIVE
    assert (rejection.place, "file lists" in rejection.sentence) == (
        "script line 3, column 24",
        True,
    )


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"mail_types": ("sometimes",)}, "mail_types"),
        ({"mail_user": "-x@y"}, "mail_user"),
        ({"mail_user": "|/bin/sh${IFS}#@example.org"}, "mail_user"),
        ({"mail_user": "/etc/passwd"}, "mail_user"),
        ({"mail_user": "a..b@example.org"}, "mail_user"),
        ({"mail_user": "a\nb"}, "mail_user"),
        ({"mail_user": "x" * 400}, "mail_user"),
        ({"comment": "x" * 2000}, "comment"),
        ({"comment": "a\x1bb"}, "comment"),
        ({"partition": "a b"}, "partition"),
        ({"open_mode": "a"}, "open_mode"),
    ],
)
def test_an_option_that_can_never_be_is_refused_by_its_field(options: dict[str, Any], place: str) -> None:
    assert refused(world(), **options).place == place


def test_what_a_job_asks_for_is_kept_with_it() -> None:
    made = world()
    wanted: dict[str, Any] = {"mail_types": ("stage_out",), "mail_user": "alan@example.org", "comment": "a b"}
    job = taken(made, **wanted, requeue=False, singleton=True)
    assert made.state.jobs[job].request.options == JobOptions(**wanted, requeue=False, singleton=True)
    plain = taken(made)
    assert made.state.jobs[plain].request.options is None


def test_a_job_may_work_and_write_wherever_its_user_may() -> None:
    made = world()
    job = taken(made, workdir="/anywhere/at/all", output="/else/%j.out")
    request = made.state.jobs[job].request
    assert (request.workdir, request.output) == ("/anywhere/at/all", f"/else/{job}.out")


@pytest.mark.parametrize("field", ["workdir", "output", "error"])
@pytest.mark.parametrize("path", ["/a/../b", "/a\0b", "/" + "a/" * 3000])
def test_a_path_that_is_none_is_refused_by_its_field(field: str, path: str) -> None:
    found = refused(world(), **{field: path})
    assert (found.code, found.place) == (RejectionCode.INVALID_FIELD, field)


def test_where_standard_error_goes_follows_from_what_was_asked() -> None:
    made = world()
    job = taken(made, workdir="/w", error="%x/%j.%A-%a", tasks=(3, 5))
    assert [error_path(made.state.jobs[one].request, one, "n1") for one in (job, job + 1)] == [
        f"/w/job/{job}.{job}-3",
        f"/w/job/{job + 1}.{job}-5",
    ]
    assert refused(made, error="%q").place == "error"
    plain = taken(made)
    assert error_path(made.state.jobs[plain].request, plain, "n1") == ""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("x",) * 257, RejectionCode.LIMIT_EXCEEDED),
        (("x" * 16 * 1024,), RejectionCode.LIMIT_EXCEEDED),
        (("a\0b",), RejectionCode.INVALID_FIELD),
    ],
)
def test_arguments_that_no_script_can_be_given_are_refused(arguments: tuple[str, ...], code: RejectionCode) -> None:
    found = refused(world(), arguments=arguments)
    assert (found.code, found.place) == (code, "arguments")


@pytest.mark.parametrize("key", ["Sources", "Destinations"])
def test_a_site_that_stages_nothing_yet_says_so_and_what_an_operator_types(key: str) -> None:
    made = world(**{key: ""})
    inwards = "#DW stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/a"
    outwards = "#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/out/a"
    found = refused(made, "#DW jobdw capacity=1M", inwards if key == "Sources" else outwards)
    assert found.code is RejectionCode.PATH_NOT_ALLOWED
    assert f"forebay config set {key}=DIRECTORY" in found.remedy
    assert taken(made, "#DW jobdw capacity=1M")
