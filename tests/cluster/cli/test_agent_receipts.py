"""`forebay node receipt`: an agent's record of moved files, verified by digest and compared with destinations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import Result

from forebay.cluster.agent.files.filesystems import mark, open_records
from forebay.cluster.agent.transfer.options import Algorithm, TransferOptions
from forebay.cluster.agent.transfer.transfer import run_transfer
from forebay.cluster.agent.transfer.transfer_state import TransferContext
from forebay.cluster.agent.transfer.workspace import Workspace
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.transfers import ReceiptsAnswer
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.descriptors import open_directory
from forebay.replica.model.orders import OrderFilesystem
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import TransferReceipt
from tests.cluster.agent.transfer.harness import SMALL, TAG, Harness, Unpaced, plant
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.transfer_views import RECEIPT

LARGE = os.urandom(20001)


@pytest.fixture
def harness(double: Double, tmp_path: Path) -> Iterator[Harness]:
    """Harness whose agent is the first of the configuration."""
    made = Harness(tmp_path)
    made.home.rmdir()
    made.home = double.config.agents[0].directory
    made.home.mkdir(parents=True, exist_ok=True)
    plant(made.source, {"a": b"hello", "d": {"large": LARGE, "b\x1b": b"b"}})
    os.mkfifo(made.source / "pipe")
    yield made
    made.close()


def moved(
    harness: Harness, job: int, attempt: int = 1, *, algorithm: Algorithm = "xxh3-128", stage: str = "stage_out"
) -> TransferReceipt:
    """Move the tree, and return the receipt."""
    home = open_directory(harness.home)
    workspace = Workspace.open(home, job, attempt, stage)
    try:
        options: TransferOptions = msgspec.structs.replace(SMALL, algorithm=algorithm)
        return run_transfer(
            [harness.item()], options, TransferContext(TAG, workspace, SystemClock(), Unpaced(), Stage.STAGE_OUT, 1)
        )
    finally:
        workspace.close()
        os.close(home)


def asked(double: Double, *words: object) -> Result:
    return forebay(double.config, "node", "receipt", "--name", double.config.agents[0].name, *map(str, words))


def in_ledger(double: Double, job: int, digest: str) -> None:
    row = msgspec.structs.replace(RECEIPT, job_id=job, digest=digest)
    answer = ReceiptsAnswer(revision=5, job_id=job, receipts=(row,))
    double.answer("GET", rf"/v1/transfers/{job}/receipts.*", answer)


def test_receipt_lines_are_printed_and_match_the_ledger_digest(double: Double, harness: Harness) -> None:
    receipt = moved(harness, 501)
    in_ledger(double, 501, receipt.digest)
    result = asked(double, "--job", 501)
    assert result.exit_code == 0, result.stderr
    assert double.asked[0].target == "/v1/transfers/501/receipts?stage=stage_out&attempt=1"
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["directory", "file", "directory", "file", "file", "left"]
    assert lines[1].split()[2] == "5" and lines[1].endswith(" a") and lines[3].endswith(r" d/b\x1b")
    assert lines[-1] == "left out   pipe (a named pipe)" and result.stderr == ""
    in_ledger(double, 501, "xxh3-128:" + "0" * 32)
    result = asked(double, "--job", 501)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED
    assert receipt.digest in result.stderr and result.stdout == ""


@pytest.mark.parametrize("algorithm", ["xxh3-128", "blake3"])
def test_a_given_digest_is_compared_without_a_request(double: Double, harness: Harness, algorithm: Algorithm) -> None:
    receipt = moved(harness, 502, algorithm=algorithm)
    result = asked(double, "--job", 502, "--digest", receipt.digest, "--recheck", "--json")
    assert result.exit_code == 0 and double.asked == [], result.stderr
    answer = json.loads(result.stdout)
    assert (answer["digest"], answer["proven"], answer["rechecked"], answer["differences"]) == (
        receipt.digest,
        True,
        True,
        [],
    )
    assert [line["kind"] for line in answer["lines"]].count("file") == 3
    path = harness.home / "receipts" / "502.1.stage_out"
    path.write_bytes(path.read_bytes().replace(b'"size":5', b'"size":6'))
    result = asked(double, "--job", 502, "--digest", receipt.digest)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED and "has the digest" in result.stderr
    assert asked(double, "--job", 502, "--digest", "md5:00").exit_code == ExitCode.BAD_INPUT


def test_an_unreachable_cluster_prints_a_note_that_nothing_was_compared(double: Double, harness: Harness) -> None:
    moved(harness, 503)
    result = asked(double, "--job", 503)
    assert result.exit_code == 0 and "was not compared" in result.stderr
    assert json.loads(asked(double, "--job", 503, "--json").stdout)["proven"] is False


def test_recheck_names_each_differing_file_and_sets_the_exit_code(double: Double, harness: Harness) -> None:
    receipt = moved(harness, 504)
    assert asked(double, "--job", 504, "--digest", receipt.digest, "--recheck").stdout == ""
    (harness.destination / "a").write_bytes(b"hallo")
    with (harness.destination / "d" / "large").open("r+b") as file:
        file.seek(9000)
        file.write(bytes((LARGE[9000] ^ 1,)))
    (harness.destination / "d" / "b\x1b").unlink()
    result = asked(double, "--job", 504, "--digest", receipt.digest, "--recheck")
    assert result.exit_code == ExitCode.VERIFICATION_FAILED and "3 files differ" in result.stderr
    named = result.stdout.splitlines()
    assert [line.split()[0] for line in named] == [
        f"{harness.destination}/a",
        rf"{harness.destination}/d/b\x1b",
        f"{harness.destination}/d/large",
    ]
    assert "instead of" in named[0] and "No such file" in named[1] and "\x1b" not in result.stdout
    answer = json.loads(asked(double, "--job", 504, "--digest", receipt.digest, "--recheck", "--json").stdout)
    assert len(answer["differences"]) == 3


def test_the_last_attempt_is_the_default_and_missing_receipts_are_errors(double: Double, harness: Harness) -> None:
    moved(harness, 505, 9)
    moved(harness, 505, 10)
    moved(harness, 505, 2, stage="stage_in")
    for words, attempt in (((), 10), (("--attempt", 9), 9), (("--stage", "stage_in"), 2)):
        assert json.loads(asked(double, "--job", 505, "--json", *words).stdout)["attempt"] == attempt
    result = asked(double, "--job", 505, "--attempt", 11)
    assert result.exit_code == ExitCode.NOT_FOUND and "no receipt of job 505 of attempt 11" in result.stderr
    assert asked(double, "--job", 506).exit_code == ExitCode.NOT_FOUND
    assert asked(double, "--job", 505, "--as-user", "nobody").exit_code == ExitCode.BAD_INPUT


def test_damaged_receipt_lines_are_named_by_position(double: Double, harness: Harness) -> None:
    moved(harness, 507)
    path = harness.home / "receipts" / "507.1.stage_out"
    path.write_bytes(path.read_bytes()[:-10])
    result = asked(double, "--job", 507)
    assert result.exit_code == ExitCode.VERIFICATION_FAILED and "line 7 of the receipts is damaged" in result.stderr


def test_the_default_agent_is_the_one_with_a_local_directory(double: Double, harness: Harness) -> None:
    moved(harness, 508)
    result = forebay(double.config, "node", "receipt", "--job", "508")
    assert result.exit_code == 0, result.stderr
    assert forebay(double.config, "node", "receipt", "--name", "nowhere", "--job", "508").exit_code != 0
    assert forebay(double.config, "run", "agent").exit_code == ExitCode.BAD_INPUT


def moved_in_place(harness: Harness, filesystem: OrderFilesystem, attempt: int, stage: str) -> TransferReceipt:
    records = open_records(filesystem, attempt)
    workspace = Workspace.open(records, 510, attempt, stage)
    try:
        kind = Stage[stage.upper()]
        context = TransferContext(TAG, workspace, SystemClock(), Unpaced(), kind, attempt)
        return run_transfer([harness.item()], SMALL, context)
    finally:
        workspace.close()
        os.close(records)


def test_mover_receipts_on_a_shared_filesystem_are_printed_and_compared(double: Double, harness: Harness) -> None:
    top = harness.directory / "bb"
    top.mkdir(mode=0o711)
    filesystem = OrderFilesystem("bb", str(top), mark(str(top)), f"{double.config.cluster.name}/510.1")
    receipts = [
        moved_in_place(harness, filesystem, *one) for one in ((1, "stage_in"), (2, "stage_out"), (3, "stage_out"))
    ]
    words = ("--job", 510, "--filesystem", top, "--recheck", "--json", "--digest")
    for words_of, receipt in zip((("--stage", "stage_in"), ("--attempt", 2), ()), receipts, strict=True):
        result = asked(double, *words, receipt.digest, *words_of)
        assert result.exit_code == 0, result.stderr
        answer = json.loads(result.stdout)
        assert (answer["attempt"], answer["proven"], answer["differences"]) == (receipt.attempt, True, [])
    path = top / ".forebay-records" / filesystem.directory / "3" / "receipts" / "510.3.stage_out"
    path.write_text(
        path.read_text().replace(f'"root":"{harness.directory}"', '"root":"$DW_PERSISTENT_STRIPED_lake"', 1)
    )
    rooted = asked(double, "--job", 510, "--filesystem", top, "--recheck", "--digest", receipts[2].digest)
    assert (
        rooted.exit_code == ExitCode.NOT_FOUND
        and "has 0 persistent buffers for $DW_PERSISTENT_STRIPED_lake" in rooted.stderr
    )
    (top / double.config.cluster.name / "lake.4.1" / "destination").mkdir(parents=True)
    rooted = asked(double, "--job", 510, "--filesystem", top, "--recheck", "--digest", receipts[2].digest)
    assert rooted.exit_code == ExitCode.VERIFICATION_FAILED and "3 files differ" in rooted.stderr
    gone = asked(double, "--job", 511, "--filesystem", top)
    assert gone.exit_code == ExitCode.NOT_FOUND and "no receipt of job 511" in gone.stderr
    assert asked(double, "--job", 510, "--filesystem", harness.source).exit_code == ExitCode.BAD_INPUT
    assert "add --filesystem PATH" in asked(double, "--job", 510).stderr


def test_a_missing_agent_and_a_deleted_buffer_are_errors(double: Double, harness: Harness) -> None:
    receipt = moved(harness, 509)
    path = harness.home / "receipts" / "509.1.stage_out"
    text = path.read_text().replace(f'"root":"{harness.directory}"', '"root":"$DW_JOB_STRIPED"', 1)
    path.write_text(text)
    result = asked(double, "--job", 509, "--digest", receipt.digest, "--recheck")
    assert result.exit_code == ExitCode.NOT_FOUND and "buffer of job 509 is not on this node" in result.stderr
    (harness.home / "buffers" / "509" / "striped").mkdir(parents=True)
    result = asked(double, "--job", 509, "--digest", receipt.digest, "--recheck")
    assert result.exit_code == ExitCode.VERIFICATION_FAILED and "3 files differ" in result.stderr
