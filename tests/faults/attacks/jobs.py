"""Attacks by jobs on their node: keys, capacity, names of buffers, results, and programs."""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import stat
from pathlib import Path
from typing import Final

from forebay.cluster.agent.limits import BUFFER_DEPTH_MAX
from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.requests import ClearRequest, DrainRequest
from forebay.replica.grammar.settings import KEYS, ValueKind
from tests.faults import verify
from tests.faults.attacks.sites import (
    IS_ROOT,
    LUA_NAME,
    PATIENCE_S,
    RunFailed,
    nodes_are_there,
    run_job,
    seen,
    submitted,
    until,
)
from tests.faults.local_cluster import LocalCluster

PUBLIC: Final = {".pem", ".toml", ".lua"}
"""What anybody may know: certificates, the configuration, which names no secrets, and the site's program."""

SECRET_VARIABLE: Final = "FOREBAY_QUICK_START"
"""A variable that replicas and agents have: who reads it has read the environment of somebody else."""

# A socket may be written to by everybody on purpose, the gateway above all: the kernel says who has connected.
TRIES: Final = f"""#!/bin/sh
#SBATCH -t 1
exec 2>/dev/null
id -u >tried
while read -r path; do
    [ -e "$path" ] && head -c 1 "$path" >/dev/null && echo "read $path" >>tried
    [ -d "$path" ] && ls "$path" >/dev/null && echo "listed $path" >>tried
    [ -e "$path" ] && [ ! -S "$path" ] && [ -w "$path" ] && echo "may write $path" >>tried
done <private
for process in /proc/[0-9]*; do
    [ "$process" != "/proc/$$" ] && tr '\\0' '\\n' <"$process/environ" | grep -q '^{SECRET_VARIABLE}=' \\
        && echo "read the environment of $(tr '\\0' ' ' <"$process/cmdline")" >>tried
done
echo over >>tried
"""
"""A job that tries to read, list and change each path that the file `private` names, and says in `tried` what it could.

What it has to pass on the way to its own buffer may be read by name, and not listed or changed."""

ENDLESS: Final = "while :; do sleep 0.1; done"
"""What a script does that was not ended: it would wait for its time limit."""

WRITES: Final = {
    "300MiB": ("dd if=/dev/zero of=big bs=1M count=300 2>/dev/null", "(limit: 1 MiB)"),
    "20000-files": ("i=0; while [ $i -lt 20000 ]; do : > $i; i=$((i+1)); done", "(limit for 1 MiB: 10"),
    "removed": ("exec 3>gone; rm gone; dd if=/dev/zero bs=1M count=30 >&3 2>/dev/null", "(limit: 1 MiB)"),
    "reserved": (": > reserved; fallocate -n -l 300M reserved", "of blocks, although its files are smaller"),
    "deep": (
        f"i=0; while [ $i -le {BUFFER_DEPTH_MAX} ]; do mkdir d; cd -P d; i=$((i+1)); done",
        "nested too deeply",
    ),
}
"""What a script writes into a buffer of 1 MiB, and what it is told."""

BUFFER: Final = "#DW jobdw capacity=1MiB access_mode=striped type=scratch"

THESIS: Final = "the only copy of a thesis"


def private(site: Path) -> list[Path]:
    """Return everything of a cluster but what is public, what jobs work in, their buffers, and logs of these tests."""
    open_to_all = {"buffers", "work", "logs"}
    return [
        path
        for path in sorted(site.rglob("*"))
        if path.suffix not in PUBLIC and not open_to_all & set(path.relative_to(site).parts)
    ]


async def keys(site: LocalCluster, jobs: int) -> dict[str, int]:
    """Let jobs of a cluster as it was founded try all that is not theirs."""
    found = private(site.directory)
    if not {"ca.key", "operator.key", "n1.key", "r1.key"} <= {path.name for path in found}:
        raise RunFailed(f"there is nothing to steal: {found}")
    (site.work / "private").write_text("".join(f"{path}\n" for path in found))
    async with site.client(site.user) as client:
        for _ in range(jobs):
            await run_job(site, client, "keys", *TRIES.splitlines()[1:])
            uid, *could = (site.work / "tried").read_text().splitlines()
            if uid == "0" or could != ["over"]:
                raise RunFailed(f"a job that ran as uid {uid} could do this: {could}")
    return {"jobs": jobs, "paths": len(found)}


async def capacity(site: LocalCluster, jobs: int) -> dict[str, int]:
    """Write over the capacity of a buffer, each job in another way, as many at a time as there are ways."""
    async with site.client(site.user) as client:
        await nodes_are_there(client)
        nodes = (await client.call(ops.LIST_NODES)).nodes
        held = all(node.process_control == "cgroup" for node in nodes)
        # Without a cgroup nothing says which processes are the job's, so removed files are not counted.
        kinds = itertools.islice(itertools.cycle([kind for kind in WRITES if held or kind != "removed"]), jobs)
        while some := list(itertools.islice(kinds, len(WRITES))):
            await asyncio.gather(*(_writes_over(site, client, kind) for kind in some))
    return {"jobs": jobs}


async def watch(site: LocalCluster, files: int) -> dict[str, int]:
    """Fill one buffer with empty files, and write over the capacity of another meanwhile."""
    filled = site.work / "filled"
    filled.unlink(missing_ok=True)
    async with site.client(site.user) as client:
        hog = await submitted(
            site, client, "hog", BUFFER.replace("1MiB", f"{-(-files // 1024)}MiB"), 'cd "$DW_JOB_STRIPED" || exit 9',
            f"i=0; while [ $i -lt {files} ]; do : > $i; i=$((i+1)); done; : > {filled}", ENDLESS,
        )  # fmt: skip
        await until("a buffer that is full of files", filled.exists)
        await _writes_over(site, client, "300MiB")
        await client.call(ops.CANCEL_JOB, id=hog)
    return {"files": files}


async def _writes_over(site: LocalCluster, client: Client, kind: str) -> None:
    writes, told = WRITES[kind]
    lines = (BUFFER, 'trap "" TERM', 'cd "$DW_JOB_STRIPED" || exit 9', writes, ENDLESS)
    view = await run_job(site, client, kind, *lines)
    if (view.state, view.signal) != ("FAILED", 9):
        raise RunFailed(f"a job that wrote {kind} ended {view.state}: {view.system_comment or view.reason}")
    rows = (await client.call(ops.SHOW_JOB_HISTORY, id=view.job_id)).rows
    if not any(told in f"{row.sentence} {row.detail}" for row in rows):
        raise RunFailed(f"a job that wrote {kind} is not told why it ended: {view.system_comment!r}")


async def names(site: LocalCluster, rounds: int) -> dict[str, int]:
    """Read what a cleared buffer held, as the next user of its name."""
    lake = '"$DW_PERSISTENT_STRIPED_lake"'
    makes = ("#BB create_persistent name=lake capacity=1MiB", "#DW persistentdw name=lake")
    looks = f"(find {lake}; cat {lake}/* {lake}/../*/* {lake}/../.*/*) >looked 2>/dev/null"
    async with site.client("operator") as operator, site.client(site.user) as client:
        # One node, so that the next buffer lies where the last one lay.
        await nodes_are_there(client)
        drain = DrainRequest(command_id=operator.new_command_id(), reason="attack")
        await operator.call(ops.DRAIN_NODE, drain, name="n2")
        await asyncio.to_thread(site.forebay, "config", "set", "Flags=EnablePersistent")
        for _ in range(rounds):
            wrote = await run_job(site, client, "writes", *makes, f"echo '{THESIS}' >{lake}/thesis")
            if THESIS not in _beneath(site.directory / "n1" / "persistent"):
                raise RunFailed(f"nothing was written that could be read: {wrote}")
            await _cleared(operator)
            read = await run_job(site, client, "reads", *makes, looks, "true")
            looked = (site.work / "looked").read_text()
            if read.state != "COMPLETED" or "thesis" in looked:
                raise RunFailed(f"the next user of the name found {looked!r} ({read.state})")
            await _cleared(operator)
        await operator.call(ops.RESUME_NODE, name="n2")
    return {"cleared": 2 * rounds}


async def _cleared(operator: Client) -> None:
    clear = ClearRequest(command_id=operator.new_command_id(), discard=True)
    await operator.call(ops.CLEAR_PERSISTENT_BUFFER, clear, name="lake")


def _beneath(directory: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in directory.rglob("*") if path.is_file())


async def results(site: LocalCluster, rounds: int) -> dict[str, int]:
    """Stage out trees with links that lead out, modes that hide what is in them, and programs that change the user."""
    key = site.directory / "tls" / "operator.key"
    uid = pwd.getpwnam(site.user).pw_uid if IS_ROOT else os.geteuid()
    arrived_count = 0
    hostile = (
        f"ln -s {key} key", f"ln -s {key.parent} tls", "ln -s ../../../../../../../../etc up", "ln -s loop loop",
        f"ln -s ../../../../../tls/{key.name} near", "mkdir d; ln -s ../.. d/out",
    )  # fmt: skip
    async with site.client(site.user) as client:
        for number in range(rounds):
            for kind, links in (("honest", ()), ("hostile", hostile)):
                to = site.work / f"{kind}{number}"
                view_id = await submitted(
                    site, client, kind, BUFFER,
                    f"#DW stage_out type=directory source=$DW_JOB_STRIPED/out destination={to}",
                    'mkdir -m 700 "$DW_JOB_STRIPED/out"; cd "$DW_JOB_STRIPED/out" || exit 9',
                    "mkdir step100; echo done >step100/word; ln -s step100 latest; mkdir -m 1770 shared",
                    "cp /bin/true changes; chmod 6755 changes; umask 077; echo mine >mine", *links,
                )  # fmt: skip
                view = await seen(
                    client, view_id, lambda job: verify.over(job) or bool(job.state == "STAGE_OUT" and job.hold)
                    or job.burst_buffer_state == "teardown_failed" or _is_stuck(job.reason),
                )  # fmt: skip
                if kind == "honest" and view.state != "COMPLETED":
                    raise RunFailed(f"honest results did not arrive: {view}")
                arrived_count += _check_results(to, key, uid, honest=kind == "honest")
                if not verify.over(view):
                    await client.call(ops.CANCEL_JOB, id=view_id)
    return {"trees": 2 * rounds, "arrived": arrived_count}


def _is_stuck(reason: str) -> bool:
    return reason.startswith("BurstBufferOperation")


def _check_results(to: Path, key: Path, uid: int, *, honest: bool) -> int:
    """Return how many files and directories arrived; RunFailed if one of them is more than the job's user may have."""
    secret = key.read_bytes()
    count = 0
    if honest and (stat.S_IMODE(to.stat().st_mode), os.readlink(to / "latest")) != (0o700, "step100"):
        raise RunFailed(f"a directory of mode 0700 arrived as {to.stat().st_mode:o}")
    for path in [to, *to.rglob("*")] if to.exists() else []:
        status = path.lstat()
        count += 1
        if status.st_uid != uid:
            raise RunFailed(f"{path} belongs to user id {status.st_uid}")
        if path.is_symlink():
            # What it says is its user's business, as long as it was not followed.
            continue
        if stat.S_ISREG(status.st_mode) and secret in path.read_bytes():
            raise RunFailed(f"{path} has what is in {key}")
        if path.name == "mine" and status.st_mode & 0o077:
            raise RunFailed(f"{path}, a file of mode 0600, arrived as {status.st_mode:o}")
    return count


async def programs(site: LocalCluster, jobs: int) -> dict[str, int]:
    """As an operator, name the text of a user's job as each program that a configuration can name."""
    ran = site.work / "ran"
    # Who is root, or runs it as a file of the agent that is no job's script, is Forebay itself.
    says = (
        f'case "$0" in */calls/*) echo "$0 as $(id -u)" >>{ran}; exit 0;; esac; [ "$(id -u)" = 0 ] && echo "$0" >>{ran}'
    )
    naming = [key.name for key in KEYS if key.kind is ValueKind.PROGRAM]
    named = tried = 0
    async with site.client("operator") as operator, site.client(site.user) as client:
        settings = (await operator.call(ops.SHOW_CONFIGURATION)).settings
        former = next(row.value for row in settings if row.key == "BurstBufferType")

        async def configure(*words: str) -> None:
            await asyncio.to_thread(site.forebay, "config", "set", *words)

        for _ in range(jobs):
            # The agent keeps the text of a job for the programs of a provider.
            await configure("BurstBufferType=lua", f"LuaScript={site.directory / LUA_NAME}")
            attacker = await submitted(site, client, "attacker", "#BB_LUA", says, "sleep 600")
            await seen(client, attacker, lambda job: job.state == "RUNNING")
            texts = list(site.directory.glob(f"n*/calls/{attacker}/script"))
            if not texts:
                raise RunFailed(f"the text of job {attacker} is not kept for a provider")
            for kind, text in itertools.product(("datawarp", "generic"), texts):
                await configure(f"BurstBufferType={kind}", "PollInterval=1", *(f"{name}={text}" for name in naming))
                named += len(naming)
                victim = await submitted(site, client, "victim", BUFFER, "true", may_be_refused=True)
                if victim:
                    await _tried(client, victim)
                tried += 1
            await configure(f"BurstBufferType={former}", *(f"{name}=" for name in naming))
            await client.call(ops.CANCEL_JOB, id=attacker)
        if ran.exists():
            raise RunFailed(f"a user's text was run by Forebay itself: {ran.read_text()}")
    return {"programs_named": named, "jobs": tried}


async def _tried(client: Client, job: int) -> None:
    """Wait until something was tried for a job: it is stuck, over, or held."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                view = await client.call(ops.SHOW_JOB, id=job)
            except ApiError:
                return
            if verify.over(view) or view.system_comment or view.hold:
                return
            await asyncio.sleep(0.1)
