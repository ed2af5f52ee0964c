"""Slurm with a backup slurmctld: two simulated hosts on one machine, each with its own name, address and /run."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

from tests.benchmarks.users.slurm import SlurmSite

PRIMARY, BACKUP = "ctl1", "ctl2"

SETTINGS = """\
SlurmctldTimeout=10
CommunicationParameters=NoCtldInAddrAny
"""
"""slurm.conf: the backup waits for so many seconds; each controller listens at its own address only."""


def on_host(host: str, *binds: tuple[Path, Path]) -> list[str]:
    """Return how a command line begins that is run under a host's name; the second of each pair lies over the first."""
    steps = [f"hostname {host}"]
    steps += [f"mount --bind {shlex.quote(str(own))} {shlex.quote(str(shared))}" for shared, own in binds]
    return ["unshare", "--uts", "--mount", "sh", "-c", " && ".join((*steps, 'exec "$@"')), "sh"]


class TwoControllers(SlurmSite):
    """Such a Slurm; `run` is where scripts look for the bridge, `backup_run` where that of the backup's host is."""

    hosts = f"SlurmctldHost={PRIMARY}(127.0.0.1)\nSlurmctldHost={BACKUP}(127.0.0.2)"

    def __init__(
        self,
        directory: Path,
        *,
        script: str,
        plugin: str,
        buffers: str | None,
        settings: str,
        run: Path,
        user: str = "root",
    ) -> None:
        settings += SETTINGS
        super().__init__(directory, script=script, plugin=plugin, buffers=buffers, settings=settings, user=user)
        self._run = run
        self.backup_run = run.with_name(f"{run.name}-{BACKUP}")

    def _launch_primary(self) -> None:
        names = self._directory / "hosts"
        names.write_text(f"127.0.0.1 localhost {PRIMARY}\n127.0.0.2 {BACKUP}\n")
        self._known = (Path("/etc/hosts"), names)  # a controller looks its own name up
        self._launch("slurmctld", "-D", "-f", str(self._directory / "slurm.conf"), within=on_host(PRIMARY, self._known))

    def _launch_controllers(self) -> None:
        self._launch_primary()
        name = self._directory / "state" / "clustername"
        # The other would read half of it.
        self._wait("ClusterName in the state", lambda: name.exists() and name.stat().st_size > 0)
        pid_file = self._directory / "slurmctld.pid"
        own = pid_file.with_name(f"{BACKUP}.pid")
        for file in (pid_file, own):
            file.touch()
        backup = on_host(BACKUP, self._known, (self._run, self.backup_run), (pid_file, own))
        conf = str(self._directory / "slurm.conf")
        self._launch("slurmctld", "-D", "-f", conf, name=BACKUP, within=backup)

    def backup_stands_by(self) -> bool:
        """Return whether the backup answers, active or in standby."""
        shown = self.ask("scontrol", "ping").stdout
        return any(BACKUP in line and line.endswith(" UP") for line in shown.splitlines())

    def backup_again(self) -> None:
        """End the backup, unless it has ended by itself, and start it again, as a watchdog would."""
        if self._processes.process(BACKUP).poll() is None:
            self.end_controller(signal.SIGKILL, BACKUP)
        else:
            self._processes.end(BACKUP)
        self._processes.again(BACKUP)
