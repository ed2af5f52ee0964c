"""SIGHUP to real processes of the services beside replicas and agents does not end them."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.config.config import Config
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.security.proofs import verifier_of
from forebay.cluster.system import SystemClock
from forebay.cluster.witness import CheckpointStore, make_key
from tests.cluster.harness import PATIENCE_S, story
from tests.cluster.test_serve import ROOT, finish, make, start
from tests.ports import free_ports

SERVICES = ("gateway", "bridge", "helper", "witness")


async def launch(service: str, directory: Path) -> asyncio.subprocess.Process:
    """Start a service's process as its unit does, with the required files."""
    config = make(directory, 1)
    port = free_ports(1)[0]
    if service == "gateway":
        return await start(config.file, "local", module="forebay.cluster.gateway")
    if service == "witness":
        key = directory / "witness.key"
        CheckpointStore.create(directory / "seen", str(make_key(key, "w.example/1")))
        log = f"forebay/demo={verifier_of('forebay/demo', Ed25519PrivateKey.generate())}"
        words = ("--log", log, "--key", key, "--db", directory / "seen", "--listen", f"127.0.0.1:{port}")
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "forebay.cluster.witness", *map(str, words)), cwd=ROOT,
            stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    certify(config, "tall", Role.SCHEDULER if service == "bridge" else Role.HELPER)
    if service == "helper":
        with config.file.open("a") as file:
            file.write(f'\n[[helper]]\nname = "tall"\naddress = "127.0.0.1:{port}"\ntargets = ["r1"]\n')
        return await start(config.file, "tall", module="forebay.cluster.drills.helper")
    state = directory / "slurmctld"
    state.mkdir()
    words = ("--state", str(state), "--run", str(directory / "run"))
    return await start(config.file, "tall", *words, module="forebay.cluster.slurm")


def certify(config: Config, name: str, role: Role) -> None:
    at = SystemClock().now()
    issue(load_authority(config.tls.certificates), config.tls.certificates, role=role, name=name, at=at)


def handles_hangup(pid: int) -> bool:
    """Return whether a process handles SIGHUP; False if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return False
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> signal.SIGHUP - 1 & 1)


@pytest.mark.parametrize("service", SERVICES)
@story
async def test_sighup_keeps_a_service_running_and_sigterm_ends_it(service: str, tmp_path: Path) -> None:
    process = await launch(service, tmp_path)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not handles_hangup(process.pid):
                assert process.returncode is None, await process.communicate()
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGHUP)
        process.terminate()
        code, said = await finish(process)
        assert (code, "Traceback" in said) == (0, False), said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
