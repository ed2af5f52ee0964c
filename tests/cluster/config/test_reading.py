"""Without --config, the file is searched in the working directory, the user's directory, and the machine's."""

import os
from itertools import product
from pathlib import Path

import pytest

from forebay.cluster.config.discovery import CONFIG_NAME, config_places, find_config
from forebay.cluster.config.toml import ConfigError


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
def test_the_first_location_with_a_file_is_used(
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


def test_the_xdg_configuration_directory_is_the_users_own(tmp_path: Path) -> None:
    found = list(config_places({"XDG_CONFIG_HOME": str(tmp_path), "HOME": "/home/a"}))
    assert found[1] == tmp_path / "forebay" / CONFIG_NAME
    assert len(list(config_places({"HOME": "relative"}))) == len(list(config_places({}))) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_accounts_file_is_rejected_and_not_skipped(
    places: tuple[dict[str, str], list[Path]], tmp_path: Path
) -> None:
    environment, files = places
    for file in files:
        file.write_text("")
    os.chown(files[0], 12_345, 12_345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        find_config(environment, tmp_path / "etc")


def link_to_text_of_ours(file: Path) -> None:
    """Like `/proc/PID/cmdline` of a non-dumpable process: root owns it, but the caller chose its text."""
    chosen = file.with_name("chosen")
    file.rename(chosen)
    file.symlink_to(chosen)


def dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("gone")


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def directory_of_another(file: Path) -> None:
    os.chown(file.parent, 12_345, -1)


def directory_above_of_another(file: Path) -> None:
    os.chown(file.parent.parent, 12_345, -1)


UNTRUSTED = {
    "a link": (link_to_text_of_ours, "symbolic link"),
    "a link to nothing": (dangling_link, "symbolic link"),
    "a pipe": (pipe, "not a regular file"),
    "others may write the file": (lambda file: file.chmod(0o666), "others may write to .*forebay.toml"),
    "others may write the directory": (lambda file: file.parent.chmod(0o777), "others may write to"),
    "its group may write the directory": (lambda file: file.parent.chmod(0o775), "others may write to"),
    "a directory as /tmp is": (lambda file: file.parent.chmod(0o1777), "others may write to"),
    "the directory of another account": (directory_of_another, "belongs to user 12345"),
    "a directory above of another account": (directory_above_of_another, "belongs to user 12345"),
}


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("what", UNTRUSTED)
def test_a_file_that_others_could_place_is_rejected(
    places: tuple[dict[str, str], list[Path]], tmp_path: Path, what: str, number: int
) -> None:
    environment, files = places
    files[number].write_text("")
    assert find_config(environment, tmp_path / "etc") == files[number]
    change, sentence = UNTRUSTED[what]
    if "another account" in what and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    change(files[number].absolute())
    with pytest.raises(ConfigError, match=f"(?s){sentence}.*--config"):
        find_config(environment, tmp_path / "etc")


def test_the_target_directory_of_a_link_is_checked(places: tuple[dict[str, str], list[Path]], tmp_path: Path) -> None:
    environment, files = places
    (tmp_path / "dotfiles").mkdir()
    files[1].parent.rmdir()
    files[1].parent.symlink_to(tmp_path / "dotfiles")
    (tmp_path / "dotfiles" / CONFIG_NAME).write_text("")
    # The returned path has no links, which could be changed before it is read.
    assert find_config(environment, tmp_path / "etc") == tmp_path / "dotfiles" / CONFIG_NAME
    (tmp_path / "dotfiles").chmod(0o777)
    with pytest.raises(ConfigError, match="others may write"):
        find_config(environment, tmp_path / "etc")
