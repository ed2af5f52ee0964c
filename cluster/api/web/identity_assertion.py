"""Identity assertions: accounts without a certificate, authenticated by a gateway or by munged.

A gateway's assertion counts for user accounts only. Operators are determined by this replica's own [access]
configuration and the groups of its machine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from forebay.cluster.api.web.problems import Problem, permission_denied, too_busy
from forebay.cluster.config import GROUP_SIGN, MUNGE, AccessTable
from forebay.cluster.schemas import USER_HEADER
from forebay.cluster.security import (
    NAME_RULE,
    SCHEME,
    THROUGH_MUNGE,
    Identity,
    IdentityError,
    Munge,
    MungeCredential,
    MungeError,
    MungeUnavailable,
    PeerCertificate,
    Role,
    is_name,
    purpose_of,
    revocable_as,
)
from forebay.cluster.system import Clock, SystemClock, account_of, is_member
from forebay.cluster.system.eventloop import NameService, NotKnownNow
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant

LOGGER = logging.getLogger(__name__)

SPOKEN_FOR_S: Final = 3_600
"""Longest request on behalf of an asserted account, seconds, mainly event streams; the client then reconnects and is
checked again.
"""

DECODERS: Final = 4
"""Threads that call munged, count; it has two by default."""

DECODES_MAX: Final = 256
"""Credentials waiting for munged, count: half a second's worth."""


class Decoding(Protocol):
    """Decoder of credentials (`cluster.security.Munge`)."""

    def decode(self, credential: str) -> MungeCredential: ...


class AccessRules(msgspec.Struct, frozen=True, array_like=True):
    """The part of [access] that determines identities, as sent to an API worker."""

    users: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    operators_through: tuple[str, ...] | None = None
    munge: bool = False
    munge_socket: str | None = None

    @classmethod
    def of(cls, table: AccessTable) -> AccessRules:
        """Return the rules of a configuration."""
        socket = None if table.munge_socket is None else str(table.munge_socket)
        return cls(table.users, table.operators, table.operators_through, table.munge, socket)

    def may_operate_through(self, way: str) -> bool:
        """Return True if operators may use this kind of authentication."""
        return way != MUNGE if self.operators_through is None else way in self.operators_through


class Voucher(msgspec.Struct, frozen=True):
    """Identity of a request, and the purpose its credential must match."""

    shown: PeerCertificate
    payload: bytes | None = None

    def check(self, purpose: Callable[[], bytes]) -> None:
        """Check that the credential was made for this request.

        Raises:
            Problem: 401, if it was not.
        """
        if self.payload is not None and not hmac.compare_digest(self.payload, purpose()):
            words = "the MUNGE credential was made for another request, or for another replica"
            raise _not_asserted(words, "make one for each request, and for the address that it is sent to")


class IdentityAssertions:
    """Resolves asserted accounts to identities."""

    def __init__(
        self,
        rules: AccessRules,
        cluster_id: str,
        *,
        clock: Clock | None = None,
        member: Callable[[tuple[str, str]], bool] = lambda asked: is_member(*asked),
        account: Callable[[int], str | None] = account_of,
        munge: Decoding | None = None,
    ) -> None:
        """`member` and `account` query the name service, which can be slow; `munge`: the decoder."""
        self._rules = rules
        self._cluster_id = cluster_id
        self._clock = clock = clock or SystemClock()
        self._members = NameService(member, clock)
        self._accounts = NameService(account, clock)
        self._munge = munge
        self._decoders: concurrent.futures.ThreadPoolExecutor | None = None
        self._decoding = 0

    @property
    def takes_munge(self) -> bool:
        """Return whether MUNGE credentials are accepted."""
        return self._rules.munge

    async def through_gateway(self, gateway: PeerCertificate, account: str) -> Voucher:
        """Return the identity a gateway asserts.

        Raises:
            Problem: The account is unknown or not allowed.
        """
        if not is_name(account):
            raise permission_denied(
                f"{account!r:.120} cannot name a user: {NAME_RULE}", "give the account another name"
            )
        name = gateway.identity.name
        identity = await self._identity(account, name)
        return Voucher(self._spoken_for(identity, gateway, f"{Role.GATEWAY}:{name}"))

    async def by_munge(self, authorization: str) -> Voucher:
        """Return the creator of the credential in an Authorization header.

        Raises:
            Problem: 401, if the credential is invalid.
        """
        scheme, _, credential = authorization.partition(" ")
        if scheme != SCHEME:
            raise _not_asserted(
                f"the Authorization scheme {scheme!r:.40} is not supported", f"use {SCHEME}, or a certificate"
            )
        vouched = await self._decode_in_thread(credential.strip())
        try:
            account = await self._accounts.ask(vouched.uid)
        except NotKnownNow as error:
            raise too_busy(str(error)) from error
        if account is None or not is_name(account):
            words = f"this replica's machine has no account with the uid {vouched.uid}"
            raise _not_asserted(words, "let all machines of the site have the same accounts")
        return Voucher(self._spoken_for(await self._identity(account, MUNGE), None, THROUGH_MUNGE), vouched.payload)

    def purpose(self, server: str, method: str, target: str, body: bytes) -> bytes:
        """Return the required purpose of a credential for this request."""
        return purpose_of(self._cluster_id, server, method, target, body)

    def _spoken_for(self, identity: Identity, by: PeerCertificate | None, through: str) -> PeerCertificate:
        until = Instant(self._clock.now() + SPOKEN_FOR_S * MICROSECONDS_PER_SECOND)
        serial = ""
        if by is not None:
            until, serial = min(until, by.valid_until), by.serial
        return PeerCertificate(identity, serial, until, revocable_as(identity, serial, through), through)

    async def _identity(self, account: str, way: str) -> Identity:
        rules = self._rules
        try:
            is_operator = rules.may_operate_through(way) and await self._is_among(account, rules.operators)
            if rules.users and not is_operator and not await self._is_among(account, rules.users):
                words = f"the account {account} may not use this cluster"
                raise permission_denied(
                    words, f"ask an operator to add it to [access] users, which has {', '.join(rules.users):.200}"
                )
        except NotKnownNow as error:
            raise too_busy(str(error)) from error
        return Identity(Role.OPERATOR if is_operator else Role.USER, account)

    async def _is_among(self, account: str, listed: tuple[str, ...]) -> bool:
        if account in listed:
            return True
        groups = [text.removeprefix(GROUP_SIGN) for text in listed if text.startswith(GROUP_SIGN)]
        for group in groups:
            if await self._members.ask((account, group)):
                return True
        return False

    async def _decode_in_thread(self, credential: str) -> MungeCredential:
        if self._decoding >= DECODES_MAX:
            raise too_busy("too many credentials wait for munged")
        loop = asyncio.get_running_loop()
        self._decoding += 1
        try:
            if self._decoders is None:
                self._decoders = concurrent.futures.ThreadPoolExecutor(DECODERS, "munge")
            return await loop.run_in_executor(self._decoders, self._decode, credential)
        except MungeError as error:
            words = f"the MUNGE credential is rejected: {error}"
            raise _not_asserted(words, "send the command again; compare the clocks of the machines") from error
        except MungeUnavailable as error:
            LOGGER.error("MUNGE credentials cannot be decoded: %s", error)
            raise Problem(
                503, "munge_unavailable", f"this replica cannot reach munged: {error}", "start munged"
            ) from error
        finally:
            self._decoding -= 1

    def _decode(self, credential: str) -> MungeCredential:
        if self._munge is None:
            socket = self._rules.munge_socket
            self._munge = Munge(None if socket is None else Path(socket))
        return self._munge.decode(credential)


def unidentified_client() -> IdentityError:
    """Return the error of a gateway that names no account."""
    return IdentityError(f"a gateway request must name exactly one account, in its header {USER_HEADER}")


def _not_asserted(sentence: str, remedy: str) -> Problem:
    return Problem(401, "not_identified", sentence, remedy)
