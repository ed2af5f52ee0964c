"""Double of a leader for the bridge: external jobs in the phases of the API, which tests advance."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from forebay.cluster.client import ApiError
from forebay.cluster.schemas import JobTransfersView, TransferView, WhyView
from forebay.cluster.schemas import external_jobs as g
from forebay.cluster.schemas import operations as ops
from forebay.cluster.slurm import programs
from forebay.replica.grammar import DirectiveRejected, read_external_job_request

GRAIN = 2**20
PYTHON = "#!/usr/bin/python3"

NEVER_RAN = ("waiting", "set-up", "staging-in", "stage-in-failed", "staged-in")


def put_programs(directory: Path, run: Path, shell: str = "/bin/sh") -> Path:
    """Write the programs of burst_buffer/datawarp for a bridge in `run`; return the path of dw_wlm_cli."""
    for name, text in programs(run).items():
        path = directory / name
        path.write_text(text.replace(PYTHON, f"#!{sys.executable}", 1).replace("#!/bin/sh", f"#!{shell}", 1))
        path.chmod(0o755)
    return directory / "dw_wlm_cli"


class LeaderDouble:
    """Double of `cluster.client.Client`. `hold` has the phases that last until `end` is called."""

    def __init__(self, place: str = "/bb/fast") -> None:
        self.hurries: list[bool] = []
        """The parameter hurry of each teardown."""
        self.place = place
        self.total = 64 * GRAIN
        self.external_jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.setups: dict[str, g.SetUpExternalJobRequest] = {}
        """Jobs -> request of their last setup."""
        self.hold: set[str] = set()
        self.late_s = 0.0
        """Delay of answers to queries, seconds."""
        self.failing: dict[str, str] = {}
        self.away = False
        self.unanswered: set[str] = set()
        """Jobs that were queried while the leader did not answer."""
        self.sentence = "the buffer is being staged in"
        self.transfer: TransferView | None = None
        self.missed: list[tuple[str, str]] = []
        self.forgotten: list[tuple[str, str]] = []
        self.changed = asyncio.Event()
        self.persistent: dict[str, g.PersistentView] = {}
        self.persistent_fails = ""
        """Reason to reject persistent buffers; if empty, creation and deletion succeed at the second query."""

    async def call(self, operation: Any, request: Any = None, *, job: str = "", **parameters: Any) -> Any:
        """Perform an operation as the API would."""
        if self.away:
            self.unanswered.add(job)
            await asyncio.sleep(0.01)
            raise ApiError(0, "unreachable", "no replica answers")
        if operation not in (
            ops.SHOW_SCHEDULER_SITE,
            ops.LIST_EXTERNAL_JOBS,
            ops.SHOW_EXTERNAL_JOB,
            ops.LIST_PERSISTENT,
        ):
            self.asked.append((operation.name, job or parameters.get("name", "")))
        if operation is ops.LIST_PERSISTENT:
            return g.PersistentsAnswer(revision=1, buffers=tuple(self.persistent.values()))
        if operation in (ops.MAKE_PERSISTENT, ops.REMOVE_PERSISTENT):
            return self._persistent(operation is ops.MAKE_PERSISTENT, request, parameters["name"])
        if operation is ops.SHOW_SCHEDULER_SITE:
            return self._site()
        if operation is ops.REGISTER_SCHEDULER:
            return g.SchedulersAnswer(revision=1, schedulers=())
        if operation is ops.LIST_EXTERNAL_JOBS:
            return g.ExternalJobsAnswer(revision=1, external_jobs=tuple(self._view(job) for job in self.external_jobs))
        if operation is ops.EXPLAIN_JOB:
            return WhyView(revision=1, at="", job_id=7, state="PENDING", reason="/in/a is gone", sentence=self.sentence)
        if operation is ops.SHOW_JOB_TRANSFERS:
            return JobTransfersView(revision=1, job_id=7, transfer=self.transfer)
        if operation is ops.SHOW_EXTERNAL_JOB:
            return await self._shown(job, parameters)
        if operation is ops.MISS_EXTERNAL_JOB:
            self.missed.append((job, request.state))
            return self._view(job)
        external_job = self.external_jobs.setdefault(job, {"phase": "none", "epoch": 0})
        meant = getattr(request, "epoch", 0)
        if operation is not ops.SET_UP_EXTERNAL_JOB and meant and meant != external_job["epoch"]:
            return await self._shown(job, parameters)  # it comes late
        if operation is ops.SET_UP_EXTERNAL_JOB:
            self.setups[job] = request
            self._set_up(external_job, request)
        elif operation is ops.STAGE_IN_EXTERNAL_JOB and external_job["phase"] in ("set-up", "stage-in-failed"):
            self._begin(job, "staging-in", "staged-in", "stage-in-failed")
        elif operation is ops.BEGIN_EXTERNAL_JOB_RUN and external_job["phase"] == "staged-in":
            external_job["phase"] = "running"
        elif operation is ops.END_EXTERNAL_JOB_RUN and external_job["phase"] == "running":
            external_job["phase"] = "post-run"
        elif operation is ops.STAGE_OUT_EXTERNAL_JOB and external_job["phase"] in (
            "running",
            "post-run",
            "stage-out-failed",
        ):
            self._begin(job, "staging-out", "over", "stage-out-failed")
        elif operation is ops.TEAR_DOWN_EXTERNAL_JOB and external_job["phase"] != "none":
            self.hurries.append(request.hurry)
            ran = external_job["phase"] not in NEVER_RAN
            if request.reason:
                self.forgotten.append((job, request.reason))
                external_job["phase"] = "retained" if ran else "over"
            elif "teardown" in self.hold:
                external_job["phase"] = "teardown"
            else:
                external_job["phase"] = "over" if ran else "lingering"
        self._news()
        return await self._shown(job, parameters)

    def _site(self) -> g.SchedulerSiteAnswer:
        held = sum(
            external_job["size"]
            for external_job in self.external_jobs.values()
            if external_job["phase"] not in ("none", "over")
        )
        pool = g.ExternalJobPoolView(
            name="fast", unit="bytes", quantity=self.total, granularity=GRAIN, free=self.total - held, default=True
        )
        return g.SchedulerSiteAnswer(
            revision=1,
            pools=(pool,),
            directive="BB_LUA",
            provider="native",
            allow_users=(),
            deny_users=(),
            setup_wait_s=20,
            linger_s=300,
        )

    def _set_up(self, external_job: dict[str, Any], request: Any) -> None:
        try:
            read_external_job_request(request.script)
        except DirectiveRejected as refused:
            found = refused.rejection
            raise ApiError(
                400, "invalid_directive", found.sentence, remedy=found.remedy, place=found.place
            ) from refused
        if external_job["phase"] in ("none", "over", "lingering"):
            external_job |= {
                "phase": "set-up",
                "epoch": external_job["epoch"] + 1,
                "size": request.size,
                "uid": request.uid,
            }

    def _persistent(self, makes: bool, request: Any, name: str) -> g.PersistentAnswer:
        known = self.persistent.get(name)
        if known is not None and known.user != request.user:
            raise ApiError(403, "permission_denied", f"{name} is another user's")
        during, after = ("allocating", "allocated") if makes else ("deleting", "none")
        state = "none" if known is None else known.state
        if state != after and not self.persistent_fails:
            state = after if state == during else during
        if state == "none":
            self.persistent.pop(name, None)
        else:
            self.persistent[name] = g.PersistentView(
                name=name, state=state, user=request.user, pool="fast", size=4 * GRAIN, number=9,
                path=f"{self.place}/slurm/{name}.9.1", create_time="2026-11-20T10:00:00Z",
            )  # fmt: skip
        shown = self.persistent.get(name) or g.PersistentView(name=name, state="none")
        failed = bool(self.persistent_fails) and state != after
        fields = {field: getattr(shown, field) for field in g.PersistentView.__struct_fields__}
        return g.PersistentAnswer(revision=1, failed=failed, message=self.persistent_fails, **fields)

    def _begin(self, job: str, during: str, after: str, failed: str) -> None:
        self.external_jobs[job]["phase"] = during
        if during not in self.hold:
            self.end(job, failed if during in self.failing else after, self.failing.get(during, ""))

    def end(self, job: str, phase: str, message: str = "") -> None:
        """End the current operation of an external job in a phase."""
        self.external_jobs[job] |= {"phase": phase, "message": message}
        self._news()

    def _news(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _shown(self, job: str, parameters: dict[str, Any]) -> g.ExternalJobAnswer:
        awaited = parameters.get("while", "").split(",")
        try:
            async with asyncio.timeout(parameters.get("wait_s") or 0.001):
                while self._view(job).phase in awaited and not self.away:
                    await self.changed.wait()
        except TimeoutError:
            pass
        if awaited != [""]:
            await asyncio.sleep(self.late_s)
        return self._view(job)

    def _view(self, job: str) -> g.ExternalJobAnswer:
        external_job = self.external_jobs.get(job, {"phase": "none", "epoch": 0})
        epoch = external_job["epoch"]
        return g.ExternalJobAnswer(
            revision=1,
            scheduler="slurm",
            job=job,
            epoch=epoch,
            phase=external_job["phase"],
            job_id=7 if epoch else None,
            user="alice" if epoch else "",
            uid=external_job.get("uid", 0),
            size=external_job.get("size", 0),
            message=external_job.get("message", ""),
            path=f"{self.place}/slurm/{job}.{epoch}",
            persistent=external_job.get("persistent", {}),
            pool="fast",
        )
