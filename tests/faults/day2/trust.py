"""Rows about certificates: renewing certificates and the authority, and revoking."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from typing import Final

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import TlsFiles
from tests.faults.day2.day import Day, check
from tests.faults.day2.site import Site, until
from tests.faults.local_cluster import AGENTS, REPLICAS, USER

OWNERS: Final = {**dict.fromkeys(REPLICAS, "replica"), **dict.fromkeys(AGENTS, "agent")} | {
    "operator": "operator",
    USER: "user",
}
"""Who has a certificate, and as what."""

STOLEN: Final = "alan"


async def certificate(day: Day) -> str:
    """The certificate of the row, and then everybody else's, are renewed while their processes run."""
    site = day.site
    before = {name: site.pid(name) for name in (*REPLICAS, *AGENTS)}
    shown = {name: await _shown(site, name) for name in REPLICAS}
    await day.types()
    site.copy_pair("r2")
    await _in_use(site, "r2")
    for name in OWNERS:
        if name != "r2":
            await _renew(site, name)
    for name in REPLICAS:
        await _in_use(site, name)
        check(await _shown(site, name) != shown[name], f"{name} shows the certificate of before")
    after = {name: site.pid(name) for name in before}
    check(after == before, f"restarted: {before} became {after}")
    return f"{len(OWNERS)} certificates renewed, {len(REPLICAS)} replicas show theirs, no process restarted"


async def authority(day: Day) -> str:
    """The authority is renewed in its three steps, and the former one is believed by nobody at the end."""
    site = day.site
    former = site.directory / "former"
    shutil.copytree(site.operators / "tls", former)
    await day.types()
    both = shutil.copy2(site.operators / "tls" / "ca.pem", former / "both.pem")
    await _give_authority(site)
    for name in OWNERS:
        await _renew(site, name)
    for name in REPLICAS:
        await _in_use(site, name)
    await site.typed(["cert", "retire-authority"])
    await _give_authority(site)
    # Who shows it believes both authorities: it is the replicas that refuse.
    old = TlsFiles(both, former / "operator.pem", former / "operator.key")
    await until(lambda: _refused(site, old), "nobody believes a certificate of the former authority")
    await day.load.commits()
    return "all have certificates of the new authority, one of the former is refused by every replica"


async def revoke(day: Day) -> str:
    """A user whose key was stolen is refused by each replica, also on a connection that is open."""
    site = day.site
    await site.typed(["cert", "issue", STOLEN, "--role", "user", "--replace"])
    tls = site.operators / "tls"
    files = TlsFiles(tls / "ca.pem", tls / f"{STOLEN}.pem", tls / f"{STOLEN}.key")
    check(not await _refused(site, files), f"{STOLEN} is refused before anything is revoked")
    assert site.config is not None
    open_ones = [await _connection(site, name, STOLEN) for name in REPLICAS]
    await day.types()
    await until(lambda: _refused(site, files), f"{STOLEN} is refused by every replica")
    async with asyncio.timeout(10):
        for reader, writer in open_ones:
            check(not await reader.read(1), "an open connection answers")
            writer.close()
    listed = (await site.typed(["cert", "revocations"])).out
    check(f"user:{STOLEN}" in listed, f"the list of what is revoked has no {STOLEN}: {listed}")
    await site.typed(["cert", "unrevoke", f"user:{STOLEN}"])
    return f"{STOLEN} was refused by {len(REPLICAS)} replicas, and {len(REPLICAS)} connections of his were closed"


async def _renew(site: Site, name: str) -> None:
    await site.typed(["cert", "issue", name, "--role", OWNERS[name], "--replace"])
    if name in site.places:
        site.copy_pair(name)


async def _give_authority(site: Site) -> None:
    """Copy ca.pem to every machine, and have each process read it now."""
    for host in site.hosts():
        site.copy(host, "ca.pem")
    site.hang_up((*REPLICAS, *AGENTS))
    await site.whole("the authorities were read")


async def _refused(site: Site, files: TlsFiles) -> bool:
    """Say whether each replica refuses who shows a certificate."""
    assert site.config is not None
    found = []
    for name in REPLICAS:
        api = site.config.replica(name).api
        async with Client([api], files, deadline_s=2) as client:
            try:
                await client.call(ops.LIST_POOLS, replica=api, stale=True)
                found.append(False)
            except ApiError:
                found.append(True)
    return all(found)


async def _connection(site: Site, name: str, identity: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to a replica's API that shows a certificate, whoever answers there."""
    assert site.config is not None
    tls = site.operators / "tls"
    context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
    context.check_hostname = False
    context.load_cert_chain(tls / f"{identity}.pem", tls / f"{identity}.key")
    api = site.config.replica(name).api
    return await asyncio.open_connection(api.host, api.port, ssl=context)


async def _shown(site: Site, name: str) -> bytes:
    """Return the certificate that a replica shows."""
    _, writer = await _connection(site, name, "operator")
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


async def _in_use(site: Site, name: str) -> None:
    """Wait until a replica shows the certificate that was issued last."""
    issued = ssl.PEM_cert_to_DER_cert((site.operators / "tls" / f"{name}.pem").read_text())

    async def shows() -> bool:
        return await _shown(site, name) == issued

    await until(shows, f"{name} shows its new certificate")
