"""Forebay as the burst buffer of an unmodified Slurm: the scripts that Slurm calls, and the bridge that they ask."""

import shlex
from pathlib import Path
from typing import Final

RUN: Final = Path("/run/forebay-slurm")
"""Where the bridge has its files, unless somebody says another place."""

PARTS: Final = "lua"
"""The directory below it of what burst_buffer.lua reads of itself."""

_HERE: Final = Path(__file__).parent
_LUA: Final = _HERE / "lua"
_PROGRAMS: Final = _HERE / "programs"


SITE_SCRIPT: Final = "burst_buffer.site.lua"
"""The file beside slurm.conf that holds a burst-buffer script of the site's own, to which burst_buffer.lua hands the
jobs that have its directive.
"""


def script_text(run: Path, conf: Path = Path("/etc/slurm")) -> str:
    """Return burst_buffer.lua as it goes beside slurm.conf in `conf`, for a bridge in `run`."""
    text = _filled((_LUA / "burst_buffer.lua").read_text(encoding="utf-8"), f'"{RUN}"', f'"{run}"')
    return _filled(text, f'"/etc/slurm/{SITE_SCRIPT}"', f'"{conf / SITE_SCRIPT}"')


def script_parts() -> dict[str, str]:
    """Return what burst_buffer.lua compiles where a call needs it, by the names that the bridge gives it."""
    names = ("slurmctld.lua", "slurmscriptd.lua", "requests.lua")
    return {name: (_LUA / name).read_text(encoding="utf-8") for name in names}


def submission_check(directive: str) -> str:
    """Return the check that a site's job_submit.lua may call; `directive` is that of burst_buffer.conf, BB_LUA."""
    text = (_LUA / "job_submit.lua").read_text(encoding="utf-8")
    before, found, after = text.partition('local DIRECTIVE = "#BB_LUA"')
    assert found
    return f'{before}local DIRECTIVE = "#{directive}"{after}'


def programs(run: Path) -> dict[str, str]:
    """Return what burst_buffer/datawarp calls, by names, and what these call, for a bridge in `run`."""
    shell, python = ((_PROGRAMS / name).read_text(encoding="utf-8") for name in ("dw_wlm_cli", "forebay-bb"))
    shell = _filled(shell, f"'{RUN}'", shlex.quote(str(run)))
    return {"dw_wlm_cli": shell, "dwstat": shell, "forebay-bb": _filled(python, f'"{RUN}"', f'"{run}"')}


def _filled(text: str, constant: str, value: str) -> str:
    """Return a script with one of its constants; its first occurrence is where it is defined."""
    before, found, after = text.partition(constant)
    assert found, constant
    return f"{before}{value}{after}"
