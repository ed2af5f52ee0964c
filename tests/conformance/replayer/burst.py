"""What listings would have printed at any moment of the run: `forebay slurm burst` by the server's view and the
command's text, and of squeue what can be counted.
"""

import msgspec

from forebay.cluster.api.burst import burst_view
from forebay.cluster.schemas.burst import burst_text as text_of
from forebay.replica.model.job_states import ENDED, JobState
from forebay.replica.state.state import State
from forebay.replica.views.burst import burst_of
from forebay.replica.views.jobs import reason_of
from tests.conformance.replayer.words import Parsed

_COUNTED = frozenset({"%r", "%t", "%t %r", "%r %t"})
"""Formats of squeue that are counted: what they show needs no number of a job."""


def burst_text(state: State, *, oneliner: bool = False, polls: bool = True) -> str:
    """Return the text of `forebay slurm burst` at `state`; `polls`: as releases from 24.11 on print it."""
    found = burst_of(state, only_user=None)
    users = {row.user for row in found.buffers} | {row.user for row in found.uses}
    view = burst_view(found, int(state.revision), dict.fromkeys(users, 0))
    if not polls:
        view = msgspec.structs.replace(view, poll_interval_s=None)
    return text_of(view, one_line=oneliner)


def squeue_text(state: State, parsed: Parsed) -> str | None:
    """Return what squeue would print of states and reasons at `state`, one line a job; None for other formats."""
    form = parsed.option("o", "format")
    wanted = parsed.option("t", "states")
    if form not in _COUNTED or wanted == "all" or parsed.option("h") is None:
        return None
    lines = []
    for job_id, job in sorted(state.jobs.items()):
        if job.state in ENDED or (wanted is not None and job.state.code not in wanted.split(",")):
            continue
        reason = reason_of(state, job_id) if job.state in (JobState.PENDING, JobState.STAGE_OUT) else "None"
        lines.append(form.replace("%r", reason).replace("%t", job.state.code))
    return "".join(f"{line}\n" for line in lines)
