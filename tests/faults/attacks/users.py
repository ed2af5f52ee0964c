"""Attacks by request contents: mail addresses that are commands, and outdated command IDs."""

from __future__ import annotations

from typing import Final

from forebay.cluster.client import ApiError
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.agents import RegisterRequest
from forebay.cluster.schemas.base import Command
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.schemas.requests import HoldCommand
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.system.clock import SystemClock
from forebay.replica.values import Instant, seconds
from tests.clocks import ManualClock
from tests.faults.attacks.sites import RunFailed, until, works
from tests.faults.bare import BareCluster, held_job

MAIL_TRICKS: Final = (
    "|touch${{IFS}}{ran}#",
    "|touch${{IFS}}{ran}${{IFS}}#@example.org",
    "|{ran}",
    "{ran}",
    "{ran}@example.org",
    "`touch${{IFS}}{ran}`@example.org",
    "$(touch${{IFS}}{ran})",
    "-Xtouch{ran}",
    "a@b|touch${{IFS}}{ran}",
    "a\\n|touch {ran}",
    "../../{ran}",
    ":include:{ran}",
)
"""Recipients that some mail program takes for a command, a file or an option; {ran} is a file that must not come."""

AHEAD_S: Final = (3600, 290, 60, 15)
BEHIND_S: Final = (310, 3600, 86_400)
"""How far clocks are off whose commands are refused, seconds: 10 ahead and 300 behind are allowed."""


async def mail(site: BareCluster, rounds: int) -> dict[str, int]:
    """Submit jobs whose mail goes to a command, and have the mail sent; nothing may run, and honest mail must come."""
    ran, sent = site.directory / "ran", site.directory / "sent"
    refused = accepted = 0
    async with site.client() as client:
        await site.leader(client)
        addresses = [trick.format(ran=ran) for trick in MAIL_TRICKS] * rounds
        for address in [*addresses, "honest@example.org"]:
            request = held_job(client, "mail", mail_user=address, mail_types=("all",))
            try:
                job = (await client.call(ops.SUBMIT_JOB, request)).job_id
            except ApiError as error:
                if error.outcome != "rejected":
                    raise
                refused += 1
                continue
            accepted += 1
            await client.call(ops.CANCEL_JOB, id=job)
        # It is sent in the order in which it is owed: what came before the honest one has been tried.
        await until("the honest mail", lambda: sent.exists() and "honest@example.org" in sent.read_text())
        if ran.exists():
            raise RunFailed(f"a mail address ran a command, or wrote a file: {sorted(sent.read_text().splitlines())}")
        got = set(sent.read_text().splitlines()) - {"honest@example.org"}
        if got:
            raise RunFailed(f"the mail program was handed {sorted(got)}")
        await works(site, client)
    return {"addresses": len(addresses), "rejected": refused, "sent": accepted}


async def ids(site: BareCluster, commands: int) -> dict[str, int]:
    """Send commands with ids of another time, as a user and as an agent, among those of honest people.

    A user's are refused. An agent's are heard, since its attempts tell its reports apart; nobody is refused, and no
    answer is forgotten, for what is in them.
    """
    authority = load_authority(site.directory / "tls")
    issue(authority, site.directory / "tls", role=Role.AGENT, name="n1", at=SystemClock().now(), replace=True)
    refused = heard = 0
    async with site.client() as client, site.client("operator") as operator, site.client("n1") as agent:
        await operator.call(ops.ADMIT_NODE, name="n1")
        first = held_job(client, "first")
        job = (await client.call(ops.SUBMIT_JOB, first)).job_id
        for off_s in (*AHEAD_S, *(-behind_s for behind_s in BEHIND_S)):
            clock = ManualClock(Instant(SystemClock().now() + seconds(off_s)))
            for _ in range(commands):
                register = RegisterRequest(command_id=new_command_id(clock), instance="i", storage_id="s", cpus=1)
                await agent.call(ops.REGISTER_NODE, register, node="n1")
                heard += 1
                try:
                    await client.call(ops.HOLD_JOB, Command(command_id=new_command_id(clock)), id=job)
                except ApiError as error:
                    if error.code != "command_too_old":
                        raise RunFailed(f"a user whose clock is {off_s} s off was told {error}") from error
                    refused += 1
                else:
                    raise RunFailed(f"a command of a user whose clock is {off_s} s off was carried out")
        holds = [HoldCommand(command_id=client.new_command_id(), job_id=job) for _ in range(commands)]
        if any(result.status != 200 for result in (await client.commands(holds)).results):
            raise RunFailed("honest commands were refused")
        if (again := (await client.call(ops.SUBMIT_JOB, first)).job_id) != job:
            raise RunFailed(f"the retry of the submit of job {job} made job {again}")
        await works(site, client)
    return {"of_users_refused": refused, "of_agents_heard": heard}
