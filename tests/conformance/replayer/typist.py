"""A process that has the command line of Forebay loaded, and forks for each command: none starts Python.

It reads one JSON line for each command, `{"id", "words", "directory", "stdin", "stdout", "stderr"}` (paths of files),
and answers with `{"id", "code"}` when the command has ended. The command runs in a child of its own, as a user's would.
"""

import json
import os
import select
import signal
import sys

from forebay.cluster.cli import app


def _perform(request: dict[str, object]) -> None:
    os.chdir(str(request["directory"]))
    for number, name, flags in (
        (0, "stdin", os.O_RDONLY),
        (1, "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(str(request[name]), flags | os.O_CLOEXEC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    words = request["words"]
    assert isinstance(words, list)
    sys.argv = ["forebay", *map(str, words)]
    app.cli(args=sys.argv[1:], prog_name="forebay")


def main() -> int:
    """Serve until standard input ends."""
    running: dict[int, object] = {}
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            code = os.waitstatus_to_exitcode(status)
            print(json.dumps({"id": running.pop(pid), "code": code}), flush=True)
        if 0 not in ready:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            return 0
        pending += chunk
        while b"\n" in pending:
            line, _, pending = pending.partition(b"\n")
            request = json.loads(line)
            sys.stdout.flush()
            pid = os.fork()
            if pid:
                running[pid] = request["id"]
                continue
            code = 70
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _perform(request)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
