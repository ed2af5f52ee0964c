"""Installation on a slurmctld host, and its removal: scripts, configuration fragments, and a unit file.

A manifest beside slurm.conf records the written files with their digests. It is written before the first file and
removed after the last, so it is correct even after an interruption. All files are first staged beside their
destinations, so that a full disk is detected before any change. Files that others wrote or changed are never touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from forebay.cluster.slurm import RUN, SITE_SCRIPT, programs, script_text, submission_check
from forebay.cluster.slurm.checks import (
    OTHER_TIMEOUT_S,
    PERSISTENT_FLAG,
    POLL_INTERVAL_S,
    TEARDOWN_FLAG,
    SlurmSettings,
    buffer_conf,
    buffer_conf_faults,
    claim_faults,
    directive_of,
    is_polling,
    path_faults,
    plugin_faults,
    site_script_faults,
    trust_faults,
)
from forebay.cluster.system import sync_directory

SCRIPT: Final = "burst_buffer.lua"
"""Script beside slurm.conf that burst_buffer/lua reads."""

MANIFEST: Final = "forebay-slurm.manifest"
"""File beside slurm.conf that records the written files."""

FRAGMENT: Final = "forebay-slurm.conf"
"""File beside slurm.conf, to be included by it."""

SUBMISSION_CHECK: Final = "forebay-job-submit.lua"
"""File beside slurm.conf that a site's job_submit.lua may call."""

UNIT: Final = "forebay-slurm-bridge.service"

MANIFEST_BYTES_MAX: Final = 64 * 1024
"""Limit of a manifest, bytes: a manifest names half a dozen files."""

STAGE_TIMEOUT_S: Final = 86_400
"""StageInTimeout and StageOutTimeout to write, seconds: Slurm's defaults (burst_buffer.conf(5))."""

FIFOS: Final = 16_384
"""Limit of open files of the bridge: up to 8,192 FIFOs of waiting calls, and spares."""

_BESIDE: Final = ".forebay-new"
_PRIVATE: Final = 0o600
_READABLE: Final = 0o644
_EXECUTABLE: Final = 0o755
_RUN: Final = Path("/run")


class InstallRefused(Exception):
    """Reasons not to write or remove anything, one sentence each."""

    def __init__(self, *reasons: str) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Paths and names of the installation on this host; all paths are absolute."""

    plugin: str
    """`lua` or `datawarp`."""
    conf: Path
    """Directory of slurm.conf."""
    programs: Path
    """Directory of dw_wlm_cli, dwstat and their helpers (datawarp)."""
    units: Path
    run: Path
    """Directory of the bridge's files and socket."""
    config: Path
    """Forebay's configuration file."""
    scheduler: str
    """Name in the bridge's certificate."""
    forebay: tuple[Path, ...]
    """Programs that SlurmUser runs; the first is Forebay's command, used in the unit file."""

    @property
    def named_programs(self) -> dict[str, Path]:
        """Return the program keys of burst_buffer.conf with their programs."""
        if self.plugin == "lua":
            return {}
        return {"GetSysState": self.programs / "dw_wlm_cli", "GetSysStatus": self.programs / "dwstat"}

    @property
    def line(self) -> str:
        """Return the slurm.conf line that enables Forebay."""
        return f"Include {self.conf / FRAGMENT}"


class WrittenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """File of a manifest."""

    path: str
    sha256: tuple[str, ...]
    """Digests of the possible contents: the new one, and during a replacement also the old one."""


class InstallManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Written files, and the directories created for them."""

    plugin: str
    files: tuple[WrittenFile, ...] = ()
    directories: tuple[str, ...] = ()


class Content(msgspec.Struct, frozen=True):
    """Content and mode of a file."""

    data: bytes
    mode: int

    @property
    def sha256(self) -> str:
        """Return the digest, hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()


def contents(layout: Layout, slurm: SlurmSettings) -> dict[Path, Content]:
    """Return all of Forebay's files on this host."""
    fragment = f"# Written by `forebay slurm install`.\nBurstBufferType=burst_buffer/{layout.plugin}\n"
    made = {layout.conf / FRAGMENT: Content(fragment.encode(), _READABLE)}
    if layout.plugin == "lua":
        made[layout.conf / SCRIPT] = Content(script_text(layout.run, layout.conf).encode(), _READABLE)
        check = submission_check(directive_of(buffer_conf(layout.conf, layout.plugin)))
        made[layout.conf / SUBMISSION_CHECK] = Content(check.encode(), _READABLE)
    else:
        for name, text in programs(layout.run).items():
            made[layout.programs / name] = Content(text.encode(), _EXECUTABLE)
    conf = buffer_conf(layout.conf, layout.plugin)
    ours = {one.path: one.sha256 for one in _manifest(layout.conf).files}
    digest = _digest(conf)
    # A changed file belongs to the site and is no longer written.
    if digest is None or digest in ours.get(str(conf), ()):
        keys = {
            **layout.named_programs,
            "OtherTimeout": OTHER_TIMEOUT_S,
            "StageInTimeout": STAGE_TIMEOUT_S,
            "StageOutTimeout": STAGE_TIMEOUT_S,
            # Let Forebay decide who may create persistent buffers, because it gives an error message.
            "Flags": TEARDOWN_FLAG if layout.plugin == "lua" else f"{TEARDOWN_FLAG},{PERSISTENT_FLAG}",
        }
        if is_polling(slurm, layout.plugin):
            keys |= {"PollInterval": POLL_INTERVAL_S}
        lines = ["# Written by `forebay slurm install`.", *(f"{key}={value}" for key, value in keys.items())]
        made[conf] = Content(("\n".join(lines) + "\n").encode(), _READABLE)
    made[layout.units / UNIT] = Content(_unit(layout, slurm).encode(), _READABLE)
    return made


def _unit(layout: Layout, slurm: SlurmSettings) -> str:
    writable = [slurm.state]
    directory = ""
    if layout.run.parent == _RUN:
        # Keep the directory while the bridge is down: slurmctld reads its files, and callers wait at its FIFOs.
        directory = f"RuntimeDirectory={layout.run.name}\nRuntimeDirectoryMode=0700\nRuntimeDirectoryPreserve=yes\n"
    else:
        writable.append(layout.run)
    words = (
        layout.forebay[0], "--config", layout.config, "run", "bridge", "--name", layout.scheduler,
        "--state", slurm.state, "--run", layout.run, "$BRIDGE_OPTIONS",
    )  # fmt: skip
    return f"""\
# Written by `forebay slurm install`.
[Unit]
Description=Forebay's bridge to slurmctld
Documentation=man:slurmctld(8)
Wants=network-online.target
After=network-online.target munge.service
# A slurmctld that finds no pools asks again after 30 s, and rejects buffer jobs until then.
Before=slurmctld.service
StartLimitIntervalSec=0

[Service]
Type=notify
User={slurm.user}
Environment=SLURM_CONF={layout.conf / "slurm.conf"}
# Further options of the site; `systemctl edit` keeps them apart from this file.
Environment=BRIDGE_OPTIONS=
ExecStart={" ".join(map(str, words))}
ExecReload=/bin/sh -c "kill -HUP $MAINPID"
Restart=always
RestartSec=3
# The configuration or the certificate is invalid: a restart does not help.
RestartPreventExitStatus=78
{directory}LimitNOFILE={FIFOS}
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ReadWritePaths={" ".join(f"-{path}" for path in writable)}
ProtectHome=read-only
ProtectClock=yes
ProtectHostname=yes
ProtectControlGroups=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
PrivateDevices=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service

[Install]
WantedBy=multi-user.target
"""


# Checks ---------------------------------------------------------------------------------------------------------------


def obstacles(layout: Layout, slurm: SlurmSettings) -> list[str]:
    """Return the reasons not to write: files that other accounts could change, and foreign files in the way."""
    found = list(path_faults((layout.conf, layout.programs, layout.units, layout.run, layout.config, slurm.state)))
    found += path_faults(layout.forebay[:1])
    if found:
        return found
    made = contents(layout, slurm)
    conf = buffer_conf(layout.conf, layout.plugin)
    read = (layout.conf / "slurm.conf", layout.conf / SITE_SCRIPT, conf, layout.config, *layout.forebay, layout.run)
    found += trust_faults((*made, *read), slurm.uid)
    found += claim_faults(layout.run)
    found += [f"{path}: does not exist; name an existing directory" for path in (layout.units,) if not path.is_dir()]
    known = _manifest(layout.conf)
    if known.files and known.plugin != layout.plugin:
        found.append(f"{layout.conf / MANIFEST}: was written for --plugin {known.plugin}; --remove that first")
    ours = {one.path: one.sha256 for one in known.files}
    for path in made:
        digest = _digest(path)
        if digest is None or digest in ours.get(str(path), ()):
            continue
        if str(path) in ours:
            found.append(f"{path}: was changed since Forebay wrote it; save your changes, and remove the file")
        elif path.name == SCRIPT:
            remedy = (
                f"to use both, rename it to {SITE_SCRIPT} "
                '(see "Keep a second script" in docs/slurm/install.md), or move it away'
            )
            found.append(f"{path}: exists and was not written by Forebay; {remedy}")
        else:
            found.append(f"{path}: exists and was not written by Forebay; move it away")
    found += plugin_faults(slurm, layout.plugin)
    return found


def remaining(layout: Layout, slurm: SlurmSettings, setup_wait_s: int) -> list[str]:
    """Return the remaining steps: changes of the administrator's own files, and missing or outdated files."""
    found = []
    for path, content in contents(layout, slurm).items():
        digest = _digest(path)
        if digest is None:
            found.append(f"{path}: missing; run `forebay slurm install`, without --check")
        elif digest != content.sha256:
            found.append(f"{path}: differs from what this release writes; run `forebay slurm install`, without --check")
        elif stat.S_IMODE(path.stat().st_mode) != content.mode:
            found.append(f"{path}: has the wrong mode; run: chmod {content.mode:04o} {path}")
    found += buffer_conf_faults(
        buffer_conf(layout.conf, layout.plugin),
        layout.named_programs,
        setup_wait_s,
        polls=is_polling(slurm, layout.plugin),
    )
    if layout.plugin == "lua":
        found += site_script_faults(layout.conf / SITE_SCRIPT, directive_of(buffer_conf(layout.conf, layout.plugin)))
    wanted = f"burst_buffer/{layout.plugin}"
    path = layout.conf / "slurm.conf"
    if not slurm.buffers:
        found.append(f"{path}: has no BurstBufferType; add the line: {layout.line}")
    elif slurm.buffers != wanted:
        found.append(f"{path}: BurstBufferType is {slurm.buffers}; replace it with: {layout.line}")
    return found


def _digest(path: Path) -> str | None:
    """Return the digest of a file, None if it is missing, an empty string if it is not a regular file."""
    try:
        status = path.lstat()
        return hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
    except (FileNotFoundError, NotADirectoryError):
        return None


# Writing --------------------------------------------------------------------------------------------------------------


def install(layout: Layout, slurm: SlurmSettings) -> list[Path]:
    """Write all files, each atomically; return those that changed.

    An interrupted call is repaired by a later call of this function or of `remove`.

    Raises:
        InstallRefused: Nothing was changed; the error has the reasons.
        OSError: A file cannot be written; nothing was changed.
    """
    reasons = obstacles(layout, slurm)
    if reasons:
        raise InstallRefused(*reasons)
    made, known = contents(layout, slurm), _manifest(layout.conf)
    changed = {path: content for path, content in made.items() if _digest(path) != content.sha256}
    before = {one.path: one.sha256 for one in known.files}
    directories = [*known.directories]
    missing = _missing(layout.programs) if layout.named_programs else []
    if missing:
        directories = list(dict.fromkeys((*directories, *missing)))
    during = InstallManifest(
        plugin=layout.plugin,
        files=tuple(
            WrittenFile(str(path), tuple(dict.fromkeys((*before.get(str(path), ()), content.sha256))))
            for path, content in made.items()
        ),
        directories=tuple(directories),
    )
    after = msgspec.structs.replace(
        during, files=tuple(WrittenFile(str(path), (content.sha256,)) for path, content in made.items())
    )
    manifest = layout.conf / MANIFEST
    new: list[Path] = []
    for path in (*made, manifest):
        # Remove files that an interrupted call left.
        _beside(path).unlink(missing_ok=True)
    if not changed and after == known:
        return []
    try:
        # Write the manifest first: it records the created directories and the staged files.
        _stage(manifest, _encoded(during))
        _settle(manifest)
        for directory in map(Path, reversed(missing)):
            directory.mkdir(mode=_EXECUTABLE)
            new.append(directory)
            directory.chmod(_EXECUTABLE)
        for path, content in changed.items():
            _stage(path, content)
        _stage(manifest, _encoded(after))
    except OSError:
        _undo(layout.conf, known, changed, new)
        raise
    for path in (*changed, manifest):
        _settle(path)
    return list(changed)


def _missing(directory: Path) -> list[str]:
    """Return the directories to create, the innermost first."""
    return [str(one) for one in (directory, *directory.parents) if not one.exists()]


def _undo(conf: Path, known: InstallManifest, changed: Mapping[Path, Content], new: list[Path]) -> None:
    """Restore the state before any file was installed."""
    manifest = conf / MANIFEST
    for path in (manifest, *changed):
        with contextlib.suppress(OSError):
            _beside(path).unlink()
    for directory in reversed(new):
        with contextlib.suppress(OSError):
            directory.rmdir()
    with contextlib.suppress(OSError):
        if known.files:
            # On a full disk the manifest stays as it is, which is harmless: it only names too many files.
            _stage(manifest, _encoded(known))
            _settle(manifest)
        else:
            manifest.unlink()


def known_plugin(conf: Path) -> str:
    """Return the plugin of an earlier installation; empty if there was none.

    Raises:
        InstallRefused: The manifest cannot be read.
    """
    return _manifest(conf).plugin


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}{_BESIDE}")


def _stage(path: Path, content: Content) -> None:
    """Write a file beside its destination, complete and synced.

    Raises:
        OSError: The file cannot be written.
    """
    beside = _beside(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(beside, flags, _PRIVATE), "wb") as file:
        file.write(content.data)
        os.fchmod(file.fileno(), content.mode)
        file.flush()
        os.fsync(file.fileno())


def _settle(path: Path) -> None:
    """Move a staged file to its destination."""
    _beside(path).rename(path)
    sync_directory(path.parent)


def _encoded(manifest: InstallManifest) -> Content:
    return Content(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n", _READABLE)


def _manifest(conf: Path) -> InstallManifest:
    """Return the record of an earlier installation.

    Raises:
        InstallRefused: The manifest cannot be read.
    """
    path = conf / MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(MANIFEST_BYTES_MAX)
    except FileNotFoundError:
        return InstallManifest(plugin="")
    except OSError as error:
        raise InstallRefused(f"{path}: cannot be read ({error.strerror})") from error
    remedy = "restore the original file, or remove it and all files that Forebay wrote by hand"
    try:
        known = msgspec.json.decode(data, type=InstallManifest)
    except msgspec.MsgspecError as error:
        raise InstallRefused(f"{path}: is not a manifest of Forebay ({error}); {remedy}") from error
    # Check the names: SlurmUser may be able to change the manifest, and root removes the files that it names.
    foreign = [one.path for one in known.files if Path(one.path).name not in _NAMES]
    if foreign:
        raise InstallRefused(f"{path}: names {foreign[0]}, which is not a file of Forebay; {remedy}")
    return known


_NAMES: Final = frozenset(
    {
        *(FRAGMENT, UNIT, SCRIPT, SUBMISSION_CHECK, *programs(RUN), "burst_buffer.conf"),
        *(f"burst_buffer_{plugin}.conf" for plugin in ("lua", "datawarp")),
    }
)
"""Names of the files that Forebay writes on a slurmctld host."""


# Removing -------------------------------------------------------------------------------------------------------------


class RemovalResult(msgspec.Struct, frozen=True):
    """Result of `remove`: deleted files, and those kept because they were changed."""

    gone: tuple[Path, ...]
    kept: tuple[Path, ...]


def remove(conf: Path, slurm: SlurmSettings, in_use: str = "") -> RemovalResult:
    """Remove exactly the written files; do nothing if none are left.

    The removal is rejected while slurm.conf includes the fragment or names the plugin, because slurmctld could not
    start again. It is also rejected while the running slurmctld uses the plugin (`in_use` is its BurstBufferType),
    because that would lose its programs.

    Raises:
        InstallRefused: Nothing was removed; the error has the reasons.
        OSError: A file cannot be removed.
    """
    known = _manifest(conf)
    if not known.files:
        # Without a manifest, an interrupted installation can have left only a staged manifest.
        _beside(conf / MANIFEST).unlink(missing_ok=True)
        return RemovalResult((), ())
    reasons = []
    if slurm.buffers == f"burst_buffer/{known.plugin}":
        reasons.append(
            f"{conf / 'slurm.conf'}: uses burst_buffer/{known.plugin}, and slurmctld would not start without these "
            f"files; remove the line Include {conf / FRAGMENT}, restart slurmctld, and repeat the removal"
        )
    elif in_use == f"burst_buffer/{known.plugin}":
        reasons.append(f"slurmctld still runs with {in_use}, and uses these files; restart it, and repeat the removal")
    reasons += trust_faults((conf,), slurm.uid)
    if reasons:
        raise InstallRefused(*reasons)
    gone, kept = [], []
    for one in known.files:
        path = Path(one.path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            _beside(path).unlink()
        digest = _digest(path)
        if digest is None:
            continue
        if digest in one.sha256:
            path.unlink()
            sync_directory(path.parent)
            gone.append(path)
        else:
            kept.append(path)
    for directory in map(Path, known.directories):
        # The directory may contain other files.
        with contextlib.suppress(OSError):
            directory.rmdir()
    manifest = conf / MANIFEST
    _beside(manifest).unlink(missing_ok=True)
    manifest.unlink()
    sync_directory(conf)
    return RemovalResult(tuple(gone), tuple(kept))
