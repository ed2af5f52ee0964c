"""`forebay slurm install`: written and removed files, and rejections, on a host of temporary directories."""

from __future__ import annotations

import errno
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.slurm import SITE_SCRIPT, checks
from forebay.cluster.slurm import install as installing
from forebay.cluster.slurm.checks import NoSlurm, SlurmSettings, read_slurm_conf
from forebay.cluster.slurm.install import (
    FRAGMENT,
    MANIFEST,
    SCRIPT,
    UNIT,
    InstallRefused,
    Layout,
    RemovalResult,
    install,
    obstacles,
)
from forebay.cluster.slurm.slurmctld import parsed_type
from forebay.cluster.system.clock import SystemClock
from tests.fuzzing.external_jobs import interpreters

ACCOUNT = pwd.getpwuid(os.geteuid()).pw_name
SETUP_WAIT_S = 20


class SlurmHost:
    """Directory with the files of a slurmctld host."""

    def __init__(self, root: Path, plugin: str) -> None:
        self.conf, self.units, self.plugins = root / "etc", root / "units", root / "plugins"
        for directory in (self.conf, self.units, self.plugins):
            directory.mkdir(mode=0o755)
        self.program, self.config = root / "forebay", root / "forebay.toml"
        for path in (self.program, self.config, self.conf / "other"):
            path.write_text("theirs\n")
            path.chmod(0o644)
        (self.plugins / f"burst_buffer_{plugin}.so").write_bytes(b"\x7fELF\0liblua5.1.so.0\0")
        self.lines = ["ClusterName=Tall", f"SlurmUser={ACCOUNT}", f"StateSaveLocation={root}/state", "# plain"]
        self.lines.append(f"PluginDir={root}/none:{self.plugins}")
        self.write()
        self.layout = Layout(
            plugin=plugin, conf=self.conf, programs=root / "libexec" / "forebay", units=self.units,
            run=Path("/run/forebay-slurm"), config=self.config, scheduler="tall", forebay=(self.program,),
        )  # fmt: skip
        self.root = root

    def write(self) -> None:
        (self.conf / "slurm.conf").write_text("\n".join(self.lines) + "\n")
        (self.conf / "slurm.conf").chmod(0o644)

    def install(self) -> list[Path]:
        return install(self.layout, read_slurm_conf(self.conf))

    def remove(self) -> RemovalResult:
        return installing.remove(self.conf, read_slurm_conf(self.conf))

    def findings(self) -> list[str]:
        slurm = read_slurm_conf(self.conf)
        return obstacles(self.layout, slurm) + installing.remaining(self.layout, slurm, SETUP_WAIT_S)

    def use(self) -> None:
        """Let slurmctld use the files, as the next steps tell the administrator."""
        self.lines.append(self.layout.line)
        self.write()

    def tree(self) -> dict[str, tuple[int, bytes]]:
        """Return all files with contents and modes."""
        return {
            str(path.relative_to(self.root)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
            for path in sorted(self.root.rglob("*"))
        }


@pytest.fixture(params=["lua", "datawarp"])
def host(tmp_path: Path, request: pytest.FixtureRequest) -> SlurmHost:
    return SlurmHost(tmp_path, request.param)


def test_removal_deletes_exactly_the_written_files(host: SlurmHost) -> None:
    before = host.tree()
    assert installing.known_plugin(host.conf) == ""
    written = host.install()
    assert installing.known_plugin(host.conf) == host.layout.plugin
    assert len(written) >= 4 and all(path.is_file() for path in written)
    assert {path for path in host.tree() if path not in before} >= {str(p.relative_to(host.root)) for p in written}
    assert host.install() == [], "a second time there is nothing to do"
    host.use()
    assert host.findings() == []
    with pytest.raises(InstallRefused, match="slurmctld would not start"):
        host.remove()
    host.lines.pop()
    host.write()
    plugin = host.layout.plugin
    with pytest.raises(InstallRefused, match=f"slurmctld still runs with burst_buffer/{plugin}, .*; restart it"):
        installing.remove(host.conf, read_slurm_conf(host.conf), f"burst_buffer/{plugin}")
    assert set(host.remove().gone) == set(written)
    assert host.tree() == before
    assert host.remove() == RemovalResult((), ())


def test_the_sites_own_script_is_kept_and_gets_its_jobs(tmp_path: Path) -> None:
    host = SlurmHost(tmp_path, "lua")
    script = host.conf / installing.SCRIPT
    script.write_text("-- the site's own\n")
    assert [one for one in host.findings() if f"rename it to {SITE_SCRIPT}" in one]
    beside = host.conf / SITE_SCRIPT
    script.rename(beside)
    beside.chmod(0o644)
    host.install()
    host.use()
    assert f'"{beside}"' in script.read_text()
    conf = host.conf / "burst_buffer.conf"
    for first, directive, said in (
        ("-- the site's own", "BB_LUA", [f"{beside}: is never called, because its first line names no directive"]),
        ("-- directive: BB_SITE", "BB_LUA", [f"{beside}: Slurm ignores #BB_SITE, since Directive=BB_LUA"]),
        ("-- directive: OTHER", "BB_LUA", ["choose directives with a common prefix"]),
        ("-- directive: BB_SITE", "BB_", []),
        ("-- directive: BB_LUA_SITE", "BB_LUA", []),
    ):
        beside.write_text(f"{first}\n")
        conf.write_text(f"Directive={directive}\nFlags=TeardownFailure\n")
        found = [one for one in host.findings() if str(beside) in one]
        assert len(found) == len(said) and all(word in found[0] for word in said), (first, found)
    beside.chmod(0o666)
    assert [one for one in host.findings() if "others could change the files that slurmctld runs" in one]
    beside.chmod(0o644)
    host.lines.pop()
    host.write()
    host.remove()
    assert beside.exists() and not script.exists()


def test_the_running_burst_buffer_type_is_parsed_from_scontrol() -> None:
    said = "BatchStartTimeout       = 10 sec\nBurstBufferType         = {}\nCliFilterPlugins        = (null)"
    for shown, plugin in (("burst_buffer/lua", "burst_buffer/lua"), ("(null)", ""), ("", "")):
        assert parsed_type(said.format(shown)) == plugin, shown
    assert parsed_type("slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)\n") == ""


def test_scripts_and_unit_file_have_the_paths_of_this_host(host: SlurmHost) -> None:
    host.layout = msgspec.structs.replace(host.layout, run=host.root / "run")
    host.install()
    unit = (host.units / UNIT).read_text()
    for line in (
        "Type=notify",
        "Before=slurmctld.service",
        "Restart=always",
        'ExecReload=/bin/sh -c "kill -HUP $MAINPID"',
        "RestartPreventExitStatus=78",
        f"User={ACCOUNT}",
        "NoNewPrivileges=yes",
    ):
        assert f"\n{line}\n" in unit
    assert f"run bridge --name tall --state {host.root}/state --run {host.root}/run $BRIDGE_OPTIONS\n" in unit
    assert "\nEnvironment=BRIDGE_OPTIONS=\n" in unit
    assert "RuntimeDirectory" not in unit and f"-{host.root}/run" in unit
    programs = list(host.layout.programs.iterdir()) if host.layout.plugin == "datawarp" else []
    assert host.layout.programs.exists() is (host.layout.plugin == "datawarp")
    assert {program.name for program in programs} == ({"dw_wlm_cli", "dwstat", "forebay-bb"} if programs else set())
    for program in programs:
        assert stat.S_IMODE(program.stat().st_mode) == 0o755
        assert re.search(rf"^RUN ?= ?[\"']?{host.root}/run[\"']?( |$)", program.read_text(), re.MULTILINE)
    if host.layout.plugin == "lua":
        script = (host.conf / "burst_buffer.lua").read_text()
        assert f'\nlocal RUN = "{host.root}/run"\n' in script
        for lua in interpreters():
            subprocess.run([lua, "-e", f"assert(loadfile('{host.conf}/burst_buffer.lua'))"], check=True)


def test_the_bridge_directory_is_private_to_slurmuser_and_preserved(host: SlurmHost) -> None:
    host.install()
    unit = (host.units / UNIT).read_text()
    for line in ("=forebay-slurm", "Mode=0700", "Preserve=yes"):
        assert f"\nRuntimeDirectory{line}\n" in unit


def _group_may_write(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWGRP)


def _all_may_write(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


OTHERS: dict[str, Callable[[SlurmHost], Path]] = {
    "conf": lambda host: host.conf,
    "slurm.conf": lambda host: host.conf / "slurm.conf",
    "units": lambda host: host.units,
    "forebay": lambda host: host.program,
    "forebay.toml": lambda host: host.config,
    "root": lambda host: host.root,
    "fragment": lambda host: host.conf / FRAGMENT,
    "program": lambda host: next(iter(host.layout.named_programs.values()), host.conf / SCRIPT),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("change", [_group_may_write, _all_may_write])
def test_files_changeable_by_others_are_rejected_by_name(
    host: SlurmHost, what: str, change: Callable[[Path], None]
) -> None:
    host.install()
    host.use()
    change(OTHERS[what](host))
    before = host.tree()
    assert [line for line in host.findings() if line.startswith(f"{OTHERS[what](host)}: has mode 0")] != []
    with pytest.raises(InstallRefused, match="chmod go-w"):
        host.install()
    assert host.tree() == before


@pytest.mark.parametrize("what", OTHERS)
def test_files_of_other_accounts_are_rejected_by_name(
    host: SlurmHost, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.install()
    path, plain = OTHERS[what](host), Path.lstat

    def lstat(one: Path) -> os.stat_result:
        found = plain(one)
        return os.stat_result((*found[:4], 4_000_000, *found[5:])) if one == path else found

    monkeypatch.setattr(Path, "lstat", lstat)
    assert any(line.startswith(f"{path}: belongs to user ID 4000000") for line in host.findings())
    with pytest.raises(InstallRefused, match="chown root"):
        host.install()


def _no_plugin(host: SlurmHost) -> None:
    next(host.plugins.iterdir()).unlink()


def _foreign_unit(host: SlurmHost) -> None:
    (host.units / UNIT).write_text("theirs\n")


def _link_in_the_way(host: SlurmHost) -> None:
    (host.conf / FRAGMENT).symlink_to(host.conf / "other")


def _odd_run(host: SlurmHost) -> None:
    host.layout = msgspec.structs.replace(host.layout, run=Path('/run/a"b'))


def _foreign_run(host: SlurmHost) -> None:
    run = host.root / "home" / "run"
    run.parent.mkdir(mode=0o777)
    run.parent.chmod(0o777)
    host.layout = msgspec.structs.replace(host.layout, run=run)


def _claimable_run(host: SlurmHost) -> None:
    _foreign_run(host)
    host.layout.run.parent.chmod(0o1777)


def _no_units(host: SlurmHost) -> None:
    host.units.rmdir()


def _damaged_manifest(host: SlurmHost) -> None:
    (host.conf / MANIFEST).write_text("{}")


WRONG: dict[str, tuple[Callable[[SlurmHost], None], str]] = {
    "plugin": (_no_plugin, "is not in "),
    "foreign file": (_foreign_unit, "exists and was not written by Forebay; move it away"),
    "symbolic link": (_link_in_the_way, "exists and was not written by Forebay; move it away"),
    "path": (_odd_run, "choose another path"),
    "run directory of others": (_foreign_run, "others could change the files that slurmctld runs"),
    "run directory of whoever comes first": (_claimable_run, "others could create it in .*; choose another path"),
    "directory": (_no_units, "name an existing directory"),
    "manifest": (_damaged_manifest, "is not a manifest of Forebay"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_obstacles_are_reported_before_any_file_is_written(host: SlurmHost, wrong: str) -> None:
    make, sentence = WRONG[wrong]
    make(host)
    before = host.tree()
    with pytest.raises(InstallRefused, match=sentence):
        host.install()
    assert host.tree() == before


def test_only_tested_lua_releases_are_accepted(tmp_path: Path) -> None:
    host = SlurmHost(tmp_path, "lua")
    plugin = host.plugins / "burst_buffer_lua.so"
    for version, good in (("5.0", False), ("5.1", True), ("-5.3", True), ("-5.4", True), ("-5.9", False)):
        plugin.write_bytes(f"liblua{version}.so\0".encode())
        assert (host.findings() == [] or "Lua" not in "".join(host.findings())) is good, version


def test_a_changed_file_is_neither_replaced_nor_removed(host: SlurmHost) -> None:
    written = host.install()
    for changed in (path for path in written if path.name != "burst_buffer.conf"):
        data = changed.read_bytes()
        changed.write_bytes(data + b"# mine\n")
        with pytest.raises(InstallRefused, match="was changed since"):
            host.install()
        assert changed.read_bytes() == data + b"# mine\n"
        changed.write_bytes(data)
    kept = written[0]
    kept.write_bytes(b"mine\n")
    removed = host.remove()
    assert removed.kept == (kept,) and set(removed.gone) == set(written[1:])
    assert kept.read_bytes() == b"mine\n"
    assert host.remove() == RemovalResult((), ())


def test_the_sites_burst_buffer_conf_is_kept_and_checked(host: SlurmHost) -> None:
    path = host.conf / "burst_buffer.conf"
    path.write_text("OtherTimeout=20 # short\n")
    host.install()
    host.use()
    found = host.findings()
    assert found[0].startswith(f"{path}: OtherTimeout=20 would end a setup before its wait for space, 20 s")
    named = host.layout.named_programs
    assert found[1].startswith(f"{path}: Flags lacks TeardownFailure: ")
    assert found[2:] == [f"{path}: {key} is not set; write {key}={program}" for key, program in named.items()]
    path.write_text(
        "othertimeout=21\nFlags=EnablePersistent,teardownfailure\n"
        + "".join(f"{key}={program}\n" for key, program in named.items())
    )
    assert host.findings() == []
    host.lines.pop()
    host.write()
    host.remove()
    assert path.exists()


def test_a_changed_burst_buffer_conf_belongs_to_the_site(host: SlurmHost) -> None:
    host.install()
    host.use()
    path = host.conf / "burst_buffer.conf"
    text = path.read_text()
    assert ("EnablePersistent" in text) is (host.layout.plugin == "datawarp")
    path.write_text(text + "StageInTimeout=900\n")
    assert host.findings() == [] and host.install() == [] and host.findings() == []
    path.write_text(text.replace("OtherTimeout=300", "OtherTimeout=3"))
    assert ["OtherTimeout=3 would end a setup" in line for line in host.findings()] == [True]
    host.lines.pop()
    host.write()
    assert path not in (*host.remove().gone,) and path.exists()


def test_poll_interval_is_written_only_if_the_plugin_supports_it(host: SlurmHost) -> None:
    plugin = host.plugins / f"burst_buffer_{host.layout.plugin}.so"
    path = host.conf / "burst_buffer.conf"
    old = plugin.read_bytes()
    host.install()
    host.use()
    assert "PollInterval" not in path.read_text() and host.findings() == []
    # Slurm is upgraded.
    plugin.write_bytes(old + b"OtherTimeout\0PollInterval\0Pools\0")
    assert [line for line in host.findings() if "PollInterval is not set, which is 15" in line]
    assert host.install() == [path]
    assert "PollInterval=1\n" in path.read_text() and host.findings() == []
    # After a downgrade, slurmctld would not start.
    plugin.write_bytes(old)
    assert [line for line in host.findings() if "PollInterval requires Slurm 24.05 or newer; remove it" in line]
    assert host.install() == [path] and host.findings() == []


@pytest.mark.parametrize(("interval", "faults"), [("", 1), ("PollInterval=30\n", 1), ("pollinterval=1\n", 0)])
def test_the_sites_poll_interval_is_checked(host: SlurmHost, interval: str, faults: int) -> None:
    plugin = host.plugins / f"burst_buffer_{host.layout.plugin}.so"
    plugin.write_bytes(plugin.read_bytes() + b"PollInterval\0")
    path = host.conf / "burst_buffer.conf"
    host.install()
    host.use()
    path.write_text(path.read_text().replace("PollInterval=1\n", interval) + "StageInTimeout=900\n")
    assert len([line for line in host.findings() if "write PollInterval=1" in line]) == faults


def test_files_of_the_other_plugin_must_be_removed_first(tmp_path: Path) -> None:
    host = SlurmHost(tmp_path, "lua")
    host.install()
    (host.plugins / "burst_buffer_datawarp.so").touch()
    host.layout = msgspec.structs.replace(host.layout, plugin="datawarp")
    with pytest.raises(InstallRefused, match="written for --plugin lua; --remove that first"):
        host.install()


def test_slurm_conf_is_parsed_as_by_slurm(tmp_path: Path) -> None:
    host = SlurmHost(tmp_path, "lua")
    (host.conf / "more.conf").write_text("BURSTBUFFERTYPE=burst_buffer/other # and why\n")
    host.lines += ["include more.conf", "SlurmdPort=1 StateSaveLocation=\\", "/state"]
    host.write()
    slurm = read_slurm_conf(host.conf)
    assert (slurm.cluster, slurm.user, slurm.buffers) == ("tall", ACCOUNT, "burst_buffer/other")
    assert any("BurstBufferType is burst_buffer/other; replace it with: Include" in one for one in host.findings())
    host.lines.append("SlurmUser=nobody-has-this-name")
    host.write()
    with pytest.raises(NoSlurm, match="is not an account of this host"):
        read_slurm_conf(host.conf)
    with pytest.raises(NoSlurm, match="cannot be read"):
        read_slurm_conf(host.units)


# Disks that are full, and kills ---------------------------------------------------------------------------------------


def test_a_full_disk_at_any_write_changes_nothing(host: SlurmHost, monkeypatch: pytest.MonkeyPatch) -> None:
    before, plain = host.tree(), os.fsync
    writes = 0
    while True:
        left = writes

        def fsync(descriptor: int) -> None:
            nonlocal left
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                if left == 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                left -= 1
            plain(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            host.install()
        except OSError:
            writes += 1
            assert host.tree() == before, f"write {writes}"
            continue
        break
    assert writes >= 6, "each file, and the manifest twice"


def test_removals_are_synced(host: SlurmHost, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {path.parent for path in host.install()} | {host.conf}
    left: dict[Path, set[str]] = {}

    def synced(directory: Path) -> None:
        left[directory] = {path.name for path in directory.iterdir()}

    monkeypatch.setattr(installing, "sync_directory", synced)
    host.remove()
    assert left.keys() == changed
    # The directory has the entries of its last sync.
    assert all(names == {path.name for path in one.iterdir()} for one, names in left.items() if one.exists())


KILLED = """
import os, signal, sys
from pathlib import Path
left = int(sys.argv[1])
def count(event, arguments):
    global left
    if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod") or (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
    ):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
import msgspec
from forebay.cluster.slurm.checks import read_slurm_conf
from forebay.cluster.slurm.install import Layout, install, remove
layout = msgspec.json.decode(sys.argv[2], type=Layout, dec_hook=lambda kind, value: Path(value))
slurm = read_slurm_conf(layout.conf)
sys.addaudithook(count)
install(layout, slurm) if sys.argv[3] == "install" else remove(layout.conf, slurm)
"""


@pytest.mark.campaign(3)
@pytest.mark.parametrize("what", ["install", "remove"])
def test_a_kill_at_any_step_is_repaired_by_install_or_remove(tmp_path: Path, what: str) -> None:
    host = SlurmHost(tmp_path, "lua")
    before = host.tree()
    host.install()
    whole = host.tree()
    host.remove()
    layout = msgspec.json.encode(host.layout, enc_hook=str).decode()
    steps = 0
    while True:
        if what == "remove":
            host.install()
        words = [sys.executable, "-c", KILLED, str(steps), layout, what]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        steps += 1
        # Repeat the test with each state.
        if steps % 2:
            host.install()
            assert host.tree() == whole, f"step {steps}"
        host.remove()
        assert host.tree() == before, f"step {steps}"
        if what == "install" and steps > 100:
            pytest.fail("it does not end")
    assert steps >= 6


def test_file_access_of_slurmuser_is_checked_as_by_the_kernel() -> None:
    status = os.stat_result((0o640, 0, 0, 1, 7, 8, 0, 0, 0, 0))
    reads = {(uid, group): checks._may(status, uid, frozenset({group}), 0o4) for uid in (0, 7, 9) for group in (8, 9)}
    assert reads == {(0, 8): True, (0, 9): True, (7, 8): True, (7, 9): True, (9, 8): True, (9, 9): False}


@pytest.mark.parametrize(
    "closed", ["forebay.toml", "tls/ca.pem", "tls/operator.pem", "tls/operator.key", "tls", "program"]
)
def test_files_unreadable_for_slurmuser_are_named(tmp_path: Path, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    config = create_site(site, Founding(replicas=1, agents=1), clock=SystemClock())
    program = site / "program"
    program.write_text("#!/bin/sh\n")
    account = pwd.getpwuid(os.geteuid())
    uid = os.geteuid() or 4_000_000
    for one in (program, config.file, *(site / "tls").iterdir(), site / "tls", site, *site.parents):
        if one.owner() == account.pw_name and one != one.parent and one.is_relative_to(tmp_path):
            one.chmod(0o755 if one.suffix != ".key" else 0o400)
    # Check as root for an account that is not root.
    plain = Path.stat

    def stat_of(one: Path, **options: bool) -> os.stat_result:
        seen = plain(one, **options)
        mode = seen.st_mode
        if one == site / closed:
            mode &= ~0o777
        elif one in tmp_path.parents or one == tmp_path:
            mode |= 0o111
        return os.stat_result((mode, *seen[1:4], uid, *seen[5:]))

    monkeypatch.setattr(Path, "stat", stat_of)
    slurm = SlurmSettings(
        cluster="tall",
        user=account.pw_name,
        uid=uid,
        gid=account.pw_gid,
        state=tmp_path,
        plugin_directories=(),
        buffers="",
    )
    said = list(checks.reach_faults(config, "operator", slurm, [program]))
    word = "enter" if closed == "tls" else "read"
    assert [line.partition(";")[0] for line in said] == [
        f"{site / closed}: {account.pw_name} (SlurmUser) may not {word} it"
    ]
