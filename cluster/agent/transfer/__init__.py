"""Moving data so that what arrives is what was there: the library that a worker of the agent uses (see DESIGN.md)."""

from cluster.agent.transfer.context import Context, nothing
from cluster.agent.transfer.errors import Paused, TransferFailed, root_cause
from cluster.agent.transfer.fence import Claimant, Fenced, FenceFailed
from cluster.agent.transfer.file_copy import trouble
from cluster.agent.transfer.io_counters import LOOK_S, IoWatch
from cluster.agent.transfer.options import Algorithm, Options, Verify
from cluster.agent.transfer.plan import Item, Kind
from cluster.agent.transfer.programs import NO_LIMIT_S, ProgramFailed, end_descendants, last_words
from cluster.agent.transfer.progress import PHASES, Counters, Rate, SharedCounters
from cluster.agent.transfer.rate_limit import UNLIMITED, Control, Pace, Stopped
from cluster.agent.transfer.receipt import Receipt
from cluster.agent.transfer.receipts import Place, raw_lines, read_lines, read_places
from cluster.agent.transfer.rechecking import Difference, recheck
from cluster.agent.transfer.transfer import carry, resumable
from cluster.agent.transfer.verify import hasher
from cluster.agent.transfer.workspace import RECEIPTS, STAGES, Workspace
