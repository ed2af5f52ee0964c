"""Exit codes of `forebay recover` and `forebay snapshot restore`."""

from pathlib import Path

import pytest

from cluster.audit.recovering import refusals
from cluster.cli.exits import ExitCode, Failure


def test_a_directory_without_write_permission_is_a_failure_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(Failure) as failed, refusals():
        raise PermissionError(13, "Permission denied", str(tmp_path))
    assert failed.value.code is ExitCode.PERMISSION_DENIED
    assert str(tmp_path) in str(failed.value)
