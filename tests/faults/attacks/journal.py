"""Attack of a user who fills the journals with bulk changes of own jobs."""

from __future__ import annotations

import itertools

from msgspec.structs import replace

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.accounts import AccountRequest
from forebay.cluster.schemas.requests import UpdateCommand
from tests.faults.attacks.sites import RunFailed
from tests.faults.bare import BareCluster, held_job

FULL = 507
"""What says that there is no room for this kind of command; others may still have some."""

SCRIPT_BYTES = 250_000
COMMENT = "y" * 1000
BULK = 200
"""Changes in a request, count."""


async def journal(site: BareCluster, requests: int) -> dict[str, int]:
    """Fill the journals with scripts until there is no room, then with updates, `requests` requests of them at least.

    No replica may end for it; cancels, operators and, after a restart, all go on.
    """
    async with site.client() as client, site.client("operator") as operator:
        await site.leader(client)
        job = (await client.call(ops.SUBMIT_JOB, held_job(client, "first"))).job_id
        submits = await _until_full(client)
        updates = refused = 0
        for number in itertools.count():
            commands = [
                UpdateCommand(command_id=client.new_command_id(), job_id=job, comment=f"{number}-{at}{COMMENT}"[:1024])
                for at in range(BULK)
            ]
            try:
                results = (await client.commands(commands)).results
            except ApiError as error:
                site.check_running()
                raise RunFailed(f"a request of changes was not answered: {error}") from error
            updates += sum(result.status == 200 for result in results)
            refused += sum(result.status == FULL for result in results)
            if refused and number >= requests:
                break
        site.check_running()
        for name in ("a", "b"):
            await operator.call(ops.SET_ACCOUNT, AccountRequest(command_id=operator.new_command_id()), name=name)
        await client.call(ops.CANCEL_JOB, id=job)
        await site.agreed(operator)
        site.kill(*site.running())
        site.start_all()
        await site.leader(operator)
        await site.agreed(operator)
    return {"submits": submits, "updates": updates, "rejected": refused}


async def _until_full(client: Client) -> int:
    """Submit large jobs until there is no room for them, and return how many were taken."""
    for taken in itertools.count():
        large = replace(held_job(client, "large"), script=_script(taken))
        try:
            await client.call(ops.SUBMIT_JOB, large)
        except ApiError as error:
            if error.status != FULL:
                raise
            return taken
    raise AssertionError


def _script(number: int) -> str:
    return f"#!/bin/sh\n# {number}\n" + "#" * SCRIPT_BYTES
