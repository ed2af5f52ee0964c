"""Job scripts as users of DataWarp write them (tests/slurm/datawarp), each checked against what Slurm's guide says.

The comments at the head of a script say which sentence of the guide it is about, and how it ends:

    # documented: …        # behaviour that the guide documents
    # ends: COMPLETED      # state in which the job ends; or
    # rejected: TEXT       # part of the message with which sbatch rejects it; or
    # held: TEXT           # part of the Reason with which the job is held
    # result: NAME         # file of the results that equals the input
    # tasks: N             # tasks of the array that all end so
    # sbatch: OPTIONS      # further options
    # bbf: DIRECTIVE       # line of a file for --bbf
    # after: SCRIPT        # script after which this one is run; afterburstbuffer: SCRIPT likewise
"""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Final, NamedTuple

from forebay.cluster.client import Client
from tests.slurm.exercises.arrays import all_tasks
from tests.slurm.exercises.common import Figures, exported, nothing_left, require
from tests.slurm.site import RunFailed, Site
from tests.slurm.slurm import PATIENCE_S

SCRIPTS: Final = Path(__file__).parents[1] / "datawarp"

ENDS_S: Final = 2 * PATIENCE_S
"""Seconds in which a job ends: all are submitted at once, and one runs until its time limit."""

_KEYS: Final = frozenset(
    ("documented", "ends", "rejected", "held", "result", "tasks", "sbatch", "bbf", "after", "afterburstbuffer")
)


class Script(NamedTuple):
    """One script, with what its head says."""

    name: str
    text: str
    head: dict[str, list[str]]

    def value(self, key: str) -> str:
        """Return the value of a key that is written at most once, empty where it is not."""
        return self.head.get(key, [""])[0]

    @property
    def follows(self) -> str:
        """The script after which this one is run."""
        return self.value("after") or self.value("afterburstbuffer")


def read_scripts() -> list[Script]:
    """Return all scripts, each behind the one that it follows."""
    scripts = {}
    for path in sorted(SCRIPTS.glob("*.sh")):
        text, head = path.read_text(), dict[str, list[str]]()
        for line in text.splitlines():
            key, separator, value = line.removeprefix("# ").partition(": ")
            if line.startswith("# ") and separator and key in _KEYS:
                head.setdefault(key, []).append(value)
        scripts[path.stem] = Script(path.stem, text, head)

    def depth(script: Script) -> int:
        return 1 + depth(scripts[script.follows]) if script.follows else 0

    return sorted(scripts.values(), key=depth)


async def datawarp_scripts(site: Site, client: Client, size: int, seed: int) -> Figures:
    """Every script of tests/slurm/datawarp is accepted or rejected, runs, and leaves what its head says."""
    require(site.plugin == "datawarp", "datawarp-scripts: these are scripts of DataWarp; add --plugin datawarp")
    data = site.make_input("data")
    # What is cancelled before it has run lingers: here for a moment only.
    await asyncio.to_thread(site.cluster.forebay, "config", "set", "ExternalJobLinger=1")
    leaf = site.input / "tree" / "leaf"
    leaf.parent.mkdir()
    leaf.write_bytes(data)
    scripts = read_scripts()
    jobs: dict[str, str] = {}
    wrong: list[str] = []
    rejected = 0
    for script in scripts:
        words = _options(site, script)
        if script.follows:
            kind = "afterany" if script.value("after") else "afterburstbuffer"
            words.append(f"--dependency={kind}:{jobs[script.follows]}")
        done = await site.ask("sbatch", *words, script=_placed(site, script.text))
        said = done.stderr.strip() or done.stdout.strip()
        if expected := script.value("rejected"):
            rejected += 1
            if done.returncode == 0 or expected not in said:
                wrong.append(f"{script.name}: sbatch ended with {done.returncode}: {said}")
        elif done.returncode != 0:
            raise RunFailed(f"{script.name}: sbatch rejected it: {said}")
        else:
            jobs[script.name] = done.stdout.split()[-1]
    for script in scripts:
        if script.name in jobs:
            try:
                await _ends(site, script, jobs[script.name], data)
            except RunFailed as error:
                wrong.append(f"{script.name}: {error}")
                await site.ask("scancel", jobs[script.name])
            print(
                f"{script.name}: {'not as documented' if wrong[-1:] and wrong[-1].startswith(script.name) else 'ok'}",
                flush=True,
            )
    require(not wrong, "not as documented: " + "; ".join(wrong))
    await nothing_left(site, client)
    return {"scripts": len(scripts), "rejected": rejected}


def _placed(site: Site, text: str) -> str:
    places = {"@INPUT@": str(site.input), "@RESULTS@": str(site.results), "@USER@": site.account.pw_name}
    for word, place in places.items():
        text = text.replace(word, place)
    return text.replace("#!/bin/sh\n", "#!/bin/sh\n#SBATCH -o /dev/null\n", 1)


def _options(site: Site, script: Script) -> list[str]:
    """Return the options of sbatch; directives for --bbf are written into a file."""
    words = [word for line in script.head.get("sbatch", ()) for word in shlex.split(_placed(site, line))]
    if lines := script.head.get("bbf"):
        file = site.directory / f"{script.name}.directives"
        file.write_text("".join(f"{_placed(site, line)}\n" for line in lines))
        words.append(f"--bbf={file}")
    return words


async def _ends(site: Site, script: Script, job: str, data: bytes) -> None:
    if expected := script.value("held"):

        async def is_held() -> str:
            shown = (await site.ask("scontrol", "show", "job", job)).stdout
            return shown if "Priority=0 " in shown else ""

        shown = str(await site.until(f"job {job} is held", is_held))
        require(expected.replace(" ", "_") in shown, f"its Reason is not {expected!r}: {shown}")
        await site.ask("scancel", job)
        return
    if tasks := script.value("tasks"):
        await all_tasks(site, job, int(tasks))
    else:
        ended = await site.over(job, ENDS_S)
        if ended.state != script.value("ends"):
            code = next(
                (
                    word
                    for word in (await site.ask("scontrol", "show", "job", job)).stdout.split()
                    if word.startswith("ExitCode=")
                ),
                "",
            )
            raise RunFailed(f"job {job} ended as {ended}, {code}")
    for name in script.head.get("result", ()):
        exported(site, _placed(site, name), data)
