"""References to jobs on the command line."""

import click
import pytest

from forebay.cluster.cli.commands.options import JOB_ID


@pytest.mark.parametrize("named", ["12", "12_3", "12_[1-4]", "slurm:42", "slurm:1234_7", "a.b-c:42"])
def test_a_job_reference_is_an_id_or_an_external_job_name(named: str) -> None:
    assert JOB_ID.convert(named, None, None) == named


@pytest.mark.parametrize("named", ["slurm:", ":42", "slurm:../x", "slurm:4:2", "sl urm:42", "slurm:" + "1" * 41])
def test_an_invalid_external_job_is_rejected_with_an_example(named: str) -> None:
    with pytest.raises(click.UsageError, match="write for example slurm:42"):
        JOB_ID.convert(named, None, None)
