"""What one machine's configuration says about the site's burst-buffer provider: [provider] of forebay.toml.

Which provider there is, is agreed (replica.model.configuration); here is only where this machine has its programs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from cluster.config.toml import Table
from cluster.providers.interface import Local
from cluster.providers.limits import LOCAL_VARIABLES_MAX

LUA_SCRIPT_NAME: Final = "burst_buffer.lua"
"""Name of the lua provider's script beside forebay.toml, as Slurm looks for it beside slurm.conf."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def read_provider(table: Table, base: Path) -> Local:
    """Return what the table says; ConfigError names the key that cannot be used. Paths are relative to `base`."""
    environment = table.table("environment")
    names = environment.keys()
    if len(names) > LOCAL_VARIABLES_MAX:
        raise table.refuse(
            "environment", f"found {len(names)} variables", f"at most {LOCAL_VARIABLES_MAX} are possible"
        )
    for name in names:
        if _VARIABLE.fullmatch(name) is None or name.startswith("FOREBAY_"):
            raise environment.refuse(
                name, "this is no name for a variable", "use letters, digits and _; names that begin FOREBAY_ are taken"
            )
    local = Local(
        lua_script=_program(table, "lua_script", base),
        lua_script_beside=str(base / LUA_SCRIPT_NAME),
        get_sys_state=_program(table, "get_sys_state", base),
        get_sys_status=_program(table, "get_sys_status", base),
        environment=tuple((name, environment.text(name)) for name in names),
        status_identity=table.boolean("status_identity", False),
    )
    table.finish()
    return local


def _program(table: Table, key: str, base: Path) -> str:
    path = table.text(key, "")
    return os.path.normpath(base / path) if path else ""
