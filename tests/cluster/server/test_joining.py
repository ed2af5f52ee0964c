"""Who starts without data is decided once: by the one process that joins, or that is said never to have run."""

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


def test_who_joins_starts_without_data_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        return "r4#6"

    monkeypatch.setattr(joining, "_ask", ask)
    assert join(config) == identity_of(config, "r4") == "r4#6"
    open_storage(config, "r4").close()
    assert not first_start_mark(config, "r4").exists()
    with pytest.raises(joining.JoiningRefused, match="cannot join as a new member"):
        join(config)


def test_two_that_join_at_once_leave_no_mark_that_would_allow_another_start_without_data(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has joined and started while this one still asks who it is."""

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


def test_who_joins_is_told_first_of_the_snapshots_of_a_former_life(config: Config) -> None:
    """They would stand against its start after it had noted who it is."""
    kept = config.snapshot_directory("r4") / "kept"
    kept.parent.mkdir(parents=True)
    kept.touch()
    with pytest.raises(joining.JoiningRefused, match=r"move its directory .*r4 away"):
        join(config)
    assert not member_note(config, "r4").exists()


def test_nothing_is_made_for_who_joins_and_is_said_never_to_have_run(config: Config) -> None:
    with pytest.raises(StartRefused, match="is not a founder") as refused:
        asyncio.run(run(config, "r4", first_start=True))
    assert refused.value.code == EXIT_STORAGE_REFUSED
    assert not (config.storage.directory / "r4").exists()


def test_nobody_joins_and_has_never_run_in_one_command(config: Config) -> None:
    assert main(["--config", str(config.file), "--name", "r4", "--first-start", "--join"]) == EXIT_USAGE


@pytest.mark.parametrize(
    ("has", "permitted"),
    [("nothing", True), ("data", False), ("snapshots", False), ("mark", False)],
)
def test_only_a_replica_with_nothing_left_joins_without_being_told_to(
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


def test_a_replica_that_the_cluster_has_not_added_has_no_permit_and_nothing_is_written(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        raise joining.JoiningRefused("r4 is not a member")

    monkeypatch.setattr(joining, "_ask", ask)
    assert not asyncio.run(joining.is_permitted(config, "r4", clock=SystemClock()))
    assert not (config.storage.directory / "r4").exists()


class Killed(BaseException):
    """The process died here."""


@pytest.mark.parametrize("former", ["", "r4#3"])
@pytest.mark.parametrize("at", ["_ask", "_write", "allow_first_start", "_remove"])
def test_one_that_was_killed_while_it_joined_goes_on_by_a_plain_start(
    config: Config, monkeypatch: pytest.MonkeyPatch, at: str, former: str
) -> None:
    """`former`: as whom it had joined before it lost its data and was replaced."""
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
        if (at, calls) != ("_write", 1):  # the first one says that it joins
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


def test_one_that_lost_its_data_is_not_taken_for_one_that_was_killed_while_it_joined(
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
        with pytest.raises(joining.JoiningRefused, match="lost its data since"):
            join(config)
        assert not joining.is_joining(config, "r4")


def test_a_founder_that_was_told_to_join_by_mistake_starts_as_the_founder_that_it_is(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        raise joining.JoiningRefused("r1 is a voter")

    monkeypatch.setattr(joining, "_ask", ask)
    with pytest.raises(joining.JoiningRefused):
        asyncio.run(joining.join(config, "r1", clock=SystemClock()))
    assert not joining.is_joining(config, "r1")
    open_storage(config, "r1").close()
