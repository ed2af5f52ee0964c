"""rclone, between two directories of this machine; no remote is configured and no configuration is read."""

from __future__ import annotations

from cluster.agent.transfer.backends.interface import Call, Job


class Rclone:
    """Tells rclone the names, one a line."""

    name = "rclone"
    at_once = False

    def fault(self, name: bytes) -> str | None:
        """Return why rclone cannot be told of a file: it reads names by lines, and as UTF-8."""
        if b"\n" in name or b"\r" in name:
            return "has a line break"
        try:
            name.decode("utf-8")
        except UnicodeDecodeError:
            return "is not UTF-8"
        return None

    def call(self, job: Job) -> Call:
        """Return how rclone is run."""
        return Call(
            (
                b"rclone",
                b"copy",
                b".",
                b"/proc/self/fd/%d" % job.scratch,
                b"--files-from-raw=-",
                b"--no-traverse",
                b"--config=",
                b"--retries=1",
                b"--low-level-retries=1",
                b"--log-level=ERROR",
                b"--stats=0",
                b"--local-no-check-updated",
            ),
            b"".join(name + b"\n" for name in job.names),
        )
