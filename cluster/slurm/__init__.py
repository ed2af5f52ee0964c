"""Forebay as the burst buffer of an unmodified Slurm: the scripts that Slurm calls, and the bridge that they ask."""

from pathlib import Path
from typing import Final

RUN: Final = Path("/run/forebay-slurm")
"""Where the bridge has its files, unless somebody says another place."""

PARTS: Final = "lua"
"""The directory below it of what burst_buffer.lua reads of itself."""

_HERE: Final = Path(__file__).parent
_LUA: Final = _HERE / "lua"


def script_text(run: Path) -> str:
    """Return burst_buffer.lua as it goes beside slurm.conf, for a bridge in `run`."""
    return _filled((_LUA / "burst_buffer.lua").read_text(encoding="utf-8"), f'"{RUN}"', f'"{run}"')


def script_parts() -> dict[str, str]:
    """Return what burst_buffer.lua compiles where a call needs it, by the names that the bridge gives it."""
    names = ("slurmctld.lua", "slurmscriptd.lua", "requests.lua")
    return {name: (_LUA / name).read_text(encoding="utf-8") for name in names}


def helper_text(run: Path) -> str:
    """Return what burst_buffer/datawarp calls by the names dw_wlm_cli and dwstat, for a bridge in `run`."""
    return _filled((_HERE / "forebay-bb").read_text(encoding="utf-8"), f'"{RUN}"', f'"{run}"')


def _filled(text: str, constant: str, value: str) -> str:
    """Return a script with one of its constants; its first occurrence is where it is defined."""
    before, found, after = text.partition(constant)
    assert found, constant
    return f"{before}{value}{after}"
