"""Table [provider] of forebay.toml: provider settings of one machine.

The kind of provider is replicated (replica.model.configuration). This table has the paths of this machine's programs,
and the paths in the replicated configuration that this machine may run.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from forebay.cluster.config.toml import InvalidValue, Text, check_line
from forebay.cluster.providers import LOCAL_PROGRAMS_MAX, LOCAL_VARIABLES_MAX, Local
from forebay.replica.model import program_fault

LUA_SCRIPT_NAME: Final = "burst_buffer.lua"
"""Name of the lua provider's script beside forebay.toml, as Slurm has it beside slurm.conf."""

_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]*"


class ProviderTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table [provider]; `Local` documents its keys."""

    lua_script: Text = ""
    get_sys_state: Text = ""
    get_sys_status: Text = ""
    allowed_programs: Annotated[tuple[Text, ...], Meta(max_length=LOCAL_PROGRAMS_MAX)] = ()
    environment: dict[str, Any] = {}
    status_identity: bool = False
    lua_version: Literal["5.1", "5.2", "5.3", "5.4"] = "5.4"

    def __post_init__(self) -> None:
        """Check programs and variables.

        Raises:
            InvalidValue: One of them is invalid.
        """
        for number, path in enumerate(self.allowed_programs):
            fault = program_fault(path)
            if fault is not None:
                remedy = "write the absolute path of a program, as the site's configuration names it"
                raise InvalidValue(f"this {fault}", remedy, "allowed_programs", number)
        count = len(self.environment)
        if count > LOCAL_VARIABLES_MAX:
            remedy = f"at most {LOCAL_VARIABLES_MAX} are possible"
            raise InvalidValue(f"found {count} variables", remedy, "environment")
        for name, value in self.environment.items():
            if re.fullmatch(_VARIABLE, name) is None or name.startswith("FOREBAY_"):
                remedy = "use letters, digits and _; names that begin with FOREBAY_ are reserved"
                raise InvalidValue("this is not a valid variable name", remedy, "environment", name)
            check_line(value, "environment", name)

    def local(self, base: Path, cluster: str) -> Local:
        """Return the provider settings of this machine; paths are relative to `base`, `cluster` is the cluster's
        name.
        """
        return Local(
            lua_script=_program(self.lua_script, base),
            lua_script_beside=str(base / LUA_SCRIPT_NAME),
            get_sys_state=_program(self.get_sys_state, base),
            get_sys_status=_program(self.get_sys_status, base),
            allowed_programs=self.allowed_programs,
            environment=tuple(self.environment.items()),
            status_identity=self.status_identity,
            lua_version=self.lua_version,
            cluster=cluster,
        )


def _program(path: str, base: Path) -> str:
    return os.path.normpath(base / path) if path else ""
