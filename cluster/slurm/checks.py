"""Checks of a slurmctld host: each yields sentences with file, fault and remedy."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from forebay.cluster.config import AccessConfig, Config, ConfigError
from forebay.cluster.security import Role, TlsError, certificate_of
from forebay.cluster.system import format_instant
from forebay.replica.values import Instant

CONF_BYTES_MAX: Final = 16 * 1024 * 1024
"""Limit of one Slurm configuration file, bytes: tens of thousands of nodes fit."""

INCLUDES_MAX: Final = 100
"""Maximum number of files included by slurm.conf, which may include each other."""

PLUGIN_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of a plugin that are searched for its Lua library."""

OTHER_TIMEOUT_S: Final = 300
"""Default OtherTimeout, seconds (burst_buffer.conf(5))."""

TEARDOWN_FLAG: Final = "TeardownFailure"
"""Flag of burst_buffer.conf that tears down the buffers of failed jobs, so that a released job starts again.

Without the flag, Slurm never continues such a job (seen on 22.05.8). The flag loses no data, because buffers of jobs
that ran are retained.
"""

POLL_INTERVAL_S: Final = 1
"""PollInterval written to burst_buffer.conf, seconds.

Slurm sleeps for this time after each reply that a stage is unfinished. The bridge delays such a reply while it waits
for the end of the stage.
"""

POLL_DEFAULT_S: Final = 15
"""Default PollInterval, seconds (burst_buffer.conf(5))."""

DIRECTIVE: Final = "BB_LUA"
"""Default directive (burst_buffer.conf(5))."""

PERSISTENT_FLAG: Final = "EnablePersistent"
"""Flag of burst_buffer.conf that permits persistent buffers; without it, Slurm silently rejects them."""

LUA_VERSIONS: Final = frozenset({"5.1", "5.2", "5.3", "5.4"})
"""Lua versions that burst_buffer.lua is tested with."""

PLUGIN_PLACES: Final = (
    "/usr/lib/*/slurm-wlm", "/usr/lib/*/slurm", "/usr/lib64/slurm", "/usr/lib/slurm", "/usr/local/lib/slurm",
)  # fmt: skip
"""Plugin directories of common packages; slurm.conf names any other."""

SITE_LINE_BYTES_MAX: Final = 1024
"""Bytes read of the first line of a site's own script."""

_SITE_DIRECTIVE = re.compile(r"-- directive: ([A-Za-z0-9_]+)", re.ASCII)
_SHARED: Final = stat.S_IWGRP | stat.S_IWOTH
_LINKED = re.compile(rb"liblua-?(5\.[0-9])")
_WORD = re.compile(r"[A-Za-z0-9_]+", re.ASCII)
_PLAIN = re.compile(r"/[A-Za-z0-9._/-]*", re.ASCII)


class SlurmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings needed from slurm.conf, with Slurm's defaults."""

    cluster: str
    user: str
    uid: int
    gid: int
    state: Path
    plugin_directories: tuple[Path, ...]
    buffers: str
    """BurstBufferType; empty for none."""


class NoSlurm(Exception):
    """Unusable slurm.conf; the message names the file, the cause and the remedy."""


def read_slurm_conf(directory: Path) -> SlurmSettings:
    """Return the settings of slurm.conf and its included files.

    Raises:
        NoSlurm: The file is unusable.
    """
    path = directory / "slurm.conf"
    try:
        values = read_values(path, includes=True)
    except OSError as error:
        raise NoSlurm(f"{path}: cannot be read ({error.strerror}); specify the directory of slurm.conf") from error
    user = values.get("slurmuser", "root")
    # slurmctld also accepts a uid.
    try:
        account = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except (KeyError, OverflowError):
        raise NoSlurm(
            f"{path}: SlurmUser={user} is not an account of this host; create it, or run this command on the host of "
            "slurmctld"
        ) from None
    found = values.get("plugindir", "")
    return SlurmSettings(
        cluster=values.get("clustername", "").lower(),
        user=account.pw_name,
        uid=account.pw_uid,
        gid=account.pw_gid,
        state=Path(values.get("statesavelocation", "/var/spool")),
        plugin_directories=tuple(map(Path, found.split(":"))) if found else _plugin_places(),
        buffers=values.get("burstbuffertype", "").lower(),
    )


def read_values(path: Path, *, includes: bool = False) -> dict[str, str]:
    """Return the keys of a Slurm configuration file, in lower case, with their values.

    Raises:
        OSError: The file cannot be read.
    """
    values: dict[str, str] = {}
    left = [path]
    for _ in range(INCLUDES_MAX):
        if not left:
            break
        with left.pop(0).open("rb") as file:
            text = file.read(CONF_BYTES_MAX).decode("utf-8", "replace")
        for line in text.replace("\\\n", " ").splitlines():
            words = re.sub(r"(?<!\\)#.*", "", line).split()
            if includes and len(words) == 2 and words[0].lower() == "include":
                left.append(path.parent / words[1].replace("%c", values.get("clustername", "")))
            for word in words:
                key, equals, value = word.partition("=")
                if equals:
                    values[key.lower()] = value.strip('"')
    return values


def _plugin_places() -> tuple[Path, ...]:
    return tuple(found for pattern in PLUGIN_PLACES for found in sorted(Path("/").glob(pattern.lstrip("/"))))


def path_faults(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the paths that cannot be written literally into scripts and unit files."""
    for path in paths:
        if _PLAIN.fullmatch(str(path)) is None:
            yield f"{path}: must begin with / and contain only letters, digits, '.', '_' and '-'; choose another path"


def trust_faults(paths: Iterable[Path], slurm_uid: int) -> Iterator[str]:
    """Yield the faults of path components that accounts other than root and SlurmUser can change; skip missing ones."""
    seen: set[Path] = set()
    for path in paths:
        for way in (path, Path(os.path.realpath(path))):
            for one in (*reversed(way.parents), way):
                if one in seen:
                    continue
                seen.add(one)
                try:
                    status = one.lstat()
                except OSError:
                    break
                yield from _status_faults(one, status, slurm_uid)


def _status_faults(path: Path, status: os.stat_result, slurm_uid: int) -> Iterator[str]:
    if status.st_uid not in (0, slurm_uid):
        owner = status.st_uid
        remedy = f"choose a directory that root owns, or run: chown root {path}"
        yield f"{path}: belongs to user ID {owner}, who could change the files that slurmctld runs; {remedy}"
    # In a sticky directory like /tmp, other accounts cannot replace a file.
    is_sticky = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
    if not stat.S_ISLNK(status.st_mode) and status.st_mode & _SHARED and not is_sticky:
        mode = stat.S_IMODE(status.st_mode)
        yield f"{path}: has mode {mode:04o}: others could change the files that slurmctld runs; run: chmod go-w {path}"


def claim_faults(path: Path) -> Iterator[str]:
    """Yield a fault if other accounts could create a missing directory, as in /tmp."""
    way = Path(os.path.realpath(path))
    if way.exists():
        return
    parent = next(one for one in way.parents if one.exists())
    if parent.stat().st_mode & _SHARED:
        yield f"{path}: does not exist, and others could create it in {parent}; choose another path"


def plugin_faults(slurm: SlurmSettings, plugin: str) -> Iterator[str]:
    """Yield why slurmctld could not load its plugin, or could not use burst_buffer.lua with it."""
    name = f"burst_buffer_{plugin}.so"
    path = _plugin_path(slurm, plugin)
    if path is not None:
        if plugin == "lua":
            linked = {version.decode() for version in _LINKED.findall(_plugin_bytes(path))}
            if not linked & LUA_VERSIONS:
                found = ", ".join(sorted(linked)) or "none"
                yield f"{path}: is linked against Lua {found}; use a Slurm that was built with Lua 5.1 to 5.4"
        return
    looked = ", ".join(map(str, slurm.plugin_directories)) or "the usual places"
    remedy = "install the package that has it (Debian: slurm-wlm-basic-plugins), or set PluginDir in slurm.conf"
    yield f"{name}: is not in {looked}; {remedy}"


def is_polling(slurm: SlurmSettings, plugin: str) -> bool:
    """Return whether this Slurm accepts PollInterval in burst_buffer.conf.

    Slurm 24.05 and newer accept it; with older releases, slurmctld does not start. The plugin file contains the names
    of its keys.
    """
    path = _plugin_path(slurm, plugin)
    return path is not None and b"PollInterval" in _plugin_bytes(path)


def _plugin_path(slurm: SlurmSettings, plugin: str) -> Path | None:
    """Return the first file that slurmctld would load as the plugin."""
    paths = (directory / f"burst_buffer_{plugin}.so" for directory in slurm.plugin_directories)
    return next((path for path in paths if path.is_file()), None)


def _plugin_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(PLUGIN_BYTES_MAX)


def buffer_conf(directory: Path, plugin: str) -> Path:
    """Return the burst-buffer configuration file that Slurm reads: burst_buffer.conf takes precedence."""
    general = directory / "burst_buffer.conf"
    special = directory / f"burst_buffer_{plugin}.conf"
    return special if special.exists() and not general.exists() else general


def directive_of(path: Path) -> str:
    """Return the directive named in burst_buffer.conf, or Slurm's default if it names no valid one."""
    try:
        found = read_values(path).get("directive", "")
    except OSError:
        found = ""
    return found if _WORD.fullmatch(found) else DIRECTIVE


def site_script_faults(path: Path, directive: str) -> Iterator[str]:
    """Yield why jobs are not passed to a site's own burst-buffer script; yield nothing if there is none.

    `directive` is Directive of burst_buffer.conf; Slurm reads the lines that begin with it.
    """
    try:
        with path.open("rb") as file:
            first = file.readline(SITE_LINE_BYTES_MAX).decode("utf-8", "replace")
    except FileNotFoundError:
        return
    except OSError as error:
        yield f"{path}: cannot be read ({error.strerror})"
        return
    named = _SITE_DIRECTIVE.fullmatch(first.rstrip())
    if named is None:
        yield (
            f"{path}: is never called, because its first line names no directive; write for example: -- directive: "
            "BB_LUA"
        )
    elif not named[1].startswith(directive):
        common = os.path.commonprefix((named[1], directive))
        remedy = (
            f"write Directive={common} in burst_buffer.conf" if common else "choose directives with a common prefix"
        )
        yield f"{path}: Slurm ignores #{named[1]}, since Directive={directive} in burst_buffer.conf; {remedy}"


def buffer_conf_faults(
    path: Path, programs: Mapping[str, Path], setup_wait_s: int, *, polls: bool = False
) -> Iterator[str]:
    """Yield the settings of burst_buffer.conf that Forebay cannot work with.

    `programs` has the program keys that the file must have; for `polls` see `is_polling`.
    """
    try:
        values = read_values(path)
    except FileNotFoundError:
        return
    except OSError as error:
        yield f"{path}: cannot be read ({error.strerror})"
        return
    said = values.get("othertimeout", str(OTHER_TIMEOUT_S))
    if not said.isdigit() or int(said) <= setup_wait_s:
        yield (
            f"{path}: OtherTimeout={said} would end a setup before its wait for space, {setup_wait_s} s "
            f"(ExternalJobSetupWait); write OtherTimeout={OTHER_TIMEOUT_S}"
        )
    if TEARDOWN_FLAG.lower() not in values.get("flags", "").lower().split(","):
        yield (
            f"{path}: Flags lacks {TEARDOWN_FLAG}: a job whose setup or stage-in failed stays in BurstBufferStageIn "
            f"forever once it is released; write Flags={TEARDOWN_FLAG}"
        )
    interval = values.get("pollinterval")
    if polls and interval != str(POLL_INTERVAL_S):
        yield (
            f"{path}: PollInterval is {interval or f'not set, which is {POLL_DEFAULT_S}'}: Slurm notices the end of a "
            f"stage up to that many seconds late; write PollInterval={POLL_INTERVAL_S}"
        )
    elif not polls and interval is not None:
        yield f"{path}: PollInterval requires Slurm 24.05 or newer; remove it, otherwise slurmctld does not start"
    for key, program in programs.items():
        if values.get(key.lower(), "") != str(program):
            yield f"{path}: {key} is {values.get(key.lower()) or 'not set'}; write {key}={program}"


def certificate_fault(access: AccessConfig, name: str, at: Instant) -> str:
    """Return why a bridge's certificate would be rejected, with file and remedy, or an empty string.

    A certificate that is not yet valid is accepted, because the clock of a booting machine is often behind.
    """
    try:
        files = access.tls_files(name)
    except (ConfigError, TlsError) as error:
        return str(error).replace("--role ROLE", f"--role {Role.SCHEDULER}")
    found = certificate_of(files.certificate.parent, name)
    issue = f"forebay cert issue {name} --role {Role.SCHEDULER}"
    if found.problem:
        return f"{files.certificate}: {found.problem}; issue it again: {issue} --replace"
    if found.role != Role.SCHEDULER:
        return (
            f"{files.certificate}: has the role {found.role or 'unknown'}, but a bridge needs the role "
            f"{Role.SCHEDULER}; choose an unused name: forebay cert issue NAME --role {Role.SCHEDULER}"
        )
    if found.cluster_id != access.cluster.id:
        return f"{files.certificate}: belongs to another cluster than {access.file}; issue one in that cluster: {issue}"
    if found.valid_until <= at:
        when = str(format_instant(found.valid_until))[:10]
        return f"{files.certificate}: expired on {when}; issue it again where ca.key is: {issue} --replace"
    return ""


def reach_faults(
    access: AccessConfig | Config, name: str, slurm: SlurmSettings, programs: Iterable[Path]
) -> Iterator[str]:
    """Yield faults of files and programs that SlurmUser cannot read, and of a key that SlurmUser does not own."""
    groups = frozenset(os.getgrouplist(slurm.user, slurm.gid))
    certificates = access.tls.certificates
    key = certificates / f"{name}.key"
    remedy = "give SlurmUser a copy (--into), or change the mode"
    found = [
        _closed(path, slurm, groups, remedy)
        for path in (access.file, access.tls.authority, certificates / f"{name}.pem", key)
    ]
    for path in programs:
        real = Path(os.path.realpath(path))
        found.append(_closed(real, slurm, groups, "install Forebay where SlurmUser can run it"))
    yield from dict.fromkeys(filter(None, found))
    with contextlib.suppress(OSError):
        status = key.stat()
        if status.st_uid != slurm.uid:
            yield f"{key}: belongs to user ID {status.st_uid}, not to SlurmUser; run: chown {slurm.user} {key}"
        elif status.st_mode & 0o077:
            yield f"{key}: other users may use it; run: chmod 600 {key}"


def _closed(path: Path, slurm: SlurmSettings, groups: frozenset[int], remedy: str) -> str:
    """Return the fault of the path component that SlurmUser may not traverse or read, or an empty string."""
    for one in (*reversed(path.parents), path):
        try:
            status = one.stat()
        except OSError as error:
            return f"{one}: cannot be inspected ({error.strerror}); {remedy}"
        is_way = stat.S_ISDIR(status.st_mode)
        if not _may(status, slurm.uid, groups, 0o1 if is_way else 0o4):
            return f"{one}: {slurm.user} (SlurmUser) may not {'enter' if is_way else 'read'} it; {remedy}"
    return ""


def _may(status: os.stat_result, uid: int, groups: frozenset[int], bit: int) -> bool:
    if uid == 0:
        return True
    if status.st_uid == uid:
        return bool(status.st_mode & bit << 6)
    return bool(status.st_mode & (bit << 3 if status.st_gid in groups else bit))
