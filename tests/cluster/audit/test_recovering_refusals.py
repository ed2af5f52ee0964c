"""Words and exit codes of `forebay cluster recover` and `forebay backup restore`."""

from pathlib import Path

import pytest

from forebay.cluster.audit.recovering import rejections, show_plan, view_of
from forebay.cluster.cli.exits import ExitCode, Failure
from forebay.cluster.server.recovery import RecoveryPlan, RecoveryResult
from forebay.replica.model import Recovery
from forebay.replica.values import Instant
from tests.cluster.test_serve import make


def test_a_directory_without_write_permission_is_named(tmp_path: Path) -> None:
    with pytest.raises(Failure) as failed, rejections():
        raise PermissionError(13, "Permission denied", str(tmp_path))
    assert failed.value.code is ExitCode.PERMISSION_DENIED
    assert str(tmp_path) in str(failed.value)


# ---- what a plan says, and what is said once it is done


def _plan(*members: str) -> RecoveryPlan:
    return RecoveryPlan(
        id="5f0c2a91", replica="r1", member="r1.1", incarnation="1", members=members, known_index=7, known_revision=5,
        known_at=Instant(1), kept_index=9, kept_revision=6, kept_at=Instant(2), void_entries=0, jobs={}, last_job=3,
        reachable={},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("members", "warning"),
    [
        (("r1.1",), ""),
        (("r1.1", "r2.1"), " First make sure that r2.1 cannot start again: its additional entries are lost."),
        (
            ("r1.1", "r2.1", "r3.1"),
            " First make sure that r2.1 and r3.1 cannot start again: their additional entries are lost.",
        ),
    ],
)
def test_a_recovery_plan_warns_about_the_other_members(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], members: tuple[str, ...], warning: str
) -> None:
    plan, config = _plan(*members), make(tmp_path / "site", 3)
    show_plan(view_of(plan), False, config, "forebay cluster recover --name r1")
    said = capsys.readouterr()
    assert (
        said.err.strip()
        == f"Nothing was changed.{warning} To proceed: forebay cluster recover --name r1 --confirm 5f0c2a91"
    )


def test_the_next_steps_name_each_other_replica_with_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make(tmp_path / "site", 3)
    recovery = Recovery(
        incarnation=2, mark="ab", by="ann", replica="r1.1", kept_index=9, known_index=7, first_job=1_000_000
    )
    show_plan(view_of(_plan("r1.1", "r2.1"), RecoveryResult(plan=_plan("r1.1"), recovery=recovery)), False, config)
    said = capsys.readouterr().err
    for name in ("r2", "r3"):
        replica = config.replica(name)
        assert f"`forebay cluster add {name} --peer {replica.peer} --api {replica.api}`" in said
    assert "NAME" not in said and "HOST" not in said and "cluster add r1 " not in said
