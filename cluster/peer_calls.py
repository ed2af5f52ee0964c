"""Requests of a replica to the APIs of its peers, and to witnesses of its ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, TypeVar

from forebay.cluster.client import ApiError, Client, WitnessClient, WitnessReply, WitnessUnreachable
from forebay.cluster.config import Config
from forebay.cluster.schemas import ApiOperation, CheckpointRequest, HandedView, SignRequest, StatusView
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security.proofs import VerifierKey, parse_key
from forebay.cluster.server import Digests
from forebay.cluster.server.tlog import CountedHistories, LogPeers, NoAnswer, SignedCheckpoint
from forebay.cluster.system import Address, Clock

_Asked = TypeVar("_Asked")
_T = TypeVar("_T")

PEER_ANSWER_S = 2.0
"""Maximum duration of a request to a peer, seconds; it is repeated later."""


class PeerCalls:
    """Client of the other replicas. Each request names its peer.

    Raises:
        ApiError: The peer does not answer a request, or rejects it.
        LookupError: The address of the peer's API is unknown.
    """

    def __init__(self, config: Config, name: str, *, api_of: Callable[[str], str | None], clock: Clock) -> None:
        """Use the certificate of replica `name`; `api_of` returns the address of a peer's API, None if unknown."""
        self._api_of = api_of
        self._client = Client.from_config(config, name, clock=clock, deadline_s=PEER_ANSWER_S)
        self._witnesses = WitnessClient(config.witnesses)

    def renew(self, config: Config) -> None:
        """Use the addresses of a reloaded configuration."""
        self._client.reach_at(config.endpoints)
        self._witnesses.renew(config.witnesses)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
        await self._witnesses.close()

    def of_log(self) -> LogPeers:
        """Return the calls to peers that the publisher of checkpoints makes."""
        return LogPeers(
            self._signature,
            self._hand_checkpoint,
            self._log_key,
            note_of=self._checkpoint,
            submit=self._cosignature,
            count_of=self._history_counts,
        )

    async def digests(self, peer: str, index: int) -> Digests:
        """Return the peer's digests of states, and of its ledger up to entry `index`."""
        answer = await self._call(peer, ops.LIST_DIGESTS, ledger=index)
        return Digests(answer.digests, answer.ledgers)

    async def history(self, peer: str, last: int) -> Iterable[HandedView]:
        """Return entries of the peer's ledger up to index `last`."""
        return (await self._call(peer, ops.READ_STORED_ENTRIES, last=last)).entries

    async def status(self, peer: str) -> StatusView:
        """Return the peer's status."""
        return await self._call(peer, ops.SHOW_STATUS)

    async def _signature(self, peer: str, size: int, root: bytes) -> SignedCheckpoint:
        answer = await self._call(peer, ops.SIGN_CHECKPOINT, SignRequest(size=size, root=root.hex()))
        return SignedCheckpoint(parse_key(answer.key), bytes.fromhex(answer.root), answer.note)

    async def _history_counts(self, peer: str, size: int, root: bytes) -> CountedHistories | None:
        request = SignRequest(size=size, root=root.hex(), histories=True)
        found = (await self._call(peer, ops.SIGN_CHECKPOINT, request)).histories
        return None if found is None else CountedHistories(found.jobs, bytes.fromhex(found.root))

    async def _hand_checkpoint(self, peer: str, note: str) -> None:
        await self._call(peer, ops.TAKE_CHECKPOINT, CheckpointRequest(note=note))

    async def _log_key(self, peer: str) -> VerifierKey:
        (found,) = (await self._call(peer, ops.LIST_LOG_KEYS, alone=True)).keys
        return parse_key(found.key)

    async def _checkpoint(self, peer: str) -> str:
        try:
            return await self._call(peer, ops.READ_CHECKPOINT)
        except ApiError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            return ""

    async def _cosignature(self, witness: str, body: bytes) -> WitnessReply:
        try:
            return await self._witnesses.add_checkpoint(witness, body)
        except WitnessUnreachable as error:
            raise NoAnswer(str(error)) from error

    async def _call(
        self, peer: str, operation: ApiOperation[_Asked, _T], request: _Asked | None = None, **query: Any
    ) -> _T:
        api = self._api_of(peer)
        if api is None:
            raise LookupError(f"the API address of {peer} is unknown")
        return await self._client.call(operation, request, replica=Address.parse(api), **query)
