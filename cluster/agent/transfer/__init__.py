"""Verified data transfer: the library used by the agent's workers (see DESIGN.md)."""

from forebay.cluster.agent.transfer import fence, workspace
from forebay.cluster.agent.transfer.digests import hasher
from forebay.cluster.agent.transfer.errors import TransferFailed, TransferPaused, file_message, is_absence, root_cause
from forebay.cluster.agent.transfer.fence import Claimant, FenceFailed, WriterFenced
from forebay.cluster.agent.transfer.options import Algorithm, ItemKind, Links, TransferItem, TransferOptions, Verify
from forebay.cluster.agent.transfer.programs import (
    NO_LIMIT_S,
    POLL_S,
    IoWatch,
    end_program,
)
from forebay.cluster.agent.transfer.progress import PHASES, Counters, Rate, SharedCounters, no_op
from forebay.cluster.agent.transfer.rate_limit import UNLIMITED, Pace, TransferControl, TransferStopped
from forebay.cluster.agent.transfer.receipts import (
    ReceiptDifference,
    ReceiptItem,
    raw_lines,
    read_lines,
    read_places,
    recheck,
)
from forebay.cluster.agent.transfer.transfer import make_top, resumable, run_transfer
from forebay.cluster.agent.transfer.transfer_state import TransferContext
from forebay.cluster.agent.transfer.workspace import STAGES, Workspace
