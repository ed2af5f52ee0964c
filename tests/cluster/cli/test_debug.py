"""`forebay support debug` collects all available diagnostics, and no secrets."""

import gzip
import json
import stat
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.cli.debug import NEVER, PART_BYTES_MAX
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.config.new_site import quote
from forebay.cluster.config.toml import redact
from forebay.cluster.schemas import NodesAnswer
from tests.cluster.cli.double import Double, forebay


def read(bundle: Path) -> dict[str, bytes]:
    with tarfile.open(bundle) as archive:
        members = archive.getmembers()
        assert all(member.isfile() and member.mode == 0o600 for member in members)
        found = {member.name.removeprefix("forebay-debug/"): archive.extractfile(member) for member in members}
        return {name: file.read() for name, file in found.items() if file is not None}


def written(
    double: Double, into: Path, *words: str, identity: str | None = "operator"
) -> tuple[dict[str, bytes], dict[str, Any]]:
    bundle = into / "b.tar.gz"
    result = forebay(double.config, "support", "debug", "--output", str(bundle), "--json", *words, identity=identity)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    rows = {part["name"]: part for part in json.loads(result.stdout)["parts"]}
    found = read(bundle)
    assert {row["name"] for row in json.loads(found["contents.json"])["parts"]} == set(rows)
    assert set(found) - {"contents.json"} == {name for name, row in rows.items() if row["size"] is not None}
    assert all(len(found[name]) == row["size"] for name, row in rows.items() if row["size"] is not None)
    return found, rows


def test_the_bundle_has_answers_and_the_reasons_of_missing_parts(double: Double, tmp_path: Path) -> None:
    double.answer("GET", "/v1/nodes", NodesAnswer(revision=7, nodes=()))
    double.refuse("GET", "/v1/configuration", 403, "forbidden", "user alice may not do that")
    found, rows = written(double, tmp_path)
    assert json.loads(found["cluster/nodes.json"])["revision"] == 7
    assert rows["cluster/configuration.json"]["missing"] == "user alice may not do that"
    assert "there is no /metrics" in rows["replicas/r1/metrics.txt"]["missing"]
    assert found["forebay.toml"] == double.config.file.read_bytes()
    assert {"machine/about.json", "machine/loadavg.txt", "machine/self-limits.txt"} <= set(found)
    assert {row["check"] for row in json.loads(found["machine/check.json"])} >= {"certificate", "disk", "clock"}


def test_only_requested_jobs_are_in_the_bundle(double: Double, tmp_path: Path) -> None:
    double.asked.clear()
    written(double, tmp_path)
    assert not [one.target for one in double.asked if "/jobs" in one.target or "/transfers" in one.target]
    (tmp_path / "b.tar.gz").unlink()
    _, rows = written(double, tmp_path, "--job", "42", "--job", "43_1")
    assert {name for name in rows if name.startswith("jobs/")} == {
        f"jobs/{job}/{what}.json" for job in ("42", "43_1") for what in ("job", "history", "why", "transfers")
    }
    for bad in ("../x", "٤٢", "42/..", ""):
        refused = forebay(double.config, "support", "debug", "--output", str(tmp_path / "c"), "--job", bad)
        assert refused.exit_code == ExitCode.BAD_INPUT and "is not a job" in refused.stderr


def test_keys_never_enter_the_bundle_and_only_log_ends_are_kept(double: Double, tmp_path: Path) -> None:
    key = double.config.tls.certificates / "r1.key"
    assert NEVER in key.read_bytes()
    log = tmp_path / "a.log"
    log.write_bytes(b"old" + b"x" * PART_BYTES_MAX + b"new")
    found, rows = written(double, tmp_path, "--log", str(key), "--log", str(log))
    assert rows["logs/1-r1.key"] == {"name": "logs/1-r1.key", "size": None, "missing": "it contains a private key"}
    tail = found["logs/2-a.log"]
    assert len(tail) == PART_BYTES_MAX and tail.endswith(b"new") and not tail.startswith(b"old")
    secret = b"".join(key.read_bytes().splitlines()[1:-1])[:40]
    assert secret not in gzip.decompress((tmp_path / "b.tar.gz").read_bytes())
    # Names and sizes of keys are not secret; a missing or readable key may be the problem.
    listed = {row["path"]: row for row in json.loads(found["machine/files.json"])}
    assert listed[str(key)]["mode"].endswith("600")


def test_files_in_buffers_are_not_named_in_the_bundle(double: Double, tmp_path: Path) -> None:
    (agent,) = double.config.agents
    mine = agent.directory / "buffers" / "alices-secret-project"
    mine.mkdir(parents=True)
    found, _ = written(double, tmp_path)
    assert str(agent.directory / "buffers").encode() in found["machine/files.json"]
    assert mine.name.encode() not in found["machine/files.json"]


def test_an_existing_bundle_is_kept_and_no_partial_one_is_left(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for output in (there, link, tmp_path / "no" / "such"):
        refused = forebay(double.config, "support", "debug", "--output", str(output))
        assert refused.exit_code == ExitCode.BAD_INPUT and "cannot be written" in refused.stderr
    assert there.read_text() == "mine" and not (tmp_path / "elsewhere").exists()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forebay.cluster.cli.debug._write", full)
    failed = forebay(double.config, "support", "debug", "--output", str(tmp_path / "new"))
    assert failed.exit_code == ExitCode.BAD_INPUT and "No space left on device" in failed.stderr
    assert not (tmp_path / "new").exists()


def test_a_bundle_is_written_even_if_the_cluster_is_down(double: Double, tmp_path: Path) -> None:
    text = double.config.file.read_text()
    port = double.config.replicas[0].api.port
    try:
        double.config.file.write_text(text.replace(f":{port}", ":1"))
        found, rows = written(double, tmp_path)
    finally:
        double.config.file.write_text(text)
    assert rows["cluster/overview.json"]["size"] is None and "machine/about.json" in found


def test_a_machine_without_access_gets_a_bundle_with_local_parts(double: Double, tmp_path: Path) -> None:
    found, rows = written(double, tmp_path, identity=None)
    assert "there is no gateway" in rows["cluster"]["missing"] and "machine/check.json" in found


@pytest.mark.parametrize(
    ("does", "found", "missing"),
    [
        ("echo 'r1 elected'", b"r1 elected\n", ""),
        ("echo first >&2; echo 'you may not' >&2; exit 1", None, "you may not"),
        ("exit 3", None, "exit code 3"),
        ("exec sleep 60", None, "timed out"),
    ],
)
def test_the_journal_is_included_or_its_absence_is_explained(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, found: bytes | None, missing: str
) -> None:
    program = tmp_path / "journalctl"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o700)
    monkeypatch.setattr("forebay.cluster.cli.debug.JOURNAL_S", 1.0)
    monkeypatch.setattr("forebay.cluster.cli.debug.shutil.which", lambda name: str(program))
    contents, rows = written(double, tmp_path)
    assert contents.get("logs/journal.txt") == found and missing in rows["logs/journal.txt"]["missing"]


SECRETS = """
[provider.environment] # { = "x" }
"API_TOKEN" = "s3cr\\u0065t-value"
LITERAL = 'C:\\secret\\path'
short = "ab"
"""

FORMS = {
    "a table": SECRETS,
    "dotted keys": """
[provider]
environment.API_TOKEN = "s3cret-value" # kept
environment."LITERAL" = 'C:\\secret\\path'
""",
    "inline": "[provider]\nenvironment = { API_TOKEN = \"s3cret-value\", LITERAL = 'C:\\secret\\path' }\n",
    "dotted from the top": 'provider.environment.API_TOKEN = "s3cret-value"\n',
}


@pytest.mark.parametrize("form", FORMS)
def test_provider_environment_values_are_in_no_part(double: Double, tmp_path: Path, form: str) -> None:
    file, log = double.config.file, tmp_path / "some.log"
    before = file.read_text()
    text = FORMS[form] + before if form == "dotted from the top" else before + "\n" + FORMS[form]
    log.write_text("called with TOKEN=s3cret-value\n")
    file.write_text(text)
    try:
        found, _ = written(double, tmp_path, "--log", str(log))
    finally:
        file.write_text(before)
    for name, content in found.items():
        for secret in (b"s3cr", b"secret\\path"):
            assert secret not in content, name
    assert tomllib.loads(found["forebay.toml"].decode())["cluster"] == tomllib.loads(before)["cluster"]
    assert b"API_TOKEN" in found["forebay.toml"] and b"(redacted)" in found["logs/1-some.log"]


VALUES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r"), max_size=12)


@given(st.dictionaries(st.sampled_from("ABCDE"), VALUES), st.sampled_from(("table", "inline", "dotted")), st.booleans())
def test_redaction_removes_all_values_of_a_table_and_nothing_else(
    values: dict[str, str], form: str, above: bool
) -> None:
    rows = [f"{name} = {quote(value)}" for name, value in values.items()]
    text = {
        "table": "\n".join(("[a.b]", *rows)),
        "inline": f"[a]\nb = {{ {', '.join(rows)} }}",
        "dotted": "\n".join(("[a]", *(f"b . {row}" for row in rows))),
    }[form]
    other = '[other]\nA = "kept"\nb = { A = "kept" }\n'
    whole = f"{other}{text}\n" if above else f"{text}\n{other}"
    found = tomllib.loads(redact(whole, ("a", "b"), "x"))
    assert found["other"] == {"A": "kept", "b": {"A": "kept"}}
    assert found["a"].get("b", {}) == dict.fromkeys(values, "x")
