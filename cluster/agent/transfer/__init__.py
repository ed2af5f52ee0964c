"""Moving data so that what arrives is what was there: the library that a worker of the agent uses (see DESIGN.md)."""

from cluster.agent.transfer import fence, workspace
from cluster.agent.transfer.digests import hasher
from cluster.agent.transfer.errors import Paused, TransferFailed, file_message, is_absence, root_cause
from cluster.agent.transfer.fence import Claimant, Fenced, FenceFailed
from cluster.agent.transfer.options import Algorithm, Item, Kind, Links, Options, Verify
from cluster.agent.transfer.programs import (
    NO_LIMIT_S,
    POLL_S,
    IoWatch,
    end_program,
)
from cluster.agent.transfer.progress import PHASES, Counters, Rate, SharedCounters, nothing
from cluster.agent.transfer.rate_limit import UNLIMITED, Control, Pace, Stopped
from cluster.agent.transfer.receipts import Difference, Place, raw_lines, read_lines, read_places, recheck
from cluster.agent.transfer.transfer import make_top, resumable, run_transfer
from cluster.agent.transfer.transfer_state import Context
from cluster.agent.transfer.workspace import STAGES, Workspace
