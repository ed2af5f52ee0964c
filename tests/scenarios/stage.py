"""A small stage for scenarios: a world in which commands are typed, and what people would see is written down.

The text is what the command line prints, from the same functions: state, view, renderer. Times are in UTC, accounts are
those of ACCOUNTS, whatever the machine has.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from forebay.cluster.api.burst import burst_view
from forebay.cluster.api.render.jobs import job_view
from forebay.cluster.api.render.reasons import JobVerdicts
from forebay.cluster.cli.text.job import job_block
from forebay.cluster.cli.text.squeue import STANDARD, Field, format_line, read_format, sort_jobs
from forebay.cluster.schemas.burst import burst_text
from forebay.cluster.schemas.jobs import JobView
from forebay.cluster.server.mail.text import subject_of
from forebay.replica.fold.apply import apply_batch
from forebay.replica.grammar.burst_buffer_conf import parse_text
from forebay.replica.grammar.directives import read_request
from forebay.replica.messages import commands as c
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.model.buffers import BufferState
from forebay.replica.model.job_states import ENDED
from forebay.replica.model.jobs import Hold
from forebay.replica.model.requests import JobOptions, JobRequest
from forebay.replica.state.invariants import find_violations
from forebay.replica.values.errors import Rejection
from forebay.replica.values.units import Revision
from forebay.replica.views.burst import burst_of
from tests.replica.world import World, user

ACCOUNTS = {"bbu1": 20001, "bbu2": 20002}
GROUPS = {65534: "nogroup"}


class Stage(World):
    """A world whose commands and answers are kept as a transcript."""

    def __init__(self, configuration: str = "", **fields: Any) -> None:
        super().__init__(**fields)
        self.text: list[str] = []
        self.last_job = 0
        if configuration:
            parsed = parse_text(configuration)
            assert parsed.faults == (), parsed.faults
            settled = self.settle(c.ConfigureSite(parsed.settings, partial=True))
            assert not isinstance(settled, Rejection), settled

    def commit(self, entry: Entry) -> None:
        # As World does, but a pool may shrink below what is in use here.
        batch = Batch(Revision(self.state.revision), self.at, (entry,))
        following = apply_batch(self.state, batch)
        assert following is not None
        self.state = following
        self.ledger.append(batch)
        assert find_violations(self.state) == []

    def say(self, words: str) -> None:
        self.text.append(f"# {words}")

    def wait(self, seconds: float) -> None:
        self.advance(seconds)

    def asks(self, *directives: str, who: str = "bbu1", array: tuple[int, ...] = (), **more: Any) -> int:
        """Submit a job with these directives; options of JobOptions and fields of JobRequest by name."""
        script = "\n".join(("#!/bin/sh", *directives, "true", ""))
        site = self.state.site
        reading = read_request(script, provider=site.provider, directive=site.directive)
        named = {key: more.pop(key) for key in tuple(more) if key in JobOptions.__struct_fields__}
        throttle = more.pop("throttle", 0)
        options = JobOptions(**{"gid": 65534, **named})
        spec: dict[str, Any] = {"name": "sbatch", "user": who, "script": script, "workdir": "/out", "time_limit_s": 60}
        request = JobRequest(**{**spec, **more}, buffer=reading.request, options=options)
        command = c.SubmitJob(request, Hold.NONE, array, throttle)
        self.text += [f"$ [{who}] submit", *(f"    {directive}" for directive in directives)]
        job = self.settle(command, user(who))
        assert isinstance(job, int), job
        self.text.append(f"Submitted batch job {job}")
        return job

    # What people see

    def burst(self, **options: Any) -> None:
        found = burst_of(self.state, only_user=options.pop("only_user", None))
        view = burst_view(found, self.state.revision, ACCOUNTS)
        self._show("forebay slurm burst", burst_text(view, zone=datetime.UTC, **options))

    def job(self, job_id: int) -> None:
        shown = job_block(self.view(job_id), self.at, zone=datetime.UTC, uid=ACCOUNTS.get, group=GROUPS.get)
        self._show(f"forebay job show {job_id}", shown)

    def queue(self, layout: str = STANDARD) -> None:
        columns = read_format(layout)
        views = sort_jobs(tuple(self.view(job) for job in self.state.jobs if self.state.jobs[job].state not in ENDED))
        cells = [self._cell(view) for view in views]
        heading: Callable[[Field], str] = lambda field: field.heading  # noqa: E731
        self._show("forebay queue -o squeue", "\n".join(format_line(columns, cell) for cell in (heading, *cells)))

    def _cell(self, view: JobView) -> Callable[[Field], str]:
        return lambda field: field.shows(view, self.at)

    def standing(self, job_id: int) -> None:
        """Write one line as Slurm's transcripts have it: job state, reason, buffer state."""
        view = self.view(job_id)
        self.text.append(
            f"  job {job_id}: JobState={view.state} Reason={view.reason} BB={view.burst_buffer_state or ''}"
        )

    def mails(self) -> None:
        """Write the subjects of the mails that are owed, in the order in which they came to be, and settle them."""
        owed = sorted(self.state.mails.values(), key=lambda mail: (mail.at, mail.key))
        self.text += [f"mail to {mail.recipient}: {subject_of(mail)}" for mail in owed]
        self.settle(c.SettleMails(tuple(mail.key for mail in owed)), c.CONTROLLER)

    def view(self, job_id: int) -> JobView:
        return job_view(self.state, job_id, JobVerdicts(self.state))

    def _show(self, command: str, text: str) -> None:
        self.text += [f"$ {command}", text]

    # Agents

    def until(self, job: int, state: BufferState, *, seconds: float = 1) -> None:
        """Have the agent succeed, one operation after the other, until the job's buffer is in a state."""
        for _ in range(20):
            if self.state.buffers[job].state is state:
                return
            self.advance(seconds)
            order = self.order(job)
            if order.stage == "run" and not order.started:
                self.report(job, c.ScriptStarted(), order)
            else:
                self.done(job)
        raise AssertionError(f"job {job} never is {state.word}")

    def fails(self, job: int, message: str, operation: str) -> None:
        self.advance(1)
        failed = self.report(job, c.OperationFailed(message, final=True, operation=operation))
        assert not isinstance(failed, Rejection), failed
