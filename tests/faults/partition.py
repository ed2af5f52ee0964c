"""Cuts networks, freezes and kills replicas while clients write and read, and checks the clients' histories.

Run by scripts/partition.

Every replica and the clients live in network namespaces of their own. Each round does one thing of FAULTS for a moment
and undoes it. At the end: nothing acknowledged is lost, doubled or made up, no answer shows an older revision than an
answer before it, the history of every job and of every pool written is linearizable (a check that does not finish is a
failure), state digests are equal and every ledger verifies.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from forebay.cluster.client import Client
from tests.faults import kernel, network
from tests.faults.bare import BareCluster
from tests.faults.ending import percentiles, perform
from tests.faults.histories import DEADLINE_S, Clients
from tests.faults.local_cluster import REPLICAS
from tests.faults.network import Network

CLIENTS = "clients"
"""The namespace that all clients are in, and we with them."""

WRITERS = 5
"""Clients at work, count."""

KILL_LEADER = "kill the leader"
"""The fault that ends by itself, when clients commit without the killed leader: it is never one of two at once."""

BOTH_SHARE = 0.3
"""In this share of the rounds two faults happen at once."""

FAULT_S = (0.3, 2.5)
"""How long a fault lasts, seconds."""

CALM_S = (0.2, 0.8)
"""How long clients work between two faults, seconds."""


class Partitions:
    """A cluster in namespaces, clients at work, and what is done to them."""

    def __init__(self, directory: Path, net: Network, seed: int, *, stale: bool = False) -> None:
        """With `stale` clients take for current what they should not: then the checks must fail."""
        self.cluster = BareCluster(directory)
        self.stale = stale
        self.chance = random.Random(seed)
        self.clients = Clients(seed)
        self.faults: Counter[str] = Counter()
        self.combined = 0
        self.takeovers_s: list[float] = []
        self.network = net

    async def run(self, rounds: int, kinds: list[str], *, leader_kills: bool) -> None:
        """Do `rounds` rounds, then check everything."""
        self.cluster.found(
            hosts={name: self.network.addresses[name] for name in REPLICAS}, settings="snapshot_every_entries = 400"
        )
        for name in REPLICAS:
            self.cluster.prefixes[name] = Network.inside(name)
        kernel.enter_network(CLIENTS)
        self.cluster.start_all()
        async with self.cluster.client("operator") as observer:
            await self.cluster.leader(observer)
            async with self.clients.at_work(self.cluster, [DEADLINE_S] * WRITERS, stale=self.stale):
                while self.faults.total() < rounds:
                    await asyncio.sleep(self.chance.uniform(*CALM_S))
                    self.clients.check_working()
                    kind = KILL_LEADER if leader_kills else self.chance.choice(kinds)
                    alone = kind == KILL_LEADER or self.chance.random() > BOTH_SHARE
                    both = None if alone else self.chance.choice([other for other in kinds if other != KILL_LEADER])
                    await self.round(kind, both, observer)
            await self.clients.look_at_everything(observer)
            await self.cluster.agreed(observer)
        self.cluster.verify_ledgers()
        self.clients.check()

    async def round(self, kind: str, both: str | None, observer: Client) -> None:
        """Do one fault, or two at once, undo it, and see that clients commit again."""
        leader = await self.cluster.leader(observer)
        others = [name for name in REPLICAS if name != leader]
        self.chance.shuffle(others)
        happening = [FAULTS[kind](self, leader, others)]
        if both is not None:
            happening.append(FAULTS[both](self, leader, others))
            self.combined += 1
        await asyncio.gather(*happening)
        self.network.heal()
        self.cluster.start_all()
        healed_s = time.monotonic()
        waited_s = await self.clients.commits_after(healed_s, self.cluster) - healed_s
        self.faults[kind] += 1
        total = self.faults.total()
        what = kind if both is None else f"{kind}, and {both}"
        print(f"round {total:3}: {what} ({leader} led); commits {waited_s:.2f} s after the end of it", flush=True)
        self.cluster.check_running()

    async def last(self) -> None:
        """Let the fault last a while."""
        await asyncio.sleep(self.chance.uniform(*FAULT_S))

    # Faults: each is given who leads and who does not, and returns when it is to be undone

    async def isolate_leader(self, leader: str, others: list[str]) -> None:
        """The leader hears none of its peers and they do not hear it; clients still reach it."""
        self.network.separate([leader], others)
        await self.last()

    async def isolate_leader_wholly(self, leader: str, others: list[str]) -> None:
        """Nobody reaches the leader, and it reaches nobody."""
        self.network.separate([leader], [*others, CLIENTS])
        await self.last()

    async def deafen_leader(self, leader: str, others: list[str]) -> None:
        """The leader speaks but hears nothing of its peers."""
        self.network.cut(others, [leader])
        await self.last()

    async def silence_leader(self, leader: str, others: list[str]) -> None:
        """The leader hears its peers but they do not hear it."""
        self.network.cut([leader], others)
        await self.last()

    async def isolate_follower(self, leader: str, others: list[str]) -> None:
        """One follower is cut off from its peers."""
        self.network.separate(others[:1], [leader, others[1]])
        await self.last()

    async def silence_follower(self, leader: str, others: list[str]) -> None:
        """One follower hears everything and is not heard."""
        self.network.cut(others[:1], [leader, others[1]])
        await self.last()

    async def make_a_bridge(self, leader: str, others: list[str]) -> None:
        """Leader and one follower do not hear each other; the other follower hears both."""
        self.network.separate([leader], others[:1])
        await self.last()

    async def hide_leader_from_clients(self, leader: str, others: list[str]) -> None:
        """Clients cannot reach the leader, or do not get its answers."""
        if self.chance.random() < 0.5:
            self.network.cut([CLIENTS], [leader])
        else:
            self.network.cut([leader], [CLIENTS])
        await self.last()

    async def separate_all(self, leader: str, others: list[str]) -> None:
        """No replica hears another."""
        self.network.separate([leader], others)
        self.network.separate(others[:1], others[1:])
        await self.last()

    async def lose_packets(self, leader: str, others: list[str]) -> None:
        """Three packets of ten are lost between replicas, and on the way to and from clients."""
        self.network.lose([*REPLICAS, CLIENTS])
        await self.last()

    async def stop_leader(self, leader: str, others: list[str]) -> None:
        """The leader is frozen and wakes up believing that it leads."""
        await self._freeze([leader])

    async def stop_majority(self, leader: str, others: list[str]) -> None:
        """The leader and a follower are frozen."""
        await self._freeze([leader, others[0]])

    async def kill_leader(self, leader: str, others: list[str]) -> None:
        """SIGKILL; it starts again when clients commit without it."""
        self.cluster.kill(leader)
        killed_s = time.monotonic()
        self.takeovers_s.append(await self.clients.commits_after(killed_s, self.cluster) - killed_s)

    async def kill_follower(self, leader: str, others: list[str]) -> None:
        """SIGKILL of a follower; it stays away for a while."""
        self.cluster.kill(others[0])
        await self.last()

    async def kill_majority(self, leader: str, others: list[str]) -> None:
        """SIGKILL of the leader and a follower."""
        self.cluster.kill(leader, others[0])
        await self.last()

    async def kill_all(self, leader: str, others: list[str]) -> None:
        """SIGKILL of all replicas."""
        self.cluster.kill(*REPLICAS)

    async def _freeze(self, names: list[str]) -> None:
        for name in names:
            self.cluster.signal(name, signal.SIGSTOP)
        try:
            await self.last()
        finally:
            for name in names:
                self.cluster.signal(name, signal.SIGCONT)


FAULTS: dict[str, Callable[[Partitions, str, list[str]], Awaitable[None]]] = {
    "isolate the leader from its peers": Partitions.isolate_leader,
    "isolate the leader from everybody": Partitions.isolate_leader_wholly,
    "the leader hears nothing": Partitions.deafen_leader,
    "the leader is not heard": Partitions.silence_leader,
    "isolate a follower": Partitions.isolate_follower,
    "a follower is not heard": Partitions.silence_follower,
    "only one replica hears both others": Partitions.make_a_bridge,
    "clients and leader do not reach each other": Partitions.hide_leader_from_clients,
    "no replica hears another": Partitions.separate_all,
    "packets are lost": Partitions.lose_packets,
    "stop the leader": Partitions.stop_leader,
    "stop a majority": Partitions.stop_majority,
    KILL_LEADER: Partitions.kill_leader,
    "kill a follower": Partitions.kill_follower,
    "kill a majority": Partitions.kill_majority,
    "kill all": Partitions.kill_all,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/partition", description="Faults of networks and processes.")
    parser.add_argument("--rounds", type=int, default=30, help="how many faults (default: 30)")
    parser.add_argument("--leader-kills", action="store_true", help="every fault is a SIGKILL of the leader")
    parser.add_argument("--fault", action="append", choices=sorted(FAULTS), help="only this one; may be repeated")
    parser.add_argument(
        "--stale-reads", action="store_true", help="let clients read with stale=ok: the run must find that"
    )
    parser.add_argument("--seed", type=int, default=None, help="of faults and commands (default: drawn)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    kernel.end_on_signals()
    try:
        kernel.require_root("make network namespaces")
        kernel.require_tools(network.TOOLS)
        kernel.enter_private_mounts()
        kernel.enter_private_networks()
        net = Network((*REPLICAS, CLIENTS))
    except kernel.Unable as unable:
        print(f"partition: unable: {unable}", file=sys.stderr)
        return kernel.EXIT_UNABLE
    directory = Path(tempfile.mkdtemp(prefix="forebay-partition-")).resolve()
    injection = Partitions(directory, net, seed, stale=options.stale_reads)
    print(f"partition: {options.rounds} rounds, seed {seed}", flush=True)
    work = injection.run(options.rounds, options.fault or list(FAULTS), leader_kills=options.leader_kills)
    release = injection.cluster.stop_all
    ended = perform("partition", work, release=release, directory=directory, seed=seed)
    return ended.report(
        rounds=injection.faults.total(),
        faults=dict(sorted(injection.faults.items())),
        two_at_once=injection.combined,
        stale_reads=options.stale_reads,
        **injection.clients.figures,
        **percentiles(injection.takeovers_s),
    )


if __name__ == "__main__":
    sys.exit(main())
