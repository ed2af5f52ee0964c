"""A stand-alone file without Forebay verifies the proof of a job, and every changed byte is detected."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from forebay.cluster.security.proofs import cosign, parse_note, verifier_of, write_note
from forebay.cluster.security.proofs.notes import COSIGNATURE_KEY
from forebay.cluster.server.tlog import SIGNING_DIRECTORY, Signer, origin_of
from forebay.replica.messages.events import EVENTS, JobSubmitted, SubmittedTasks
from tests.cluster.audit.ledgers import real, typed
from tests.cluster.harness import PATIENCE_S, PLAIN, SCRIPT, Harness, make_cluster, placed, story
from tests.repo.tree import ROOT

VERIFIER = ROOT / "cluster" / "security" / "proofs" / "verify_proof.py"
FLIPS = 10_000


def loaded() -> ModuleType:
    """The verifier as a module."""
    spec = importlib.util.spec_from_file_location("verify_proof", VERIFIER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VERIFY = loaded()


class Site:
    """Stopped cluster of one replica, with proofs of its jobs and its signing keys."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.proofs: dict[int, bytes] = {}
        self.jobs: list[int] = []
        self.keys = directory / "keys"

    @property
    def home(self) -> Path:
        return self.config.storage.directory / "r1"

    @property
    def job(self) -> int:
        return self.jobs[0]

    async def proof(self, harness: Harness, job: int) -> bytes:
        answer = await harness.ask("GET", f"/v1/jobs/{job}/proof")
        assert answer.status == 200, answer
        held: bytes = answer.body
        return held

    async def run(self) -> None:
        """Submit jobs one by one, many in one request, and as an array."""
        self.config = placed(make_cluster(self.directory / "cluster"), self.directory)
        async with Harness(self.config) as harness:
            for number in range(4):
                submitted = await harness.submit(script=SCRIPT if number % 2 else PLAIN, hold=True)
                self.jobs.append(submitted.body["job_id"])
            # Submit concurrently, so that some commands share an entry.
            await asyncio.gather(*(harness.submit(script=PLAIN, who="bob") for _ in range(20)))
            self.array = (await harness.submit(script=PLAIN, array="0-3")).body["job_id"]
            for job in self.jobs:
                for verb in ("release", "hold", "cancel"):
                    await harness.ask("POST", f"/v1/jobs/{job}/{verb}", {"command_id": harness.new_id()}, who="alice")
            assert await harness.service.publisher.publish()
            self.uncounted = await self.proof(harness, self.job)
            await counted(harness)
            assert not await harness.service.publisher.record_histories(), "there is nothing new to be counted"
            for job in (*self.jobs, self.array, self.array + 2):
                self.proofs[job] = await self.proof(harness, job)
            # Records after the count, which are in the next checkpoint.
            await harness.submit(script=PLAIN, who="bob")
            await harness.ask("POST", f"/v1/jobs/{self.array}/hold", {"command_id": harness.new_id()}, who="alice")
            assert await harness.service.publisher.publish()
            self.later = await self.proof(harness, self.array)
            self.proofs = {job: await self.proof(harness, job) for job in self.proofs}
            listed = (await harness.ask("GET", "/v1/tlog/keys", who="auditor")).body
            self.keys.write_text("".join(f"# {one['replica']}\n{one['key']}\n" for one in listed["keys"]))
            harness.controller.journal.flush_hints()


async def counted(harness: Harness) -> None:
    """Have the records of all jobs counted, and a checkpoint with that."""
    revision = harness.controller.state.revision
    async with asyncio.timeout(PATIENCE_S):
        # This takes a moment if the counting process has just started.
        while not await harness.service.publisher.record_histories():
            await asyncio.sleep(0.1)
        while harness.controller.state.revision == revision:
            await asyncio.sleep(0.01)
    assert await harness.service.publisher.publish()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("site"))
    story(made.run)()
    return made


def verdict(held: bytes, keys: Path, least: int = 1, *, whole: bool = False) -> str:
    """Run the verifier in this process; return its output, or raise its rejection."""
    lines = [line for line in keys.read_text().splitlines() if not line.startswith("#")]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            VERIFY.verify(held, dict(map(VERIFY.key_of, lines)), least, whole=whole)
        except (
            VERIFY.InvalidProof,
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            RecursionError,
            OverflowError,
        ) as error:
            return f"REFUSED: {error}"
    return printed.getvalue()


def test_a_majority_counts_keys_of_the_checkpoints_origin(site: Site, tmp_path: Path) -> None:
    held = site.proofs[site.job]
    origin = json.loads(held)["checkpoint"].split("\n")[0]
    keys = tmp_path / "keys"
    others = [verifier_of(f"{origin}/2-{'ab' * 8}", Ed25519PrivateKey.generate()) for _ in range(3)]
    keys.write_text(site.keys.read_text() + "".join(f"{one}\n" for one in others))
    # Keys of another incarnation are ignored.
    proof = tmp_path / "proof"
    proof.write_bytes(held)
    assert ran(proof, keys).returncode == 0
    more = [verifier_of(origin, Ed25519PrivateKey.generate()) for _ in range(2)]
    keys.write_text(keys.read_text() + "".join(f"{one}\n" for one in more))
    refused = ran(proof, keys)
    assert refused.returncode == 1 and f"1 of 2 required replicas of {origin} signed the checkpoint" in refused.stderr
    keys.write_text("".join(f"{one}\n" for one in others))
    assert ran(proof, keys).returncode == 1


def ran(proof: Path, keys: Path) -> subprocess.CompletedProcess[str]:
    """Run the verifier as an auditor does, without Forebay in the directory or the path."""
    copy = proof.parent / "verify_proof.py"
    shutil.copy(VERIFIER, copy)
    words = [sys.executable, "-P", str(copy), "--keys", str(keys), str(proof)]
    return subprocess.run(words, cwd=proof.parent, capture_output=True, text=True, check=False)


def test_the_verifier_imports_only_the_standard_library_and_a_signature_library() -> None:
    text = VERIFIER.read_text()
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported - sys.stdlib_module_names == {"cryptography"}


def test_the_verifier_knows_the_job_field_of_each_event() -> None:
    fields = {kind.__struct_config__.tag: (kind.__name__, kind.__struct_fields__) for kind in EVENTS}
    expected = {tag: (name, names.index("job") + 1 if "job" in names else 0) for tag, (name, names) in fields.items()}
    assert expected == VERIFY.KINDS
    assert JobSubmitted.__struct_config__.tag == VERIFY.SUBMITTED
    assert JobSubmitted.__struct_fields__[VERIFY.SUBMITTED_ARRAY - 1] == "array"
    assert SubmittedTasks.__struct_fields__[0] == "tasks"


def test_a_proof_is_verified_standalone_and_shows_the_job_history(site: Site, tmp_path: Path) -> None:
    proof = tmp_path / "job.proof"
    proof.write_bytes(site.proofs[site.job])
    result = ran(proof, site.keys)
    assert result.returncode == 0, result.stderr
    count = len(json.loads(site.proofs[site.job])["records"])
    for words in ("submit_job by user alice: JobSubmitted", "cancel_job by user alice", f"proven: all {count} records"):
        assert words in result.stdout
    proof.write_bytes(site.proofs[site.job].replace(f'"job": {site.job},'.encode(), b'"job": 999,'))
    result = ran(proof, site.keys)
    assert result.returncode == 1 and "does not name job 999" in result.stderr


def test_every_job_and_task_can_be_proven(site: Site) -> None:
    for job, held in site.proofs.items():
        count = len(json.loads(held)["records"])
        if job < site.array:
            assert f"proven: all {count} records of job {job} in the first" in verdict(held, site.keys, whole=True)
    assert site.array + 2 in site.proofs


def test_every_flipped_byte_of_a_proof_is_detected(site: Site) -> None:
    held, chance = site.proofs[site.job], random.Random(42)
    for number in range(FLIPS):
        # Flip each byte at least once if the proof is short; otherwise random bytes.
        at = number if number < min(len(held), FLIPS // 2) else chance.randrange(len(held))
        changed = held[:at] + bytes([held[at] ^ chance.randrange(1, 256)]) + held[at + 1 :]
        assert verdict(changed, site.keys).startswith("REFUSED"), (at, held[at : at + 20], changed[at : at + 20])


def altered(held: bytes, change: Any) -> bytes:
    proof = json.loads(held)
    change(proof)
    return (json.dumps(proof, ensure_ascii=False, indent=1) + "\n").encode()


def test_invented_or_omitted_record_fields_are_rejected(site: Site) -> None:
    held, other = site.proofs[site.job], json.loads(site.proofs[site.jobs[1]])
    for change in (
        lambda proof: proof["records"].reverse(),
        lambda proof: proof["records"].append(proof["records"][0]),
        lambda proof: proof["records"].clear(),
        lambda proof: proof["records"].append(other["records"][0]),
        lambda proof: proof["records"][0].update(command=other["records"][0]["command"]),
        lambda proof: proof["records"][0].update(leaf=other["records"][0]["leaf"]),
        lambda proof: proof["records"][0]["path"].pop(),
        lambda proof: proof["records"][0].update(position=False),
        lambda proof: proof.update(job=True),
        lambda proof: proof.update(more=1),
    ):
        assert verdict(altered(held, change), site.keys).startswith("REFUSED")


def test_every_omitted_record_is_detected(site: Site) -> None:
    for job, held in site.proofs.items():
        records = json.loads(held)["records"]
        assert len(records) > 1
        later = job >= site.array  # its last record came after the count
        for number in range(len(records) - later):
            said = verdict(altered(held, lambda proof, at=number: proof["records"].pop(at)), site.keys)
            assert f"the proof shows {len(records) - 1 - later} of " in said, (job, number, said)


def test_records_after_the_count_are_shown_as_incomplete(site: Site) -> None:
    count = len(json.loads(site.later)["records"])
    said = verdict(site.later, site.keys, whole=True)
    assert f"proven: all {count - 1} records of job {site.array} in the first" in said
    assert "beyond these, 1 later records are shown, perhaps not all" in said


def test_a_proof_without_a_count_is_rejected_if_completeness_is_required(site: Site) -> None:
    for held in (site.uncounted, altered(site.proofs[site.job], lambda proof: proof.update(history=None))):
        assert "not proven: that there are no others" in verdict(held, site.keys)
        assert "REFUSED: the proof does not show that these are all records" in verdict(held, site.keys, whole=True)


def test_a_wrong_or_invented_count_is_rejected(site: Site) -> None:
    held, other = site.proofs[site.job], json.loads(site.proofs[site.jobs[1]])["history"]
    assert json.loads(held)["history"]["record"] == other["record"]
    for change in (
        lambda history: history.update(count=history["count"] - 1),
        lambda history: history.update(count=history["count"] + 1),
        lambda history: history.update(count=True),
        lambda history: history.update(other),
        lambda history: history.update(path=other["path"]),
        lambda history: history.update(salt=other["salt"]),
        lambda history: history["path"].pop(),
        lambda history: history["record"].update(json.loads(held)["records"][0]),
        lambda history: history.clear(),
        lambda history: history.update(more=1),
    ):
        said = verdict(altered(held, lambda proof, change=change: change(proof["history"])), site.keys)
        assert said.startswith("REFUSED"), said


@story
async def test_a_purged_job_has_a_complete_proof(tmp_path: Path) -> None:
    site = Site(tmp_path)
    config = placed(make_cluster(tmp_path / "cluster"), tmp_path)
    site.config = replace(config, policy=replace(config.policy, finished_jobs_kept=1))
    async with Harness(site.config) as harness:
        for _ in range(3):
            job = (await harness.submit(script=PLAIN, hold=True)).body["job_id"]
            site.jobs.append(job)
            await harness.ask("POST", f"/v1/jobs/{job}/cancel", {"command_id": harness.new_id()}, who="alice")
        async with asyncio.timeout(PATIENCE_S):
            while site.job in harness.controller.state.jobs:
                await asyncio.sleep(0.01)
        assert await harness.service.publisher.publish()
        await counted(harness)
        listed = (await harness.ask("GET", "/v1/tlog/keys", who="auditor")).body
        site.keys.write_text("".join(f"{one['key']}\n" for one in listed["keys"]))
        harness.controller.journal.flush_hints()
    output = tmp_path / "offline.proof"
    result = await asyncio.to_thread(real, "audit", "prove", "--data", site.home, "--job", site.job, "-o", output)
    assert result.returncode == 0, result.stderr
    said = verdict(output.read_bytes(), site.keys, whole=True)
    assert "JobPurged" in said and "proven: all 3 records of job" in said, said
    missing = altered(output.read_bytes(), lambda proof: proof["records"].pop())
    assert "the proof shows 2 of 3 records" in verdict(missing, site.keys)


def test_missing_signers_and_unknown_keys_do_not_count(site: Site, tmp_path: Path) -> None:
    held = site.proofs[site.job]
    assert "of 2 required replicas of" in verdict(held, site.keys, least=2)
    stranger = tmp_path / "keys"
    stranger.write_text(f"{Signer(tmp_path / 'other', origin_of(site.config.cluster.id)).key}\n")
    assert "a signature is by a key that was not given" in verdict(held, stranger)


def test_a_witness_is_shown_with_its_time_and_not_as_a_replica(site: Site, tmp_path: Path) -> None:
    private, keys = Ed25519PrivateKey.generate(), tmp_path / "keys"
    keys.write_text(f"{site.keys.read_text()}{verifier_of('witness.example', private, COSIGNATURE_KEY)}\n")

    def witnessed(proof: Any) -> None:
        text, signatures = parse_note(proof["checkpoint"].encode())
        proof["checkpoint"] = write_note(text, [*signatures, cosign(text, "witness.example", private, 1_800_000_000)])

    held = altered(site.proofs[site.job], witnessed)
    assert "witness.example" in verdict(held, keys) and "a witness, at 2027-01-15T08:00:00Z" in verdict(held, keys)
    assert verdict(held, keys, least=2).startswith("REFUSED")


def test_offline_proofs_equal_online_proofs_with_or_without_the_index(site: Site) -> None:
    output = site.directory / "offline.proof"
    for index in (site.home / "index", None):
        if index is None:
            shutil.rmtree(site.home / "index")
            shutil.rmtree(site.home / "tlog/tile", ignore_errors=True)
        result = real("audit", "prove", "--data", site.home, "--job", site.job, "-o", output)
        assert result.returncode == 0, result.stderr
        assert output.read_bytes() == site.proofs[site.job]
    assert (site.home / SIGNING_DIRECTORY / "key").exists()


def test_an_impossible_proof_is_rejected_with_a_remedy(site: Site, tmp_path: Path) -> None:
    def asked(job: object, data: Path) -> tuple[int, str]:
        result = typed("audit", "prove", "--data", data, "--job", job, "-o", tmp_path / "none")
        return result.exit_code, str(result.exception or "") + result.output

    assert asked(999, site.home)[0] != 0
    copy = tmp_path / "copy"
    shutil.copytree(site.home, copy)
    note = copy / "tlog" / "checkpoint"
    note.write_text(note.read_text().replace(note.read_text().splitlines()[2][:8], "AAAAAAAA", 1))
    assert asked(site.job, copy)[0] != 0
    note.unlink()
    assert asked(site.job, copy)[0] != 0
    assert not (tmp_path / "none").exists()
