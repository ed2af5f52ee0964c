"""Reload of a running process's configuration on SIGHUP: applies permitted changes, and logs others.

An invalid file changes nothing, and the log names the fault. A reload never ends a process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from forebay.cluster.config.access import AccessConfig
from forebay.cluster.config.toml import ConfigError

LOGGER = logging.getLogger(__name__)

_C = TypeVar("_C", bound=AccessConfig)

_TABLES: Final[Mapping[str, str]] = {
    "cluster": "[cluster]",
    "replicas": "[[replica]]",
    "tls": "[tls]",
    "agents": "[[agent]]",
    "pools": "[[pool]]",
    "filesystems": "[[filesystem]]",
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
    "sinks": "[[sink]]",
}
"""Tables of the file, by field of the configuration."""

_BY_NAME: Final = frozenset({"replicas", "agents", "helpers"})
"""Fields of which a process uses only the row with its name."""

AGREED: Final = ("pools", "filesystems", "policy")
"""Fields that are used only to found a cluster, and replicated afterwards."""


class Reloader(Generic[_C]):
    """Reload behaviour of one process."""

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
        """Prepare to reload the configuration of the process `name`; `use` receives each effective configuration.

        Changes of fields in `applies` take effect at once, of those in `restarts` and of the process's own rows at the
        next start, and of those in `agreed` never: they need a command. Changes of other fields are ignored.
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
        """Reload in the background, and once more if called during a reload; this is the handler of SIGHUP."""
        if self._task is not None:
            self._again = True
            return
        self._task = asyncio.get_running_loop().create_task(self.reload())
        self._task.add_done_callback(self._on_task_end)

    async def reload(self) -> None:
        """Read the file and apply permitted changes; log any error with its position."""
        file = self._config.file
        try:
            found = await asyncio.to_thread(self._read, file)
        except (ConfigError, OSError) as error:
            LOGGER.error("the previous configuration stays in force: %s", error)
            return
        kept = [
            _TABLES[field]
            for field in self._restarts
            if self._own_view(self._config, field) != self._own_view(found, field)
        ]
        if kept:
            LOGGER.warning("%s: changes of %s take effect when %s restarts", file, ", ".join(kept), self._name)
        agreed = [_TABLES[field] for field in self._agreed if getattr(self._config, field) != getattr(found, field)]
        if agreed:
            LOGGER.warning(
                "%s: changes of %s have no effect on an existing cluster: use `forebay config apply` and "
                "`forebay pool`",
                file,
                ", ".join(agreed),
            )
        values = {field: self._rows(found) if field == "replicas" else getattr(found, field) for field in self._applies}
        changed = [field for field, value in values.items() if value != getattr(self._config, field)]
        if not changed:
            LOGGER.info("%s was reloaded: nothing to apply", file)
            return
        self._config = msgspec.structs.replace(self._config, **{field: values[field] for field in changed})
        self._use(self._config)
        LOGGER.info("%s was reloaded: %s apply from now on", file, ", ".join(_TABLES[field] for field in changed))

    def _own_view(self, config: _C, field: str) -> Any:
        """Return this process's part of a field."""
        value = getattr(config, field)
        return next((row for row in value if row.name == self._name), None) if field in _BY_NAME else value

    def _rows(self, found: _C) -> tuple[Any, ...]:
        """Return the configured replicas, keeping this process's own row, whose addresses are in use."""
        own = self._own_view(self._config, "replicas")
        others = tuple(row for row in found.replicas if row.name != self._name)
        return found.replicas if own is None else tuple(sorted((*others, own), key=lambda row: row.name))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            LOGGER.error("the configuration cannot be reloaded", exc_info=error)
        if self._again:
            self._again = False
            self.ask()
