"""`forebay slurm burst` and `forebay queue`: text, one line, JSON, formats, and rejected options."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.burst import BurstAnswer, BurstBufferView, BurstPoolView, BurstUseView
from forebay.cluster.schemas.jobs import JobsAnswer
from tests.clocks import local_zone
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.views import JOBS

KIB = 1024
BURST = BurstAnswer(
    revision=9, name="lua", default_pool=None, granularity=1, flags="DisablePersistent", poll_interval_s=15,
    stage_in_timeout_s=86_400, stage_out_timeout_s=86_400, validate_timeout_s=5, other_timeout_s=300,
    pools=(BurstPoolView(name="pool1", unit="bytes", granularity=KIB, total=100 * KIB, free=99 * KIB, used=KIB),),
    buffers=(
        BurstBufferView(
            job_id=1, create_time="2026-11-20T22:10:45.500000Z", pool="pool1", unit="bytes", size=KIB,
            state="allocated", buffer_state="running", user="bbu1", uid=20001,
        ),
    ),
    uses=(BurstUseView(user="bbu1", uid=20001, unit="bytes", used=KIB),),
)  # fmt: skip

TEXT = """\
Name=lua DefaultPool=(null) Granularity=1 TotalSpace=0 FreeSpace=0 UsedSpace=0
  PoolName[0]=pool1 Granularity=1KiB TotalSpace=100KiB FreeSpace=99KiB UsedSpace=1KiB
  Flags=DisablePersistent
  PollInterval=15
  StageInTimeout=86400 StageOutTimeout=86400 ValidateTimeout=5 OtherTimeout=300
  GetSysState=(null)
  GetSysStatus=(null)
  Allocated Buffers:
    JobID=1 CreateTime=2026-11-20T22:10:45 Pool=pool1 Size=1KiB State=allocated UserID=bbu1(20001)
  Per User Buffer Use:
    UserID=bbu1(20001) Used=1KiB
"""


@pytest.fixture(autouse=True)
def _in_utc() -> Iterator[None]:
    with local_zone("UTC"):
        yield


def test_burst_output_matches_scontrol(double: Double) -> None:
    double.answer("GET", "/v1/burst", BURST)
    result = forebay(double.config, "slurm", "burst")
    assert (result.exit_code, result.stdout) == (0, TEXT)


def test_the_oneliner_output_of_burst_has_the_same_words(double: Double) -> None:
    double.answer("GET", "/v1/burst", BURST)
    assert forebay(double.config, "slurm", "burst", "-o").stdout == " ".join(TEXT.split()) + "\n"


def test_burst_with_json_prints_the_answer_alone(double: Double) -> None:
    double.answer("GET", "/v1/burst", BURST)
    assert msgspec.json.decode(forebay(double.config, "slurm", "burst", "--json").stdout, type=BurstAnswer) == BURST


def test_user_ids_unknown_to_the_replica_are_looked_up_locally(double: Double) -> None:
    unknown = msgspec.structs.replace(BURST.uses[0], user="root", uid=None)
    double.answer("GET", "/v1/burst", msgspec.structs.replace(BURST, uses=(unknown,)))
    assert "    UserID=root(0) Used=1KiB\n" in forebay(double.config, "slurm", "burst").stdout


def test_user_names_in_burst_output_cannot_control_the_terminal(double: Double) -> None:
    evil = msgspec.structs.replace(BURST.uses[0], user="a\x1b[2J\nb")
    double.answer("GET", "/v1/burst", msgspec.structs.replace(BURST, uses=(evil,)))
    assert "UserID=a\\x1b[2J\\nb(20001)" in forebay(double.config, "slurm", "burst").stdout


def test_queue_lists_unfinished_jobs_in_the_squeue_format(double: Double) -> None:
    double.answer("GET", r"/v1/jobs\?.*", JOBS)
    lines = forebay(double.config, "queue", "-o", "squeue").stdout.splitlines()
    assert lines[0] == "             JOBID PARTITION     NAME     USER ST       TIME  NODES NODELIST(REASON)"
    assert lines[1] == "                42    (null)     sort    alice PD       0:00      1 (BurstBufferResources)"
    assert "COMPLETED" not in double.asked[-1].target and "PENDING" in double.asked[-1].target


def test_queue_filters_by_states_jobs_and_columns(double: Double) -> None:
    double.answer("GET", r"/v1/jobs\?.*", JOBS)
    result = forebay(double.config, "queue", "-t", "all", "-j", "42", "--noheader", "-o", "%i:%t:%5r|%.4u")
    assert result.stdout == "42:PD:Burst|alic\n"
    assert "state=" not in double.asked[-1].target
    found = forebay(double.config, "queue", "--json", "-j", "42").stdout
    assert [job.job_id for job in msgspec.json.decode(found, type=JobsAnswer).jobs] == [42]


@pytest.mark.parametrize("layout", ["%!", "%", "%99999i", "%Y", "x" * 2_000])
def test_an_invalid_queue_format_is_rejected(double: Double, layout: str) -> None:
    result = forebay(double.config, "queue", "-o", layout)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "--format" in result.stderr
