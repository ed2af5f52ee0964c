"""Independent stopwatch that records the acknowledgements of writes from outside.

It is of another make than the probes of a drill, and shares no code with them or with Forebay: a process for each
replica, threads in it, each with a blocking connection of its own; writes that hold and release a job. It needs nothing
but Python's own library.

    python stopwatch.py --ca ca.pem --cert user.pem --key user.key --job 1 HOST:PORT …

`ready` once every connection is open; at the end of standard input, JSON: moments of acknowledgements, seconds of the
monotonic clock. Nothing is printed for what was not acknowledged.
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import signal
import ssl
import sys
import threading
import time

EVERY_S = 0.01
"""Between two writes to a replica."""

THREADS = 5
"""Writes to a replica that may wait at a time."""

TIMEOUT_S = 4.0

PRIORITY = 1
"""Of this program among those of real time, where it may have one and there is another processor: an instrument waits
for none."""

NICENESS = -10
"""Of it otherwise, where it may choose, within its session and among sessions."""

HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}


def command_id():
    """Return a UUID of version 7, as 32 digits."""
    number = int.from_bytes(os.urandom(16), "big") & ~(0xFFFF_FFFF_FFFF << 80) & ~(0xF << 76) & ~(0b11 << 62)
    return f"{number | int(time.time() * 1000) << 80 | 7 << 76 | 0b10 << 62:032x}"


def watch(context, host, port, job, phase_s, found, opened):
    """Send a write every THREADS * EVERY_S for ever, and note when one is acknowledged."""
    connection, turn = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context), 0
    with contextlib.suppress(OSError):
        connection.connect()
    opened.release()
    every_s = THREADS * EVERY_S
    due_s = math.ceil(time.monotonic() / every_s) * every_s + phase_s
    while True:
        time.sleep(max(0.0, due_s - time.monotonic()))
        # By the clock, whenever it began and however late an answer was: threads that drift together leave gaps.
        due_s += every_s * max(1, math.ceil((time.monotonic() - due_s) / every_s))
        turn += 1
        try:
            body = json.dumps({"command_id": command_id()})
            connection.request("POST", f"/v1/jobs/{job}/{('hold', 'release')[turn % 2]}", body=body, headers=HEADERS)
            answer = connection.getresponse()
            answer.read()
            # What is refused because it is so already was decided, and written down, too.
            if answer.status < 300 or answer.status == 409:
                found.append(time.monotonic())
        except (OSError, http.client.HTTPException):
            connection.close()


def watch_one(options, place, end, out):
    """Be the process for one replica: threads until the pipe `end` is closed, then all moments, into the pipe `out`."""
    sys.setswitchinterval(0.0005)
    context = ssl.create_default_context(cafile=options.ca)
    context.load_cert_chain(options.cert, options.key)
    host, _, port = place.rpartition(":")
    found, opened = [], threading.Semaphore(0)
    for number in range(THREADS):
        arguments = (context, host.strip("[]"), int(port), options.job, number * EVERY_S, found, opened)
        threading.Thread(target=watch, args=arguments, daemon=True).start()
    for _ in range(THREADS):
        opened.acquire()
    os.write(out, b"ready\n")
    os.read(end, 1)
    with os.fdopen(out, "wb") as file:
        file.write(json.dumps(list(found)).encode())


def come_first():
    """Take a priority of real time, or be nice to nobody, as far as this account may."""
    if len(os.sched_getaffinity(0)) > 1:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(PRIORITY))
            return
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(NICENESS))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--ca", "--cert", "--key"):
        parser.add_argument(name, required=True)
    parser.add_argument("--job", type=int, required=True, help="a job that is held and released")
    parser.add_argument("places", nargs="+", metavar="HOST:PORT")
    options = parser.parse_args()
    come_first()
    end, close_end = os.pipe()
    pids, results = [], []
    for place in options.places:
        result, out = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(close_end)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            watch_one(options, place, end, out)
            os._exit(0)
        os.close(out)
        pids.append(pid)
        results.append(os.fdopen(result, "rb"))
    for result in results:
        result.readline()
    print("ready", flush=True)
    sys.stdin.read()
    os.close(close_end)
    moments = sorted(moment for result in results for moment in json.loads(result.read()))
    for pid in pids:
        os.waitpid(pid, 0)
    print(json.dumps(moments), flush=True)


if __name__ == "__main__":
    main()
