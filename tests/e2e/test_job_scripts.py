"""Job scripts in the styles of sites and workflow managers, submitted with only their paths changed.

The scripts are in `job_scripts/NN-style.sh`. Each prints `finished` last. Commands of their clusters, such as `srun`
and `module`, are shell functions here.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.account import OWN
from tests.ports import free_ports

FOREBAY = Path(sys.executable).with_name("forebay")
SCRIPTS = sorted((Path(__file__).parent / "job_scripts").glob("*.sh"))
PORTS = 14
TIMEOUT_S = 120
"""Seconds that a step may take: a bound against hanging."""

PATHS: Final = ("/global/cfs/cdirs/m1234", "/scratch/k1234", "/lus/grand/projects/mat", "/scratch1/01234/ada")
"""Directories of the scripts' sites."""

REJECTED: Final = {
    "08-nersc-four-nodes": "line 2, column 17: the job requests 4 nodes",
    "14-kaust-ranks-of-four-nodes": "line 3, column 12: the job requests 4 nodes",
    "22-tacc-hybrid-ten-nodes": "line 5, column 12: the job requests 10 nodes",
}
"""Scripts that need several nodes -> error message."""

WARNED: Final = {
    "01-nersc-cpu-node": "--constraint, --account=m1234, --qos=regular",
    "02-nersc-gpu-node": "--constraint, --gpus-per-task, --gpu-bind, --account=m1234_g, --qos=debug",
    "03-nersc-shared-node": "--constraint, --mem, --qos=shared, --licenses=cfs",
    "04-nersc-container": "--image, --module, --constraint, --qos=regular",
    "05-nersc-array": "--constraint, --qos=debug, --licenses=SCRATCH",
    "06-nersc-checkpoint": "--constraint, --time-min, --qos=flex",
    "07-nersc-burst-buffer": "--constraint, --qos=premium",
    "09-kaust-ibex-gpu": "--gres, --constraint, --mem",
    "10-kaust-ibex-exclusive": "--contiguous, --mem, --exclude",
    "11-kaust-shaheen-mpi": "--hint, --account=k1234",
    "12-kaust-datawarp": "--account=k1234",
    "13-kaust-licence": "--mem-per-cpu, --licenses=matlab@kaust:1, --licenses=simulink@kaust:2",
    "15-alcf-ranks": "--distribution, --switches, --account=mat",
    "16-alcf-ensemble": "--overcommit, --account=mat",
    "17-alcf-environment": "--threads-per-core, --profile, --wckey, --export=ALL",
    "18-alcf-python": "--mem, --get-user-env, --account=mat",
    "19-tacc-serial": "--account=myproject",
    "20-tacc-openmp": "--account=project",
    "21-tacc-mpi": "--account=project",
    "23-tacc-launcher": "--ntasks-per-node",
    "24-nextflow-task": "--mem",
    "25-nextflow-options": "--mem, --constraint, --account=genomics, --qos=short",
    "26-nextflow-head": "--mem, --kill-on-invalid-dep",
    "27-snakemake-jobscript": "--mem",
    "28-snakemake-profile": "--mem-per-cpu, --tmp, --account=genomics, --qos=normal",
    "29-buildtest-hello": "--constraint, --qos=debug",
    "30-buildtest-stream": "--ntasks-per-core, --sockets-per-node, --mem-bind, --cpu-freq, --acctg-freq, "
    "--account=nstaff, --licenses=SCRATCH, --reservation=acceptance",
}
"""Script -> options listed in its warning."""

FUNCTIONS: Final = """
module() { :; }
launch() {
    while [ "${1#-}" != "$1" ]; do
        case "$1" in
            -n | -N | -c | -d | -j | --ppn | --cpu-bind) shift 2 ;;
            *) shift ;;
        esac
    done
    "$@"
}
srun() { launch "$@"; }
mpiexec() { launch "$@"; }
aprun() { launch "$@"; }
ibrun() { "$@"; }
shifter() { "$@"; }
"""
"""Commands that this machine may lack; a launcher runs the program once."""


class Submitted(NamedTuple):
    """Result of a script: its submit, and its job or array tasks."""

    code: int
    stdout: str
    stderr: str
    jobs: tuple[dict[str, Any], ...]


class Site:
    """Cluster of one node with a directory for each site."""

    def __init__(self, place: Path) -> None:
        self.place, self.data, self.submits = place, place / "data", place / "data" / "submits"
        self.config = place / "site" / "forebay.toml"
        self.environment = {**os.environ, "FOREBAY_CONFIG": str(self.config)}
        self.environment.pop("FOREBAY_IDENTITY", None)
        self.submits.mkdir(parents=True)
        for path in PATHS:
            directory = Path(self.adapted(path))
            directory.mkdir(parents=True)
            (directory / "numbers.txt").write_text("".join(f"{number * 7 % 101}\n" for number in range(1, 101)))
        (Path(self.adapted(PATHS[1])) / "project" / "input").mkdir(parents=True)
        (Path(self.adapted(PATHS[1])) / "project" / "input" / "lines").write_text("one\ntwo\n")
        (self.data / "functions.sh").write_text(FUNCTIONS)

    def adapted(self, text: str) -> str:
        """Return a script with the directories of its site below the data of this one."""
        return re.sub("|".join(PATHS), lambda found: str(self.data / found[0].strip("/").replace("/", "-")), text)

    def typed(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the directory of the scripts."""
        line = [str(FOREBAY), "--identity", "ada", *words]
        return subprocess.run(
            line, cwd=self.submits, env=self.environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )

    def submit(self, name: str, script: str) -> Submitted:
        """Submit a script, and return the output."""
        (self.submits / name).write_text(self.adapted(script))
        done = self.typed("submit", "--export", f"BASH_ENV={self.data / 'functions.sh'}", name)
        return Submitted(done.returncode, done.stdout, done.stderr, ())

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs."""
        done = self.typed("queue", "--all", "--json")
        assert done.returncode == 0, done.stderr
        return list(json.loads(done.stdout)["jobs"])

    def ended(self) -> dict[int, tuple[dict[str, Any], ...]]:
        """Return the jobs once all have finished, by their ID, those of an array by its own."""
        deadline = time.monotonic() + TIMEOUT_S
        going = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "STAGE_OUT"}
        found = self.jobs()
        while any(job["state"] in going for job in found):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
            found = self.jobs()
        by_id: dict[int, tuple[dict[str, Any], ...]] = {}
        for job in found:
            array = (job.get("details") or {}).get("array_job_id") or job["job_id"]
            by_id[array] = (*by_id.get(array, ()), job)
        return by_id


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    place = Path(tempfile.mkdtemp(prefix="forebay-test-"))
    place.chmod(0o755)
    made = Site(place)
    words = ["--pool", "fast=1GiB/16MiB,default", "--source-root", "data", "--destination-root", "data"]
    words += ["--replicas", "1", "--agents", "1", "--cpus", "64", "--accounts", OWN, "--user", "ada"]
    base = str(free_ports(PORTS)[0])
    line = [str(FOREBAY), "cluster", "init", "site", *words, "--base-port", base]
    subprocess.run(line, cwd=place, env=made.environment, check=True, capture_output=True, timeout=TIMEOUT_S)
    cluster = subprocess.Popen(
        [str(FOREBAY), "cluster", "up"], cwd=place / "site", env=made.environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert cluster.stdout is not None
        said = [next(cluster.stdout)]
        while "Ready:" not in said[-1]:
            said.append(next(cluster.stdout))
        yield made
    finally:
        cluster.send_signal(signal.SIGINT)
        cluster.communicate(timeout=TIMEOUT_S)
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def submitted(site: Site) -> dict[str, Submitted]:
    """Submit every script, and return all results once the jobs have finished."""
    found = {path.stem: site.submit(path.name, path.read_text()) for path in SCRIPTS}
    jobs = site.ended()
    numbers = {name: re.search(r"[0-9]+", one.stdout) for name, one in found.items()}
    return {
        name: one._replace(jobs=jobs.get(int(number[0]), ()) if (number := numbers[name]) else ())
        for name, one in found.items()
    }


def test_at_most_three_of_thirty_scripts_are_rejected() -> None:
    names = {path.stem for path in SCRIPTS}
    assert len(names) == 30 and REJECTED.keys() | WARNED.keys() == names and len(REJECTED) <= 3


@pytest.mark.parametrize("name", sorted(WARNED))
def test_a_script_runs_with_only_its_paths_changed(submitted: dict[str, Submitted], name: str) -> None:
    found = submitted[name]
    assert (found.code, found.stderr) == (0, f"forebay: warning: options without effect here: {WARNED[name]}\n")
    assert len(found.jobs) == (3 if "array" in name else 1)
    for job in found.jobs:
        output = Path(job["output"]).read_text()
        assert (job["state"], job.get("exit_code")) == ("COMPLETED", 0), (job, output)
        assert output.splitlines()[-1].startswith("finished")


@pytest.mark.parametrize("name", sorted(REJECTED))
def test_a_multi_node_script_is_rejected_with_the_reason(submitted: dict[str, Submitted], name: str) -> None:
    found = submitted[name]
    assert (found.code, found.stdout, found.jobs) == (2, "", ())
    assert f"{name}.sh {REJECTED[name]}" in found.stderr


def test_output_files_are_at_the_requested_paths(site: Site, submitted: dict[str, Submitted]) -> None:
    def only(name: str) -> dict[str, Any]:
        [job] = submitted[name].jobs
        return job

    number = only("09-kaust-ibex-gpu")["job_id"]
    assert only("09-kaust-ibex-gpu")["output"] == str(site.submits / f"train.{number}.out")
    assert "with 4 CPUs" in (site.submits / f"train.{number}.err").read_text()
    whole = only("10-kaust-ibex-exclusive")
    assert (whole["cpus"], whole["output"]) == (64, str(site.submits / f"io_bench.n1.{whole['job_id']}.log"))
    assert Path(only("13-kaust-licence")["output"]).read_text().splitlines()[0] == "100"
    assert "(sample_1_REP1)" in only("24-nextflow-task")["name"]
    assert (site.data / "scratch1-01234-ada" / ".exitcode").read_text() == "0"
    assert (site.data / "global-cfs-cdirs-m1234" / "sorted" / "numbers.txt").read_text().startswith("1\n2\n")
    assert (site.data / "scratch-k1234" / "project" / "count.txt").read_text().strip() == "2"


def test_a_four_megabyte_script_runs(site: Site, submitted: dict[str, Submitted]) -> None:
    head = "#!/bin/bash\n#SBATCH --output=long.out --mem=1G\n"
    line = "true run %07d --of a script that some program has written\n"
    lines = "".join(line % number for number in range((4 * 1024 * 1024 - 200) // len(line % 0)))
    found = site.submit("long.sh", f"{head}{lines}wc -c < $0\necho finished\n")
    assert found.code == 0, found.stderr
    [job] = site.ended()[int(found.stdout.split()[-1])]
    assert job["state"] == "COMPLETED"
    size = (site.submits / "long.sh").stat().st_size
    assert size > 4_000_000 and (site.submits / "long.out").read_text() == f"{size}\nfinished\n"


def test_a_strict_site_names_each_ignored_option_with_its_place(site: Site, submitted: dict[str, Submitted]) -> None:
    line = [str(FOREBAY), "config", "set"]
    try:
        subprocess.run([*line, "UnknownSbatchOptions=reject"], env=site.environment, check=True, timeout=TIMEOUT_S)
        found = site.submit("strict.sh", "#!/bin/sh\n#SBATCH -t 5 --mem=4G\n#SBATCH --gres=gpu:1\ntrue\n")
        assert (found.code, found.stdout) == (2, "")
        lines = [one for one in found.stderr.splitlines() if one.startswith("forebay: ")]
        assert [one.split(" has no effect")[0] for one in lines] == [
            "forebay: strict.sh line 2, column 14: --mem", "forebay: strict.sh line 3, column 9: --gres",
        ]  # fmt: skip
        assert "qos 'debug' does not exist" in site.submit("strict.sh", "#!/bin/sh\n#SBATCH -q debug\ntrue\n").stderr
    finally:
        subprocess.run([*line, "UnknownSbatchOptions=warn"], env=site.environment, check=True, timeout=TIMEOUT_S)
