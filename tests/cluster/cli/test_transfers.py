"""`forebay transfer …`: requests, output, and missing transfers."""

import asyncio

import pytest
from msgspec.structs import replace

from forebay.cluster.cli.commands import transfer as module
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.cli.text.transfer import bar, state_words
from forebay.cluster.schemas.transfers import ReceiptsAnswer, TransfersAnswer, TransferState, TransferView
from tests.cluster.cli.double import Double, forebay, on_a_terminal
from tests.cluster.cli.test_top import ends, until
from tests.cluster.cli.transfer_views import COPYING, OF_A_JOB, RECEIPT, TRANSFERS


def test_transfers_are_filtered_by_user(double: Double) -> None:
    double.answer("GET", "/v1/transfers", TransfersAnswer(revision=5, transfers=TRANSFERS))
    result = forebay(double.config, "transfer", "list", "--user", "bob")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["JOBID", "44", "45"]


@pytest.mark.parametrize("words", [("list",), ("show", "42")])
def test_watched_transfers_are_drawn_until_none_is_active(double: Double, words: tuple[str, ...]) -> None:
    double.answer("GET", "/v1/transfers", TransfersAnswer(revision=5, transfers=TRANSFERS))
    double.answer("GET", "/v1/transfers/42", OF_A_JOB)
    with on_a_terminal(double.config, "--identity", "operator", "transfer", *words, "--watch") as (ours, _, watching):
        until(ours, b"42")
        double.answer("GET", "/v1/transfers", TransfersAnswer(revision=6, transfers=()))
        double.answer("GET", "/v1/transfers/42", replace(OF_A_JOB, transfer=None))
        assert ends(ours, watching) == ExitCode.OK
    assert len(double.asked) > 1


def test_receipts_are_filtered_by_stage_and_attempt(double: Double) -> None:
    double.answer(
        "GET", r"/v1/transfers/42/receipts.*", ReceiptsAnswer(revision=5, job_id=42, receipts=(RECEIPT, RECEIPT))
    )
    result = forebay(double.config, "transfer", "receipt", "42", "--stage", "stage_out", "--attempt", "4")
    assert result.exit_code == 0 and result.stdout.count("Receipt of job 42") == 2
    assert double.asked[0].target == "/v1/transfers/42/receipts?stage=stage_out&attempt=4"
    assert forebay(double.config, "transfer", "receipt", "42", "--stage", "run").exit_code == ExitCode.BAD_INPUT
    assert forebay(double.config, "transfer", "receipt", "42", "--attempt", "0").exit_code == ExitCode.BAD_INPUT


def test_a_missing_receipt_is_an_error_and_a_truncated_history_is_noted(double: Double) -> None:
    double.answer("GET", r"/v1/transfers/42/receipts.*", ReceiptsAnswer(revision=5, job_id=42, receipts=()))
    result = forebay(double.config, "transfer", "receipt", "42", "--stage", "stage_in")
    assert result.exit_code == ExitCode.NOT_FOUND and result.stdout == ""
    assert "job 42 has no receipt of stage_in" in result.stderr and "transfer show 42" in result.stderr
    cut = ReceiptsAnswer(revision=5, job_id=42, receipts=(RECEIPT,), complete=False)
    double.answer("GET", r"/v1/transfers/42/receipts.*", cut)
    result = forebay(double.config, "transfer", "receipt", "42")
    assert result.exit_code == 0 and "Earlier receipts may be missing" in result.stderr
    none = ReceiptsAnswer(revision=5, job_id=42, receipts=(), complete=False)
    double.answer("GET", r"/v1/transfers/42/receipts.*", none)
    assert "try another one" in forebay(double.config, "transfer", "receipt", "42").stderr


def test_watch_needs_a_terminal_and_excludes_json(double: Double) -> None:
    double.answer("GET", "/v1/transfers/42", OF_A_JOB)
    for words in (("list",), ("show", "42")):
        piped = forebay(double.config, "transfer", *words, "--watch")
        assert piped.exit_code == ExitCode.BAD_INPUT and "needs a terminal" in piped.stderr
        both = forebay(double.config, "transfer", *words, "--watch", "--json")
        assert both.exit_code == ExitCode.BAD_INPUT and "exclude each other" in both.stderr
    assert double.asked == []


def test_a_progress_bar_counts_files_if_the_size_is_unknown() -> None:
    def drawn(**fields: int) -> str:
        return bar(TransferView(job_id=1, attempt=1, node="n", stage="stage_in", **fields))

    assert drawn() == "·" * 24 + "   0.0 %  0 B of ?  0 of ? files"
    assert drawn(files_done=1, files_total=2).startswith("█" * 12 + "·" * 12 + "  50.0 %")
    assert drawn(bytes_done=999, bytes_total=1_000).startswith("█" * 23 + "·")
    assert drawn(bytes_done=2_000, bytes_total=1_000).startswith("█" * 24 + " 100.0 %")


def test_phase_names_of_agents_cannot_control_the_terminal() -> None:
    hostile = TransferView(job_id=1, attempt=1, node="n", stage="stage_in", phase="\x1b[2J")
    assert "\x1b" not in state_words(hostile) and state_words(COPYING) == "copying"


def test_watch_ends_when_only_failed_transfers_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WATCH_PERIOD_S", 0.0)
    failed = TransferView(job_id=1, attempt=1, node="n1", stage="stage_in", state="failed")
    states: tuple[TransferState, ...] = ("queued", "moving", "retrying")
    for last in ([], [failed]):
        answers = [[failed, replace(failed, job_id=2, state=state)] for state in states]
        answers += [*([replace(failed, state=state)] for state in states), last, [replace(failed, state="moving")]]

        async def ask(waiting: list[list[TransferView]] = answers) -> list[TransferView]:
            return waiting.pop(0)

        asyncio.run(module._draw(ask))
        assert len(answers) == 1
