"""Gates that make a call of Slurm wait before the program that it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

_GATE = """\
#!/bin/sh
for word in "$@"; do
    if [ -e "{gates}/$word" ] && mv "{gates}/$word" "{gates}/$word.reached" 2>/dev/null; then
        while [ -e "{gates}/$word.reached" ]; do sleep 0.05; done
    fi
done
exec "{program}" "$@"
"""
"""What Slurm starts instead of the helper: one call of a function can be made to wait in front of it."""


FUNCTIONS: Final = {
    "setup": "setup",
    "data_in": "data_in",
    "pre_run": "pre_run",
    "post_run": "post_run",
    "data_out": "data_out",
    "teardown": "job_teardown",
}
"""Calls that gates hold, and what the script calls them."""

_AROUND: Final = """
for gate, name in pairs({{ {names} }}) do
  local act = _G["slurm_bb_" .. name]
  _G["slurm_bb_" .. name] = function(...)
    os.execute("{gate} " .. gate)
    return act(...)
  end
end
"""


class Gates:
    """The gates of one site, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def text(self, program: str) -> str:
        """Return a shell script that goes on as `program` with its own arguments."""
        return _GATE.format(gates=self.directory, program=program)

    def around(self, functions: Mapping[str, str]) -> str:
        """Return lines of burst_buffer.lua that put the gates in front of its functions: gate -> name there."""
        names = ", ".join(f'{gate} = "{name}"' for gate, name in functions.items())
        return _AROUND.format(names=names, gate=self.directory.with_name("gate"))

    def make(self) -> None:
        """Create the gates' directory, and the program that burst_buffer.lua runs."""
        self.directory.mkdir(exist_ok=True)
        gate = self.directory.with_name("gate")
        gate.write_text(self.text("true"))
        gate.chmod(0o755)

    def program(self, path: Path, text: str) -> None:
        """Make a program behind the gates."""
        behind = path.parent / "behind" / path.name
        behind.parent.mkdir(exist_ok=True)
        for file, content in ((behind, text), (path, self.text(str(behind)))):
            file.write_text(content)
            file.chmod(0o755)

    def close(self, function: str) -> None:
        """Make the next call of a function wait until its gate is opened."""
        (self.directory / function).touch()

    def waits_at(self, function: str) -> bool:
        """Return whether a call waits at this gate."""
        return (self.directory / f"{function}.reached").exists()

    def let_pass(self, function: str) -> None:
        """Let the waiting call continue."""
        (self.directory / f"{function}.reached").unlink()

    def open(self) -> None:
        """Let all calls continue."""
        for file in self.directory.iterdir() if self.directory.exists() else ():
            file.unlink(missing_ok=True)
