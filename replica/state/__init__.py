"""Replicated state: its tables, builder, digest and invariants."""

from replica.state.answers import Answers
from replica.state.builder import Facts, StateBuilder
from replica.state.derived import derive, is_finished
from replica.state.digest import (
    RecordedDigests,
    StateDiffers,
    is_checkpoint,
    recorded_in,
    state_digest,
    table_digests,
)
from replica.state.interning import shared_buffer, shared_buffer_request, shared_job, shared_receipt, shared_request
from replica.state.invariants import check
from replica.state.receipts import Receipts
from replica.state.state import EMPTY, TABLES, State, Table
