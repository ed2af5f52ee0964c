"""Replays transcripts of a real Slurm at a real Forebay and compares what both showed. Run by scripts/conformance.

For each file of DIR a cluster of its own is founded: a replica, agents, mutual TLS on loopback, user certificates,
the transcript's burst_buffer.conf and the site's scripts beside DIR. The last line is JSON; the exit code is 0 only if
nothing failed. What is compared, and how, is said in compare.py and tests/conformance/README.md.
"""

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.conformance.replayer.cluster import Cluster, ConformanceFailed
from tests.conformance.replayer.compare import Outcome, Step
from tests.conformance.replayer.differences import Differences, DifferencesError, read_differences
from tests.conformance.replayer.listings import compare
from tests.conformance.replayer.provider_calls import compare_told
from tests.conformance.replayer.replay import Replay
from tests.conformance.replayer.run import Result, Run
from tests.conformance.replayer.setting import Scripts, Setting, pools_in, setting_of
from tests.conformance.replayer.transcript import Transcript, TranscriptError, read_transcript

ROOT: Final = Path(__file__).resolve().parents[3]
DIFFERENCES: Final = ROOT / "tests" / "conformance" / "differences.toml"

AT_ONCE: Final = 3
"""Transcripts at once, count: most of a transcript is waiting, and two cores bear the rest."""

FAILURES_SHOWN: Final = 200
"""Failures of one transcript that are printed, count."""

USAGE: Final = 2
"""Exit code for what cannot be started at all."""

INTERRUPTED: Final = 130
"""Exit code of a run that was ended from outside."""

_AS_RECORDED: Final = (("StageRetries", "0"), ("HoldOversized", "yes"))
"""Forebay's own settings that make it do what the recorded Slurm did: no retries of a failed operation before the hold,
and requests of more than there is wait."""


def _scripts(options: argparse.Namespace) -> Scripts:
    beside = options.directory.resolve().parent
    lua = options.lua or beside / "lua" / "burst_buffer.lua"
    programs = options.bin or beside / "bin"
    conf = options.conf or beside / "conf"
    return Scripts(lua.resolve(), programs / "dw_wlm_cli", programs / "dwstat", conf / "pools.json")


def _prepare(cluster: Cluster, setting: Setting, scripts: Scripts) -> dict[str, str]:
    """Lay out what the site's scripts expect, and return the variables that they find."""
    run = cluster.run
    if setting.provider == "lua" and scripts.lua.exists():
        (run / "burst_buffer.lua").write_text(scripts.lua.read_text().replace("@RUN@", str(run)))
        if scripts.pools.exists():
            shutil.copy(scripts.pools, run / "pools.json")
    for name, seconds in setting.slow:
        (run / "dwctl" / f"{name}.sleep").write_text(f"{seconds / setting.speed:g}\n")
    programs = run / "bin"
    programs.mkdir(exist_ok=True)
    for script in (scripts.dw_wlm_cli, scripts.dwstat):
        if script.exists():
            shutil.copy(script, programs / script.name)
            (programs / script.name).chmod(0o755)
    sleep = run / "faster"
    sleep.mkdir(exist_ok=True)
    if setting.speed != 1:
        real = shutil.which("sleep") or "/bin/sleep"
        body = f'#!/bin/sh\nexec {real} "$(awk "BEGIN{{print $1/{setting.speed}}}")"\n'
        (sleep / "sleep").write_text(body)
        (sleep / "sleep").chmod(0o755)
    asked = shlex.quote(str(cluster.asked))
    # What scripts of transcripts ask for themselves; the driver answers, as no Python has to be started for it.
    (sleep / "scontrol").write_text(
        f'#!/bin/sh\n[ "$1 $2" = "show burst" ] || exit 1\n: >{asked}/$$\n'
        f"while [ ! -e {asked}/$$.out ]; do /bin/sleep 0.02; done\ncat {asked}/$$.out\n"
    )
    (sleep / "scontrol").chmod(0o755)
    return {"SLURM_CONF": str(run / "slurm.conf"), "RUN": str(run), "PATH": setting.path(run)}


def _conf_text(cluster: Cluster, setting: Setting) -> str:
    """Return the burst_buffer.conf that the transcript shows, with the provider and where its scripts are here."""
    run = cluster.run
    values = dict(setting.conf)
    lines = [f"BurstBufferType=burst_buffer/{setting.provider}"]
    if setting.provider == "lua":
        lines.append(f"LuaScript={run / 'burst_buffer.lua'}")
    for key in ("GetSysState", "GetSysStatus"):
        if key in values:
            values[key] = str(run / "bin" / values[key].rpartition("/")[2])
    lines += [f"{key}={value}" for key, value in values.items()]
    lines += [f"{key}={value}" for key, value in _AS_RECORDED]
    return "\n".join(lines) + "\n"


async def _configure(cluster: Cluster, setting: Setting, variables: dict[str, str]) -> None:
    if setting.provider == "native":
        return  # what a new cluster is
    path = cluster.run / "burst_buffer.conf"
    path.write_text(_conf_text(cluster, setting))
    answer = await cluster.forebay("config", "apply", str(path))
    if answer.code:
        raise ConformanceFailed(f"`forebay config apply` exited {answer.code}: {answer.err.strip()}")


async def replay_one(
    transcript: Transcript,
    setting: Setting,
    scripts: Scripts,
    differences: Differences,
    directory: Path,
    say: Callable[[str], None],
    replicas: int,
) -> Result:
    """Found a cluster, do what the transcript did, compare, and end the cluster."""
    started = time.monotonic()
    result = Result(transcript.name)
    cluster = Cluster(directory, nodes=setting.nodes, cpus=setting.cpus, users=setting.users, replicas=replicas)
    try:
        variables = _prepare(cluster, setting, scripts)
        for name, text in setting.files:
            path = cluster.work / name.removeprefix("$HERE/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        pools = setting.pools
        if not pools and setting.provider == "lua" and scripts.pools.exists():
            pools = pools_in(scripts.pools.read_text())
        await cluster.found(pools, variables)
        await _configure(cluster, setting, variables)
        run = Run(transcript, setting, cluster, differences)
        answering = asyncio.create_task(cluster.answer_scripts())
        try:
            await Replay(run, say).run()
        finally:
            answering.cancel()
        cluster.check()
        await asyncio.to_thread(compare, run)
        compare_told(run)
        result.steps = run.steps
    except Exception as error:
        # Whatever it is, it is this transcript's: the others go on.
        if not isinstance(error, ConformanceFailed | OSError | TimeoutError):
            traceback.print_exc()
        result.steps.append(Step(Outcome.FAILED, 0, "a run to the end", f"{type(error).__name__}: {error}"))
    finally:
        await cluster.stop()
    result.seconds = time.monotonic() - started
    return result


def _report(result: Result, file: str, used: Differences, *, declared: bool) -> None:
    counts = {outcome: sum(step.outcome is outcome for step in result.steps) for outcome in Outcome}
    verdict = "FAILED" if counts[Outcome.FAILED] else "ok"
    print(
        f"{verdict:<7} {result.name}: {counts[Outcome.MATCHED]} matched, {counts[Outcome.DECLARED]} declared, "
        f"{counts[Outcome.FAILED]} failed, {counts[Outcome.ASIDE]} transient, {result.seconds:.0f} s",
        flush=True,
    )
    failures = [step for step in result.steps if step.outcome is Outcome.FAILED]
    for step in failures[:FAILURES_SHOWN]:
        print(f"  {file}:{step.line}: {step.note}".rstrip(": "))
        print(f"    expected: {step.expected or '(nothing)'}")
        print(f"    got:      {step.got or '(nothing)'}", flush=True)
    for step in result.steps:
        if step.outcome is Outcome.DECLARED and step.row is not None:
            used.use(step.row)
            if declared:
                print(f"  {file}:{step.line}: [{step.row.id}] {step.note}".rstrip())
                print(f"    expected: {step.expected or '(nothing)'}")
                print(f"    got:      {step.got or '(nothing)'}", flush=True)


async def _run(
    transcripts: list[Transcript], options: argparse.Namespace, differences: Differences, directory: Path
) -> list[Result]:
    # Whoever ends this run ends its clusters, too.
    here = asyncio.current_task()
    assert here is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, here.cancel)
    room = asyncio.Semaphore(options.jobs)
    scripts = _scripts(options)
    begun = time.monotonic()

    async def one(number: int, transcript: Transcript) -> Result:
        async with room:
            try:
                setting = setting_of(transcript, speed=options.speed, transient_s=options.transient)
            except ValueError as error:
                result = refused(transcript.name, 1, f"it does not say what cluster it is of: {error}")
                _report(result, transcript.file, differences, declared=options.declared)
                return result

            def say(text: str) -> None:
                print(f"[{time.monotonic() - begun:7.1f}] {transcript.name}: {text}", flush=True)

            say(f"{len(transcript.acts)} commands, provider {setting.provider}")
            place = directory / f"{number}"
            place.mkdir()
            result = await replay_one(transcript, setting, scripts, differences, place, say, options.replicas)
            _report(result, transcript.file, differences, declared=options.declared)
            return result

    # The longest first, so that none is left over at the end.
    order = sorted(enumerate(transcripts), key=lambda pair: -(pair[1].items[-1].at_s if pair[1].items else 0.0))
    return list(await asyncio.gather(*(one(number, transcript) for number, transcript in order)))


def refused(name: str, line: int, why: str) -> Result:
    """Return what became of a transcript that cannot be replayed."""
    return Result(name, [Step(Outcome.FAILED, line, "a transcript", why)])


def summary(results: list[Result]) -> dict[str, int]:
    """Return the last line: every step is matched, declared or failed."""
    steps = [step for result in results for step in result.steps if step.outcome is not Outcome.ASIDE]
    counts = {outcome: sum(step.outcome is outcome for step in steps) for outcome in Outcome}
    return {
        "scenarios": len(results),
        "steps": len(steps),
        "matched": counts[Outcome.MATCHED],
        "declared": counts[Outcome.DECLARED],
        "failed": counts[Outcome.FAILED],
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/conformance", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIR", help="a folder of transcripts, *.txt")
    parser.add_argument("--only", metavar="TEXT", help="only files whose name has this text")
    parser.add_argument("--lua", type=Path, help="the site's burst_buffer.lua [DIR/../lua/burst_buffer.lua]")
    parser.add_argument("--bin", type=Path, help="where dw_wlm_cli and dwstat are [DIR/../bin]")
    parser.add_argument("--conf", type=Path, help="where pools.json is [DIR/../conf]")
    parser.add_argument("--differences", type=Path, default=DIFFERENCES, help="the declared differences")
    parser.add_argument("--speed", type=float, default=1.0, help="divides all waiting and all sleeping [1]")
    parser.add_argument("--transient", type=float, default=1.5, help="seconds that Forebay may show more than Slurm")
    parser.add_argument("--jobs", type=int, default=AT_ONCE, help=f"transcripts at once [{AT_ONCE}]")
    parser.add_argument("--replicas", type=int, choices=(1, 3), default=1, help="replicas of each cluster [1]")
    parser.add_argument("--declared", action="store_true", help="print each use of a declared difference, too")
    parser.add_argument("--keep", action="store_true", help="keep the clusters' directories")
    options = parser.parse_args()
    if not 0.1 <= options.speed <= 20 or options.jobs < 1:
        parser.error("--speed is from 0.1 to 20, --jobs at least 1")
    return options


def main() -> int:
    """Run the command line; return the exit code."""
    options = _arguments()
    try:
        differences = read_differences(options.differences)
        files = sorted(
            path for path in options.directory.glob("*.txt") if not options.only or options.only in path.name
        )
    except DifferencesError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return USAGE
    transcripts: list[Transcript] = []
    bad: list[tuple[str, Result]] = []
    for path in files:
        try:
            transcripts += read_transcript(path)
        except TranscriptError as error:
            print(f"conformance: {error}", file=sys.stderr)
            bad.append((path.name, refused(path.name, error.line, error.sentence)))
    if not transcripts:
        print(f"conformance: there are no transcripts (*.txt) in {options.directory}", file=sys.stderr)
        return USAGE
    directory = Path(tempfile.mkdtemp(prefix="forebay-conformance-")).resolve()
    os.chmod(directory, 0o755)
    try:
        results = asyncio.run(_run(transcripts, options, differences, directory))
    except asyncio.CancelledError:
        print("conformance: ended before the end", file=sys.stderr)
        return INTERRUPTED
    finally:
        if options.keep:
            print(f"conformance: logs and data are in {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)
    for file, result in bad:
        _report(result, file, differences, declared=options.declared)
    results += [result for _, result in bad]
    print(f"\n{len(differences.used)} of {len(differences.rows)} declared differences were used:")
    for row in differences.rows:
        if differences.used[row.id]:
            print(f"  {differences.used[row.id]:4} x {row.id}: {row.what} ({row.why})")
    found = summary(results)
    print(json.dumps(found), flush=True)
    return 0 if found["failed"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
