"""Commands against an HTTPS double of the API: requests, output, and exit codes."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from forebay.cluster.cli.exits import MEANINGS, ExitCode
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.schemas.jobs import (
    BuffersAnswer,
    BufferView,
    BulkAnswer,
    CommandResult,
    ErrorView,
    HistoryAnswer,
    JobsAnswer,
    JobView,
    MembersAnswer,
    MemberView,
    NodesAnswer,
    NodeView,
    PoolsAnswer,
    PoolView,
    StatusView,
    WhyView,
)
from forebay.cluster.schemas.ledger import SnapshotView
from forebay.cluster.schemas.transfers import ReceiptsAnswer, TransfersAnswer
from forebay.cluster.system.clock import SystemClock
from tests.cluster.cli.double import Double, forebay, on_a_terminal
from tests.cluster.cli.transfer_views import OF_A_JOB, RECEIPT, TRANSFERS
from tests.cluster.cli.views import HISTORY, JOBS, PENDING, job

SCRIPT = "#!/bin/sh\n#SBATCH --time=1:30:00 -J sort\n#DW jobdw capacity=16MiB type=scratch\nsort\n"
POOL = PoolView(
    name="fast", quantity_bytes=96 * 1024**2, granularity_bytes=8 * 1024**2, held_bytes=16 * 1024**2,
    free_bytes=80 * 1024**2, is_default=True, buffers=1, capacity_control=("project_quota", "watch"), revision=5,
)  # fmt: skip
NODE = NodeView(
    name="n1", state="UP", reason="", cpus=4, cpus_in_use=2, instance="i", storage_id="s", registered_time=None,
    jobs=(7, 8), last_contact_s=0.25, process_control="cgroup", capacity_control="project_quota", revision=5,
)  # fmt: skip
BUFFER = BufferView(
    job_id=42, user="alice", state="staging-in", pool="fast", capacity_bytes=16 * 1024**2, requested_bytes=1,
    held_bytes=16 * 1024**2, node="n1", access=("striped",), create_time="2026-01-31T09:00:00.000000Z", revision=5,
)  # fmt: skip
MEMBER = MemberView(
    name="r1", peer="127.0.0.1:7401", api="127.0.0.1:7411", role="leader", reachable=True, term=3, commit_index=9,
    applied_index=9, revision=5, lag_entries=0,
)  # fmt: skip
STATUS = StatusView(
    cluster="demo", cluster_id="c", replica="r1", role="leader", term=3, leader="r1", ready=True, commit_index=9,
    applied_index=9, last_index=9, revision=5, state_digest="ab" * 32,
)  # fmt: skip
SNAPSHOT = SnapshotView(
    path="/x/snapshot-9.fbs", index=9, term=3, revision=5, at=None, size_bytes=4096, ledger_digest="ab" * 32
)
WHY = WhyView(
    revision=77, at="2026-01-31T09:00:00.000000Z", job_id=42, state="PENDING", reason="BurstBufferResources",
    burst_buffer_state="pending", sentence="16MiB of pool fast are asked for, 8MiB are free", blockers=(7, 8),
    remedy="wait",
)  # fmt: skip


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "job.sh"
    path.write_text(SCRIPT)
    return str(path)


def test_a_submit_sends_the_script_and_prints_the_job_id_as_sbatch_does(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", PENDING, 201)
    result = forebay(double.config, "submit", script, "--bb", "capacity=1GiB", "--export", "A=b=c")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Submitted batch job 42\n", "")
    body = double.asked[0].body
    assert body["script"] == SCRIPT
    assert (body["name"], body["time_limit_s"], body["bb"]) == ("sort", 5_400, "capacity=1GiB")
    assert body["environment"] == {"A": "b=c"}
    assert body["workdir"] == str(Path.cwd())
    assert len(body["command_id"]) == 32


def test_a_script_is_read_from_standard_input(double: Double) -> None:
    double.answer("POST", "/v1/jobs", PENDING, 201)
    result = forebay(double.config, "submit", "-", stdin=b"#!/bin/sh\ntrue\n")
    assert result.stdout == "Submitted batch job 42\n"
    assert double.asked[0].body["name"] == "sbatch"


def test_a_submit_with_json_prints_the_job_and_warnings_go_to_stderr(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(warnings=("pfs= was kept but is not understood",)), 201)
    result = forebay(double.config, "submit", script, "--json")
    assert msgspec.json.decode(result.stdout, type=JobView).job_id == 42
    assert result.stderr == "forebay: warning: pfs= was kept but is not understood\n"


def test_a_rejection_prints_place_and_cause_and_ends_with_the_slurm_line(double: Double, script: str) -> None:
    double.refuse(
        "POST", "/v1/jobs", 400, "invalid_capacity", "the size '1XB' has an unknown suffix 'XB'", remedy="use MiB",
        place="script line 3, column 20",
    )  # fmt: skip
    result = forebay(double.config, "submit", script)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        f"forebay: {script} line 3, column 20: the size '1XB' has an unknown suffix 'XB'",
        "  what to do: use MiB",
        "Burst Buffer request invalid",
    ]


@pytest.mark.parametrize(
    ("code", "place", "shown"),
    [
        ("unknown_dependency", "dependencies", "--dependency"),
        ("path_not_allowed", "workdir", "--chdir (the present directory)"),
        ("root_not_allowed", "user", "user"),
    ],
)
def test_unrelated_rejections_of_a_submit_lack_the_burst_buffer_line(
    double: Double, script: str, code: str, place: str, shown: str
) -> None:
    double.refuse("POST", "/v1/jobs", 400, code, "it cannot be", place=place)
    result = forebay(double.config, "submit", script, "-d", "afterok:9")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert result.stderr == f"forebay: {shown}: it cannot be\n"


@pytest.mark.parametrize(
    ("status", "code", "place"),
    [
        (400, "unknown_pool", ""),
        (400, "capacity_over_total", "--bb line 1, column 1"),
        (403, "path_not_allowed", "script line 3, column 20"),
        (400, "limit_exceeded", "--bbf line 7, column 1"),
    ],
)
def test_every_rejection_of_the_request_ends_with_the_slurm_line(
    double: Double, script: str, status: int, code: str, place: str
) -> None:
    double.refuse("POST", "/v1/jobs", status, code, "it cannot be", place=place)
    result = forebay(double.config, "submit", script)
    assert result.exit_code in (ExitCode.BAD_INPUT, ExitCode.PERMISSION_DENIED)
    assert result.stderr.splitlines()[-1] == "Burst Buffer request invalid"
    assert "it cannot be" in result.stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("status", "code", "sentence", "place", "last"),
    [
        (400, "root_not_allowed", "User root can not allocate burst buffers", "user", "Burst Buffer permission denied"),
        (403, "permission_denied", "User found in DenyUsers", "user", "Burst Buffer permission denied"),
        (403, "permission_denied", "User not found in AllowUsers", "user", "Burst Buffer permission denied"),
        (
            403,
            "permission_denied",
            "Burst Buffer permission denied",
            "script line 2, column 28",
            "Burst Buffer permission denied",
        ),
        (400, "invalid_field", "Node count specification invalid", "nodes", "Node count specification invalid"),
    ],
)
def test_rejections_with_their_own_slurm_line_end_with_that_line(
    double: Double, script: str, status: int, code: str, sentence: str, place: str, last: str
) -> None:
    double.refuse("POST", "/v1/jobs", status, code, sentence, place=place)
    lines = forebay(double.config, "submit", script, "-N0").stderr.splitlines()
    assert sentence in lines[0] and lines[-1] == last


def test_a_missing_bbf_file_ends_with_the_slurm_line(double: Double, script: str) -> None:
    result = forebay(double.config, "submit", script, "--bbf=/nonexistent")
    assert result.exit_code == ExitCode.BAD_INPUT and double.asked == []
    assert result.stderr.splitlines()[-1] == "Invalid --bbf specification"


def test_every_option_of_slurm_reaches_the_controller(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", PENDING, 201)
    given = (
        "-N0 -a 1-9:2%3 -A proj -q high -L matlab:2,foo --reservation=r1 -p debug --nice=-5 --no-requeue "
        "--mail-type=stage_out,fail --mail-user=alan --comment=fast --deadline=2030-01-31T12:00:00 "
        "-d singleton,afterburstbuffer:4,afterok:7_3"
    )
    assert forebay(double.config, "submit", *given.split(), script).exit_code == 0
    body = double.asked[0].body
    assert {name: body[name] for name in body if name in WANTED} == WANTED
    assert body["deadline"].startswith("2030-01-31T")


WANTED = {
    "nodes": 0,
    "array": "1-9:2%3",
    "account": "proj",
    "qos": "high",
    "licenses": ["matlab:2", "foo"],
    "reservation": "r1",
    "partition": "debug",
    "nice": -5,
    "requeue": False,
    "mail_types": ["stage_out", "fail"],
    "mail_user": "alan",
    "comment": "fast",
    "dependencies": ["singleton", "afterburstbuffer:4", "afterok:7_3"],
}


def test_a_bad_script_is_rejected_before_any_request(double: Double) -> None:
    result = forebay(double.config, "submit", "-", stdin=b"#!/bin/sh\n#SBATCH --spread-jobs\n")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert result.stderr.startswith("forebay: script line 2, column 9: option '--spread-jobs' is unknown\n")
    assert double.asked == []


def test_a_submit_with_unknown_outcome_prints_how_to_repeat_it(double: Double, script: str) -> None:
    double.refuse("POST", "/v1/jobs", 503, "outcome_unknown", "leadership was lost", outcome="unknown")
    for deadline_s in (0.3, 1, 4, 16):  # a busy machine may send no request within the first
        result = forebay(double.config, "submit", script, deadline_s=deadline_s)
        if double.asked:
            break
    assert result.exit_code == ExitCode.OUTCOME_UNKNOWN
    sent = {asked.body["command_id"] for asked in double.asked}
    assert len(sent) == 1
    assert f"--command-id {sent.pop()}" in result.stderr


def test_a_repeated_submit_sends_the_given_command_id(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", PENDING, 201)
    command_id = new_command_id(SystemClock())
    assert forebay(double.config, "submit", script, "--command-id", command_id).exit_code == 0
    assert double.asked[0].body["command_id"] == command_id
    refused = forebay(double.config, "submit", script, "--command-id", "42")
    assert (refused.exit_code, len(double.asked)) == (ExitCode.BAD_INPUT, 1)
    assert "--command-id" in refused.stderr


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "invalid_field", ExitCode.BAD_INPUT),
        (401, "unauthorized", ExitCode.PERMISSION_DENIED),
        (403, "permission_denied", ExitCode.PERMISSION_DENIED),
        (404, "unknown_job", ExitCode.NOT_FOUND),
        (409, "wrong_state", ExitCode.REFUSED),
        (413, "too_large", ExitCode.BAD_INPUT),
        (429, "queue_full", ExitCode.REFUSED),
        (503, "no_leader", ExitCode.UNREACHABLE),
    ],
)
def test_each_kind_of_rejection_has_its_exit_code(double: Double, status: int, code: str, expected: ExitCode) -> None:
    double.refuse("GET", "/v1/jobs/42", status, code, "it was refused", remedy="do otherwise")
    # Only temporary errors are retried until the deadline.
    result = forebay(double.config, "job", "show", "42", deadline_s=2.0 if status in (429, 503) else 60.0)
    assert result.exit_code == expected
    assert expected in MEANINGS
    assert result.stdout == ""
    assert "it was refused" in result.stderr
    assert "what to do: do otherwise" in result.stderr


def test_an_unreachable_cluster_has_its_exit_code(double: Double, tmp_path: Path) -> None:
    other = tmp_path / "forebay.toml"
    text = double.config.file.read_text().replace(str(double.config.replicas[0].api), "127.0.0.1:1")
    other.write_text(text.replace('"tls', f'"{double.config.tls.certificates}'))
    config = type(double.config).load(other)
    result = forebay(config, "queue", deadline_s=0.2)
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "127.0.0.1:1 cannot be reached" in result.stderr


def test_the_identity_option_selects_the_certificate(double: Double) -> None:
    double.answer("GET", "/v1/jobs/42", PENDING)
    assert forebay(double.config, "job", "show", "42", identity="alice").exit_code == 0
    assert forebay(double.config, "job", "show", "42").exit_code == 0
    assert [asked.identity for asked in double.asked] == ["user alice", "operator operator"]
    unknown = forebay(double.config, "job", "show", "42", identity="mallory")
    assert unknown.exit_code == ExitCode.BAD_INPUT
    assert "mallory" in unknown.stderr


def test_a_key_readable_by_others_is_rejected(double: Double) -> None:
    key = double.config.tls.certificates / "alice.key"
    key.chmod(0o644)
    try:
        result = forebay(double.config, "job", "show", "42", identity="alice")
    finally:
        key.chmod(0o600)
    assert result.exit_code in (ExitCode.BAD_INPUT, ExitCode.PERMISSION_DENIED)
    assert "chmod 600" in result.stderr
    assert double.asked == []


def test_another_accounts_certificate_directory_is_permission_denied(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    exists = Path.exists

    def denied(path: Path) -> bool:
        # Deny access as the kernel does for other accounts; root itself would be admitted.
        if path.parent == double.config.tls.certificates:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", denied)
    result = forebay(double.config, "queue")
    assert result.exit_code == ExitCode.PERMISSION_DENIED
    assert "operator.pem cannot be read (Permission denied)" in result.stderr
    assert "forebay cert issue" in result.stderr and "fault" not in result.stderr


def test_another_accounts_configuration_is_permission_denied(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def denied(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == double.config.file:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", denied)
    assert forebay(double.config, "queue").exit_code == ExitCode.PERMISSION_DENIED


def test_an_unusable_certificate_is_permission_denied(double: Double) -> None:
    key = double.config.tls.certificates / "alice.key"
    text = key.read_bytes()
    key.write_bytes((double.config.tls.certificates / "operator.key").read_bytes())
    try:
        result = forebay(double.config, "job", "show", "42", identity="alice")
    finally:
        key.write_bytes(text)
    assert result.exit_code == ExitCode.PERMISSION_DENIED
    assert "alice.key" in result.stderr
    assert "Traceback" not in result.stderr


def test_ended_jobs_are_listed_only_with_all(double: Double) -> None:
    double.answer("GET", "/v1/jobs.*", JOBS)
    for words in ([], ["--all"], ["--state", "pd,running"], ["--user", "bob", "--limit", "5"]):
        assert forebay(double.config, "queue", *words).exit_code == 0
    unfinished = "PENDING%2CCONFIGURING%2CRUNNING%2CSUSPENDED%2CSTAGE_OUT"
    assert [asked.target for asked in double.asked] == [
        f"/v1/jobs?state={unfinished}&limit=1000",
        "/v1/jobs?limit=1000",
        "/v1/jobs?state=PENDING%2CRUNNING&limit=1000",
        f"/v1/jobs?state={unfinished}&user=bob&limit=5",
    ]


@pytest.mark.parametrize(
    "words, path",
    [
        (["queue"], "/v1/jobs"), (["queue", "--start"], "/v1/jobs"), (["job", "show", "42"], "/v1/jobs/42"),
        (["pool", "list"], "/v1/pools"), (["pool", "show", "fast"], "/v1/pools"), (["node", "list"], "/v1/nodes"),
        (["buffer", "list"], "/v1/buffers"), (["slurm", "burst"], "/v1/burst"),
        (["config", "show"], "/v1/configuration"),
    ],
)  # fmt: skip
def test_every_listing_accepts_a_past_revision_or_time(double: Double, words: list[str], path: str) -> None:
    for at, sent in (("77", "77"), ("2026-01-02T03:04:05Z", "2026-01-02T03%3A04%3A05.000000Z")):
        double.asked.clear()
        forebay(double.config, *words, "--at", at)
        target = urlsplit(double.asked[0].target)
        assert target.path == path and f"at={sent}" in target.query.split("&")
    for wrong in ("yesterday", "25:00", "2999-01-01", "-1", ""):
        double.asked.clear()
        result = forebay(double.config, *words, f"--at={wrong}")
        assert result.exit_code == ExitCode.BAD_INPUT and "--at" in result.stderr and not double.asked


def test_run_times_of_a_past_listing_end_at_the_past_time(double: Double) -> None:
    running = msgspec.structs.replace(PENDING, state="RUNNING", start_time="2026-01-02T03:00:00Z", end_time=None)
    double.answer("GET", "/v1/jobs.*", JobsAnswer(revision=7, jobs=(running,), at="2026-01-02T03:04:05Z"))
    for words in (["queue"], ["queue"]):
        assert " 4:05 " in forebay(double.config, *words, "--at", "7").stdout


def test_watch_and_at_exclude_each_other(double: Double) -> None:
    result = forebay(double.config, "queue", "--watch", "--at", "7")
    assert result.exit_code == ExitCode.BAD_INPUT and "--watch and --at" in result.stderr


def test_an_unknown_job_state_is_rejected_with_a_suggestion(double: Double) -> None:
    result = forebay(double.config, "queue", "--state", "RUNING")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "did you mean RUNNING?" in result.stderr


def test_a_truncated_list_prints_a_note_on_stderr(double: Double) -> None:
    double.answer("GET", "/v1/jobs.*", JobsAnswer(revision=1, jobs=(PENDING,), truncated=True))
    assert "Only the newest 1 jobs" in forebay(double.config, "queue").stderr


@pytest.mark.parametrize(("limit", "cut"), [(12_345, True), (25_000, False), (20_003, False)])
def test_job_lists_are_read_in_pages_and_keep_the_newest_jobs(double: Double, limit: int, cut: bool) -> None:
    def page(first: int, last: int, truncated: bool) -> JobsAnswer:
        jobs = tuple(msgspec.structs.replace(PENDING, job_id=number) for number in range(first, last + 1))
        return JobsAnswer(revision=last, jobs=jobs, truncated=truncated)

    double.answer("GET", r"/v1/jobs\?limit=10000&after=0", page(1, 10_000, True))
    double.answer("GET", r"/v1/jobs\?limit=10000&after=10000", page(10_001, 20_000, True))
    double.answer("GET", r"/v1/jobs\?limit=10000&after=20000", page(20_001, 20_003, False))
    result = forebay(double.config, "queue", "--all", "--limit", str(limit), "--json", deadline_s=60.0)
    assert result.exit_code == 0
    found = msgspec.json.decode(result.stdout, type=JobsAnswer)
    assert [job.job_id for job in found.jobs] == list(range(max(1, 20_004 - limit), 20_004))
    assert (found.revision, found.truncated) == (20_003, cut)


def test_deleted_buffers_are_listed_only_with_all(double: Double) -> None:
    double.answer("GET", "/v1/buffers.*", BuffersAnswer(revision=5, buffers=(BUFFER,)))
    for words in ([], ["--all"]):
        assert forebay(double.config, "buffer", "list", *words).exit_code == 0
    assert [asked.target for asked in double.asked] == ["/v1/buffers?live=yes", "/v1/buffers"]


def test_the_location_of_a_buffer_is_listed(double: Double) -> None:
    placed = msgspec.structs.replace(BUFFER, path="/bb/fast/demo/42.1")
    double.answer("GET", "/v1/buffers.*", BuffersAnswer(revision=5, buffers=(BUFFER, placed)))
    lines = forebay(double.config, "buffer", "list").stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["PATH", "-", "/bb/fast/demo/42.1"]


def test_api_remedies_name_commands_instead_of_routes(double: Double) -> None:
    double.refuse("GET", "/v1/jobs/99", 404, "unknown_job", "there is no job 99", remedy="see /v1/jobs")
    assert "what to do: see `forebay queue --all`\n" in forebay(double.config, "job", "show", "99").stderr
    double.refuse("GET", "/v1/jobs/99", 404, "unknown_job", "job 99 is over", remedy="see /v1/jobs/99/history")
    assert "what to do: see `forebay job history 99`\n" in forebay(double.config, "job", "show", "99").stderr


def test_the_replica_list_includes_each_replicas_own_report(double: Double) -> None:
    api = str(double.config.replicas[0].api)
    follower = msgspec.structs.replace(
        MEMBER, name="r2", api=api, role="follower", term=None, commit_index=None, applied_index=None, revision=None
    )
    away = msgspec.structs.replace(follower, name="r3", reachable=False)
    answer = MembersAnswer(revision=5, replica="r1", leader="r1", term=3, members=(MEMBER, follower, away))
    double.answer("GET", "/v1/members", answer)
    double.answer("GET", "/v1/status", msgspec.structs.replace(STATUS, replica="r2", applied_index=8, revision=4))
    result = forebay(double.config, "cluster", "members", "--json", deadline_s=60.0)
    found = msgspec.json.decode(result.stdout, type=MembersAnswer).members
    assert found[0] == MEMBER and found[2] == away
    assert (found[1].term, found[1].commit_index, found[1].applied_index, found[1].revision) == (3, 9, 8, 4)
    assert found[1].lag_entries == follower.lag_entries, "how far behind it is, the leader says"
    double.refuse("GET", "/v1/status", 403, "permission_denied", "no")
    result = forebay(double.config, "cluster", "members", "--json", deadline_s=60.0)
    assert msgspec.json.decode(result.stdout, type=MembersAnswer) == answer


def test_watch_repeats_the_list_until_interrupted(double: Double) -> None:
    double.answer("GET", "/v1/jobs.*", JOBS)
    with on_a_terminal(double.config, "queue", "--watch") as (ours, _, watching):
        seen = b""
        while seen.count(b"BurstBufferResources") < 2:
            seen += os.read(ours, 4096)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=60) == ExitCode.INTERRUPTED
    assert len(double.asked) >= 2


READS = {
    ("queue",): ("/v1/jobs?.*", JOBS),
    ("job", "show", "42"): ("/v1/jobs/42", PENDING),
    ("job", "history", "42"): ("/v1/jobs/42/history", HISTORY),
    ("job", "why", "42"): ("/v1/jobs/42/why", WHY),
    ("pool", "list"): ("/v1/pools", PoolsAnswer(revision=5, pools=(POOL,))),
    ("buffer", "list"): ("/v1/buffers", BuffersAnswer(revision=5, buffers=(BUFFER,))),
    ("node", "list"): ("/v1/nodes", NodesAnswer(revision=5, nodes=(NODE,))),
    ("transfer", "list"): ("/v1/transfers", TransfersAnswer(revision=5, transfers=TRANSFERS)),
    ("transfer", "show", "42"): ("/v1/transfers/42", OF_A_JOB),
    ("transfer", "receipt", "42"): (
        "/v1/transfers/42/receipts",
        ReceiptsAnswer(revision=5, job_id=42, receipts=(RECEIPT,)),
    ),
    ("cluster", "members"): (
        "/v1/members",
        MembersAnswer(revision=5, replica="r1", leader="r1", term=3, members=(MEMBER,)),
    ),
}


SOFT = {("transfer", "list"), ("transfer", "show")}
"""Fields that only the leader knows."""


@pytest.mark.parametrize("words", READS, ids=" ".join)
def test_every_listing_prints_the_answer_alone_as_json(double: Double, words: tuple[str, ...]) -> None:
    path, view = READS[words]
    double.answer("GET", path + r"(\?.*)?", view)
    result = forebay(double.config, *words, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert msgspec.json.decode(result.stdout, type=type(view)) == view


@pytest.mark.parametrize("words", [words for words in READS if words[:2] not in SOFT], ids=" ".join)
def test_the_global_option_stale_requests_stale_reads(double: Double, words: tuple[str, ...]) -> None:
    path, view = READS[words]
    double.answer("GET", path + r"(\?.*)?", view)
    assert forebay(double.config, *words, stale=True).exit_code == 0
    assert "stale=ok" in double.asked[0].target


def test_why_accepts_a_time_like_a_revision(double: Double) -> None:
    double.answer("GET", r"/v1/jobs/42/why\?at=2026-01-02T03%3A04%3A05.000000Z", WHY)
    result = forebay(double.config, "job", "why", "42", "--at", "2026-01-02T03:04:05Z")
    assert result.exit_code == 0 and "At revision" in result.stdout
    for wrong in ("yesterday", "2100-01-01"):
        result = forebay(double.config, "job", "why", "42", "--at", wrong)
        assert result.exit_code == ExitCode.BAD_INPUT and "--at" in result.stderr


def test_why_explains_a_past_wait_with_figures(double: Double) -> None:
    double.answer("GET", r"/v1/jobs/42/why\?at=77", WHY)
    result = forebay(double.config, "job", "why", "42", "--at", "77")
    assert result.stdout.splitlines() == [
        "Job 42: JobState=PENDING, Reason=BurstBufferResources, BurstBufferState=pending",
        "At revision 77 (2026-01-31T09:00:00Z): 16MiB of pool fast are asked for, 8MiB are free",
        "Waiting for jobs 7, 8.",
        "What to do: wait",
    ]


def test_array_tasks_have_the_names_of_slurm(double: Double) -> None:
    double.answer("POST", "/v1/jobs/42_.*/(cancel|hold|release)", PENDING)
    double.answer("GET", "/v1/jobs/42_3", PENDING)
    for command, word, asked in (
        ("cancel", "42_[1-3,7]", "/v1/jobs/42_%5B1-3%2C7%5D/cancel"),
        ("hold", "42_3", "/v1/jobs/42_3/hold"),
        ("release", "042_[5]", "/v1/jobs/42_5/release"),
        ("show", "42_3", "/v1/jobs/42_3"),
    ):
        result = forebay(double.config, "job", command, word)
        assert result.exit_code == 0, result.stderr
        assert double.asked[-1].target == asked


def test_a_bulk_change_continues_after_a_rejection_and_exits_with_its_code(
    double: Double,
) -> None:
    unknown = ErrorView(code="unknown_job", sentence="there is no job 7")
    results = (
        CommandResult(command_id="a" * 32, status=404, error=unknown),
        CommandResult(command_id="b" * 32, status=200, job=PENDING),
    )
    double.answer("POST", "/v1/commands", BulkAnswer(revision=5, results=results))
    words = ("cancel", "hold", "release", "suspend", "resume", "requeue", "update")
    for command in words:
        more = ("--nice", "3") if command == "update" else ()
        result = forebay(double.config, "job", command, "7", "42", "42", *more)
        assert result.exit_code == ExitCode.NOT_FOUND
        assert result.stdout == "JobId=42 JobState=PENDING Reason=BurstBufferResources BurstBufferState=pending\n"
        assert result.stderr == "forebay: there is no job 7\n"
    sent = [asked.body["commands"] for asked in double.asked]
    assert [[(one["type"], one["job_id"]) for one in commands] for commands in sent] == [
        [(f"{word}_job", "7"), (f"{word}_job", "42")] for word in words
    ]
    assert len({one["command_id"] for commands in sent for one in commands}) == 2 * len(words)
    assert [one["nice"] for one in sent[-1]] == [3, 3]


def test_many_jobs_are_changed_in_several_requests(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cluster.schemas.BULK_COMMANDS_MAX", 2)
    results = tuple(CommandResult(command_id="a" * 32, status=200, job=PENDING) for _ in range(2))
    double.answer("POST", "/v1/commands", BulkAnswer(revision=5, results=results))
    assert forebay(double.config, "job", "hold", "1", "2", "3", "4").exit_code == ExitCode.OK
    assert [len(asked.body["commands"]) for asked in double.asked] == [2, 2]


def test_a_bulk_change_ends_at_an_unanswered_request(double: Double) -> None:
    double.refuse("POST", "/v1/commands", 403, "permission_denied", "not with this certificate")
    result = forebay(double.config, "job", "hold", "1", "2")
    assert (result.exit_code, result.stderr) == (ExitCode.PERMISSION_DENIED, "forebay: not with this certificate\n")
    assert len(double.asked) == 1


def test_hurry_is_sent_only_on_request(double: Double) -> None:
    double.answer("POST", "/v1/jobs/42/cancel", PENDING)
    forebay(double.config, "cancel", "42")
    forebay(double.config, "cancel", "42", "--hurry")
    assert [asked.body.get("hurry") for asked in double.asked] == [None, True]


def test_a_pool_change_sends_only_the_given_properties(double: Double) -> None:
    double.answer("POST", "/v1/pools/fast/change", POOL)
    result = forebay(double.config, "pool", "set", "fast", "--quantity", "64MiB")
    assert result.stdout.startswith("Pool fast: total 96MiB, free 80MiB") and result.stdout.endswith(", default\n")
    sent = double.asked[-1].body
    assert sent.pop("command_id") and sent == {"quantity": "64MiB"}
    nothing = forebay(double.config, "pool", "set", "fast")
    assert nothing.exit_code == ExitCode.BAD_INPUT and "use an option" in nothing.stderr


def test_a_quantity_off_the_granularity_causes_a_warning(double: Double) -> None:
    for granularity, warning in ((10 * 1024**2, "the last 6MiB cannot be used"), (8 * 1024**2, "")):
        double.answer("POST", "/v1/pools/fast/change", msgspec.structs.replace(POOL, granularity_bytes=granularity))
        result = forebay(double.config, "pool", "set", "fast", "--granularity", str(granularity))
        assert result.exit_code == 0
        assert warning in result.stderr and bool(warning) == bool(result.stderr)


def test_an_invalid_size_error_names_option_and_character(double: Double) -> None:
    result = forebay(double.config, "pool", "create", "fast", "--quantity", "64XiB")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert result.stderr.startswith("forebay: --quantity, character 3: ")
    assert double.asked == []


def test_nodes_are_drained_with_a_reason_and_resumed(double: Double) -> None:
    double.answer("POST", "/v1/nodes/n1/.*", msgspec.structs.replace(NODE, state="DRAINED", reason="disks"))
    assert (
        forebay(double.config, "node", "drain", "n1", "--reason", "disks").stdout
        == "NodeName=n1 State=DRAINED Reason=disks\n"
    )
    assert forebay(double.config, "node", "resume", "n1").exit_code == 0
    assert double.asked[0].body["reason"] == "disks"
    assert forebay(double.config, "node", "drain", "n1", "--reason", " ").exit_code == ExitCode.BAD_INPUT


def test_probe_asks_each_replica_for_its_own_status(double: Double) -> None:
    double.answer("GET", r"/v1/status\?digest=yes", STATUS)
    result = forebay(double.config, "cluster", "probe", "--digest", "--json")
    assert result.exit_code == 0
    [answer] = msgspec.json.decode(result.stdout)["replicas"]
    assert (answer["name"], answer["reachable"], answer["status"]["state_digest"]) == ("r1", True, "ab" * 32)


def test_probe_without_any_answer_exits_as_unreachable(double: Double) -> None:
    double.refuse("GET", "/v1/status", 503, "stopping", "the replica is stopping")
    result = forebay(double.config, "cluster", "probe", deadline_s=0.2)
    assert result.exit_code == ExitCode.UNREACHABLE
    assert "r1 did not answer" in result.stderr
    assert forebay(double.config, "cluster", "probe", "r9").exit_code == ExitCode.BAD_INPUT


def test_the_named_replica_writes_the_snapshot(double: Double) -> None:
    double.answer("POST", "/v1/snapshots", SNAPSHOT)
    result = forebay(double.config, "cluster", "snapshot", "--name", "r1", "--json")
    assert msgspec.json.decode(result.stdout, type=SnapshotView) == SNAPSHOT
    assert forebay(double.config, "cluster", "snapshot", "--name", "r2").exit_code == ExitCode.BAD_INPUT


def every_text(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from every_text(inner)


def test_text_of_other_users_cannot_control_the_terminal(double: Double) -> None:
    evil = "\x1b]0;x\x07[red]\r\n\x9b31m\u202e"
    found = job(name=evil, system_comment=evil, burst_buffer=f"#DW {evil}", reason=evil, workdir=evil)
    double.answer("GET", "/v1/jobs.*", JobsAnswer(revision=1, jobs=(found,)))
    double.answer("GET", "/v1/jobs/42", found)
    double.answer("GET", "/v1/jobs/42/why", msgspec.structs.replace(WHY, sentence=evil))
    row = msgspec.structs.replace(HISTORY.rows[0], sentence=evil, actor=evil, reason=evil, state=evil)
    double.answer("GET", "/v1/jobs/42/history", HistoryAnswer(revision=1, job_id=42, rows=(row,)))
    for words in (["list"], ["show", "42"], ["why", "42"], ["history", "42"]):
        result = forebay(double.config, "job", *words)
        assert result.exit_code == 0
        assert [character for character in result.stdout if not character.isprintable() and character != "\n"] == []
        assert "[red]" in result.stdout
        # JSON contains the same text with escapes, because it is also read on terminals.
        result = forebay(double.config, "job", *words, "--json")
        assert result.exit_code == 0
        assert [character for character in result.stdout if not character.isprintable() and character != "\n"] == []
        assert any(evil in text for text in every_text(json.loads(result.stdout)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["job", "show", "0"], "job IDs begin at 1"),
        (["job", "show", "x"], "is not a job ID"),
        (["cancel", "12_[3-1]"], "names no tasks"),
        (["job", "shw"], "job show"),
        (["submit"], ""),
        (["queue", "--nope"], "--nope"),
        (["queue", "--all", "--state", "R"], "exclude each other"),
        (["queue", "--watch", "--json"], "exclude each other"),
        (["queue", "--watch"], "terminal"),
        (["node", "drain", "n1"], "--reason"),
        (["audit", "verify", "--from", "1"], "--from"),
    ],
)
def test_a_usage_error_has_its_exit_code_and_no_traceback(double: Double, words: list[str], expected: str) -> None:
    result = forebay(double.config, *words)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert result.stdout == ""
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_configuration_error_names_the_init_command(tmp_path: Path, double: Double) -> None:
    missing = msgspec.structs.replace(double.config, file=tmp_path / "none.toml")
    result = forebay(missing, "queue")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "none.toml" in result.stderr
    assert "forebay cluster init" in result.stderr


def test_an_internal_error_is_printed_as_a_message(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr("forebay.cluster.cli.text.job_block", fail)
    double.answer("GET", "/v1/jobs/42", PENDING)
    result = forebay(double.config, "job", "show", "42")
    assert result.exit_code == ExitCode.FAULT
    assert "ZeroDivisionError: by hand" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_completion_script(double: Double, shell: str) -> None:
    result = forebay(double.config, "support", "completion", shell)
    assert result.exit_code == 0
    assert "_FOREBAY_COMPLETE" in result.stdout
    assert "forebay" in result.stdout
