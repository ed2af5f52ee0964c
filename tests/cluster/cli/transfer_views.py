"""Transfer views as the API returns them, for tests of the output."""

import msgspec

from forebay.cluster.schemas.transfers import (
    CheckpointView,
    JobTransfersView,
    LeftOutView,
    NotExportedView,
    ReceiptView,
    TransferView,
)

COPYING = TransferView(
    job_id=42, user="alice", attempt=1, node="n1", stage="stage_in", files_done=1, files_total=3, bytes_done=1536,
    bytes_total=4096, rate_bytes_s=512.0, phase="copying", time_left_s=5.2, retries=1, resumed_files=1,
    resumed_bytes=1024, file="data/\x1b[31mred/" + "x" * 80, waiting=True, node_limit_bytes_s=512,
    updated_time="2026-01-31T11:59:59.000000Z", order_time="2026-01-31T11:59:00.000000Z",
)  # fmt: skip
PAUSED = msgspec.structs.replace(COPYING, job_id=43, stage="stage_out", paused=True, rate_bytes_s=0.0, file="")
QUEUED = TransferView(job_id=44, user="bob", attempt=2, node="n2", stage="stage_out", state="queued")
FAILED = TransferView(
    job_id=45, user="bob", attempt=9, node="n2", stage="stage_out", state="failed",
    message="burst_buffer/native: data_out: no space left",
)  # fmt: skip
TRANSFERS = (COPYING, PAUSED, QUEUED, FAILED)
RECEIPT = ReceiptView(
    job_id=42, node="n1", stage="stage_out", attempt=4, complete=True, backends=("native", "rsync"), files=3,
    directories=2, links=1, size_bytes=5 * 2**30, written_bytes=2**30, resumed_files=1, resumed_bytes=2**20, retries=2,
    removed_files=0, left_out=18, left_out_first=(LeftOutView(path="/buffer/\x1bfifo", reason="a FIFO"),), stripped=1,
    verify="digest", algorithm="xxh3-128", digest="xxh3-128:" + "ab" * 16, manifest_digest="xxh3-128:" + "cd" * 16,
    start_time="2026-01-31T11:00:00.000000Z", end_time="2026-01-31T11:00:02.500000Z", revision=77,
)  # fmt: skip
OF_A_JOB = JobTransfersView(
    revision=5,
    job_id=42,
    transfer=COPYING,
    checkpoint=CheckpointView(
        stage="stage_in", attempt=1, files=1, size_bytes=1024, files_total=3, total_bytes=4096, manifest_digest="",
        time="2026-01-31T11:59:30.000000Z",
    ),
    receipts=(
        msgspec.structs.replace(RECEIPT, stage="stage_in", attempt=1, complete=False, digest="", left_out=0), RECEIPT,
    ),
    not_exported=(
        NotExportedView(path="/results/a", why="it is being staged out", lost=False),
        NotExportedView(path="/results/b", why="the buffer was removed without stage-out", lost=True),
    ),
)  # fmt: skip
