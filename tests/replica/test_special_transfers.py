"""Lists, commands, persistent buffers and choices, from the directive to the agent's order."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from forebay.replica.grammar.directives import read_request
from forebay.replica.grammar.lexer import DirectiveRejected
from forebay.replica.model.buffers import BufferState, TransferKind
from forebay.replica.model.orders import Order, SpecialTransfers
from forebay.replica.model.requests import ListTransfer
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import (
    NO_CHOICE,
    TransferChoice,
    TransferRules,
    default_backend,
    template_fault,
    template_words,
    transfer_choices,
)
from forebay.replica.values.errors import RejectionCode
from forebay.replica.views.orders import orders_for, special_transfers
from tests.replica.reference.printing import format_request
from tests.replica.test_request_options import taken, world
from tests.replica.world import World

STAGE_OUT = "#DW stage_out type=file source=$DW_JOB_STRIPED/{0} destination=/out/{0}"


def order_of(made: World, job: int, stage: Stage) -> Order:
    """Return the order of a job's stage, with the job where that stage is ordered."""
    buffer = made.state.buffers[job]
    state = {Stage.STAGE_IN: BufferState.STAGING_IN, Stage.STAGE_OUT: BufferState.STAGING_OUT}[stage]
    buffers = made.state.buffers.set(job, replace(buffer, state=state, node="n1"))
    on_node = made.state.on_node.set("n1", frozenset({job}))
    jobs = made.state.jobs.set(job, replace(made.state.jobs[job], node="n1", attempt=1, stuck=False, retry_at=0))
    (order,) = orders_for(replace(made.state, buffers=buffers, on_node=on_node, jobs=jobs), "n1")
    return order


def test_an_order_has_the_lists_of_its_stage_and_the_roots_that_they_lie_beneath() -> None:
    made = world()
    job = taken(
        made,
        "#DW jobdw capacity=1M",
        "#DW stage_in type=list source=/in/%u/list destination=$FOREBAY_JOB_DIR/l",
        "#DW stage_out type=list source=/in/back destination=/out/x",
    )
    coming = order_of(made, job, Stage.STAGE_IN).special
    going = order_of(made, job, Stage.STAGE_OUT).special
    assert coming is not None and going is not None
    assert coming.lists == (ListTransfer(False, "/in/alan/list", "$FOREBAY_JOB_DIR/l", "script line 3, column 24"),)
    assert going.lists == (ListTransfer(True, "/in/back", "/out/x", "script line 4, column 25"),)
    assert coming.list_roots == going.list_roots == made.state.site.sources
    assert not coming.commands and not coming.choices


def test_an_order_has_the_commands_of_its_stage_and_what_they_need() -> None:
    made = world()
    job = taken(made, bb="stage_in:cp /in/a $DW_JOB_STRIPED; stage_in:second; stage_out:tar c .;")
    special = order_of(made, job, Stage.STAGE_IN).special
    assert special is not None and special.commands == ("cp /in/a $DW_JOB_STRIPED", "second")
    going = order_of(made, job, Stage.STAGE_OUT).special
    assert going is not None and going.commands == ("tar c .",)


def test_an_ordinary_order_has_nothing_special() -> None:
    made = world()
    job = taken(made, "#DW jobdw capacity=1M", STAGE_OUT.format("a"))
    assert order_of(made, job, Stage.STAGE_OUT).special is None
    assert special_transfers(made.state, made.state.jobs[job], Stage.RUN) is None


def test_each_transfer_has_its_own_choice_and_reads_back_as_it_was_written() -> None:
    script = "\n".join(
        [
            "#!/bin/sh",
            "#DW jobdw capacity=1MiB access_mode=striped type=scratch",
            "#DW stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/a backend=rclone",
            STAGE_OUT.format("a"),
            STAGE_OUT.format("b") + " move=yes backend=rsync colour=red",
            "#DW stage_out type=list source=/in/l destination=/out move=yes",
            STAGE_OUT.format("c") + " move=no links=follow acls=yes",
            "#DW stage_out type=list source=/in/m destination=/out/m",
            "",
        ]
    )
    reading = read_request(script)
    assert reading.request is not None
    options = reading.request
    assert transfer_choices(options, "stage_in", 1, listed=False) == (TransferChoice("rclone"),)
    assert transfer_choices(options, "stage_out", 3, listed=False) == (
        NO_CHOICE,
        TransferChoice("rsync", True),
        TransferChoice(links="follow", acls=True),
    )
    assert transfer_choices(options, "stage_out", 2, listed=True) == (TransferChoice("", True), NO_CHOICE)
    assert transfer_choices(options, "stage_in", 0, listed=True) == ()
    bb, bbf = format_request(options)
    again = read_request("#!/bin/sh\n", bb, bbf)
    assert again.request is not None
    assert (again.request.options, again.request.stage_out) == (options.options, reading.request.stage_out)


def test_an_order_says_what_was_chosen_for_each_transfer() -> None:
    made = world()
    rules = TransferRules(backends=("native", "rsync"))
    made.state = replace(made.state, transfer_rules=rules)
    lines = ("#DW jobdw capacity=1M", STAGE_OUT.format("a"), STAGE_OUT.format("b") + " backend=rsync move=yes")
    job = taken(made, *lines)
    special = order_of(made, job, Stage.STAGE_OUT).special
    assert special == SpecialTransfers(choices=(NO_CHOICE, TransferChoice("rsync", True)))
    assert order_of(made, job, Stage.STAGE_IN).special is None


@pytest.mark.parametrize(
    ("line", "column", "says", "remedy"),
    [
        ("#DW stage_in type=file source=/a destination=$DW_JOB_STRIPED/a move=yes", 69,
         "move=yes would leave the only copy", "only stage_out can move files"),
        ("#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/a move=maybe", 70, "move=maybe", "yes, no"),
        ("#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/a backend=tape", 73, "backend=tape", "rsync"),
        ("#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/a backend=command", 73, "backend=", "native"),
        ("#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/a move=no move=no", 73, "is written twice", ""),
        ("#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/a acls=keep", 70, "acls=keep", "yes, no"),
        ("#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/a links=copy", 71, "links=copy", "keep, asis"),
        ("#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/a links=follow move=yes", 71,
         "does not belong to this transfer", "leave out one"),
        ("#DW stage_out type=file source=$DW_JOB_STRIPED/a destination=/a backend=rsync links=follow", 85,
         "only Forebay itself follows links", "leave out one"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_is_refused_where_it_stands(line: str, column: int, says: str, remedy: str) -> None:
    with pytest.raises(DirectiveRejected) as refused:
        read_request(f"#!/bin/sh\n#DW jobdw capacity=1M\n{line}\n")
    found = refused.value.rejection
    assert (found.code, found.place) == (RejectionCode.INVALID_DIRECTIVE, f"script line 3, column {column}")
    assert says in found.sentence and remedy in found.remedy


def test_a_path_on_a_persistent_buffer_that_the_job_uses_is_a_transfer_like_any_other() -> None:
    reading = read_request(
        "#!/bin/sh\n#DW persistentdw name=lake\n"
        "#DW stage_in type=file source=/in/a destination=$DW_PERSISTENT_STRIPED_lake/a\n"
        "#DW stage_out type=directory source=${DW_PERSISTENT_STRIPED_lake}/o destination=/out/o\n"
    )
    assert reading.request is not None
    assert reading.request.stage_in[0].inside == "$DW_PERSISTENT_STRIPED_lake/a"
    assert reading.request.stage_out[0].kind is TransferKind.DIRECTORY


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("/bin/cp -aT {source} {destination}", None),
        ("", "is empty"),
        ("/usr/local/sbin/move", None),
        ("/usr/local/sbin/move --fast", None),
        ("cp {source} {destination}", "not an absolute path"),
        ("/bin/cp {source}", "no {destination}"),
        ("/bin/cp {destination}", "no {source}"),
        ("/bin/cp '{source} {destination}", "quotes"),
        ("{source} {destination}", "not an absolute path"),
    ],
)
def test_a_command_line_that_cannot_be_run_is_refused_with_what_is_wrong(template: str, fault: str | None) -> None:
    found = template_fault(template)
    assert found is None if fault is None else found is not None and fault in found


def test_a_program_alone_is_given_source_and_destination() -> None:
    assert template_words("/bin/move") == ["/bin/move", "{source}", "{destination}"]
    assert template_words("/bin/move --to={destination} '{source}'") == ["/bin/move", "--to={destination}", "{source}"]
    assert template_words("""/x  'a "b' "c 'd"e'' '' {source} {destination}""") == [
        "/x", 'a "b', "c 'de", "", "{source}", "{destination}",
    ]  # fmt: skip


def test_the_first_backend_that_moves_data_is_used_where_nothing_is_named() -> None:
    assert default_backend(("native", "command")) == "native"
    assert default_backend(("command", "rsync")) == "rsync" and default_backend(("command",)) == "native"
