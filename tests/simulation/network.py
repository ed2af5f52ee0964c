"""Links between replicas: one ordered connection for each direction, which loses the frames in flight when it breaks.

Every frame is encoded and decoded by the real `frames`. What TCP does not do between two connections, a careless
transport might: a few frames of an old connection may come once more on the next one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from forebay.cluster.consensus.frames import AnyMessage, decode_body, encode_frame

if TYPE_CHECKING:
    from tests.simulation.world import World

REMEMBERED_FRAMES = 6
"""Frames of an old connection that may be repeated on the next one."""


class Link:
    """One direction between two places."""

    __slots__ = (
        "arrives_s",
        "black",
        "clogged_s",
        "cut",
        "dialling",
        "epoch",
        "old",
        "slow_s",
        "speaker",
        "travelling",
    )

    def __init__(self) -> None:
        self.epoch = 0
        """Which connection this is; 0 while there is none."""
        self.arrives_s = 0.0
        self.cut = False
        """Nothing can connect."""
        self.black = False
        """It stays up and loses everything."""
        self.clogged_s = 0.0
        """Nothing arrives before this time."""
        self.slow_s = 0.0
        self.travelling: deque[bytes] = deque()
        self.old: deque[bytes] = deque(maxlen=REMEMBERED_FRAMES)
        self.dialling = False
        self.speaker = ""
        """The id under which the sender of this connection speaks."""


class SimLinks:
    """What `TlsLinks` is to a replica's consensus: who is dialled is found by address, who speaks says its id."""

    def __init__(self, world: World, place: str, *, me: str, cluster_id: str, listener: Any, **rest: Any) -> None:
        """`rest`: what TLS and its timeouts need."""
        self._world = world
        self.place = place
        self.me = me
        self.cluster_id = cluster_id
        self.listener = listener
        self.open = False
        self.peers: dict[str, str] = {}
        """Who is dialled: id -> address."""
        world.replicas[place].links = self

    def set_peers(self, addresses: Mapping[str, tuple[str, ...]]) -> None:
        # The one that its cluster has, if any: the world's files are as old as the world, and no certificate here says
        # that somebody else has come to live at the first one.
        before, self.peers = self.peers, {peer: places[-1] for peer, places in sorted(addresses.items())}
        if self.open and before != self.peers:
            self._world.network.rearranged(self, before)

    def address_of(self, name: str) -> str | None:
        return next((address for peer, address in self.peers.items() if peer.partition("#")[0] == name), None)

    async def start(self) -> None:
        self.open = True
        self._world.network.dial_all(self.place)

    async def stop(self) -> None:
        self.open = False
        self._world.network.drop_all(self.place)

    def abort(self) -> None:
        self.open = False

    def send(self, peer: str, message: AnyMessage) -> None:
        if self.open and self._world.replicas[self.place].links is self:
            self._world.network.send(self, peer, message)

    def flush(self) -> None:
        pass

    def ids_at(self, place: str) -> list[str]:
        """As whom the process at `place` is dialled: a replica and its successor may share an address."""
        places = self._world.places
        return [peer for peer, address in self.peers.items() if places.get(address) == place]

    def place_of(self, peer: str) -> str | None:
        """Where a message to `peer` goes: to its address, else back to who dialled and speaks under this id."""
        address = self.peers.get(peer)
        if address is not None:
            return self._world.places.get(address)
        for place, replica in self._world.replicas.items():
            links = replica.links
            if links is not None and links.open and links.me == peer and links.ids_at(self.place):
                return place
        return None


class Network:
    """All links of a cluster."""

    def __init__(self, world: World, names: list[str]) -> None:
        self._world = world
        self._epochs = itertools.count(1)
        self.links = {pair: Link() for pair in itertools.permutations(names, 2)}
        self.latency_s = 0.001
        self.losses = 0.0
        self.repeats = 0.0
        """Chance that frames of an old connection come again on the next one."""
        self.breaks = 0.0
        """Chance, per frame, that the connection breaks under it."""
        self.frames = 0
        self.tamper: Callable[[str, str, AnyMessage], AnyMessage | None] | None = None
        """Function by which a scenario changes or drops (None) each message."""

    def add_place(self, name: str) -> None:
        """Lay links between a new place and all others."""
        others = dict.fromkeys(sender for sender, _ in self.links)
        for other in others:
            self.links[name, other] = Link()
            self.links[other, name] = Link()

    def rearranged(self, links: SimLinks, before: Mapping[str, str]) -> None:
        """A replica dials others than before."""
        for peer, address in before.items():
            place = self._world.places.get(address)
            if links.peers.get(peer) != address and place is not None and self._is_up(links.place, place):
                self._world.hear(links.place, "on_down", peer)
        for peer, address in links.peers.items():
            place = self._world.places.get(address)
            if before.get(peer) == address or place is None or place == links.place:
                continue
            if self._is_up(links.place, place):
                self._world.timeline.after(0.002, self._tell_up, links, peer, place)
            for pair in ((links.place, place), (place, links.place)):
                self._dial(pair, 0.002)

    def _is_up(self, sender: str, receiver: str) -> bool:
        link = self.links.get((sender, receiver))
        return link is not None and bool(link.epoch)

    def _tell_up(self, links: SimLinks, peer: str, place: str) -> None:
        if self._is_up(links.place, place) and peer in links.ids_at(place):
            if self._world.replicas[links.place].links is links:
                self._world.hear(links.place, "on_up", peer)

    def _is_wanted(self, sender: str, receiver: str) -> bool:
        """Whether there is a way from one to the other: a connection that either has dialled."""
        ours, theirs = (self._world.replicas[name].links for name in (sender, receiver))
        return bool(ours and theirs and (ours.ids_at(receiver) or theirs.ids_at(sender)))

    def dial_all(self, name: str) -> None:
        """Whoever may connect with `name` tries to."""
        for pair in self.links:
            if name in pair:
                self._dial(pair, 0.002)

    def drop_all(self, name: str, *, silently: bool = False) -> None:
        """Break every link of `name`; `silently`: its peers do not learn of it before they try to use it."""
        for sender, receiver in self.links:
            if name in (sender, receiver):
                self.drop(sender, receiver, silently=silently)

    def drop(self, sender: str, receiver: str, *, silently: bool = False) -> None:
        """Break one link; both ends are told, unless nobody tells them, and it is dialled again."""
        link = self.links[sender, receiver]
        if not link.epoch:
            return
        link.epoch = 0
        link.travelling.clear()
        rng = self._world.rng
        delay_s = rng.uniform(0.1, 1.5) if silently else rng.uniform(0.0, 0.002)
        self._world.timeline.after(delay_s, self._tell_down, sender, receiver)
        self._dial((sender, receiver), delay_s + rng.uniform(0.01, 0.2))

    def _tell_down(self, sender: str, receiver: str) -> None:
        links = self._world.replicas[sender].links
        for peer in links.ids_at(receiver) if links is not None else ():
            self._world.hear(sender, "on_down", peer)
        self._world.hear(receiver, "on_lost_sight", self.links[sender, receiver].speaker)

    def _dial(self, pair: tuple[str, str], delay_s: float) -> None:
        link = self.links[pair]
        if not link.dialling and not link.epoch:
            link.dialling = True
            self._world.timeline.after(delay_s, self._connect, pair)

    def _connect(self, pair: tuple[str, str]) -> None:
        link = self.links[pair]
        link.dialling = False
        if link.epoch or not all(self._world.is_listening(name) for name in pair):
            return  # whoever starts to listen dials again
        if not self._is_wanted(*pair):
            return  # whoever learns of the other dials
        rng = self._world.rng
        if link.cut:
            self._dial(pair, rng.uniform(0.05, 0.3))
            return
        link.epoch = next(self._epochs)
        link.arrives_s = self._world.timeline.now_s
        self._world.note("link", pair[0], "up to", pair[1])
        links = self._world.replicas[pair[0]].links
        assert links is not None
        if link.speaker != links.me:
            link.old.clear()  # another replica has the place now
        link.speaker = links.me
        for peer in links.ids_at(pair[1]):
            self._world.hear(pair[0], "on_up", peer)
        if link.old and rng.random() < self.repeats:
            for frame in list(link.old)[rng.randrange(len(link.old)) :]:
                self._carry(pair, link, frame, self._world.timeline.now_s)
        link.old.clear()

    def send(self, links: SimLinks, peer: str, message: AnyMessage) -> None:
        """Put a message on the link, if there is one."""
        world = self._world
        world.check_promise(links, peer, message)
        place = links.place_of(peer)
        if place is None or place == links.place:
            return
        pair = (links.place, place)
        if self.tamper is not None:
            changed = self.tamper(*pair, message)
            if changed is None:
                return
            message = changed
        link = self.links[pair]
        if not link.epoch:
            return
        frame = encode_frame(links.cluster_id, links.me, message)
        self.frames += 1
        world.hash_bytes(frame)
        if world.verbose:
            world.tell("send", links.me, peer, message)
        if self.repeats:
            link.old.append(frame)
        if self.breaks and world.rng.random() < self.breaks:
            world.note("link", *pair, "breaks")
            self.drop(*pair)
            return
        if link.black or (self.losses and world.rng.random() < self.losses):
            return
        self._carry(pair, link, frame, world.replicas[links.place].clock.monotonic_s())

    def _carry(self, pair: tuple[str, str], link: Link, frame: bytes, leaves_s: float) -> None:
        delay_s = self.latency_s * (0.5 + 1.5 * self._world.rng.random()) + link.slow_s
        link.arrives_s = max(leaves_s + delay_s, link.arrives_s, link.clogged_s)
        link.travelling.append(frame)
        self._world.timeline.at(link.arrives_s, self._arrive, pair, link, link.epoch)

    def _arrive(self, pair: tuple[str, str], link: Link, epoch: int) -> None:
        if link.epoch != epoch:
            return
        if link.clogged_s > self._world.timeline.now_s:
            self._world.timeline.at(link.clogged_s, self._arrive, pair, link, epoch)
            return
        frame = link.travelling.popleft()
        if link.black:
            return
        receiver = self._world.replicas[pair[1]]
        if receiver.links is not None and receiver.links.open:
            decoded = decode_body(receiver.links.cluster_id, memoryview(frame)[4:])
            self._world.hear(pair[1], "on_frame", decoded.sender, decoded.message)

    def heal(self) -> None:
        """Repair every link."""
        self.losses = self.repeats = self.breaks = 0.0
        for pair, link in self.links.items():
            link.cut = link.black = False
            link.clogged_s = link.slow_s = 0.0
            if not link.epoch:
                self._dial(pair, 0.01)
