"""The client's calls about transfers: what is under way, and receipts."""

from urllib.parse import quote

from cluster.client.configuring import Calls
from cluster.schemas import transfers as v


class Transferring:
    """Mixed into the client."""

    async def transfers(self: Calls, *, deadline_s: float | None = None) -> v.TransfersAnswer:
        """Return the transfers under way, as the leader knows them."""
        return await self._read("/v1/transfers", {}, v.TransfersAnswer, False, deadline_s)

    async def job_transfers(self: Calls, job: int | str, *, deadline_s: float | None = None) -> v.JobTransfersView:
        """Return what is moved for a job now, what was, and what was not exported."""
        return await self._read(_path(job), {}, v.JobTransfersView, False, deadline_s)

    async def receipts(
        self: Calls,
        job: int | str,
        *,
        stage: str | None = None,
        attempt: int | None = None,
        stale: bool = False,
        deadline_s: float | None = None,
    ) -> v.ReceiptsAnswer:
        """Return every receipt of a job that the ledger has, of one stage or attempt if that is said."""
        query = {"stage": stage, "attempt": None if attempt is None else str(attempt)}
        asked = {name: value for name, value in query.items() if value is not None}
        return await self._read(f"{_path(job)}/receipts", asked, v.ReceiptsAnswer, stale, deadline_s)


def _path(job: int | str) -> str:
    return f"/v1/transfers/{quote(str(job), safe='')}"
