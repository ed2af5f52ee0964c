"""The client's calls about accounts, QOS, licences, reservations, the rules of scheduling, and estimates."""

from typing import TypeVar
from urllib.parse import quote

from cluster.client.configuring import Calls
from cluster.schemas import Command
from cluster.schemas import accounts as v

_T = TypeVar("_T")


class Accounting:
    """Mixed into the client. What changes something is for operators."""

    async def accounts(self: Calls, *, stale: bool = False, deadline_s: float | None = None) -> v.AccountsAnswer:
        """Return the accounts."""
        return await self._read("/v1/accounts", {}, v.AccountsAnswer, stale, deadline_s)

    async def set_account(
        self: Calls, name: str, request: v.AccountRequest, *, deadline_s: float | None = None
    ) -> v.AccountsAnswer:
        """Make an account, or change all of it."""
        return await _put(self, "accounts", name, request, v.AccountsAnswer, deadline_s)

    async def delete_account(
        self: Calls, name: str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> v.AccountsAnswer:
        """Take an account away."""
        return await _delete(self, "accounts", name, command_id, v.AccountsAnswer, deadline_s)

    async def qos(self: Calls, *, stale: bool = False, deadline_s: float | None = None) -> v.QosAnswer:
        """Return the QOS."""
        return await self._read("/v1/qos", {}, v.QosAnswer, stale, deadline_s)

    async def set_qos(self: Calls, name: str, request: v.QosRequest, *, deadline_s: float | None = None) -> v.QosAnswer:
        """Make a QOS, or change all of it."""
        return await _put(self, "qos", name, request, v.QosAnswer, deadline_s)

    async def delete_qos(
        self: Calls, name: str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> v.QosAnswer:
        """Take a QOS away."""
        return await _delete(self, "qos", name, command_id, v.QosAnswer, deadline_s)

    async def licenses(self: Calls, *, stale: bool = False, deadline_s: float | None = None) -> v.LicensesAnswer:
        """Return the licences and how many of each are in use."""
        return await self._read("/v1/licenses", {}, v.LicensesAnswer, stale, deadline_s)

    async def set_license(
        self: Calls, name: str, request: v.LicenseRequest, *, deadline_s: float | None = None
    ) -> v.LicensesAnswer:
        """Say how many of a licence there are."""
        return await _put(self, "licenses", name, request, v.LicensesAnswer, deadline_s)

    async def delete_license(
        self: Calls, name: str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> v.LicensesAnswer:
        """Take a licence away."""
        return await _delete(self, "licenses", name, command_id, v.LicensesAnswer, deadline_s)

    async def reservations(
        self: Calls, *, stale: bool = False, deadline_s: float | None = None
    ) -> v.ReservationsAnswer:
        """Return the reservations that have not ended."""
        return await self._read("/v1/reservations", {}, v.ReservationsAnswer, stale, deadline_s)

    async def set_reservation(
        self: Calls, name: str, request: v.ReservationRequest, *, deadline_s: float | None = None
    ) -> v.ReservationsAnswer:
        """Make a reservation, or change all of it."""
        return await _put(self, "reservations", name, request, v.ReservationsAnswer, deadline_s)

    async def delete_reservation(
        self: Calls, name: str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> v.ReservationsAnswer:
        """Take a reservation away."""
        return await _delete(self, "reservations", name, command_id, v.ReservationsAnswer, deadline_s)

    async def scheduling(self: Calls, *, stale: bool = False, deadline_s: float | None = None) -> v.SchedulingAnswer:
        """Return the rules of scheduling, and what was measured of transfers."""
        return await self._read("/v1/scheduling", {}, v.SchedulingAnswer, stale, deadline_s)

    async def set_scheduling(
        self: Calls, request: v.SchedulingRequest, *, deadline_s: float | None = None
    ) -> v.SchedulingAnswer:
        """Change all of the rules of scheduling."""
        return await self._write("PUT", "/v1/scheduling", request, v.SchedulingAnswer, deadline_s)

    async def estimate(
        self: Calls, job: int | str, *, stale: bool = False, deadline_s: float | None = None
    ) -> v.EstimateView:
        """Return when a job, or one task of an array (`12_3`), should start, and why not sooner."""
        return await self._read(f"/v1/jobs/{quote(str(job), safe='')}/estimate", {}, v.EstimateView, stale, deadline_s)


async def _put(client: Calls, what: str, name: str, request: Command, kind: type[_T], deadline_s: float | None) -> _T:
    return await client._write("PUT", f"/v1/{what}/{quote(name, safe='')}", request, kind, deadline_s)


async def _delete(
    client: Calls, what: str, name: str, command_id: str | None, kind: type[_T], deadline_s: float | None
) -> _T:
    request = v.DeleteRequest(command_id=command_id or client.new_command_id())
    return await client._write("POST", f"/v1/{what}/{quote(name, safe='')}/delete", request, kind, deadline_s)
