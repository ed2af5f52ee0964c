"""The job table of a Lua script: every field of every release of Slurm from 22.05 to 26.05, its type and value."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.providers import Local, OperationError
from forebay.cluster.providers.job_table import FIELDS, FIRST, JobContext, job_table, job_text, value_of
from forebay.cluster.providers.slurm_constants import CONSTANTS, error_codes
from forebay.replica.model.job_states import ENDED, JobState
from forebay.replica.model.orders import JobStatus
from forebay.replica.model.requests import JobOptions
from forebay.replica.values.units import Instant
from tests.cluster.providers.conftest import HERE, Programs
from tests.cluster.providers.test_lua import JOB, perform

SCRIPTS = HERE / "scripts"
SOURCE = os.environ.get("FOREBAY_SLURM_SOURCE", "")
RELEASES = ("22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11", "26.05")
WITH_TABLE = RELEASES[1:]
"""Releases whose plugin passes a job table."""

needs_source = pytest.mark.skipif(not SOURCE, reason="FOREBAY_SLURM_SOURCE names no Git directory of Slurm's source")

SECOND = 1_000_000
OPTIONS = JobOptions(
    account="physics",
    qos="high",
    licenses=(("matlab", 2),),
    reservation="maint",
    nice=-5,
    requeue=False,
    mail_types=("begin", "stage_out"),
    mail_user="a@b.example",
    comment="hello",
    partition="debug",
    tasks=2,
    exclusive=True,
    input="in",
)
STATUS = JobStatus(
    state="STAGE_OUT",
    result="FAILED",
    buffer_state="staging-out",
    priority=7,
    restarts=3,
    dependency="afterok:12",
    output="/home/alice/o",
    error="/home/alice/e",
    comment="it broke",
    tres="cpu=2,node=1,bb/lua=1M",
    exit_code=2,
    signal=9,
    submitted_at=Instant(100 * SECOND),
    eligible_at=Instant(150 * SECOND),
    started_at=Instant(200 * SECOND),
    ended_at=Instant(300 * SECOND),
    deadline=Instant(900 * SECOND),
    suspended_at=Instant(250 * SECOND),
    suspended_s=11,
)
KNOWN: dict[str, object] = {
    "account": "physics",
    "array_job_id": 40,
    "array_max_tasks": 2,
    "array_task_id": 1,
    "batch_host": "n1",
    "burst_buffer": "#BB_LUA pool=fast",
    "burst_buffer_state": "staging-out",
    "cluster": "demo",
    "comment": "hello",
    "cpus_per_task": 3,
    "deadline": 900,
    "dependency": "afterok:12",
    "eligible_time": 150,
    "end_time": 300,
    "exit_code": 2 * 256 + 9,
    "group_id": 2002,
    "job_id": 7,
    "job_state": 5 | 0x800000,
    "licenses": "matlab:2",
    "mail_type": 0x101,
    "mail_user": "a@b.example",
    "max_nodes": 0,
    "name": "n",
    "nice": 0x80000000 - 5,
    "nodes": "n1",
    "num_cpus": 6,
    "num_nodes": 1,
    "num_tasks": 2,
    "partition": "debug",
    "pn_min_cpus": 6,
    "pre_sus_time": 11,
    "priority": 7,
    "qos": "high",
    "requeue": 0,
    "restart_cnt": 3,
    "resv_name": "maint",
    "shared": 0,
    "start_time": 200,
    "state_desc": "burst_buffer/lua: Stage-out in progress",
    "std_err": "/home/alice/e",
    "std_in": "in",
    "std_out": "/home/alice/o",
    "submit_time": 100,
    "suspend_time": 250,
    "system_comment": "it broke",
    "time_limit": 2,
    "tres_alloc_str": "cpu=2,node=1,bb/lua=1M",
    "tres_req_str": "cpu=2,node=1,bb/lua=1M",
    "user_id": 1001,
    "user_name": "alice",
    "work_dir": "/home/alice",
}
"""Fields that depend on the job, with their values for a job that sets everything."""


DEFAULTS: dict[str, object] = {
    "alloc_sid": 0xFFFFFFFE,
    "batch_flag": 1,
    "billable_tres": 0xFFFFFFFE,
    "core_spec": 0xFFFE,
    "cores_per_socket": 0xFFFE,
    "cpu_freq_gov": 0xFFFFFFFE,
    "cpu_freq_max": 0xFFFFFFFE,
    "cpu_freq_min": 0xFFFFFFFE,
    "min_mem_per_cpu": None,
    "ntasks_per_core": 0xFFFF,
    "ntasks_per_socket": 0xFFFF,
    "show_flags": 2,
    "site_factor": 0x80000000,
    "sockets_per_node": 0xFFFE,
    "threads_per_core": 0xFFFE,
}
"""Constant values other than 0 and nil: defaults of sbatch or slurmctld."""


def full(programs: Programs) -> JobContext:
    """Return a job that sets every field."""
    subject = programs.subject(
        directives="#BB_LUA pool=fast",
        cpus=6,
        time_limit_s=61,
        array_job=40,
        array_task=1,
        array_throttle=2,
        options=OPTIONS,
        status=STATUS,
    )
    return JobContext(subject, Local(cluster="demo"))


def use(programs: Programs, name: str) -> None:
    """Use a script of `scripts` as the site's."""
    shutil.copyfile(SCRIPTS / name, programs.script)


def test_known_job_fields_have_slurms_names(programs: Programs) -> None:
    bare = JobContext(programs.subject(job=0, name="", user="", uid=0, gid=0, workdir="", node=""), Local())
    rich = full(programs)
    varying = {field.name: value_of(field, rich) for field in FIELDS if value_of(field, rich) != value_of(field, bare)}
    assert varying == {name: value for name, value in KNOWN.items() if name != "num_nodes"}
    assert {name: job_table(rich)[name] for name in KNOWN} == KNOWN


def test_unsupported_job_fields_have_slurms_defaults() -> None:
    constant = {field.name: field.value for field in FIELDS if not callable(field.value)}
    zero = {"integer": 0, "number": 0, "string": None, "table": None}
    assert constant == {
        field.name: DEFAULTS.get(field.name, zero[field.kind]) for field in FIELDS if field.name in constant
    }
    assert DEFAULTS.keys() <= constant.keys()
    assert not constant.keys() & KNOWN.keys()


def test_a_job_outside_an_array_has_slurms_array_defaults(programs: Programs) -> None:
    table = job_table(JobContext(programs.subject(), Local()))
    names = ("array_job_id", "array_task_id", "array_max_tasks", "array_task_str")
    assert [table.get(name) for name in names] == [0, 0xFFFFFFFE, 0, None]


def test_mail_goes_to_the_user_by_default(programs: Programs) -> None:
    asked = programs.subject(options=JobOptions(mail_types=("ALL",)))
    table = job_table(JobContext(asked, Local()))
    assert (table["mail_user"], table["mail_type"]) == ("alice", 0x10F)


def test_resources_of_a_pending_job_are_requested_not_allocated(programs: Programs) -> None:
    table = job_table(JobContext(programs.subject(status=JobStatus(tres="cpu=1")), Local()))
    assert (table["tres_req_str"], table.get("tres_alloc_str")) == ("cpu=1", None)


def test_fields_are_unique_and_releases_are_valid() -> None:
    assert len({field.name for field in FIELDS}) == len(FIELDS)
    for field in FIELDS:
        assert field.since in RELEASES and field.until in ("", *RELEASES), field.name


def test_a_job_without_a_node_has_no_node_fields(programs: Programs) -> None:
    table = job_table(JobContext(programs.subject(options=JobOptions(nodes=0)), Local()))
    assert (table["num_nodes"], table["num_cpus"], table.get("nodes"), table.get("batch_host")) == (0, 0, None, None)


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_has_slurms_number(programs: Programs, state: JobState) -> None:
    numbers = {"PENDING": 0, "CONFIGURING": 0x4001, "RUNNING": 1, "SUSPENDED": 2, "STAGE_OUT": 0x800003}
    ends = {"COMPLETED": 3, "CANCELLED": 4, "FAILED": 5, "TIMEOUT": 6, "NODE_FAIL": 7}
    status = JobStatus(state=state.name, result="COMPLETED")
    assert job_table(JobContext(programs.subject(status=status), Local()))["job_state"] == (numbers | ends)[state.name]
    assert {each.name for each in ENDED} == ends.keys()


def test_a_running_job_ends_at_its_time_limit(programs: Programs) -> None:
    status = JobStatus(state="RUNNING", started_at=Instant(200 * SECOND), suspended_s=5)
    table = job_table(JobContext(programs.subject(status=status, time_limit_s=60), Local()))
    assert (table["start_time"], table["end_time"]) == (200, 265)


def test_the_text_has_labelled_fields_with_scontrol_times(programs: Programs) -> None:
    text = job_text(full(programs))
    assert text.startswith("JobId=7 JobName=n\n   ")
    pairs = dict(line.strip().split("=", 1) for line in text.strip().split("\n")[1:])
    assert pairs.keys() == {field.label for field in FIELDS if field.label}
    expected = {
        "UserId": "alice(1001)",
        "JobState": "STAGE_OUT",
        "ExitCode": "2:9",
        "Nice": "-5",
        "SubmitTime": datetime.fromtimestamp(100, UTC).astimezone().strftime("%Y-%m-%dT%H:%M:%S"),
        "TimeLimit": "00:02:00",
        "Account": "physics",
        "Network": "(null)",
    }
    assert {key: pairs[key] for key in expected} == expected


@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("operation", [*JOB[:-1], "real_size"])
def test_a_script_can_read_every_field_in_every_function(programs: Programs, operation: str, rich: bool) -> None:
    use(programs, "every_field.lua")
    subject = full(programs).subject if rich else programs.subject()
    perform(programs.provider("lua"), operation, subject, str(programs.directory))
    read = dict(line.partition(" ")[2].split("=", 1) for line in programs.calls() if line.startswith(f"{operation} "))
    assert read.keys() == {field.name for field in FIELDS}
    job = JobContext(subject, programs.local)
    for field in FIELDS:
        value = value_of(field, job)
        shown = f"{value:.0f}" if isinstance(value, float) else "nil" if value is None else str(value)
        assert read[field.name] == shown.split("\n")[0], field.name


def test_field_names_and_types_match_the_script() -> None:
    rows = re.findall(r'^  \{"(\w+)", "(\w+)", "([\d.]+)"(?:, "([\d.]+)")?\},$', script_text(), re.MULTILINE)
    assert rows == [
        *((field.name, field.kind, field.since, field.until) for field in fields_in_order_of(rows)),
    ]


def script_text() -> str:
    """Return the text of the script that reads every field."""
    return (SCRIPTS / "every_field.lua").read_text()


def fields_in_order_of(rows: list[tuple[str, str, str, str]]) -> list[object]:
    """Return the fields in the order of the rows."""
    by_name = {field.name: field for field in FIELDS}
    return [by_name[name] for name, *_ in rows]


def test_a_job_table_has_no_pairs_and_its_text_needs_the_calls_table(programs: Programs) -> None:
    programs.script.write_text(
        "function slurm_bb_setup(_, _, _, _, _, _, info)\n"
        "  for name in pairs(info) do return slurm.ERROR, name end\n"
        "  local code, text = slurm.job_info_to_string({})\n"
        "  return slurm.ERROR, code .. ' ' .. text\n"
        "end\n"
    )
    with pytest.raises(OperationError, match="-1 job_info_to_string needs the job_info table of the call"):
        programs.provider("lua").setup(programs.subject(), str(programs.directory))


# A real Slurm, recorded --------------------------------------------------------------------------------------------

UNKNOWN_HERE = {
    "accrue_time": "Forebay has no age limits",
    "alloc_node": "the login node is not recorded",
    "alloc_sid": "the login session is not recorded",
    "billable_tres": "Forebay bills nothing",
    "command": "the script arrives as text, without its path",
    "last_sched_eval": "scheduling cycles look at all jobs",
    "start_protocol_ver": "no job speaks Slurm's protocol",
    "state_reason": "its numbers differ between releases",
}
"""Fields in which Forebay's constant differs from a real Slurm's -> reason."""


def read_record() -> dict[str, dict[str, str]]:
    """Return the recorded values of a real Slurm 24.11, by function and field."""
    found: dict[str, dict[str, str]] = {}
    for line in (SCRIPTS / "slurm-24.11-job-table.txt").read_text().splitlines():
        if not line.startswith("#"):
            function, _, row = line.partition(" ")
            name, _, value = row.partition("=")
            found.setdefault(function, {})[name] = value
    return found


def as_lua_prints(value: object) -> str:
    """Return a value as Lua 5.1 prints it."""
    return "nil" if value is None else f"{value:.0f}" if isinstance(value, float) else str(value)


def test_constants_equal_those_of_a_real_slurm_except_documented_ones() -> None:
    constant = {field.name: as_lua_prints(field.value) for field in FIELDS if not callable(field.value)}
    differing = {
        name
        for values in read_record().values()
        for name, value in values.items()
        if name in constant and constant[name] != value
    }
    assert differing == UNKNOWN_HERE.keys()


@pytest.mark.parametrize(
    ("function", "status"),
    [
        ("setup", JobStatus(buffer_state="staging-in")),
        ("pre_run", JobStatus(state="CONFIGURING", buffer_state="pre-run")),
        ("data_out", JobStatus(state="STAGE_OUT", result="COMPLETED", buffer_state="staging-out")),
    ],
)
def test_known_fields_equal_those_of_a_real_slurm(programs: Programs, function: str, status: JobStatus) -> None:
    subject = programs.subject(
        job=1,
        name="j.sh",
        user="u1",
        uid=20001,
        gid=20001,
        workdir="/tmp",
        time_limit_s=120,
        directives="#BB_LUA_X pool=fast capacity=2M",
        options=JobOptions(nice=3, comment="hello", partition="debug"),
        status=status,
    )
    job = JobContext(subject, Local(cluster="bbtest"))
    theirs = read_record()[function]
    differing = {
        field.name
        for field in FIELDS
        if callable(field.value) and field.name in theirs and as_lua_prints(value_of(field, job)) != theirs[field.name]
    }
    times = {"eligible_time", "end_time", "start_time", "submit_time"}
    # Slurm omits the user's name, its TRES include memory and billing, and its file names are patterns.
    assert differing - times <= {"user_name", "tres_req_str", "tres_alloc_str", "std_out", "nodes", "batch_host"}
    assert ({"nodes", "batch_host"} <= differing) == (function == "setup"), "the node is known earlier here"


# Slurm's source, if a copy exists -------------------------------------------------------------------


def slurm_file(release: str, path: str) -> str:
    """Return a file of a release of Slurm."""
    argv = ["git", "-C", SOURCE, "show", f"slurm-{release}:{path}"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@needs_source
@pytest.mark.parametrize("release", WITH_TABLE)
def test_the_fields_of_a_release_match_its_source(release: str) -> None:
    source = slurm_file(release, "src/plugins/burst_buffer/lua/burst_buffer_lua.c")
    body = source[source.index("static int _lua_job_info_field") :]
    body = body[: body.index("\n}\n")]
    found: dict[str, str] = {}
    for part in re.split(r"xstrcmp\(name, ", body)[1:]:
        name = part.split('"')[1]
        pushed = re.findall(r"lua_push(\w+)\(", part)
        kind = {"string": "string", "integer": "integer", "number": "number"}.get(pushed[0], "integer")
        found[name] = "table" if "lua_newtable" in part else kind
    at = RELEASES.index(release)
    ours = {
        field.name: field.kind
        for field in FIELDS
        if RELEASES.index(field.since) <= at <= RELEASES.index(field.until or RELEASES[-1])
    }
    assert ours == found


@needs_source
def test_the_first_release_passes_no_job_table() -> None:
    assert "_lua_job_info_field" not in slurm_file("22.05", "src/plugins/burst_buffer/lua/burst_buffer_lua.c")
    assert WITH_TABLE[0] == FIRST


@needs_source
@pytest.mark.parametrize("release", RELEASES)
def test_the_slurm_table_has_every_name_of_the_release(release: str, programs: Programs) -> None:
    source = slurm_file(release, "src/lua/slurm_lua.c")
    names = set(re.findall(r'lua_setfield\(\w+, -2, "(\w+)"\)', source))
    functions = source[source.index("slurm_functions") :]
    names |= set(re.findall(r'\{ ?"(\w+)", \w+ ?\}', functions[: functions.index("};")]))
    names |= set(re.findall(r"ERRTAB_ENTRY\((\w+)\)", slurm_file(release, "src/common/slurm_errno.c"))) - {"_e"}
    words = " ".join(sorted(names))
    programs.script.write_text(
        "function slurm_bb_pools()\n"
        "  local missing = {}\n"
        f"  for name in ('{words}'):gmatch('%S+') do\n"
        "    if slurm[name] == nil then missing[#missing + 1] = name end\n"
        "  end\n"
        "  return slurm.ERROR, 'missing: ' .. table.concat(missing, ' ')\n"
        "end\n"
    )
    with pytest.raises(OperationError) as raised:
        programs.provider("lua").pools(str(programs.directory))
    assert raised.value.message == "missing: "


@needs_source
@pytest.mark.parametrize("release", RELEASES)
def test_slurms_example_script_runs_unmodified(release: str, programs: Programs) -> None:
    programs.script.write_text(slurm_file(release, "etc/burst_buffer.lua.example"))
    programs.status_identity = release in WITH_TABLE
    lua, directory = programs.provider("lua"), str(programs.directory)
    for subject in (programs.subject(), full(programs).subject):
        for operation in JOB:
            perform(lua, operation, subject, directory)
        lua.real_size(subject, directory)
    pools = lua.pools(directory)
    assert pools is not None and {"pool1", "pool2"} <= {pool.name for pool in pools}
    status = lua.get_status(("foo", "bar"), 1, 2, directory)
    assert status.startswith("Status return message") and ("\nfoo\nbar\n" in status) == programs.status_identity


@needs_source
@pytest.mark.parametrize("release", RELEASES)
def test_error_codes_match_the_source(release: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    header = slurm_file(release, "slurm/slurm_errno.h").replace("#include <slurm/slurm_version.h>", "")
    names = [name for name in error_codes() if re.search(rf"\b{name}\b", header)]
    checks = "\n".join(f'_Static_assert({name} == {error_codes()[name]}, "{name}");' for name in names)
    (tmp_path / "check.c").write_text(f"{header}\n{checks}\n")
    done = subprocess.run([compiler, "-fsyntax-only", "-w", str(tmp_path / "check.c")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(names) > 200


def test_constants_are_numbers() -> None:
    assert CONSTANTS["SUCCESS"] == 0 and CONSTANTS["ERROR"] == CONSTANTS["FAILURE"] == -1
    assert error_codes()["ESLURM_INVALID_PARTITION_NAME"] == 2000
    assert not error_codes().keys() & CONSTANTS.keys()


def test_the_status_of_an_order_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(STATUS), type=JobStatus) == STATUS
