"""A script from Python is read as by `forebay submit`, and options take precedence over its lines."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

import forebay
import forebay.testing

SCRIPT = """#!/bin/sh
#SBATCH --job-name=sum --time=10 --cpus-per-task=4 --licenses=matlab
#BB capacity=1GiB
true
"""


def test_the_lines_of_a_script_are_options_that_arguments_override(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(SCRIPT)
    with forebay.testing.cluster() as cluster:
        client = cluster.client("dana")
        from_file, from_text = client.submit(path), client.submit(SCRIPT, name="other", time_limit_s=60, cpus=2)
        assert (from_file.name, from_file.time_limit_s, from_file.cpus) == ("sum", 600, 4)
        assert (from_text.name, from_text.time_limit_s, from_text.cpus) == ("other", 60, 2)
        assert from_file.capacity_bytes == from_text.capacity_bytes == 2**30
        assert from_file.workdir == str(Path.cwd())


def test_a_value_that_the_site_does_not_define_is_dropped_from_a_script_with_a_warning_only() -> None:
    with forebay.testing.cluster() as cluster:
        client = cluster.client()
        assert any("matlab" in warning for warning in client.submit(SCRIPT).warnings)
        with pytest.raises(forebay.InvalidRequestError) as caught:
            client.submit(SCRIPT, licenses=["matlab"])
        assert caught.value.place == "licenses"


def test_times_paths_and_files_are_accepted(tmp_path: Path) -> None:
    directives = tmp_path / "request.bbf"
    directives.write_text("#BB capacity=3GiB\n")
    begin = datetime.datetime(2026, 1, 1, 1, tzinfo=datetime.UTC)
    with forebay.testing.cluster() as cluster:
        client = cluster.client()
        job = client.submit("#!/bin/sh\n", bbf=directives, begin_at=begin, workdir=tmp_path, output=Path("o.txt"))
        assert (job.eligible_time, job.capacity_bytes) == ("2026-01-01T01:00:00.000000Z", 3 * 2**30)
        assert (job.workdir, job.output) == (str(tmp_path), str(tmp_path / "o.txt"))
        cluster.advance(3_000)
        assert client.job(job).state == "PENDING"
        cluster.advance(900)
        assert client.job(job).state == "COMPLETED"
