"""A configuration that nobody names is found here, then as the user's own, then as the machine's."""

import os
from itertools import product
from pathlib import Path

import pytest

from cluster.config.reading import CONFIG_NAME, config_places, find_config
from cluster.config.toml import ConfigError


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], list[Path]]:
    for name in ("here", "home/.config/forebay", "etc"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    return {"HOME": str(tmp_path / "home")}, [
        Path(CONFIG_NAME),
        tmp_path / "home/.config/forebay" / CONFIG_NAME,
        tmp_path / "etc" / CONFIG_NAME,
    ]


@pytest.mark.parametrize("there", list(product((False, True), repeat=3)))
def test_the_first_place_that_has_one_wins(
    places: tuple[dict[str, str], list[Path]], tmp_path: Path, there: tuple[bool, ...]
) -> None:
    environment, files = places
    for file, exists in zip(files, there, strict=True):
        if exists:
            file.write_text("")
    if any(there):
        assert find_config(environment, tmp_path / "etc") == files[there.index(True)]
        return
    with pytest.raises(ConfigError) as error:
        find_config(environment, tmp_path / "etc")
    assert all(str(file) in str(error.value) for file in files)


def test_a_directory_of_configurations_that_the_environment_names_is_taken_for_the_users_own(tmp_path: Path) -> None:
    found = list(config_places({"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/home/a"}))
    assert found[1] == tmp_path / "forebay" / CONFIG_NAME
    assert len(list(config_places({"HOME": "relative"}))) == len(list(config_places({}))) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_somebody_else_left_here_is_refused_and_not_passed_over(
    places: tuple[dict[str, str], list[Path]], tmp_path: Path
) -> None:
    environment, files = places
    for file in files:
        file.write_text("")
    os.chown(files[0], 12_345, 12_345)
    with pytest.raises(ConfigError, match="belongs to the account 12345"):
        find_config(environment, tmp_path / "etc")
