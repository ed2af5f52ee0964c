"""Forebay beside etcd and Slurm, in the same run, on this machine: what users do, then the parts it is made of.

Sections of what users do: `jobs` (real jobs through agents, beside a real Slurm whose script stages by `cp`),
`commands` (calls of the command line, beside etcdctl and Slurm's), `submits` (real submits over both doors, beside
sbatch), `storm` (new connections on busy cores, beside etcd); their rows are printed last, as
docs/explain/performance.md has them.
Sections of parts: `api` (HTTP/JSON, both), `channel` (Forebay's MessagePack channel, etcd's native gRPC),
`inside` (clients in the leader's process, etcd's native gRPC), `failover` (the leader killed or hung), `idle`;
`scheduling` (Forebay's scheduler by itself, with up to 100,000 jobs waiting); `transfer` (Forebay's data mover
beside cp and rsync); `nodes` (thousands of simulated agents: at rest, at work, without a leader); and `history`
(questions about the past of a long ledger). Clusters of three
are started fresh on loopback, with mutual TLS and their data on the same disk. The systems alternate, and the one that
goes first alternates too; the figure shown is the median of the rounds.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks import etcd, machine, nodes, past, report, scheduling, transfer
from tests.benchmarks.forebay import ForebayCluster
from tests.benchmarks.load import VerificationFailed
from tests.benchmarks.processes import ServerFailed
from tests.benchmarks.users import commands, jobs, listings, storm, submits
from tests.benchmarks.users.rows import Found, Row, Say, markdown

CLIENTS_DEFAULT = (1, 64, 256)
"""Numbers of concurrent clients: one person, a busy site, a storm of submits."""

CONNECTIONS_DEFAULT = 1
"""Connections that the clients of `channel` share: as many as a program has that keeps one channel, and as etcd's own
client and benchmark tool have unless they are told otherwise."""

CONNECTIONS_MAX = 64

USERS = ("jobs", "commands", "submits", "storm", "listings")
"""Sections of what users do."""

SECTIONS = (*USERS, "api", "channel", "inside", "failover", "idle", "scheduling", "transfer", "nodes", "history")
BESIDE_ETCD = ("commands", "storm", "api", "channel", "inside", "failover", "idle")
"""Sections that etcd takes part in."""

LOADS = {"api": ("forebay", "etcd"), "channel": ("channel", "etcd-grpc"), "inside": ("inside", "etcd-grpc")}
"""Section -> the system of ours and the one beside it."""

FAILOVERS_MAX = 1000
IDLE_SECONDS_MAX = 3600.0

TRANSFER_GIB_MAX = 1024.0
TRANSFER_FILES_MAX = 10_000_000

NODES_MAX = 10_000
JOBS_MAX = 10_000
CALLS_MAX = 1000
STORMS_MAX = 100
CONNECTIONS_NEW_MAX = 2000
"""Connections of a storm: below half of what one replica keeps open."""

SECONDS_MAX = 300.0
ROUNDS_MAX = 50
CLIENTS_MAX = 1024
"""Bounds on what one run may ask for: a benchmark that stops by itself."""

WARM_UP_S = 1.0
"""Seconds of load before the measured time: connections and TLS handshakes are made, code and caches are warm."""

FAIRNESS = """\
All: three members on loopback, mutual TLS 1.3 with the same kind of certificates, data on the same disk, requests sent
to the leader. The client runs on this machine too and takes its share of the processors: see the columns of cores.
api: the same Python client code (aiohttp, one connection and one outstanding request per client); etcd is asked through
its JSON gateway, which costs it more than native gRPC. channel, inside: etcd is asked through its native gRPC, by a
client that costs about as much as Forebay's (benchmarks/http2.py); all clients of either share --connections
connections, with one outstanding request per client. inside: the clients run in the leader's process and count among
its cores."""


def arguments() -> argparse.Namespace:
    """Return the command line's options, checked."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="measured time per figure (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds whose median is shown (default: 3)")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS_DEFAULT), help="default: 1 64 256")
    parser.add_argument(
        "--connections",
        type=int,
        default=CONNECTIONS_DEFAULT,
        help=f"connections that the clients of `channel` share, of either system (default: {CONNECTIONS_DEFAULT})",
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    parser.add_argument("--only", choices=("forebay", "etcd"), help="measure one of the two alone")
    parser.add_argument("--api-workers", type=int, help="processes that serve clients in front of each replica")
    parser.add_argument("--failovers", type=int, default=20, help="leaders lost per row (default: 20)")
    parser.add_argument("--idle-seconds", type=float, default=20.0, help="time left alone (default: 20)")
    parser.add_argument("--transfer-gib", type=float, default=4.0, help="size of the large file, GiB (default: 4)")
    parser.add_argument("--transfer-files", type=int, default=100_000, help="number of small files (default: 100,000)")
    parser.add_argument(
        "--memory-files", type=int, help="files of the transfer whose memory is measured (default: the small ones)"
    )
    parser.add_argument("--jobs", type=int, default=100, help="small jobs at once (default: 100)")
    parser.add_argument("--calls", type=int, default=commands.CALLS, help="calls of each command (default: 15)")
    parser.add_argument("--storms", type=int, default=10, help="storms of new connections (default: 10)")
    parser.add_argument("--storm-connections", type=int, default=1000, help="connections of each (default: 1,000)")
    parser.add_argument("--nodes", type=int, default=9000, help="simulated agents of `nodes` (default: 9,000)")
    parser.add_argument(
        "--events",
        type=int,
        default=past.EVENTS,
        help=f"events of each ledger of `history` (default: {past.EVENTS:,})",
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        choices=past.WAVES,
        default=list(past.WAVES),
        help="ledgers of `history`",
    )
    parser.add_argument(
        "--ledgers",
        type=Path,
        help="where the ledgers of `history` stay; a later run goes on with them (default: removed with the rest)",
    )
    parser.add_argument("--directory", type=Path, help="where the data goes (default: a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line, which is always JSON")
    options = parser.parse_args()
    if not 0 < options.seconds <= SECONDS_MAX:
        parser.error(f"--seconds must be above 0 and at most {SECONDS_MAX:g}")
    if not 1 <= options.rounds <= ROUNDS_MAX:
        parser.error(f"--rounds must be from 1 to {ROUNDS_MAX}")
    if not all(1 <= clients <= CLIENTS_MAX for clients in options.clients):
        parser.error(f"--clients must each be from 1 to {CLIENTS_MAX}")
    if not 1 <= options.connections <= CONNECTIONS_MAX:
        parser.error(f"--connections must be from 1 to {CONNECTIONS_MAX}")
    if not 1 <= options.failovers <= FAILOVERS_MAX:
        parser.error(f"--failovers must be from 1 to {FAILOVERS_MAX}")
    if not 0 < options.idle_seconds <= IDLE_SECONDS_MAX:
        parser.error(f"--idle-seconds must be above 0 and at most {IDLE_SECONDS_MAX:g}")
    if not 0.1 <= options.transfer_gib <= TRANSFER_GIB_MAX:
        parser.error(f"--transfer-gib must be from 0.1 to {TRANSFER_GIB_MAX:g}")
    if not 1 <= options.jobs <= JOBS_MAX:
        parser.error(f"--jobs must be from 1 to {JOBS_MAX}")
    if not 1 <= options.nodes <= NODES_MAX:
        parser.error(f"--nodes must be from 1 to {NODES_MAX}")
    if not 1_000 <= options.events <= past.EVENTS_MAX:
        parser.error(f"--events must be from 1,000 to {past.EVENTS_MAX:,}")
    if not 1 <= options.calls <= CALLS_MAX:
        parser.error(f"--calls must be from 1 to {CALLS_MAX}")
    if not (1 <= options.storms <= STORMS_MAX and 1 <= options.storm_connections <= CONNECTIONS_NEW_MAX):
        parser.error(f"--storms must be from 1 to {STORMS_MAX}, --storm-connections to {CONNECTIONS_NEW_MAX}")
    if options.memory_files is None:
        options.memory_files = options.transfer_files
    if not all(100 <= files <= TRANSFER_FILES_MAX for files in (options.transfer_files, options.memory_files)):
        parser.error(f"--transfer-files and --memory-files must be from 100 to {TRANSFER_FILES_MAX}")
    return options


def main() -> int:
    """Measure and print; return 0 only if everything was measured without an error."""
    options = arguments()
    ForebayCluster.api_workers = options.api_workers
    # SIGTERM ends the run as Ctrl-C does: the servers are ended and their data is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=options.directory) as directory:
            Path(directory).chmod(0o711)  # the user of `jobs` has files below it
            return run(options, Path(directory))
    except (ServerFailed, VerificationFailed) as error:
        print(f"bench: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
    return 1


def run(options: argparse.Namespace, directory: Path) -> int:
    """Measure with data in `directory`; return the exit code."""

    def say(text: str = "") -> None:
        if not options.json:
            print(text, flush=True)

    facts = machine.facts(directory)
    if options.only != "forebay" and set(options.sections) & set(BESIDE_ETCD):
        facts["etcd"] = etcd.version()
    say("Machine")
    for name, value in facts.items():
        say(f"  {name:<18} {value}")
    say()
    if set(options.sections) & set(BESIDE_ETCD):
        say(FAIRNESS)
    found: dict[str, object] = {"machine": facts, "seconds": options.seconds, "rounds": options.rounds}
    if options.only != "etcd":
        rows, whole = users(options, directory, say, found)
    else:
        rows, whole = [], True
    pairs = [LOADS[section] for section in SECTIONS if section in options.sections and section in LOADS]
    if pairs:
        loads, complete = report.loads(options, pairs, directory, say, warm_up_s=WARM_UP_S)
        found.update(loads)
        whole = whole and complete
    systems = [options.only] if options.only else ["forebay", "etcd"]
    if "failover" in options.sections:
        found["failovers"] = report.failovers(systems, options.failovers, directory, say)
    if "idle" in options.sections:
        found["idle"] = report.idle(systems, options.idle_seconds, directory, say)
    if "scheduling" in options.sections and options.only != "etcd":
        found["scheduling"] = scheduling.report(say)
    if "transfer" in options.sections and options.only != "etcd":
        found["transfer"] = transfer.report(
            directory,
            options.rounds,
            int(options.transfer_gib * transfer.GIB),
            options.transfer_files,
            options.memory_files,
            say,
        )
    if "nodes" in options.sections and options.only != "etcd":
        one = nodes.report(directory, options.nodes, say)
        found["nodes"] = one.figures
        rows, whole = [*rows, *one.rows], whole and one.whole
    if "history" in options.sections and options.only != "etcd":
        one = past.report(options.ledgers or directory, options.events, options.batches, say)
        found["history"] = one.figures
        rows = [*rows, *one.rows]
    found["machine"] = {**facts, "load_after": round(os.getloadavg()[0], 2)}
    if rows:
        say("\n" + markdown(rows))
    say()
    print(json.dumps(found), flush=True)
    return 0 if whole else 1


def users(options: argparse.Namespace, directory: Path, say: Say, found: dict[str, object]) -> tuple[list[Row], bool]:
    """Measure what users do, put the figures into `found`; return the rows, and whether there was no error."""
    alone = options.only == "forebay"
    sections: dict[str, Callable[[], Found]] = {
        "jobs": lambda: jobs.report(directory, options.rounds, options.jobs, say),
        "commands": lambda: commands.report(directory, options.calls, say, only_forebay=alone),
        "submits": lambda: submits.report(directory, options.rounds, options.clients, options.seconds, WARM_UP_S, say),
        "listings": lambda: listings.report(directory, options.seconds, options.rounds, say),
        "storm": lambda: storm.report(directory, options.storm_connections, options.storms, say, only_forebay=alone),
    }
    rows: list[Row] = []
    whole = True
    for section in USERS:
        if section in options.sections:
            one = sections[section]()
            found[section] = {**one.figures, "rows": [row._asdict() for row in one.rows]}
            rows += one.rows
            whole = whole and one.whole
    return rows, whole


if __name__ == "__main__":
    sys.exit(main())
