"""Links between replicas: a connection for each direction, in order while it lasts, what is in flight lost with it.

Every frame is encoded and decoded by the real `frames`. What TCP does not do between two connections, a careless
transport might: a few frames of an old connection may come once more on the next one.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.consensus.frames import AnyMessage, decode_body, encode_frame

if TYPE_CHECKING:
    from tests.simulation.world import World

REMEMBERED_FRAMES = 6
"""Frames of an old connection that may be repeated on the next one."""


class Link:
    """One direction between two replicas."""

    __slots__ = ("arrives_s", "black", "clogged_s", "cut", "dialling", "epoch", "old", "slow_s", "travelling")

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


class SimLinks:
    """What `TlsLinks` is to a replica's consensus."""

    def __init__(self, world: World, *, me: str, cluster_id: str, listener: Any, **rest: Any) -> None:
        self._world = world
        self.me = me
        self.cluster_id = cluster_id
        self.listener = listener
        self.open = False
        world.replicas[me].links = self

    async def start(self) -> None:
        self.open = True
        self._world.network.dial_all(self.me)

    async def stop(self) -> None:
        self.open = False
        self._world.network.drop_all(self.me)

    def abort(self) -> None:
        self.open = False

    def send(self, peer: str, message: AnyMessage) -> None:
        if self.open and self._world.replicas[self.me].links is self:
            self._world.network.send(self, peer, message)

    def flush(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        # What a later transport has besides and a simulation does not need: telling it of members, for example.
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


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
        """What a scenario makes of each message on its way: another one, or None for nothing."""

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
        self._world.hear(sender, "on_down", receiver)
        self._world.hear(receiver, "on_lost_sight", sender)

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
        rng = self._world.rng
        if link.cut:
            self._dial(pair, rng.uniform(0.05, 0.3))
            return
        link.epoch = next(self._epochs)
        link.arrives_s = self._world.timeline.now_s
        self._world.note("link", pair[0], "up to", pair[1])
        self._world.hear(pair[0], "on_up", pair[1])
        if link.old and rng.random() < self.repeats:
            for frame in list(link.old)[rng.randrange(len(link.old)) :]:
                self._carry(pair, link, frame, self._world.timeline.now_s)
        link.old.clear()

    def send(self, links: SimLinks, peer: str, message: AnyMessage) -> None:
        """Put a message on the link, if there is one."""
        world = self._world
        pair = (links.me, peer)
        world.check_promise(links.me, peer, message)
        if self.tamper is not None:
            changed = self.tamper(links.me, peer, message)
            if changed is None:
                return
            message = changed
        frame = encode_frame(links.cluster_id, links.me, message)
        link = self.links[pair]
        if not link.epoch:
            return
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
        self._carry(pair, link, frame, world.replicas[links.me].clock.monotonic_s())

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
            message = decode_body(receiver.links.cluster_id, memoryview(frame)[4:]).message
            self._world.hear(pair[1], "on_frame", pair[0], message)

    def heal(self) -> None:
        """Make every link good again."""
        self.losses = self.repeats = self.breaks = 0.0
        for pair, link in self.links.items():
            link.cut = link.black = False
            link.clogged_s = link.slow_s = 0.0
            if not link.epoch:
                self._dial(pair, 0.01)
