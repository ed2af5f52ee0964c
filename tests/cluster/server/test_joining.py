"""A start without data is decided once, by the one process that joins or that is declared as a first start."""

import asyncio
import shutil
from pathlib import Path

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.serve import EXIT_STORAGE_REFUSED, EXIT_USAGE, StartRefused, main, run
from forebay.cluster.server import joining
from forebay.cluster.server.storage import first_start_mark, identity_of, member_note, open_storage
from forebay.cluster.system.clock import SystemClock

JOINING = '\n[[replica]]\nname = "r4"\npeer = "127.0.0.1:7404"\napi = "127.0.0.1:7414"\njoins = true\n'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Three founders, and r4, which the cluster adds as r4#6."""
    config = create_site(tmp_path / "site", Founding(agents=0), clock=SystemClock())
    directory = config.tls.certificates
    authority = load_authority(directory)
    issue(authority, directory, role=Role.REPLICA, name="r4", addresses=["127.0.0.1"], at=SystemClock().now())
    config.file.write_text(config.file.read_text() + JOINING)
    return Config.load(config.file)


def join(config: Config) -> str:
    return asyncio.run(joining.join(config, "r4", clock=SystemClock()))


def test_joining_replica_starts_without_data_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        return "r4#6"

    monkeypatch.setattr(joining, "_ask", ask)
    assert join(config) == identity_of(config, "r4") == "r4#6"
    open_storage(config, "r4").close()
    assert not first_start_mark(config, "r4").exists()
    with pytest.raises(joining.JoiningRefused, match="cannot join as a new member"):
        join(config)


def test_two_concurrent_joins_leave_no_mark_for_another_empty_start(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has joined and started while this one still requests its ID."""

    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        monkeypatch.setattr(joining, "_ask", answer)
        await joining.join(config, name, clock=SystemClock())
        open_storage(config, name).close()
        return "r4#6"

    async def answer(config: Config, name: str, clock: object, deadline_s: float) -> str:
        return "r4#6"

    monkeypatch.setattr(joining, "_ask", ask)
    with pytest.raises(joining.JoiningRefused, match="cannot join as a new member"):
        join(config)
    assert not first_start_mark(config, "r4").exists()


def test_joining_replica_is_rejected_first_for_snapshots_of_a_former_life(config: Config) -> None:
    """Otherwise they would prevent the start after the replica had noted its ID."""
    kept = config.snapshot_directory("r4") / "kept"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(joining.JoiningRefused, match=r"move its directory .*r4 away"):
        join(config)
    assert not member_note(config, "r4").exists()


def test_nothing_is_created_for_a_joining_replica_with_first_start(config: Config) -> None:
    with pytest.raises(StartRefused, match="is not a founder") as refused:
        asyncio.run(run(config, "r4", first_start=True))
    assert refused.value.code == EXIT_STORAGE_REFUSED
    assert not (config.storage.directory / "r4").exists()


def test_join_and_first_start_exclude_each_other(config: Config) -> None:
    assert main(["--config", str(config.file), "--name", "r4", "--first-start", "--join"]) == EXIT_USAGE


@pytest.mark.parametrize(
    ("has", "permitted"),
    [("nothing", True), ("data", False), ("snapshots", False), ("mark", False)],
)
def test_only_a_replica_without_data_joins_without_being_told(
    config: Config, monkeypatch: pytest.MonkeyPatch, has: str, permitted: bool
) -> None:
    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        return "r4#6"

    monkeypatch.setattr(joining, "_ask", ask)
    files = {
        "data": config.wal_directory("r4") / "data.mdb",
        "snapshots": config.snapshot_directory("r4") / "kept",
        "mark": first_start_mark(config, "r4"),
    }
    if has in files:
        files[has].parent.mkdir(parents=True)
        files[has].touch()
    assert asyncio.run(joining.is_permitted(config, "r4", clock=SystemClock())) is permitted
    assert not member_note(config, "r4").exists() and not joining.is_joining(config, "r4")


def test_replica_not_added_by_the_cluster_is_not_permitted_and_writes_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        raise joining.JoiningRefused("r4 is not a member")

    monkeypatch.setattr(joining, "_ask", ask)
    assert not asyncio.run(joining.is_permitted(config, "r4", clock=SystemClock()))
    assert not (config.storage.directory / "r4").exists()


class Killed(BaseException):
    """The process was killed."""


@pytest.mark.parametrize("former", ["", "r4#3"])
@pytest.mark.parametrize("at", ["_ask", "_write", "allow_first_start", "_remove"])
def test_replica_killed_while_joining_continues_with_a_plain_start(
    config: Config, monkeypatch: pytest.MonkeyPatch, at: str, former: str
) -> None:
    """`former`: the ID under which it had joined before it lost its data and was replaced."""
    if former:
        member_note(config, "r4").parent.mkdir(parents=True)
        member_note(config, "r4").write_text(f"{former}\n")

    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        return "r4#6"

    monkeypatch.setattr(joining, "_ask", ask)
    calls = 0

    def die(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if (at, calls) != ("_write", 1):  # the first write marks the join
            raise Killed
        write(*arguments)  # type: ignore[arg-type]

    write = joining._write
    with monkeypatch.context() as dying:
        dying.setattr(joining, at, die)
        with pytest.raises(Killed):
            join(config)
    assert joining.is_joining(config, "r4")
    assert join(config) == "r4#6"
    assert not joining.is_joining(config, "r4")
    open_storage(config, "r4").close()


def test_replica_that_lost_its_data_is_not_mistaken_for_an_interrupted_join(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        return "r4#6"

    monkeypatch.setattr(joining, "_ask", ask)
    join(config)
    open_storage(config, "r4").close()
    shutil.rmtree(config.wal_directory("r4"))
    shutil.rmtree(config.snapshot_directory("r4"))
    for _ in range(2):
        with pytest.raises(joining.JoiningRefused, match="has lost its data"):
            join(config)
        assert not joining.is_joining(config, "r4")


def test_founder_told_to_join_by_mistake_starts_as_a_founder(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        raise joining.JoiningRefused("r1 is a voter")

    monkeypatch.setattr(joining, "_ask", ask)
    with pytest.raises(joining.JoiningRefused):
        asyncio.run(joining.join(config, "r1", clock=SystemClock()))
    assert not joining.is_joining(config, "r1")
    open_storage(config, "r1").close()
