"""Replicated state: its tables, builder, digest and invariants."""

from forebay.replica.state.builder import Facts, StateBuilder
from forebay.replica.state.derived import derive, is_finished
from forebay.replica.state.digest import (
    DigestChecker,
    StateDigestMismatch,
    is_checkpoint,
    recorded_digests,
    state_digest,
    table_digests,
)
from forebay.replica.state.interning import (
    intern_buffer,
    intern_buffer_request,
    intern_job,
    intern_receipt,
    intern_request,
)
from forebay.replica.state.invariants import find_violations
from forebay.replica.state.session_replies import SessionReplies
from forebay.replica.state.single_replies import SingleReplies
from forebay.replica.state.state import EMPTY, TABLES, State, Table
