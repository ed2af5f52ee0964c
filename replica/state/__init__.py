"""Replicated state: its tables, builder, digest and invariants."""

from replica.state.builder import Facts, StateBuilder
from replica.state.derived import derive, is_finished
from replica.state.digest import (
    DigestChecker,
    StateDigestMismatch,
    is_checkpoint,
    recorded_digests,
    state_digest,
    table_digests,
)
from replica.state.interning import intern_buffer, intern_buffer_request, intern_job, intern_receipt, intern_request
from replica.state.invariants import find_violations
from replica.state.session_replies import SessionReplies
from replica.state.single_replies import SingleReplies
from replica.state.state import EMPTY, TABLES, State, Table
