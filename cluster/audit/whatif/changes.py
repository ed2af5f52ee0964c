"""Changes of a what-if: options converted to operator commands at the start of the window."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from forebay.replica.grammar import ConfSetting, find_key
from forebay.replica.messages import Actor, ActorRole, Command
from forebay.replica.messages import commands as c
from forebay.replica.model import PoolUnit, format_amount, parse_amount
from forebay.replica.state import State
from forebay.replica.values import Rejection, RejectionCode, SizeError

POOL: Final = "pool"
NODES: Final = "nodes"
"""Name that `--set` accepts in addition to the keys of the configuration."""

NODES_MADE_MAX: Final = 1_000
"""Maximum number of added nodes."""

OPERATOR: Final = Actor(ActorRole.OPERATOR, "whatif")

_POOL: Final = re.compile(r"(?P<name>[^:]+):(?P<sign>[+-]?)(?P<size>.+)", re.DOTALL)
_NODES: Final = re.compile(r"\+([1-9][0-9]{0,3})", re.ASCII)


class BadChange(ValueError):
    """Invalid change; `remedy` is the correction."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(sentence)
        self.remedy = remedy


class ChangeRejected(Exception):
    """Change rejected at the start of the window."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.sentence)
        self.rejection = rejection


class PoolChange:
    """Change of a pool's size, relative or absolute."""

    def __init__(self, name: str, sign: str, size: str) -> None:
        self.name, self.sign, self.size = name, sign, size

    def quantity(self, known: int, unit: PoolUnit) -> int:
        """Return the pool's new quantity in its units; `known` is the present quantity.

        Raises:
            SizeError: The text is not a size.
        """
        amount = parse_amount(self.size, unit)
        return {"+": known + amount, "-": known - amount}.get(self.sign, amount)


class ScenarioChanges:
    """Changes of a simulation."""

    def __init__(
        self,
        policy: Sequence[ConfSetting] | None = None,
        settings: Sequence[str] = (),
        read: Callable[[tuple[str, ...]], tuple[ConfSetting, ...]] | None = None,
    ) -> None:
        """Parse the changes.

        `policy`: content of a burst_buffer.conf; `settings`: KEY=VALUE, Pool=NAME:SIZE, Nodes=+N; `read` converts
        KEY=VALUE to settings, by default literally. The cluster itself checks the keys.

        Raises:
            BadChange: A change is malformed, or given twice.
        """
        self._read_keys = read or _as_written
        self._policy = None if policy is None else tuple(policy)
        self._keys: list[ConfSetting] = []
        self._pools: dict[str, PoolChange] = {}
        self._nodes = 0
        self._units: dict[str, PoolUnit] = {}
        for text in settings:
            key, equals, value = text.partition("=")
            if not equals:
                raise BadChange(f"{text[:80]!r} has no =", "write KEY=VALUE, Pool=NAME:+SIZE or Nodes=+N")
            self._read(key.strip(), value.strip())
        named = Counter(setting.key.lower() for setting in self._keys)
        if twice := next((key for key, count in named.items() if count > 1), None):
            raise BadChange(f"{twice} is changed twice", "keep only one of them")

    def _read(self, key: str, value: str) -> None:
        if key.lower() == POOL:
            found = _POOL.fullmatch(value)
            if found is None:
                raise BadChange(f"Pool={value[:80]!r} has no size", "write Pool=NAME:SIZE, NAME:+SIZE or NAME:-SIZE")
            if found["name"] in self._pools:
                raise BadChange(f"pool {found['name'][:80]!r} is changed twice", "keep only one of them")
            self._pools[found["name"]] = PoolChange(found["name"], found["sign"], found["size"])
        elif key.lower() == NODES:
            count = _NODES.fullmatch(value)
            if count is None or int(count[1]) > NODES_MADE_MAX or self._nodes:
                raise BadChange(f"Nodes={value[:80]!r} adds no nodes", f"write Nodes=+N once, N up to {NODES_MADE_MAX}")
            self._nodes = int(count[1])
        else:
            self._keys += self._read_keys((f"{key}={value}",))

    def __bool__(self) -> bool:
        return bool(self._policy is not None or self._keys or self._pools or self._nodes)

    def words(self, policy: str) -> tuple[str, ...]:
        """Format the changes for display; `policy` names the file."""
        return (
            *((f"the configuration of {policy}",) if self._policy is not None else ()),
            *(f"{one.key}={one.value}" for one in self._keys),
            *(f"pool {name}: {one.sign}{one.size}" for name, one in self._pools.items()),
            *((f"{self._nodes} nodes more",) if self._nodes else ()),
        )

    def commands(self, state: State) -> Iterator[tuple[Actor, Command]]:
        """Yield the commands that change a state.

        Raises:
            ChangeRejected: A pool cannot have that size, or the CPU count of new nodes is unknown.
        """
        if self._policy is not None:
            yield OPERATOR, c.ConfigureSite(self._policy)
        if self._keys:
            yield OPERATOR, c.ConfigureSite(tuple(self._keys), partial=True)
        for name, change in self._pools.items():
            pool = state.pools.get(name)
            if pool is None:
                # Its rejection lists the existing pools.
                yield OPERATOR, c.ChangePool(name, quantity=0)
                return
            self._units[name] = pool.unit
            try:
                quantity = change.quantity(pool.quantity_bytes, pool.unit)
            except SizeError as error:
                rejection = Rejection(RejectionCode.INVALID_FIELD, error.sentence, error.remedy, f"Pool={name}")
                raise ChangeRejected(rejection) from error
            if quantity < 0:
                sentence = f"pool {name} has only {format_amount(pool.quantity_bytes, pool.unit)}"
                rejection = Rejection(RejectionCode.INVALID_FIELD, sentence, "remove less", f"Pool={name}")
                raise ChangeRejected(rejection)
            yield OPERATOR, c.ChangePool(name, quantity=quantity)
        yield from self._nodes_made(state)

    def _nodes_made(self, state: State) -> Iterator[tuple[Actor, Command]]:
        """Yield the commands that add nodes, each with the most common CPU count."""
        if not self._nodes:
            return
        cpus = Counter(node.cpus for node in state.nodes.values() if not node.is_mover)
        if not cpus:
            sentence = "there are no nodes yet, so the CPU count of additional nodes is unknown"
            raise ChangeRejected(
                Rejection(RejectionCode.UNKNOWN_NODE, sentence, "start the window later", f"Nodes=+{self._nodes}")
            )
        usual = max(cpus.items(), key=lambda one: (one[1], one[0]))[0]
        made = number = 0
        while made < self._nodes:
            number += 1
            name = f"whatif-{number}"
            if name not in state.nodes:
                made += 1
                yield OPERATOR, c.AdmitNode(name)
                yield Actor(ActorRole.AGENT, name), c.RegisterNode(name, usual, "whatif", "whatif")

    def adjusted(self, command: Command) -> Command | None:
        """Return a command of the ledger without the parts that would undo a change; None if nothing remains.

        A recorded resize of a changed pool is adjusted by the same change; a changed key keeps its value.
        """
        match command:
            case c.ConfigureSite():
                mine = {_key_name(one): one for one in (*(self._policy or ()), *self._keys)}
                kept = tuple(one for one in command.settings if _key_name(one) not in mine)
                if not command.partial:
                    kept = (*kept, *mine.values())
                return replace(command, settings=kept) if kept else None
            case c.ChangePool() if command.pool in self._pools and command.quantity is not None:
                quantity = self._quantity(command.pool, command.quantity, command.unit)
                return replace(command, quantity=quantity)
            case c.SetPool() if command.pool.name in self._pools:
                pool = command.pool
                quantity = self._quantity(pool.name, pool.quantity_bytes, pool.unit)
                return replace(command, pool=replace(pool, quantity_bytes=quantity))
            case _:
                return command

    def _quantity(self, name: str, known: int, unit: PoolUnit | None) -> int:
        try:
            return max(0, self._pools[name].quantity(known, unit or self._units.get(name, PoolUnit.BYTES)))
        except SizeError:
            return known


def _as_written(pairs: tuple[str, ...]) -> tuple[ConfSetting, ...]:
    return tuple(ConfSetting(key, value) for key, _, value in (pair.partition("=") for pair in pairs))


def _key_name(setting: ConfSetting) -> str:
    """Return a key's canonical name: key names are case-insensitive."""
    key = find_key(setting.key)
    return setting.key.lower() if key is None else key.name
