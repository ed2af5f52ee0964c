"""Holds burst_buffer.lua to the grammar: what Forebay accepts of a job that Slurm schedules, the script accepts too."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from forebay.cluster.slurm import PARTS, script_parts
from forebay.replica.grammar import (
    DirectiveRejected,
    external_job_tables,
    find_overlap,
    read_external_job_request,
    with_file_name,
)
from forebay.replica.model import BufferRequest, JobRequest, Transfer, expand_job_symbols
from forebay.replica.values import UnknownSymbol
from tests.fuzzing.generator import NAMES, PATHS, SIZES, _lines, _mutated

CHECK: Final = Path(__file__).with_name("check.lua")
INTERPRETERS: Final = ("lua5.1", "lua5.2", "lua5.3", "lua5.4")
CASES_PER_PROCESS: Final = 5_000
DIRECTIVES: Final = ("BB_LUA", "BB_LUA", "DW")
POOLS: Final = dict.fromkeys(NAMES[:4], 2**62)
"""Pools of the site and what each has, bytes."""

SHOWN_MAX: Final = 5
"""Differences that are printed, count."""

ACCEPTED, REFUSED, ELSEWHERE, LAXER, STRICTER = "accepted", "rejected", "refused elsewhere", "laxer", "stricter"
"""Both accept; both refuse, naming the same place or another; only Forebay refuses; only the script does."""


class ExternalJobCase(NamedTuple):
    """One script, and the word of the site's directives."""

    script: str
    directive: str


class Difference(NamedTuple):
    """What the two said of one case; empty: accepted."""

    case: ExternalJobCase
    forebay: str
    lua: str


def interpreters() -> list[str]:
    """Return the Lua interpreters that are installed."""
    return [name for name in INTERPRETERS if shutil.which(name)]


def make_external_job_case(random: Random) -> ExternalJobCase:
    """Return the next case of this source of randomness."""
    directive = random.choice(DIRECTIVES)
    kind = f"#{directive}"
    size, pool = random.choice(SIZES[2:5] if random.random() < 0.9 else SIZES), random.choice(NAMES[:4])
    options = [f"capacity={size}", f"pool={pool}"]
    if random.random() < 0.3:
        options.append(random.choice(("type=scratch", "access_mode=striped", "access_mode=striped,ldbalance", "x=y")))
    random.shuffle(options)
    space = f"{kind} {random.choice(('jobdw ', ''))}{' '.join(options)}"
    moves = []
    for _ in range(random.choice((0, 0, 1, 2))):
        outside = random.choice((*PATHS[:3], *PATHS[:3], "in/a", "/in/$USER/*.h5", "/in/[ab]"))
        inside = random.choice((PATHS[5], PATHS[5], PATHS[7], PATHS[8], PATHS[6], "$DW_JOB_STRIPED/*"))
        what = random.choice(("file", "file", "directory", "list"))
        choice = random.choice(("", "", " acls=yes", " links=follow", " backend=rsync", " colour=red", " # a comment"))
        if random.random() < 0.2:
            stage = random.choice(("in", "out"))
            source, into = (outside, inside) if stage == "in" else (inside, outside)
            moves.append(f"{kind} copy_{stage} source={source} destination={into}{choice}")
        elif random.random() < 0.5:
            moves.append(f"{kind} stage_in type={what} source={outside} destination={inside}{choice}")
        else:
            source, into = (outside, outside) if what == "list" else (inside, outside)
            moves.append(f"{kind} stage_out type={what} source={source} destination={into}{choice}")
    lines = [space, *moves]
    random.shuffle(lines)
    if random.random() < 0.2:
        lines.insert(random.randrange(len(lines) + 1), random.choice(("", "#SBATCH -n1", "# a comment", "#BB x", " ")))
    if random.random() < 0.2:
        line = random.randrange(len(lines))
        words = lines[line].split(" ")
        cut = random.randrange(1, len(words) + 1)
        lines[line] = " ".join(words[:cut]) + f" \\\n{kind} " + " ".join(words[cut:])
    text = "#!/bin/sh\n" + "\n".join(lines) + "\ntrue\n"
    if random.random() < 0.3:
        text = "#!/bin/sh\n" + _lines(random).replace("#DW", kind) + text[10:]
    if random.random() < 0.6:
        text = _mutated(random, text)
    return ExternalJobCase(text, directive)


def site_of(directive: str) -> dict[str, Any]:
    """Return the tables of a site, as the bridge writes them."""
    pools = [{"id": name, "quantity": size // 2**20, "granularity": 2**20} for name, size in POOLS.items()]
    return {**external_job_tables(), "directive": directive, "pools": pools}


def asked_of_forebay(case: ExternalJobCase) -> str:
    """Return why Forebay refuses a case, with its place; empty where it accepts it."""
    try:
        request = read_external_job_request(case.script, directive=case.directive).request
    except DirectiveRejected as refused:
        return str(refused)
    if request is None:
        return ""
    overlap = _overlap_of(request)
    if overlap:
        return overlap
    if request.pool not in POOLS:
        return f"{request.places[0]}: pool {request.pool!r} does not exist"
    if request.capacity_bytes > POOLS[request.pool]:
        return f"{request.places[1]}: more than the pool has"
    return ""


def _overlap_of(request: BufferRequest) -> str:
    """Return why Forebay rejects the destinations of a request, with their place; empty if it does not."""
    job, places = JobRequest("job", "alan", "", "/work", 60), iter(request.places[2:])
    try:
        lists = [
            replace(
                each,
                source=expand_job_symbols(each.source, job, 1),
                destination=expand_job_symbols(each.destination, job, 1),
            )
            for each in request.lists
        ]
        for outgoing, transfers in ((False, request.stage_in), (True, request.stage_out)):
            copies = []
            for each in transfers:
                whole = Transfer(
                    each.kind,
                    expand_job_symbols(each.outside, job, 1),
                    expand_job_symbols(each.inside, job, 1),
                    expand_job_symbols(each.pattern, job, 1),
                )
                copies.append((with_file_name(whole, outgoing=outgoing), next(places)))
            rejection = find_overlap(copies, lists, outgoing=outgoing)
            if rejection is not None:
                return f"{rejection.place}: {rejection.sentence}"
    except UnknownSymbol:
        return ""
    return ""


CPU_S = 120
"""Seconds of a processor that the script may take for any number of cases."""


def asked_of_lua(interpreter: str, cases: list[ExternalJobCase], directory: Path, cpu_s: int = CPU_S) -> list[str]:
    """Return what the script says of cases that have one directive, in their order; it is killed after `cpu_s`."""
    if not cases:
        return []
    site = directory / "site.json"
    site.write_text(json.dumps(site_of(cases[0].directive)))
    said = b"".join(
        b"%d\n%s" % (len(text), text) for case in cases for text in [case.script.encode("utf-8", "surrogatepass")]
    )
    parts = directory / PARTS
    parts.mkdir(exist_ok=True)
    for name, text in script_parts().items():
        (parts / name).write_text(text)
    command = ["prlimit", f"--cpu={cpu_s}", interpreter, str(CHECK), str(directory), str(site)]
    done = subprocess.run(command, input=said, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode("utf-8", "replace"))
    found = done.stdout.decode("utf-8", "replace").split("\n")[:-1]
    assert len(found) == len(cases), (len(found), len(cases))
    return found


def compare(interpreter: str, cases: list[ExternalJobCase], directory: Path) -> list[Difference]:
    """Return what both said of each case."""
    found = []
    for directive in sorted({case.directive for case in cases}):
        same = [case for case in cases if case.directive == directive]
        for case, lua in zip(same, asked_of_lua(interpreter, same, directory), strict=True):
            found.append(Difference(case, asked_of_forebay(case), lua))
    return found


def kind_of(difference: Difference) -> str:
    """Return how the two answers compare."""
    forebay, lua = difference.forebay, difference.lua
    if not forebay or not lua:
        return ACCEPTED if forebay == lua else STRICTER if lua else LAXER
    return REFUSED if place_of(forebay) == place_of(lua) else ELSEWHERE


def place_of(sentence: str) -> str:
    """Return where a rejection says that the fault is."""
    return sentence.partition(": ")[0]


def main(arguments: list[str] | None = None) -> int:
    """Run until the number of cases is reached; 1 where the script refuses what Forebay accepts."""
    parser = argparse.ArgumentParser(
        prog="scripts/fuzz --external-jobs", description="Hold burst_buffer.lua to the grammar."
    )
    parser.add_argument("--external-jobs", action="store_true", help="what this is")
    parser.add_argument("--cases", type=int, default=100_000, help="how many cases, all interpreters together")
    parser.add_argument("--seed", type=int, default=1, help="where the randomness begins")
    chosen = parser.parse_args(arguments)
    found = interpreters()
    if not found:
        print("scripts/fuzz: no Lua is installed; scripts/install-backends --slurm installs it")
        return 1
    count: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory:
        for begin in range(0, chosen.cases, CASES_PER_PROCESS):
            numbers = range(begin, min(begin + CASES_PER_PROCESS, chosen.cases))
            cases = [make_external_job_case(Random(f"{chosen.seed}:{number}")) for number in numbers]
            for one in compare(found[begin // CASES_PER_PROCESS % len(found)], cases, Path(directory)):
                count[kind_of(one)] += 1
                if kind_of(one) == STRICTER and count[STRICTER] <= SHOWN_MAX:
                    print(f"refused by Lua only: {one.case!r}\n  {one.lua}")
    print(json.dumps({"seed": chosen.seed, "interpreters": found, "cases": chosen.cases, **count}))
    return 1 if count[STRICTER] else 0
