"""The client's calls about partitions, what was used of burst buffers, and changes of waiting jobs."""

from urllib.parse import quote

from cluster.client.configuring import Calls
from cluster.schemas import JobView, UpdateRequest
from cluster.schemas import accounts as v


class Partitioning:
    """Mixed into the client. What changes partitions or usage is for operators."""

    async def partitions(self: Calls, *, stale: bool = False, deadline_s: float | None = None) -> v.PartitionsAnswer:
        """Return the partitions."""
        return await self._read("/v1/partitions", {}, v.PartitionsAnswer, stale, deadline_s)

    async def set_partition(
        self: Calls, name: str, request: v.PartitionRequest, *, deadline_s: float | None = None
    ) -> v.PartitionsAnswer:
        """Make a partition, or change all of it."""
        path = f"/v1/partitions/{quote(name, safe='')}"
        return await self._write("PUT", path, request, v.PartitionsAnswer, deadline_s)

    async def delete_partition(
        self: Calls, name: str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> v.PartitionsAnswer:
        """Take a partition away; its jobs wait with PartitionConfig."""
        request = v.PartitionDeleteRequest(command_id=command_id or self.new_command_id())
        path = f"/v1/partitions/{quote(name, safe='')}/delete"
        return await self._write("POST", path, request, v.PartitionsAnswer, deadline_s)

    async def usage(self: Calls, *, stale: bool = False, deadline_s: float | None = None) -> v.UsageAnswer:
        """Return what accounts, their users and QOS have used of burst buffers."""
        return await self._read("/v1/usage", {}, v.UsageAnswer, stale, deadline_s)

    async def reset_usage(
        self: Calls, request: v.UsageResetRequest, *, deadline_s: float | None = None
    ) -> v.UsageAnswer:
        """Have what an account, or a QOS, has used count as nothing."""
        return await self._write("POST", "/v1/usage/reset", request, v.UsageAnswer, deadline_s)

    async def update_job(
        self: Calls, job: int | str, request: UpdateRequest, *, deadline_s: float | None = None
    ) -> JobView:
        """Change a job that waits, or those that wait of an array (`12`) or some of its tasks (`12_[1-3]`)."""
        path = f"/v1/jobs/{quote(str(job), safe='')}/update"
        return await self._write("POST", path, request, JobView, deadline_s)
