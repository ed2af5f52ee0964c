"""Named buffers of a job, and Rabbit's `copy_in` and `copy_out`."""

from __future__ import annotations

import pytest

from forebay.replica.grammar import (
    DirectiveRejected,
    ParsedRequest,
    PathVariables,
    read_external_job_request,
    read_request,
)
from forebay.replica.model import (
    Access,
    BufferRequest,
    ListTransfer,
    Transfer,
    TransferKind,
    named_path,
    named_variables,
)
from forebay.replica.views import orders_for
from tests.replica.world import World


def reading(*lines: str) -> ParsedRequest:
    return read_request("".join(["#!/bin/sh\n", *(f"#DW {line}\n" for line in lines)]))


def request_of(*lines: str) -> BufferRequest:
    found = reading(*lines).request
    assert found is not None
    return found


TWO = (
    "jobdw name=a capacity=1GiB pool=fast",
    "jobdw name=fast-tier capacity=2GiB pool=fast access_mode=striped,private",
)


def test_the_capacities_of_named_buffers_add_up() -> None:
    found = request_of(*TWO)
    assert (found.names, found.capacity_bytes, found.pool) == (("a", "fast-tier"), 3 * 2**30, "fast")
    assert found.access == (Access.STRIPED, Access.PRIVATE)
    assert found.places[:2] == ("script line 2, column 32", "script line 2, column 18")


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("$DW_JOB_STRIPED_a/x/y", "$DW_JOB_STRIPED/a/x/y"),
        ("${DW_JOB_STRIPED_a}/x", "$DW_JOB_STRIPED/a/x"),
        ("$DW_JOB_PRIVATE_fast_tier/x", "$DW_JOB_PRIVATE/fast-tier/x"),
        ("$DW_JOB_fast-tier/x", "$DW_JOB_STRIPED/fast-tier/x"),
        ("$DW_JOB_fast_tier/$USER", "$DW_JOB_STRIPED/fast-tier/%u"),
        # The file goes into the root of the buffer.
        ("$DW_JOB_a", "$DW_JOB_STRIPED/a/"),
        ("\\\\$DW_JOB_a/%j", "\\\\$DW_JOB_STRIPED/a/%j"),
        ("$DW_JOB_STRIPED/x", "$DW_JOB_STRIPED/x"),
    ],
)
def test_a_path_may_begin_with_the_variable_of_a_named_buffer(written: str, path: str) -> None:
    # The directive of a buffer may follow those that use it.
    found = request_of(f"stage_in type=file source=/in/x destination={written}", *TWO)
    assert found.stage_in[0].inside == path
    listed = request_of(f"stage_in type=list source=/in/x destination={written}", *TWO)
    assert listed.lists[0].destination == path


def test_lists_of_both_stages_keep_their_own_destinations() -> None:
    found = request_of(
        "jobdw name=a capacity=1GiB",
        "stage_out type=list source=/in/o destination=/out",
        "stage_in type=list source=/in/i destination=$DW_JOB_a/d",
    )
    assert found.lists == (
        ListTransfer(False, "/in/i", "$DW_JOB_STRIPED/a/d", "script line 4, column 24"),
        ListTransfer(True, "/in/o", "/out", "script line 3, column 25"),
    )


@pytest.mark.parametrize(
    ("lines", "place", "sentence"),
    [
        (("jobdw name=a capacity=1GiB", "jobdw capacity=1GiB"), "line 3, column 5", "second time"),
        (("jobdw capacity=1GiB", "jobdw name=a capacity=1GiB"), "line 3, column 5", "second time"),
        (("jobdw name=a capacity=1GiB", "jobdw name=a capacity=1GiB"), "line 3, column 16", "same variables"),
        (("jobdw name=a-b capacity=1GiB", "jobdw name=a_b capacity=1GiB"), "line 3, column 16", "same variables"),
        (("jobdw name=STRIPED capacity=1GiB",), "line 2, column 16", "of an access mode"),
        (("jobdw name=1a capacity=1GiB",), "line 2, column 16", "starts with a digit"),
        (("jobdw name=a/b capacity=1GiB",), "line 2, column 16", "the name"),
        (("jobdw name=a capacity=1GiB pool=x", "jobdw name=b capacity=1GiB"), "line 3, column 5", "different pools"),
        (("jobdw name=a capacity=1GiB", "jobdw name=b capacity=1GiB pool=x"), "line 3, column 32", "different pools"),
        (("jobdw name=a capacity=1GiB", "jobdw name=b capacity=2N"), "line 3, column 27", "different units"),
        (("jobdw name=a capacity=8191PiB", "jobdw name=b capacity=8191PiB"), "line 3, column 27", "overflow"),
        ((*TWO, "stage_in type=file source=/a destination=$DW_JOB_c/x"), "line 4, column 34", "name=a, name=fast-tier"),
        ((*TWO, "stage_out type=file source=$DW_JOB_a destination=/x"), "line 4, column 32", "is the root"),
        ((*TWO, "stage_in type=file source=/a destination=$DW_JOB_a/../x"), "line 4, column 46", "goes up"),
        ((*TWO, "stage_in type=file source=/a destination=$DW_JOB_LDBALANCE_a/x"), "line 4, column 34", "needs access"),
        (
            ("jobdw capacity=1GiB", "copy_in source=/a destination=$DW_JOB_x/a"),
            "line 3, column 23",
            "is not on a buffer",
        ),
    ],
)
def test_a_contradiction_is_rejected_with_its_place(lines: tuple[str, ...], place: str, sentence: str) -> None:
    with pytest.raises(DirectiveRejected) as error:
        request_of(*lines)
    assert error.value.rejection.place == f"script {place}" and sentence in error.value.rejection.sentence


def test_more_named_buffers_than_a_job_may_have_are_rejected() -> None:
    with pytest.raises(DirectiveRejected, match="more than 16 buffers"):
        request_of(*(f"jobdw name=n{number} capacity=1GiB" for number in range(17)))


def test_jobs_of_other_schedulers_and_providers_have_no_names() -> None:
    with pytest.raises(DirectiveRejected, match="is not on the buffer"):
        read_external_job_request(
            "#!/bin/sh\n#BB_LUA jobdw pool=fast capacity=1GiB\n"
            "#BB_LUA stage_in type=file source=/a destination=$DW_JOB_a/x\n"
        )
    by_slurm = PathVariables(by_scheduler=True)
    named = "#!/bin/sh\n#DW jobdw capacity=1GiB name=a\n"
    kept = read_request(named, variables=by_slurm)
    assert kept.request is not None and kept.request.names == () and "is not known here" in kept.warnings[0]
    with pytest.raises(DirectiveRejected, match="is not on the buffer"):
        read_request(named + "#DW stage_in type=file source=/a destination=$DW_JOB_a/x\n", variables=by_slurm)
    found = read_request(named, provider="datawarp")
    assert found.request is not None and found.request.names == () and found.request.options == ("jobdw name=a",)


def test_the_variables_of_a_named_buffer_lead_back_to_it() -> None:
    for name in ("a", "fast-tier", "a.b+c"):
        for access in ((Access.STRIPED,), (Access.PRIVATE, Access.STRIPED)):
            for variable, mode in named_variables(name, access).items():
                assert named_path(f"${variable}/x", ("other", name), access) == f"${mode}/{name}/x"
    assert named_path("/a", ("a",), (Access.STRIPED,)) is None


def test_the_agent_is_told_the_names() -> None:
    world = World()
    script = "#!/bin/sh\n#DW jobdw name=a capacity=1\n#DW jobdw name=b capacity=2\n"
    job = world.submit(script=script)
    assert world.state.buffers[job].granted_bytes == 3
    assert [order.names for order in orders_for(world.state, "n1")] == [("a", "b")]


# ---- copy_in and copy_out


def test_copies_become_stages_of_a_file_or_a_directory() -> None:
    found = reading(
        "jobdw type=xfs capacity=10GiB name=fast-storage",
        "copy_in source=/in/data destination=$DW_JOB_fast_storage/data profile=no-xattr",
        "copy_out source=$DW_JOB_fast_storage/out destination=./$USER/ links=skip",
    )
    request = found.request
    assert request is not None
    assert (request.type, request.names) == ("scratch", ("fast-storage",))
    either = TransferKind.EITHER
    assert request.stage_in == (Transfer(either, "/in/data", "$DW_JOB_STRIPED/fast-storage/data"),)
    assert request.stage_out == (Transfer(either, "%d/%u/", "$DW_JOB_STRIPED/fast-storage/out"),)
    assert request.options == ("stage_out:0 links=skip",)
    assert [warning.split(": ")[0] for warning in found.warnings] == [
        "script line 2, column 16",
        "script line 3, column 67",
    ]
    assert "profile= has no effect" in found.warnings[1]


@pytest.mark.parametrize(
    ("line", "column", "sentence"),
    [
        ("copy_in source=/a", 5, "no destination="),
        ("copy_out destination=/a", 5, "no source="),
        ("copy_in source=/a/*.h5 destination=$DW_JOB_STRIPED/a", 23, "is a pattern"),
        ("copy_in source=$DW_PERSISTENT_a/x destination=$DW_JOB_STRIPED/a", 20, "is a path in a buffer"),
        ("copy_out source=$DW_JOB_STRIPED/a destination=$DW_JOB_STRIPED/b", 51, "is a path in a buffer"),
        ("copy_in source=/a destination=$DW_JOB_STRIPED/a move=yes", 58, "only copy"),
        ("copy_on source=/a", 5, "copy_out"),
    ],
)
def test_an_invalid_copy_is_rejected(line: str, column: int, sentence: str) -> None:
    with pytest.raises(DirectiveRejected) as error:
        request_of("jobdw capacity=1GiB", line)
    rejection = error.value.rejection
    assert rejection.place == f"script line 3, column {column}" and sentence in rejection.sentence + rejection.remedy


def test_other_providers_have_no_copies_and_slurm_jobs_have_them() -> None:
    with pytest.raises(DirectiveRejected, match="unknown directive 'copy_in'"):
        read_request("#!/bin/sh\n#DW jobdw capacity=1GiB\n#DW copy_in source=/a destination=/b\n", provider="datawarp")
    found = read_external_job_request(
        "#!/bin/sh\n#BB_LUA pool=fast capacity=1GiB\n#BB_LUA copy_out source=$DW_JOB_STRIPED/a destination=out\n"
    ).request
    assert found is not None
    assert found.stage_out == (Transfer(TransferKind.EITHER, "%d/out", "$DW_JOB_STRIPED/a"),)
