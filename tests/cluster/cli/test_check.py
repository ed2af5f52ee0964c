"""`forebay cluster check` reports the faults that a start would meet, and no others."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.security import server_context
from forebay.cluster.system.clock import SystemClock
from tests.cluster.cli.double import forebay
from tests.ports import free_ports


@pytest.fixture
def config(tmp_path: Path) -> Config:
    accounts: Any = "switch" if os.geteuid() == 0 else "own"
    hosts = (("r1", "127.0.0.1"), ("r2", "127.0.0.2"), ("r3", "127.0.0.3"))
    founding = Founding(
        named=hosts, nodes=(("n1", "127.0.0.1"),), accounts=accounts, base_port=free_ports(14)[0], users=("alice",)
    )
    create_site(tmp_path / "site", founding, clock=SystemClock())
    return Config.load(tmp_path / "site" / "hosts" / "127.0.0.1" / "forebay.toml")


def checked(config: Config, *words: str) -> tuple[int, dict[tuple[str, str], tuple[str, str]]]:
    result = forebay(config, "cluster", "check", "--json", *words)
    rows = json.loads(result.stdout)["checks"]
    return result.exit_code, {(row["name"], row["check"]): (row["verdict"], row["found"]) for row in rows}


def test_check_passes_for_a_new_bundle_and_its_own_processes(config: Config) -> None:
    code, found = checked(config)
    assert code == ExitCode.OK and {name for name, _ in found} == {"r1", "n1"}, found
    assert {verdict for (_, what), (verdict, _) in found.items() if not what.startswith(("reaches", "clock"))} == {"ok"}
    # The other replicas do not run yet, which is no failure.
    assert found["r1", "reaches r2"][0] == "note"
    table = forebay(config, "cluster", "check")
    assert table.exit_code == ExitCode.OK and "certificate hosts" in table.stdout


def test_a_running_replica_passes_every_check(config: Config) -> None:
    row = config.replica("r1")
    serving = server_context(config.tls_files("r1"))

    def answer(listening: socket.socket) -> None:
        with contextlib.suppress(OSError), serving.wrap_socket(listening.accept()[0], server_side=True) as secured:
            secured.recv(1)

    with (
        socket.create_server((row.api.host, row.api.port)) as api,
        socket.create_server((row.peer.host, row.peer.port)),
    ):
        answering = threading.Thread(target=answer, args=(api,))
        answering.start()
        code, found = checked(config, "--name", "r1")
        answering.join()
    assert code == ExitCode.OK
    assert (found["r1", "api port"], found["r1", "peer port"]) == (
        ("ok", f"{row.api} is used by r1, which is running"),
        ("ok", f"{row.peer} is used by r1, which is running"),
    )


def test_only_root_checks_agents_that_need_root(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cluster.cli.check.os.geteuid", lambda: 1000)
    needs_root = config.agent("n1").accounts != "own"
    assert {name for name, _ in checked(config)[1]} == ({"r1"} if needs_root else {"r1", "n1"})


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_traces_check_reports_a_missing_opentelemetry(
    config: Config, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ("r1", "traces") not in checked(config)[1]

    def version(package: str) -> str:
        if not is_installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    with config.file.open("a") as file:
        file.write('\n[traces]\nendpoint = "http://127.0.0.1:4318"\n')
    code, found = checked(config)
    verdict, text = found["r1", "traces"]
    assert code == ExitCode.OK and ("n1", "traces") not in found
    assert (verdict, "http://127.0.0.1:4318/v1/traces" in text) == (("ok", True) if is_installed else ("note", False))
    assert ("pip install forebay[otel]" in text) is not is_installed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another account")
def test_root_checks_a_replica_as_its_account(config: Config) -> None:
    nobody = 65534
    tls = config.tls.certificates
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # other accounts may traverse it
        os.chmod(directory, 0o755)
        moved = shutil.copytree(config.file.parent, Path(directory) / "forebay")
        moved.chmod(0o755)
        (moved / tls.name).chmod(0o755)
        there = Config.load(moved / config.file.name)
        os.chown(there.storage.directory / "r1", nobody, nobody)
        verdict, sentence = checked(there, "--name", "r1")[1]["r1", "certificate"]
        assert verdict == "FAIL" and str(there.tls.certificates / "r1.key") in sentence, "its account cannot read it"
        os.chown(there.tls.certificates / "r1.key", nobody, nobody)
        code, found = checked(there, "--name", "r1")
        assert code == ExitCode.OK, found
        assert os.geteuid() == 0


def test_every_cause_of_a_failed_start_fails_its_check(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cluster.cli.check.HANDSHAKE_S", 0.2)
    text = config.file.read_text()
    row = config.replica("r1")
    with socket.socket() as taken:
        taken.bind((row.api.host, row.api.port))
        taken.listen()
        code, found = checked(config, "--name", "r1")
        assert code == ExitCode.BAD_INPUT and found["r1", "api port"][0] == "FAIL"
        assert found["r1", "peer port"][0] == "ok"

    moved = text.replace(f'"{row.peer}"', f'"127.0.0.9:{row.peer.port}"')
    config.file.write_text(moved)
    _, found = checked(config, "--name", "r1")
    verdict, sentence = found["r1", "certificate hosts"]
    assert verdict == "FAIL" and "127.0.0.9 is missing" in sentence and "--host 127.0.0.9 --replace" in sentence
    config.file.write_text(text.replace(f'"{row.peer}"', f'"192.0.2.1:{row.peer.port}"'))
    assert checked(config, "--name", "r1")[1]["r1", "peer port"][0] == "FAIL"

    wrong = '"own"' if os.geteuid() == 0 else '"switch"'
    config.file.write_text(text.replace(f'accounts = "{config.agent("n1").accounts}"', f"accounts = {wrong}"))
    assert checked(config, "--name", "n1")[1]["n1", "account"][0] == "FAIL"

    config.file.write_text(text)
    tls = config.tls.certificates
    (tls / "r1.key").write_bytes((tls / "n1.key").read_bytes())
    assert checked(config, "--name", "r1")[1]["r1", "certificate"][0] == "FAIL"
    for suffix in ("pem", "key"):
        (tls / f"r1.{suffix}").write_bytes((tls / f"n1.{suffix}").read_bytes())
    verdict, sentence = checked(config, "--name", "r1")[1]["r1", "certificate"]
    assert verdict == "FAIL" and "forebay cert issue r1 --role replica --replace" in sentence
    assert checked(config, "--name", "r2")[1]["r2", "certificate"][0] == "FAIL", "it has none here"

    assert forebay(config, "cluster", "check", "--name", "r9").exit_code == ExitCode.BAD_INPUT
    for key in tls.glob("*.key"):
        key.unlink()
    nothing = forebay(config, "cluster", "check")
    assert nothing.exit_code == ExitCode.BAD_INPUT and "has no key of a replica or an agent" in nothing.stderr
