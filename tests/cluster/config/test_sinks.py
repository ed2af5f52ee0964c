"""Tables [[sink]]: receivers over HTTPS or on this machine, with a private key and a filter of known names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.config.reloading import Reloader
from forebay.cluster.config.sinks import BATCH_EVENTS_MAX, KINDS_MAX
from forebay.cluster.config.toml import ConfigError
from forebay.replica.values.limits import SINKS_MAX

REPLICA = '[cluster]\nid = "%s"\nname = "c"\n[[replica]]\nname = "r1"\npeer = "127.0.0.1:1"\napi = "127.0.0.1:2"\n'
SINK = {"name": '"audit"', "url": '"https://events.example.org/forebay"', "secret_file": '"audit.secret"'}


def written(directory: Path, *sinks: dict[str, str]) -> Path:
    tables = ("\n".join(["[[sink]]", *(f"{key} = {value}" for key, value in one.items())]) for one in sinks)
    file = directory / "forebay.toml"
    file.write_text(REPLICA % ("0" * 32) + "\n".join(tables) + "\n")
    return file


def refused(directory: Path, **changes: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Config.load(written(directory, {**SINK, **changes}))
    assert caught.value.line and caught.value.remedy
    return caught.value


def test_paths_are_relative_to_the_file_and_defaults_apply(tmp_path: Path) -> None:
    (sink,) = Config.load(written(tmp_path, {**SINK, "authority": '"keys/ca.pem"'})).sinks
    assert (sink.secret_file, sink.authority) == (tmp_path / "audit.secret", tmp_path / "keys/ca.pem")
    assert (sink.kinds, sink.batch) == ((), 100)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://[::1]:9/a", "http://localhost/x", "https://h/%7Ea"])
def test_urls_that_may_be_used(tmp_path: Path, url: str) -> None:
    assert Config.load(written(tmp_path, {**SINK, "url": f'"{url}"'})).sinks[0].url == url


@pytest.mark.parametrize(
    "url",
    [
        *("http://events.example.org", "http://10.0.0.1/x", "ftp://h/x", "h/x", "https://", "https://h:99999/"),
        *(
            "https://h/a b",
            "https://h/x?token=KEPT",
            "https://h/x#KEPT",
            "https://me:KEPT@h/x",
            "https://h/" + "a" * 1024,
        ),
    ],
)
def test_urls_that_are_rejected_without_repeating_a_secret(tmp_path: Path, url: str) -> None:
    error = refused(tmp_path, url=f'"{url}"')
    assert error.key == "sink[1].url"
    assert "KEPT" not in str(error)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kinds": '["job", "jobs_submitted"]'}, "sink[1].kinds[2]"),
        ({"kinds": '["sink_advanced"]'}, "sink[1].kinds[1]"),
        ({"kinds": "[" + '"job",' * (KINDS_MAX + 1) + "]"}, "sink[1].kinds"),
        ({"batch": "0"}, "sink[1].batch"),
        ({"batch": str(BATCH_EVENTS_MAX + 1)}, "sink[1].batch"),
        ({"name": '"a/b"'}, "sink[1].name"),
        ({"secrets": '"x"'}, "sink[1].secrets"),
    ],
)
def test_other_values_that_are_rejected(tmp_path: Path, changes: dict[str, str], key: str) -> None:
    assert refused(tmp_path, **changes).key == key


def test_a_key_that_others_can_read_is_rejected_with_the_command_that_helps(tmp_path: Path) -> None:
    secret = tmp_path / "audit.secret"
    secret.write_text("x" * 32)
    secret.chmod(0o644)
    error = refused(tmp_path)
    assert (error.key, error.remedy) == ("sink[1].secret_file", f"run: chmod 600 {secret}")
    secret.chmod(0o600)
    assert Config.load(written(tmp_path, SINK)).sinks


def test_names_are_unique_and_there_are_not_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(written(tmp_path, SINK, SINK))
    assert caught.value.key == "sink[2].name"
    many = [{**SINK, "name": f'"s{number}"'} for number in range(SINKS_MAX + 1)]
    assert len(Config.load(written(tmp_path, *many[:SINKS_MAX])).sinks) == SINKS_MAX
    with pytest.raises(ConfigError) as caught:
        Config.load(written(tmp_path, *many))
    assert caught.value.key == "sink"


def test_a_reload_applies_them(tmp_path: Path) -> None:
    used: list[Config] = []
    config = Config.load(written(tmp_path))
    reloader = Reloader(config, "r1", read=Config.load, applies=("sinks",), restarts=(), use=used.append)
    written(tmp_path, SINK)
    asyncio.run(reloader.reload())
    assert [one.name for one in used[0].sinks] == ["audit"]
