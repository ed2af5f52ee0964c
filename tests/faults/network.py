"""Private network: each replica and the clients have a network namespace, joined by a bridge in another one.

Nothing of it is visible outside, and all of it goes with the last process in it. A cut is a rule in the namespace of
the receiver that drops what a sender's address sends, so that a cut may go one way only.
"""

from collections.abc import Iterable, Sequence

from tests.faults.kernel import Unable, tool

TOOLS = {"ip": "iproute2", "nft": "nftables"}
HUB = "hub"
PREFIX = "10.77.0"
"""Addresses of the members: not routed anywhere, and in namespaces of their own."""

RULES = """
table inet cut {
  set senders { type ipv4_addr; }
  set lossy { type ipv4_addr; }
  chain arriving {
    type filter hook input priority 0; policy accept;
    ip saddr @senders drop
    ip saddr @lossy numgen random mod 100 < 30 drop
  }
}
"""


class Network:
    """Members with an address each, and the cuts between them."""

    def __init__(self, members: Sequence[str], *, prefix: str = PREFIX, bits: int = 24) -> None:
        """Make the namespaces and join them. After kernel.enter_private_networks. Unable if the kernel cannot.

        `bits`: what begins alike is reached without a router.
        """
        self.bits = bits
        self.addresses = {name: f"{prefix}.{number}" for number, name in enumerate(members, start=1)}
        self._ruled: set[str] = set()
        """Members that have rules: a kernel without nftables is good enough for whoever cuts nothing."""
        try:
            tool("ip", "netns", "add", HUB)
            tool("ip", "-n", HUB, "link", "add", "bridge", "type", "bridge")
            tool("ip", "-n", HUB, "link", "set", "bridge", "up")
            for name, address in self.addresses.items():
                tool("ip", "netns", "add", name)
                tool("ip", "-n", name, "link", "set", "lo", "up")
                tool("ip", "-n", name, "link", "add", "wire", "type", "veth", "peer", "name", name, "netns", HUB)
                tool("ip", "-n", HUB, "link", "set", name, "master", "bridge", "up")
                tool("ip", "-n", name, "address", "add", f"{address}/{bits}", "dev", "wire")
                tool("ip", "-n", name, "link", "set", "wire", "up")
        except OSError as error:
            raise Unable(f"cannot make a network of namespaces: {error.strerror}") from error

    @staticmethod
    def inside(name: str) -> tuple[str, ...]:
        """Return the words that run a command in a member's namespace."""
        return ("ip", "netns", "exec", name)

    def give(self, name: str, address: str) -> None:
        """Give a member one address more; it is reached at both."""
        tool("ip", "-n", name, "address", "add", f"{address}/{self.bits}", "dev", "wire")

    def keep(self, name: str, address: str) -> None:
        """Leave a member this address alone."""
        tool("ip", "-n", name, "address", "del", f"{self.addresses[name]}/{self.bits}", "dev", "wire")
        # With the first address of a network the kernel takes those that came after it.
        tool("ip", "-n", name, "address", "replace", f"{address}/{self.bits}", "dev", "wire")
        self.addresses[name] = address

    def cut(self, senders: Iterable[str], receivers: Iterable[str]) -> None:
        """Let nothing that the senders send arrive at the receivers; the other way stays open."""
        addresses = {name: self.addresses[name] for name in senders}
        for receiver in receivers:
            blocked = ", ".join(address for name, address in addresses.items() if name != receiver)
            if blocked:
                self._rule(receiver, f"add element inet cut senders {{ {blocked} }}")

    def separate(self, some: Iterable[str], others: Iterable[str]) -> None:
        """Cut both ways."""
        some, others = tuple(some), tuple(others)
        self.cut(some, others)
        self.cut(others, some)

    def lose(self, members: Iterable[str]) -> None:
        """Lose three packets of ten between these members, both ways, drawn at random."""
        members = tuple(members)
        for receiver in members:
            senders = ", ".join(self.addresses[name] for name in members if name != receiver)
            self._rule(receiver, f"add element inet cut lossy {{ {senders} }}")

    def heal(self) -> None:
        """Undo every cut and every loss."""
        for name in self._ruled:
            self._rule(name, "flush set inet cut senders; flush set inet cut lossy")

    def _rule(self, member: str, words: str) -> None:
        if member not in self._ruled:
            tool(*self.inside(member), "nft", "-f", "-", stdin=RULES)
            self._ruled.add(member)
        tool(*self.inside(member), "nft", words)
