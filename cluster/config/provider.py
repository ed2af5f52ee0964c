"""What one machine's configuration says about the site's burst-buffer provider: [provider] of forebay.toml.

Which provider there is, is agreed (replica.model.configuration); here is only where this machine has its programs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.config.toml import InvalidValue, Text, check_line
from cluster.providers import LOCAL_VARIABLES_MAX, Local

LUA_SCRIPT_NAME: Final = "burst_buffer.lua"
"""Name of the lua provider's script beside forebay.toml, as Slurm looks for it beside slurm.conf."""

_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"


class ProviderTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table [provider]; `Local` says what each key is."""

    lua_script: Text = ""
    get_sys_state: Text = ""
    get_sys_status: Text = ""
    environment: dict[str, Any] = {}
    status_identity: bool = False

    def __post_init__(self) -> None:
        """Refuse variables that cannot be set; InvalidValue."""
        count = len(self.environment)
        if count > LOCAL_VARIABLES_MAX:
            remedy = f"at most {LOCAL_VARIABLES_MAX} are possible"
            raise InvalidValue(f"found {count} variables", remedy, "environment")
        for name, value in self.environment.items():
            if re.fullmatch(_VARIABLE, name) is None or name.startswith("FOREBAY_"):
                remedy = "use letters, digits and _; names that begin FOREBAY_ are taken"
                raise InvalidValue("this is no name for a variable", remedy, "environment", name)
            check_line(value, "environment", name)

    def local(self, base: Path) -> Local:
        """Return where this machine has the provider's programs; paths are relative to `base`."""
        return Local(
            lua_script=_program(self.lua_script, base),
            lua_script_beside=str(base / LUA_SCRIPT_NAME),
            get_sys_state=_program(self.get_sys_state, base),
            get_sys_status=_program(self.get_sys_status, base),
            environment=tuple(self.environment.items()),
            status_identity=self.status_identity,
        )


def _program(path: str, base: Path) -> str:
    return os.path.normpath(base / path) if path else ""
