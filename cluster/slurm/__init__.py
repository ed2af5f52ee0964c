"""Burst-buffer scripts for an unmodified Slurm, and the bridge that answers them."""

import shlex
from pathlib import Path
from typing import Final

RUN: Final = Path("/run/forebay-slurm")
"""Default directory of the bridge's files."""

PARTS: Final = "lua"
"""Subdirectory of the parts that burst_buffer.lua loads."""

_HERE: Final = Path(__file__).parent
_LUA: Final = _HERE / "lua"
_PROGRAMS: Final = _HERE / "programs"


SITE_SCRIPT: Final = "burst_buffer.site.lua"
"""File beside slurm.conf with the site's own burst-buffer script, which handles jobs with that script's directive."""


def script_text(run: Path, conf: Path = Path("/etc/slurm")) -> str:
    """Return burst_buffer.lua as installed in `conf`, for a bridge in `run`."""
    text = _set_constant((_LUA / "burst_buffer.lua").read_text(encoding="utf-8"), f'"{RUN}"', f'"{run}"')
    return _set_constant(text, f'"/etc/slurm/{SITE_SCRIPT}"', f'"{conf / SITE_SCRIPT}"')


def script_parts() -> dict[str, str]:
    """Return the parts that burst_buffer.lua compiles on demand, by name."""
    names = ("slurmctld.lua", "slurmscriptd.lua", "requests.lua")
    return {name: (_LUA / name).read_text(encoding="utf-8") for name in names}


def submission_check(directive: str) -> str:
    """Return the check that a site's job_submit.lua may call.

    `directive` is Directive of burst_buffer.conf (BB_LUA).
    """
    text = (_LUA / "job_submit.lua").read_text(encoding="utf-8")
    before, found, after = text.partition('local DIRECTIVE = "#BB_LUA"')
    assert found
    return f'{before}local DIRECTIVE = "#{directive}"{after}'


def programs(run: Path) -> dict[str, str]:
    """Return the programs of burst_buffer/datawarp and their helpers by name, for a bridge in `run`."""
    shell, python = ((_PROGRAMS / name).read_text(encoding="utf-8") for name in ("dw_wlm_cli", "forebay-bb"))
    shell = _set_constant(shell, f"'{RUN}'", shlex.quote(str(run)))
    return {"dw_wlm_cli": shell, "dwstat": shell, "forebay-bb": _set_constant(python, f'"{RUN}"', f'"{run}"')}


def _set_constant(text: str, constant: str, value: str) -> str:
    """Return a script with the value of a constant replaced in its first occurrence, the definition."""
    before, found, after = text.partition(constant)
    assert found, constant
    return f"{before}{value}{after}"
