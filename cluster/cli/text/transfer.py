"""Text of transfers: table, progress bars, receipts, and the lines in `job show`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from forebay.cluster.cli.text.output import NOTHING, Listing, table
from forebay.cluster.cli.text.tables import format_time
from forebay.cluster.cli.text.times import DAY_S, format_elapsed
from forebay.cluster.schemas import JobTransfersView, ReceiptView, TransferView
from forebay.cluster.system import format_span, parse_instant, readable_size
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR_CELLS: Final = 24
"""Length of a progress bar, characters: with its figures it fits into 80."""

STATE_STYLES: Final = {"failed": "red", "retrying": "yellow", "queued": "dim"}
"""Style by state of a transfer that makes no progress."""

FILE_CHARACTERS_SHOWN: Final = 60
"""Characters shown of the end of the current file's path."""

LEFT_OUT_SHOWN: Final = 4
"""Number of skipped files named in a short receipt: the full receipt names more."""

_LONGEST_S: Final = 1_000 * DAY_S
"""Largest remaining time that is shown, seconds."""


def transfers_table(transfers: Iterable[TransferView]) -> Listing:
    """Return the table of active, queued and failed transfers."""
    return table(
        ("JOBID", "USER", "STAGE", "NODE", "ATTEMPT", "STATE", "FILES", "BYTES", "RATE", "LEFT"),
        (
            (
                row.task or row.job_id,
                row.user,
                row.stage,
                row.node,
                row.attempt,
                state_words(row),
                f"{row.files_done}/{_total(row.files_total)}",
                f"{readable_size(row.bytes_done)}/{_total_bytes(row)}",
                f"{readable_size(row.rate_bytes_s)}/s",
                left_words(row),
            )
            for row in transfers
        ),
        right=frozenset({"JOBID", "ATTEMPT", "FILES", "BYTES", "RATE", "LEFT"}),
    )


def state_words(row: TransferView) -> str:
    """Return a transfer's state or phase: `copying`, `paused`, `queued`."""
    if row.state != "moving":
        return row.state
    if row.paused:
        return "paused"
    return plain(row.phase) or row.state


def left_words(row: TransferView) -> str:
    """Return the time left at the present rate, `-` if it is unknown."""
    if row.time_left_s is None or row.paused:
        return NOTHING
    return ">1000 days" if row.time_left_s > _LONGEST_S else format_elapsed(round(row.time_left_s))


def _total(number: int) -> str:
    return str(number) if number else "?"


def _total_bytes(row: TransferView) -> str:
    return readable_size(row.bytes_total) if row.bytes_total or row.files_total else "?"


def draw_transfers(transfers: Iterable[TransferView]) -> RenderableType:
    """Return a progress bar for each transfer, with its figures and current file."""
    from rich.console import Group
    from rich.text import Text

    lines: list[RenderableType] = []
    for row in transfers:
        style = STATE_STYLES.get(row.state, "cyan")
        lines.append(Text(", ".join(_head(row)), style=style))
        lines.append(Text(f"  {bar(row)}"))
        lines.extend(Text(f"  {remark}", style="dim") for remark in (_remark(row), _file(row)) if remark)
    return Group(*lines) if lines else Text("No transfers.")


def bar(row: TransferView) -> str:
    """Return the progress bar and figures of a transfer as one line."""
    done, total = (row.bytes_done, row.bytes_total) if row.bytes_total else (row.files_done, row.files_total)
    return (
        f"{meter(done, total)}  {readable_size(row.bytes_done)} of {_total_bytes(row)}  "
        f"{row.files_done} of {_total(row.files_total)} files"
    )


def meter(part: int, whole: int) -> str:
    """Return a bar for a fraction, with its percentage; 0 if the whole is 0."""
    share = min(1.0, part / whole) if whole else 0.0
    full = int(share * BAR_CELLS)
    return f"{'█' * full}{'·' * (BAR_CELLS - full)} {100 * share:5.1f} %"


def _head(row: TransferView) -> Iterator[str]:
    yield f"job {plain(row.task or str(row.job_id))} {plain(row.stage)} on {plain(row.node)}"
    yield state_words(row)
    if row.state == "moving":
        yield f"{readable_size(row.rate_bytes_s)}/s"
    if left_words(row) != NOTHING:
        yield f"{left_words(row)} left"


def _remark(row: TransferView) -> str:
    if row.state in ("failed", "retrying"):
        return plain(row.message)
    words = []
    if row.resumed_bytes or row.resumed_files:
        files = "1 file" if row.resumed_files == 1 else f"{row.resumed_files} files"
        words.append(f"{readable_size(row.resumed_bytes)} in {files} from an earlier attempt")
    if row.retries:
        words.append(f"{row.retries} {'file' if row.retries == 1 else 'files'} transferred again")
    if row.paused:
        words.append("paused: a rate limit is 0")
    elif row.waiting:
        words.append("throttled by a rate limit")
    return "; ".join(words)


def _file(row: TransferView) -> str:
    path = plain(row.file)
    return path if len(path) <= FILE_CHARACTERS_SHOWN else "…" + path[1 - FILE_CHARACTERS_SHOWN :]


def job_transfers_text(answer: JobTransfersView) -> str:
    """Format the transfers of one job as Key=Value lines."""
    lines = list(transfer_lines(answer))
    head = f"JobId={plain(answer.task or str(answer.job_id))}"
    return "\n".join([head, *(f"   {line}" for line in lines or ["Transfer=none"])])


def transfer_lines(answer: JobTransfersView) -> Iterator[str]:
    """Yield a job's transfer lines for `job show`: active transfer, receipts, unexported files."""
    row = answer.transfer
    if row is not None:
        pairs = {
            "Transfer": row.stage,
            "TransferState": state_words(row).replace(" ", "_"),
            "Files": f"{row.files_done}/{_total(row.files_total)}",
            "Bytes": f"{row.bytes_done}/{row.bytes_total or '?'}",
            "Rate": f"{readable_size(row.rate_bytes_s)}/s".replace(" ", ""),
            "TimeLeft": left_words(row),
        }
        yield " ".join(f"{key}={plain(value)}" for key, value in pairs.items())
        limits = (
            ("RateLimit", row.transfer_limit_bytes_s),
            ("UserRateLimit", row.user_limit_bytes_s),
            ("NodeRateLimit", row.node_limit_bytes_s),
        )
        words = [f"{key}={readable_size(limit)}/s".replace(" ", "") for key, limit in limits if limit is not None]
        if words:
            yield " ".join(words)
    checkpoint = answer.checkpoint
    if checkpoint is not None:
        yield (
            f"Checkpoint={checkpoint.stage} Files={checkpoint.files} Bytes={checkpoint.size_bytes} "
            f"Time={format_time(checkpoint.time)}"
        )
    for receipt in answer.receipts:
        yield from receipt_lines(receipt)
    for missing in answer.not_exported:
        yield f"NotExported={plain(missing.path)} ({'LOST: ' if missing.lost else ''}{plain(missing.why)})"


def receipt_lines(receipt: ReceiptView) -> Iterator[str]:
    """Yield the lines of a short receipt."""
    state = "complete" if receipt.complete else "failed"
    yield (
        f"Receipt={receipt.stage} Attempt={receipt.attempt} State={state} Files={receipt.files} "
        f"Bytes={receipt.size_bytes} Resumed={receipt.resumed_bytes} Retries={receipt.retries} "
        f"LeftOut={receipt.left_out}"
    )
    if receipt.complete:
        named = receipt.left_out_first[:LEFT_OUT_SHOWN]
        for one in named:
            yield f"LeftOut={plain(one.path)} ({plain(one.reason)})"
        if named and receipt.left_out > len(named):
            yield f"LeftOut={receipt.left_out - len(named)} more (see forebay transfer receipt {receipt.job_id})"
    if receipt.digest:
        yield f"ReceiptDigest={plain(receipt.digest)} Verify={plain(receipt.verify)}"


def receipt_text(receipt: ReceiptView) -> str:
    """Format a full receipt as Key=Value lines."""
    took = NOTHING
    if receipt.start_time and receipt.end_time:
        took_us = max(0, parse_instant(receipt.end_time) - parse_instant(receipt.start_time))
        rate = receipt.written_bytes * MICROSECONDS_PER_SECOND / took_us if took_us else 0
        took = f"{format_span(Instant(took_us))}, {readable_size(rate)}/s"
    lines = [
        f"Receipt of job {receipt.job_id}, {receipt.stage} attempt {receipt.attempt} on {plain(receipt.node)}: "
        f"{'complete' if receipt.complete else 'FAILED'}",
        f"Files={receipt.files} Directories={receipt.directories}",
        f"Links={receipt.links} DanglingLinks={receipt.dangling}",
        f"Bytes={receipt.size_bytes} Written={receipt.written_bytes}",
        f"ResumedFiles={receipt.resumed_files} ResumedBytes={receipt.resumed_bytes} Retries={receipt.retries}",
        f"RemovedAtSource={receipt.removed_files} SetIdStripped={receipt.stripped} LeftOut={receipt.left_out}",
        *(f"LeftOut={plain(one.path)} ({plain(one.reason)})" for one in receipt.left_out_first),
        f"Backends={plain(','.join(receipt.backends))} Verify={plain(receipt.verify)} "
        f"Algorithm={plain(receipt.algorithm)}",
        f"Digest={plain(receipt.digest) or 'none'}",
        f"Manifest={plain(receipt.manifest_digest) or 'none'}",
        f"Start={format_time(receipt.start_time)} End={format_time(receipt.end_time)} Took={took}",
    ]
    if receipt.revision is not None:
        lines.append(f"Revision={receipt.revision}")
    return "\n   ".join(lines)
