"""A replica or audit that meets data of a later release reports it, stops, and changes nothing."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import Result

from forebay.cluster import serve
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.config.config import Config
from forebay.cluster.server.feature_levels import never_ask
from forebay.cluster.server.storage import open_storage
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages import features
from forebay.replica.messages.features import ReleaseNeeded
from forebay.snapshots import Image, load_snapshot, write_snapshot
from tests.auditing import audit
from tests.cluster.harness import Harness, story
from tests.cluster.server.test_controller import installed, submit_many
from tests.later_release import later_release

ABOVE = features.FEATURE_LEVEL_KNOWN + 1


def of_a_later_release(found: Path, directory: Path) -> Path:
    """Rewrite the snapshot as one of a cluster whose level is above the supported one."""
    image: Image = load_snapshot(found)
    directory.mkdir()
    with later_release():
        state = msgspec.structs.replace(image.state, feature_level=ABOVE)
        return write_snapshot(directory, msgspec.structs.replace(image, state=state))


def typed(*words: object) -> Result:
    return audit(*words)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.suffix in (".fbs", ".receiving")}


@story
async def test_received_snapshot_above_the_supported_level_stops_the_replica(config: Config, tmp_path: Path) -> None:
    async with Harness(config, raises=False) as harness:
        await submit_many(harness, 5)
        saved = await harness.ask("POST", "/v1/snapshots")
        path = of_a_later_release(Path(saved.body["path"]), tmp_path / "later")
        before, kept = harness.controller.state, contents(config.snapshot_directory("r1"))
        sink = harness.controller.begin_install(saved.body["index"], saved.body["term"])
        sink.write(0, path.read_bytes())
        with pytest.raises(
            ReleaseNeeded, match=rf"snapshot of entry \d+, revision {before.revision}: .*release 9\.1\.0"
        ):
            await installed(sink)
        assert harness.controller.state is before
        assert contents(config.snapshot_directory("r1")) == kept


@story
async def test_snapshot_above_the_supported_level_is_not_skipped_at_start(config: Config, tmp_path: Path) -> None:
    async with Harness(config, raises=False) as harness:
        await submit_many(harness, 5)
        saved = Path((await harness.ask("POST", "/v1/snapshots")).body["path"])
        await harness.close()
        whole = saved.read_bytes()
        shutil.copyfile(of_a_later_release(saved, tmp_path / "later"), saved)
        before = contents(config.snapshot_directory("r1"))
        with pytest.raises(ReleaseNeeded, match="start release 9.1.0"):
            open_storage(config, "r1")
        with pytest.raises(serve.StartRefused, match="start release 9.1.0") as refused:
            serve.Replica(config, "r1", clock=SystemClock())
        assert refused.value.code == serve.EXIT_RELEASE_NEEDED == 76
        assert contents(config.snapshot_directory("r1")) == before
        saved.write_bytes(whole)
        await harness.open()


@pytest.fixture
def made_up_levels() -> Iterator[None]:
    with later_release():
        yield


@pytest.mark.usefixtures("made_up_levels")
@story
async def test_audit_above_the_supported_level_names_the_required_release(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config, raises=False) as harness:
        await harness.ask("POST", "/v1/feature-level", {"command_id": harness.new_id(), "level": 2})
        saved = (await harness.ask("POST", "/v1/snapshots")).body["path"]
        await harness.close()
        directory = config.wal_directory("r1")
        audits = [("audit", "replay", "--data", directory), ("backup", "inspect", saved)]
        assert [typed(*words).exit_code for words in audits] == [ExitCode.OK, ExitCode.OK]
        monkeypatch.setattr(features, "FEATURE_LEVEL_KNOWN", 1)
        for words in audits:
            result = typed(*words)
            assert result.exit_code == ExitCode.VERIFICATION_FAILED
            assert f"start release {features.release_of(2)} or a later one" in result.stderr
            assert "read it with that release" in result.stderr and "do not start" not in result.stderr
        # The chain can be verified without decoding the entries.
        assert typed("audit", "verify", "--data", directory).exit_code == ExitCode.OK
        monkeypatch.undo()
        await harness.open()


def test_status_request_without_peers_fails_and_names_the_peer() -> None:
    with pytest.raises(LookupError, match="cannot ask r2"):
        asyncio.run(never_ask("r2"))
