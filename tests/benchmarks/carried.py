"""One transfer in a process of its own, as an agent's worker makes it: `python -m tests.benchmarks.carried JSON`.

Prints the receipt, as JSON, when the destination is durable. SIGTERM ends it as it ends a worker."""

import os
import signal
import sys

import msgspec

from forebay.cluster.agent.files.paths import Target, identity_of
from forebay.cluster.agent.transfer.fence import Claimant, claim, tidy
from forebay.cluster.agent.transfer.options import ItemKind, TransferItem, TransferOptions
from forebay.cluster.agent.transfer.progress import SharedCounters
from forebay.cluster.agent.transfer.rate_limit import Pace, TransferStopped
from forebay.cluster.agent.transfer.transfer import run_transfer
from forebay.cluster.agent.transfer.transfer_state import TransferContext
from forebay.cluster.agent.transfer.workspace import Workspace
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.descriptors import open_directory
from forebay.replica.model.stages import Stage

EXIT_ENDED = 143
"""Exit code when the transfer was told to stop, as a worker's."""

JOB = 7
STORAGE = "0123456789abcdef"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What to move, and how; `source` and `destination` are absolute, `home` is the agent's directory."""

    source: str
    destination: str
    home: str
    directory: bool
    attempt: int
    counters: int
    """Descriptor of the shared counters."""
    control: int
    """Descriptor of the agent's control page."""
    options: TransferOptions = TransferOptions()


def _target(path: str) -> Target:
    directory, name = os.path.split(path)
    return Target(open_directory(directory), directory, (name,))


def main() -> int:
    """Do it; return the exit code."""
    wanted = msgspec.json.decode(sys.argv[1], type=Wanted)
    home = open_directory(wanted.home)
    shared = SharedCounters(wanted.counters)
    holder = wanted.destination if wanted.directory else os.path.dirname(wanted.destination)
    os.makedirs(holder, exist_ok=True)
    claimed = open_directory(holder)
    claimant = Claimant(f"{STORAGE[:8]}-{JOB}", wanted.attempt, STORAGE)
    try:
        pace = Pace(wanted.control, shared, SystemClock())
        signal.signal(signal.SIGTERM, lambda *_: pace.end(TransferStopped))
        item = TransferItem(
            ItemKind.DIRECTORY if wanted.directory else ItemKind.FILE,
            _target(wanted.source),
            _target(wanted.destination),
            identity_of(home),
            identity_of(home),
            claim(claimed, holder, claimant),
        )
        context = TransferContext(
            tag=f"{JOB}-{STORAGE[:8]}",
            workspace=Workspace.open(home, JOB, wanted.attempt, "stage_out"),
            clock=SystemClock(),
            progress=shared.write,
            at=shared.at,
            pace=pace,
            stage=Stage.STAGE_OUT,
            attempt=wanted.attempt,
        )
        receipt = run_transfer([item], wanted.options, context)
        tidy(claimed, claimant)
        os.fsync(claimed)
    except TransferStopped:
        return EXIT_ENDED
    sys.stdout.buffer.write(msgspec.json.encode(msgspec.structs.asdict(receipt)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
