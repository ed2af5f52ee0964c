"""Changing a job that waits, as `scontrol update` does."""

from __future__ import annotations

from cluster.api import wire
from cluster.api.jobs import change
from cluster.api.service import Call, Reply


async def update(call: Call) -> Reply:
    """Change a job that waits, or those that wait of an array or of some of its tasks."""
    site = call.service.controller.state.site
    return await change(call, wire.update_job(*call.job_reference(), call.body, site))
