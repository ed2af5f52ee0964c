"""Comparison by `cluster probe --digest`: only states at the same revision or entry are compared."""

import itertools

import msgspec
import pytest

from forebay.cluster.cli.commands import member as members
from forebay.cluster.cli.commands.member import Agreement, Comparison, ReplicaStatus, compare
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.client import Client
from forebay.cluster.config.config import Config, ReplicaConfig
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.schemas.jobs import DigestsAnswer
from forebay.cluster.system.clock import SystemClock
from tests.cluster.cli.double import forebay
from tests.cluster.cli.test_commands import STATUS

SAME, OTHER = "ab" * 32, "cd" * 32

Answer = tuple[int, str | None, dict[int, str]]
"""Revision, state digest at this revision, and kept checkpoints."""


def said(name: str, answer: Answer | None) -> ReplicaStatus:
    if answer is None:
        return ReplicaStatus(name=name, api="127.0.0.1:1", reachable=False, error="rejected")
    revision, digest, kept = answer
    status = msgspec.structs.replace(STATUS, replica=name, revision=revision, state_digest=digest)
    checkpoints = DigestsAnswer(revision=revision, replica=name, digests=kept, ledgers={}, verdict="agrees")
    return ReplicaStatus(name=name, api="127.0.0.1:1", reachable=True, status=status, checkpoints=checkpoints)


ANSWERS: list[Answer | None] = [
    None,
    *itertools.product((7, 8), (SAME, OTHER, None), ({}, {4096: SAME}, {4096: OTHER}, {8192: SAME})),
]


def test_agreement_compares_states_at_the_same_point() -> None:
    for answers in itertools.combinations_with_replacement(ANSWERS, 3):
        given: dict[tuple[str, int], list[str]] = {}
        for answer in answers:
            if answer is None:
                continue
            revision, digest, kept = answer
            if digest is not None:
                given.setdefault(("revision", revision), []).append(digest)
            for index, one in kept.items():
                given.setdefault(("entry", index), []).append(one)
        agreement = compare([said(f"r{number}", answer) for number, answer in enumerate(answers, 1)]).agreement
        if any(len(set(digests)) > 1 for digests in given.values()):
            assert agreement is Agreement.DIFFERENT
        elif any(len(digests) > 1 for digests in given.values()):
            assert agreement is Agreement.SAME
        else:
            assert agreement is Agreement.UNKNOWN


@pytest.mark.parametrize("third", [SAME, OTHER])
def test_differing_ledgers_are_named_although_states_agree(third: str) -> None:
    answers = [said(f"r{number}", (7, SAME, {})) for number in (1, 2, 3)]
    for answer, digest in zip(answers, (SAME, SAME, third), strict=True):
        assert answer.checkpoints is not None
        answer.checkpoints.ledgers[12] = digest
    comparison = compare(answers)
    assert comparison.agreement is (Agreement.SAME if third == SAME else Agreement.DIFFERENT)
    if third != SAME:
        assert comparison.sentence == (
            f"the replicas' ledgers differ up to entry 12: r1 {SAME[:16]}, r2 {SAME[:16]}, r3 {OTHER[:16]}"
        )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    founding = Founding(name="demo", replicas=3, agents=1, base_port=20000)
    return create_site(tmp_path_factory.mktemp("three"), founding, clock=SystemClock())


@pytest.mark.parametrize("third", [SAME, OTHER])
def test_differing_states_exit_with_verification_failed(
    config: Config, monkeypatch: pytest.MonkeyPatch, third: str
) -> None:
    told: dict[str, Answer] = {"r1": (7, SAME, {}), "r2": (8, None, {4096: SAME}), "r3": (7, third, {4096: SAME})}

    async def ask(client: Client, replica: ReplicaConfig, digest: bool) -> ReplicaStatus:
        assert digest
        return said(replica.name, told[replica.name])

    monkeypatch.setattr(members, "_ask", ask)
    result = forebay(config, "cluster", "probe", "--digest")
    shown = forebay(config, "cluster", "probe", "--digest", "--json")
    comparison = msgspec.convert(msgspec.json.decode(shown.stdout)["comparison"], Comparison)
    if third == SAME:
        assert result.exit_code == shown.exit_code == 0
        assert "r1, r3 hold the same state at revision 7" in result.stderr
        assert comparison.agreement is Agreement.SAME
    else:
        assert result.exit_code == shown.exit_code == ExitCode.VERIFICATION_FAILED
        assert f"the replicas' states differ at revision 7: r1 {SAME[:16]}, r3 {OTHER[:16]}" in result.stderr
        assert "forebay cluster replace" in result.stderr
        assert comparison.agreement is Agreement.DIFFERENT
    assert forebay(config, "cluster", "probe", "r1", "--digest").exit_code == 0
