"""A site's dw_wlm_cli, dwstat and the programs of the generic provider: command lines and results."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.cluster.providers import Local, OperationError
from forebay.cluster.providers.files import replace_symbols, whole_script
from forebay.cluster.providers.trusted_programs import ProgramRefused, check_command, read_trusted
from forebay.replica.model.buffers import Access
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent
from tests.cluster.providers.conftest import Programs


def test_datawarp_command_lines_match_observations(programs: Programs) -> None:
    datawarp, subject, directory = programs.provider("datawarp"), programs.subject(), str(programs.directory)
    datawarp.process(subject, directory)
    datawarp.setup(subject, directory)
    datawarp.data_in(subject, directory)
    datawarp.real_size(subject, directory)
    datawarp.paths(subject, directory)
    datawarp.pre_run(subject, directory)
    datawarp.post_run(subject, directory)
    datawarp.data_out(subject, directory)
    datawarp.teardown(subject, False, directory)
    datawarp.teardown(subject, True, directory)
    wanted = CreatePersistent("alpha", 4096, "fast", (Access.STRIPED, Access.PRIVATE), "scratch")
    datawarp.create_persistent(subject, wanted, directory)
    datawarp.create_persistent(subject, CreatePersistent("beta", 1, "fast"), directory)
    datawarp.destroy_persistent(subject, DestroyPersistent("alpha", True), directory)
    assert programs.calls() == [
        "--function job_process --job D/script",
        "--function setup --token 7 --caller SLURM --user 1001 --groupid 2002 --capacity fast:2KiB --job D/script",
        "--function data_in --token 7 --job D/script",
        "--function real_size --token 7",
        "--function paths --job D/script --token 7 --pathfile D/path",
        "--function pre_run --token 7 --job D/script --nodehostnamefile D/client_nids",
        "--function post_run --token 7 --job D/script",
        "--function data_out --token 7 --job D/script",
        "--function teardown --token 7 --job D/script",
        "--function teardown --token 7 --job D/script --hurry",
        "--function create_persistent -c CLI -t alpha -u 1001 -C fast:4096 -a striped,private -T scratch",
        "--function create_persistent -c CLI -t beta -u 1001 -C fast:1",
        "--function teardown --token alpha --job D/script --hurry",
    ]
    assert (programs.directory / "client_nids").read_text() == "n1\n"


@pytest.mark.parametrize(
    ("operation", "said", "succeeds"),
    [
        ("job_process", "job_file_valid+True", True),
        ("job_process", "bad+directive", False),
        ("setup", "No+matching+session", False),
        ("data_in", "No+matching+session", True),
        ("data_in", "offline+namespaces", False),
        ("paths", "job_file_valid+True", True),
        ("paths", "nothing+there", False),
        ("pre_run", "mount+failed", False),
        ("post_run", "No+matching+session", True),
        ("data_out", "No+matching+session", True),
        ("data_out", "EIO", False),
        ("teardown", "token+not+found", True),
        ("teardown", "No+matching+session", True),
        ("teardown", "dws+busy", False),
    ],
)
def test_certain_datawarp_outputs_are_success_with_any_exit_code(
    programs: Programs, operation: str, said: str, succeeds: bool
) -> None:
    subject, directory = programs.subject(f"{operation}:fail:{said}"), str(programs.directory)
    datawarp = programs.provider("datawarp")

    def perform() -> None:
        if operation == "teardown":
            datawarp.teardown(subject, False, directory)
        else:
            getattr(datawarp, "process" if operation == "job_process" else operation)(subject, directory)

    if succeeds:
        perform()
        assert len(programs.calls()) == 1
    else:
        with pytest.raises(OperationError) as raised:
            perform()
        assert raised.value.message == said.replace("+", " ")


def test_a_silent_command_is_reported_with_its_exit_code(programs: Programs) -> None:
    with pytest.raises(OperationError, match=r"dw_wlm_cli ended with code 3 without output"):
        programs.provider("datawarp").setup(programs.subject("setup:silent"), str(programs.directory))


def test_a_command_is_killed_at_its_timeout(programs: Programs) -> None:
    with pytest.raises(OperationError, match="Timeout @ 300 msec"):
        programs.provider("datawarp", other_timeout_s=0.3).pre_run(
            programs.subject("pre_run:sleep:600"), str(programs.directory)
        )
    assert programs.left() == []


def test_a_persistent_buffer_counts_only_with_a_confirming_output(programs: Programs) -> None:
    programs.variables["SITE_CREATED"] = "nothing"
    with pytest.raises(OperationError, match="nothing"):
        programs.provider("datawarp").create_persistent(
            programs.subject(), CreatePersistent("alpha", 1, "fast"), str(programs.directory)
        )


@pytest.mark.parametrize(("said", "size"), [("4096", 4096), ("", None)])
def test_datawarp_reports_a_real_size_or_nothing(programs: Programs, said: str, size: int | None) -> None:
    programs.variables["SITE_SIZE"] = said
    assert programs.provider("datawarp").real_size(programs.subject(), str(programs.directory)) == size


def test_datawarp_reports_pools_and_status(programs: Programs) -> None:
    datawarp = programs.provider("datawarp")
    pools = datawarp.pools(str(programs.directory))
    assert pools is not None
    assert [(pool.name, pool.quantity, pool.granularity, pool.is_bytes) for pool in pools] == [("wlm", 3, 1024, True)]
    assert datawarp.get_status(("sessions", "a b"), 0, 0, str(programs.directory)) == "asked: sessions a b\n"


def test_user_text_never_reaches_a_shell(programs: Programs) -> None:
    touched = programs.directory / "touched"
    wicked = f"$(touch {touched}); `touch {touched}`"
    programs.provider("datawarp").setup(programs.subject(pool=wicked), str(programs.directory))
    assert programs.provider("datawarp").get_status((wicked,), 0, 0, str(programs.directory)) == f"asked: {wicked}\n"
    assert wicked in programs.log.read_text() and not touched.exists()


def test_the_generic_provider_runs_configured_programs_and_skips_others(
    programs: Programs,
) -> None:
    program = programs.directory.parent / "any"
    program.write_text('#!/bin/sh\necho "$*" >>"$SITE_LOG"\n[ "$1" != get_sys ] || echo TotalSize=5MiB\n')
    program.chmod(0o755)
    programs.more.append(program)
    subject, directory = programs.subject(script="#!/bin/sh\n#BB job=%j\n# words\ntrue\n#BB late\n"), "/proc/nowhere"
    none = programs.provider("generic", get_sys_state="")
    none.data_in(subject, directory)
    none.teardown(subject, False, directory)
    assert none.pools(directory) is None and programs.calls() == []
    generic = programs.provider(
        "generic",
        get_sys_state=str(program),
        start_stage_in=str(program),
        start_stage_out=str(program),
        stop_stage_in=str(program),
        stop_stage_out=str(program),
    )
    generic.data_in(subject, directory)
    generic.data_out(subject, directory)
    generic.teardown(subject, False, directory)
    pools = generic.pools(directory)
    assert pools is not None and [(pool.name, pool.quantity) for pool in pools] == [("generic", 5 * 1024**2)]
    assert programs.calls() == [
        "start_stage_in 7 1001 2048 #BB job=7 # words",
        "stage_out 7 1001 2048 #BB job=7 # words",
        "stop_stage_in 7",
        "stop_stage_out 7",
        "get_sys",
    ]


@pytest.mark.parametrize("which", ["file", "directory"])
def test_a_program_that_others_can_change_is_rejected(programs: Programs, which: str) -> None:
    target = programs.command if which == "file" else programs.command.parent
    target.chmod(0o777)
    with pytest.raises(ProgramRefused, match="others may write to"):
        check_command(str(programs.command), programs.local)
    with pytest.raises(OperationError, match="others may write to"):
        programs.provider("datawarp").setup(programs.subject(), str(programs.directory))
    target.chmod(0o755)
    assert check_command(str(programs.command), programs.local) == os.path.realpath(programs.command)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_program_of_another_account_is_rejected(programs: Programs) -> None:
    os.chown(programs.script, 12345, 12345)
    with pytest.raises(ProgramRefused, match="belongs to user 12345"):
        read_trusted(str(programs.script), programs.local)


def test_a_program_must_be_a_file_with_an_absolute_path(programs: Programs, tmp_path: Path) -> None:
    for path in (str(programs.directory), "burst_buffer.lua", str(tmp_path / "missing")):
        with pytest.raises(ProgramRefused, match="not a regular file|not absolute|cannot be opened"):
            read_trusted(path, Local(allowed_programs=(path,)))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProgramRefused, match="not a regular file"):
        read_trusted(str(tmp_path / "pipe"), Local(allowed_programs=(str(tmp_path / "pipe"),)))
    programs.command.chmod(0o644)
    with pytest.raises(ProgramRefused, match="is not executable"):
        check_command(str(programs.command), programs.local)


@pytest.mark.parametrize(
    ("line", "replaced"),
    [
        ("#BB_LUA a=%j b=%u c=%x d=%d", "#BB_LUA a=7 b=alice c=n d=/home/alice"),
        ("#BB_LUA %% %A %a", "#BB_LUA % 7 4294967294"),
        ("#BB_LUA %j \\\\%j", "#BB_LUA 7 %j"),
        ("#BB_LUA %q %", "#BB_LUA %q %"),
        ("# %j", "# %j"),
    ],
)
def test_symbols_are_replaced_only_in_directive_lines(programs: Programs, line: str, replaced: str) -> None:
    script = f"#!/bin/sh\n{line}\necho %j\n#BB_LUA %j\n"
    found = replace_symbols(script, programs.subject(), ("#BB_LUA",))
    assert found == f"#!/bin/sh\n{replaced}\necho %j\n#BB_LUA %j\n"


def test_an_array_task_has_its_own_symbols(programs: Programs) -> None:
    subject = programs.subject(array_job=5, array_task=3)
    assert replace_symbols("#BB_LUA %A_%a %j", subject, ("#BB_LUA",)) == "#BB_LUA 5_3 7"


def test_directives_outside_the_script_are_inserted_once(programs: Programs) -> None:
    script = "#!/bin/sh\n#BB_LUA pool=fast capacity=2K \\\n#BB_LUA more\ntrue\n"
    own = "#BB_LUA pool=fast capacity=2K more"
    for directives, expected in (
        (own, script),
        (f"#BB_LUA extra\n{own}", script.replace("#!/bin/sh\n", "#!/bin/sh\n#BB_LUA extra\n")),
        ("", script),
    ):
        assert whole_script(programs.subject(script=script, directives=directives), "lua", "BB_LUA") == expected
