"""Slurm without Forebay, for comparison: its burst_buffer.lua or dw_wlm_cli creates directories and copies."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Final

from tests.benchmarks.users.slurm import SCRIPT_OF_SITE, SlurmSite
from tests.slurm.controllers import TwoControllers
from tests.slurm.gates import FUNCTIONS
from tests.slurm.slurm import SETTINGS, Submitted

DW_WLM_CLI: Final = r"""#!/bin/sh
# dw_wlm_cli of a site: one directory a buffer, one file in and one out by cp, as the controller's account.
root="@ROOT@"
while [ $# -gt 1 ]; do
    case $1 in
    --function) function=$2 ;;
    --token) token=$2 ;;
    --job) job=$2 ;;
    --user) user=$2 ;;
    --pathfile) file=$2 ;;
    esac
    shift
done
option() { sed -n "s/^#DW jobdw.* $1=\([^ ]*\).*/\1/p" "$job"; }
session() {
    printf '{"id": %d, "token": "%d", "owner": %d, "created": %d, ' "$1" "$1" $(stat -c '%u %Y' "$root/$1")
    printf '"creator": "SLURM", "expiration": 0, "links": {"client_nodes": []}, '
    printf '"state": {"actualized": true, "mixed": false, "transitioning": false}}'
}
instance() {
    printf '{"id": %d, "label": "%d", "capacity": {"bytes": 1048576, "nodes": 1}, ' "$1" "$1"
    printf '"links": {"configurations": [%d], "session": %d}}' "$1" "$1"
}
configuration() { printf '{"id": %d, "type": "scratch", "links": {"instance": %d}}' "$1" "$1"; }
each() { # prints what the function $1 says of each buffer
    between=
    printf '{"%ss": [' "$1"
    for buffer in "$root"/*; do
        [ -d "$buffer" ] || continue
        printf '%s' "$between"
        "$1" "${buffer##*/}"
        between=', '
    done
    echo ']}'
}
pool='"id": "fast", "units": "bytes", "granularity": 1048576, "quantity": 1048576, "free": 1048576'
case $function in
pools) echo "{\"pools\": [{$pool}]}" ;;
show_sessions) each session ;;
show_instances) each instance ;;
show_configurations) each configuration ;;
job_process) echo 'job_file_valid True' ;;
setup) mkdir -p "$root/$token" && chown "$user" "$root/$token" ;;
data_in) cp "$(option in)" "$root/$token/in" ;;
paths) echo "BUFFER=$root/$token" >"$file" ;;
data_out) cp "$root/$token/out" "$(option out)" ;;
teardown) rm -rf "${root:?}/${token:?}" ;;
esac
"""


_COPY: Final = re.compile(r"\bcp .*(?= ;;)")


class PlainSite(Submitted):
    """Such a Slurm in a directory of its own; `gated`: its calls can be stopped on their way; `backup`: slurmctld has
    one; `copies` False: its script does nothing at all, and so do its jobs.
    """

    def __init__(
        self, directory: Path, *, plugin: str = "lua", gated: bool = True, backup: bool = False, copies: bool = True
    ) -> None:
        directory.mkdir()
        super().__init__(directory)
        self.exports_as = os.geteuid()
        self._plugin, self._copies, self._gated = plugin, copies, gated
        self._program = directory / "dw_wlm_cli"
        buffers = None
        if plugin == "datawarp":
            buffers = f"GetSysState={self._program}\nGetSysStatus=/bin/true\nStageInTimeout=86400\n"
        script = SCRIPT_OF_SITE if copies else SCRIPT_OF_SITE.replace("os.execute(command)", "0")
        if gated:
            script += self.gates.around(FUNCTIONS)
        if backup:
            self.slurm: SlurmSite = TwoControllers(
                directory / "slurm",
                script=script,
                plugin=plugin,
                buffers=buffers,
                settings=SETTINGS,
                run=directory / "run",
            )
        else:
            self.slurm = SlurmSite(
                directory / "slurm", script=script, plugin=plugin, buffers=buffers, settings=SETTINGS
            )

    async def start(self) -> None:
        """Start it; return when its nodes are idle."""
        self.found()
        self.gates.make()
        program = DW_WLM_CLI.replace("@ROOT@", str(self.directory / "slurm" / "buffers"))
        if not self._copies:
            program = _COPY.sub("true", program)
        if self._gated:
            self.gates.program(self._program, program)
        else:
            self._program.write_text(program)
            self._program.chmod(0o755)
        for path in (self.directory / "run", self.directory / "run-ctl2"):
            path.mkdir()
        await asyncio.to_thread(self.slurm.start)

    def stop(self) -> None:
        """End it."""
        self.gates.open()
        self.slurm.stop()

    def script(self, name: str, *body: str) -> str:
        """Return a job that has `name` copied in and what it makes of it out."""
        word = "#DW jobdw" if self._plugin == "datawarp" else "#BB_LUA"
        request = f"{word} pool=fast capacity=1MiB in={self.input}/{name} out={self.results}/{name}"
        if not self._copies:
            return f"#!/bin/sh\n#SBATCH -o /dev/null\n{request}\ntrue\n"
        lines = [line.replace("$DW_JOB_STRIPED", "$BUFFER") for line in body]
        work = lines or ["cp $BUFFER/in $BUFFER/out"]
        return "\n".join(("#!/bin/sh", "#SBATCH -o /dev/null", request, *work, ""))
