"""Every kind of transfer in a real cluster: lists, commands, persistent buffers, and a program of the site."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cluster.client import Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.jobs import JobView
from forebay.replica.messages.features import FEATURE_LEVEL_KNOWN
from tests.faults.local_cluster import USER, LocalCluster

DEADLINE_S = 60.0
"""Seconds that a job may take here: a bound against hanging, not a measure of speed."""

OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = LocalCluster(tmp_path / "c")
    made.found({"fast": "64MiB/1MiB,default"}, "1GiB")
    with made.file.open("a") as file:
        file.write('\n[provider]\nallowed_programs = ["/bin/cp"]\n')
    made.start_all()
    yield made
    made.stop_all()
    for log in sorted((tmp_path / "c" / "logs").glob("*.log")):
        print(log.name, log.read_text(errors="replace"), sep="\n")


async def run(cluster: LocalCluster, client: Client, name: str, *lines: str, bb: str = "") -> JobView:
    """Submit a script as a user would, and return the job when it is over."""
    script = cluster.work / name
    script.write_text("\n".join(("#!/bin/sh", *lines, "")))
    words = ["submit", "--json", "--chdir", str(cluster.work), *(["--bb", bb] if bb else []), str(script)]
    line = cluster.command(*words, identity="operator" if "persistent" in name else USER)
    done = await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    job = int(json.loads(done.stdout)["job_id"])
    async with asyncio.timeout(DEADLINE_S):
        while True:
            view = await client.call(ops.SHOW_JOB, id=job)
            if view.state in OVER and view.burst_buffer_state in ("", "complete", None):
                return view
            await asyncio.sleep(0.1)


@pytest.mark.campaign(3)
def test_a_job_uses_lists_persistent_buffers_and_programs_end_to_end(
    cluster: LocalCluster,
) -> None:
    asyncio.run(story(cluster))


async def story(cluster: LocalCluster) -> None:
    inputs, work = cluster.work / "input", cluster.work
    inputs.mkdir(exist_ok=True)
    for name in ("a", "b b"):
        (inputs / name).write_text(name)
    (inputs / "list").write_text(f"# what to stage\n{inputs}/a\n{inputs}/b b\n")
    (inputs / "back").write_text("$DW_JOB_STRIPED/result\n")
    async with cluster.client() as client:
        async with asyncio.timeout(DEADLINE_S):
            # The leader raises the feature level of a new cluster a moment after its founding.
            while (await client.call(ops.SHOW_FEATURE_LEVEL)).feature_level < FEATURE_LEVEL_KNOWN:
                await asyncio.sleep(0.05)
        await asyncio.to_thread(cluster.forebay, "config", "set", "Flags=EnablePersistent")
        await asyncio.to_thread(
            cluster.forebay,
            "config",
            "set",
            "TransferBackends=native,command,template",
            "TransferTemplate=/bin/cp -aT {source} {destination}",
        )
        listed = await run(
            cluster,
            client,
            "listed",
            "#DW jobdw capacity=1MiB",
            f"#DW stage_in type=list source={inputs}/list destination=$DW_JOB_STRIPED/in",
            f"#DW stage_out type=list source={inputs}/back destination={work}/listed-out",
            'cat "$DW_JOB_STRIPED/in/a" "$DW_JOB_STRIPED/in/b b" >"$DW_JOB_STRIPED/result"',
        )
        assert listed.state == "COMPLETED", listed
        assert (work / "listed-out" / "result").read_text() == "ab b"

        commanded = await run(
            cluster,
            client,
            "commanded",
            'wc -c <"$DW_JOB_STRIPED/a" >"$DW_JOB_STRIPED/size"',
            bb=f'capacity=0.001; stage_in:cp {inputs}/a "$DW_JOB_STRIPED/a"; stage_out:cp "$DW_JOB_STRIPED/size" size',
        )
        assert commanded.state == "COMPLETED", commanded
        assert (work / "size").read_text().strip() == "1"

        filled = await run(
            cluster,
            client,
            "make-persistent",
            "#BB create_persistent name=lake capacity=1MiB",
            "#DW persistentdw name=lake",
            f"#DW stage_in type=file source={inputs}/a destination=$DW_PERSISTENT_STRIPED_lake/d/a",
            'cp "$DW_PERSISTENT_STRIPED_lake/d/a" "$DW_PERSISTENT_STRIPED_lake/d/copy"',
        )
        assert filled.state == "COMPLETED", filled
        emptied = await run(
            cluster,
            client,
            "empty-persistent",
            "#DW persistentdw name=lake",
            "#DW stage_out type=directory source=$DW_PERSISTENT_STRIPED_lake/d"
            f" destination={work}/lake move=yes backend=template",
            "true",
        )
        assert emptied.state == "COMPLETED", emptied
        assert sorted(path.name for path in (work / "lake").iterdir()) == ["a", "copy"]
        assert not [path for path in cluster.directory.rglob("persistent/lake/**/*") if path.is_file()]
