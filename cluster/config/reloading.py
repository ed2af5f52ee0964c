"""Configuration of a running process, read again at SIGHUP: what can change applies, what cannot is named and kept.

A file that is refused leaves everything as it was; the log says where it is wrong. Nothing here ends a process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from cluster.config.access import Access
from cluster.config.toml import ConfigError

LOGGER = logging.getLogger(__name__)

_C = TypeVar("_C", bound=Access)

_TABLES: Final[Mapping[str, str]] = {
    "cluster": "[cluster]",
    "replicas": "[[replica]]",
    "tls": "[tls]",
    "agents": "[[agent]]",
    "pools": "[[pool]]",
    "places": "[[place]]",
    "storage": "[storage]",
    "timing": "[timing]",
    "policy": "[policy] or [staging]",
    "provider": "[provider]",
    "mail": "[mail]",
    "job_process": "[job_process]",
    "limits": "[limits]",
    "witnesses": "[[witness]]",
    "checkpoints": "[checkpoints]",
    "helpers": "[[helper]]",
    "drill": "[drill]",
    "traces": "[traces]",
}
"""Table of the file by the field of the configuration that it becomes."""

_BY_NAME: Final = frozenset({"replicas", "agents", "helpers"})
"""Fields of which a process looks at its own row alone."""

AGREED: Final = ("pools", "places", "policy")
"""Fields that count when a cluster is founded; from then on they are agreed by all."""


class Reloader(Generic[_C]):
    """What one process does about its configuration when it is asked to read it again."""

    def __init__(
        self,
        config: _C,
        name: str,
        *,
        read: Callable[[Path], _C],
        applies: Collection[str],
        restarts: Collection[str],
        agreed: Collection[str] = (),
        use: Callable[[_C], None],
    ) -> None:
        """`use` is given what is in force from now on; `name`: the process's own, whose rows wait for a restart.

        `applies`, `restarts` and `agreed` are fields of the configuration: those that change at once, those that count
        from the next start on, and those that only a command changes. The others are none of this process's.
        """
        self._config = config
        self._name = name
        self._read = read
        self._applies = tuple(applies)
        self._restarts = tuple(restarts)
        self._agreed = tuple(agreed)
        self._use = use
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def ask(self) -> None:
        """Read the file beside the loop, and once more if this is asked meanwhile: a handler of SIGHUP."""
        if self._task is not None:
            self._again = True
            return
        self._task = asyncio.get_running_loop().create_task(self.reload())
        self._task.add_done_callback(self._ended)

    async def reload(self) -> None:
        """Read the file and use what can be used; whatever is wrong with it is logged, with its place."""
        file = self._config.file
        try:
            found = await asyncio.to_thread(self._read, file)
        except (ConfigError, OSError) as error:
            LOGGER.error("the configuration that was in force stays in force: %s", error)
            return
        kept = [
            _TABLES[field] for field in self._restarts if self._seen(self._config, field) != self._seen(found, field)
        ]
        if kept:
            LOGGER.warning("%s: changes of %s count from the next start of %s on", file, ", ".join(kept), self._name)
        agreed = [_TABLES[field] for field in self._agreed if getattr(self._config, field) != getattr(found, field)]
        if agreed:
            LOGGER.warning(
                "%s: changes of %s do nothing: the cluster was founded with them, and `forebay config apply` and "
                "`forebay pool` change what is agreed",
                file,
                ", ".join(agreed),
            )
        values = {field: self._rows(found) if field == "replicas" else getattr(found, field) for field in self._applies}
        changed = [field for field, value in values.items() if value != getattr(self._config, field)]
        if not changed:
            LOGGER.info("%s was read again: nothing that applies at once is another", file)
            return
        self._config = msgspec.structs.replace(self._config, **{field: values[field] for field in changed})
        self._use(self._config)
        LOGGER.info("%s was read again: %s apply from now on", file, ", ".join(_TABLES[field] for field in changed))

    def _seen(self, config: _C, field: str) -> Any:
        """Return what this process sees of a field."""
        value = getattr(config, field)
        return next((row for row in value if row.name == self._name), None) if field in _BY_NAME else value

    def _rows(self, found: _C) -> tuple[Any, ...]:
        """Return the replicas as they are to be found, but for this one, which listens where it does."""
        own = self._seen(self._config, "replicas")
        others = tuple(row for row in found.replicas if row.name != self._name)
        return found.replicas if own is None else tuple(sorted((*others, own), key=lambda row: row.name))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("the configuration could not be read again", exc_info=error)
        if self._again:
            self._again = False
            self.ask()
