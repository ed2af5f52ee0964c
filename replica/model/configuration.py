"""Site configuration: the settings of burst_buffer.conf, Forebay's own, and those of providers.

Each setting has one source of truth. `Site` holds all settings except those for moving data (`TransferRules`) and the
default pool (`Pool.is_default`). `replica.grammar.settings` has the key of each field,
`replica.grammar.burst_buffer_conf` reads them from a file, and `replica.decide.configuration` changes them together.
The configuration is replicated state, changed by events only (law 3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

import msgspec

from forebay.replica.model.provider import NATIVE, PROVIDERS, Provision, provider_facts
from forebay.replica.values import (
    MESSAGE_CHARACTERS_MAX,
    PATH_BYTES_MAX,
    PATH_VARIABLES_MAX,
    SITE_USERS_MAX,
    SIZE_BYTES_MAX,
    TIME_LIMIT_S_MAX,
    Pattern,
    Rejection,
    RejectionCode,
    has_control_character,
    name_fault,
)

FLAGS = ("DisablePersistent", "EmulateCray", "EnablePersistent", "PrivateData", "SetExecHost", "TeardownFailure")
"""Flags of burst_buffer.conf, in the order of `show burst`."""

UNKNOWN_OPTIONS = ("warn", "reject")
"""Treatment of submits with sbatch options that have no effect here."""

RESTART_POLICIES = ("forebay", "slurm")
"""Treatment of running operations by a new leader: keep (forebay), or restart as Slurm does (SEMANTICS.md)."""

SECONDS_MAX = 2_073_600
"""Largest timeout of a provider, seconds: Slurm's lua plugin takes no more (24 days)."""


class Site(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The configuration of the site. Times are whole seconds; names follow burst_buffer.conf where it has one."""

    stage_in_timeout_s: int = 86_400
    stage_out_timeout_s: int = 86_400
    other_timeout_s: int = 300
    stage_retries: int = 3
    """Automatic retries of a failed stage-in, stage-out or teardown before the job is held (Slurm: none or unlimited).
    """
    retry_backoff_s: int = 2
    """Wait before the first retry, seconds; doubled each time up to `retry_backoff_max_s`."""
    retry_backoff_max_s: int = 300
    max_passes: int = 10
    """Number of times that smaller requests may overtake the first one that does not fit (SPUR.md, 3)."""
    staged_hold_time_s: int = 0
    """A held job's staged buffer is torn down after this many seconds; 0 never."""
    finished_jobs_kept: int = 10_000
    """Finished jobs kept in the state, newest first; the ledger keeps all."""
    allow_root: bool = False
    """True if the user root may submit (Slurm: `User root can not allocate burst buffers`)."""
    operations_per_stage_max: int = 128
    """Concurrent stage-ins, stage-outs and teardowns, each (Slurm's documented limit per stage)."""
    sources: tuple[str, ...] = ()
    """Directories that jobs may stage in from; `%u` is the job's user. Empty: stage-in is not allowed."""
    destinations: tuple[str, ...] = ()
    """Directories that jobs may stage out to and use as working directory; `%u` is the job's user."""
    provider: str = "native"
    """Provider that performs operations: one of PROVIDERS (BurstBufferType=burst_buffer/NAME)."""
    allow_users: tuple[str, ...] = ()
    """Users (names or IDs) that may request a buffer; empty: all users."""
    deny_users: tuple[str, ...] = ()
    """Users (names or IDs) that may not request a buffer."""
    directive: str = "BB_LUA"
    """Directive word after `#` in scripts of the lua provider."""
    flags: tuple[str, ...] = ("DisablePersistent",)
    """A subset of FLAGS, in their order."""
    get_sys_state: str = ""
    """Program that reports the system's state; empty: the provider's own (`get_sys_state_of`)."""
    get_sys_status: str = ""
    """Program behind `forebay slurm bbstat`; empty: the provider's own (`get_sys_status_of`)."""
    validate_timeout_s: int = 5
    poll_interval_s: int = 15
    """Time between two polls of an operation that reported that it is busy, seconds."""
    granularity: int = 1
    """Granularity of pools that are reported without one, in units of the pool."""
    pools: str = ""
    """Value of `Pools=`, kept without effect as in Slurm: pools come from the provider or from commands."""
    create_buffer: str = ""
    destroy_buffer: str = ""
    start_stage_in: str = ""
    start_stage_out: str = ""
    stop_stage_in: str = ""
    stop_stage_out: str = ""
    """The six programs of the generic provider."""
    default_pool: str = ""
    """Pool that becomes the default when the provider reports it (DefaultPool=); empty: none is awaited.

    Only Pool.is_default says which pool is the default.
    """
    lua_script: str = ""
    """Path of the site's burst_buffer.lua; empty: beside the configuration of the process that runs it."""
    pre_run_requeues: int = 0
    """Automatic requeues of a job after a failed pre-run before it is held; 0: held at once, as documented."""
    restart_policy: str = "forebay"
    """One of RESTART_POLICIES."""
    hold_oversized: bool = False
    """True if a request that exceeds its pool's total waits (as Slurm's does for some pools) instead of being rejected.
    """
    array_stage_count: int = 10
    """Tasks of one array that stage concurrently (bb_array_stage_cnt)."""
    requeue_on_node_fail: bool = False
    """True if jobs of a failed node are requeued, unless submitted with --no-requeue."""
    revision: int = 0
    """Revision of the last change to this record or the transfer rules, 0 for never; compared with `--expect-revision`.

    Set by `fold`, never by a command.
    """
    external_job_setup_wait_s: int = 20
    """Time the setup of an external job waits for space, seconds; 0: no wait. Other schedulers wait for its end."""
    external_job_linger_s: int = 300
    """Retention of an external job's data after a teardown before its run, seconds; 0: none.

    When Slurm starts, it tears down all staged data, and sets it up again a minute and a half later.
    """
    unknown_sbatch_options: str = "warn"
    """One of UNKNOWN_OPTIONS."""
    node_down_restage_s: int = 300
    """Time until jobs that have not started leave a node that is down, seconds; 0: they wait for the node."""
    path_variables: tuple[str, ...] = ("HOME", "SCRATCH")
    """Variables that paths in directives may contain, besides USER: `NAME` from the environment of the submit, or
    `NAME=/TEXT`, with `%u` for the user.
    """


DEFAULT_SITE = Site()
"""Configuration of a cluster without settings."""

FOUNDING_FIELDS = Site.__struct_fields__[: Site.__struct_fields__.index("provider")]
"""Fields that forebay.toml sets when a cluster is founded, in [policy] and [staging]."""


class HasSite(Protocol):
    """An object with the site's configuration: a State, a StateBuilder, Facts."""

    @property
    def site(self) -> Site: ...


# Queries -------------------------------------------------------------------------------------------------------


def tears_down_on_failure(site: Site) -> bool:
    """Return whether a job whose stage-in failed for good is torn down before it is held (Flags=TeardownFailure)."""
    return "TeardownFailure" in site.flags


def has_private_data(site: Site) -> bool:
    """Return whether users see only their own data (Flags=PrivateData)."""
    return "PrivateData" in site.flags


def allows_user_persistent(site: Site) -> bool:
    """Return whether users may create and destroy persistent buffers (Flags=EnablePersistent)."""
    return "EnablePersistent" in site.flags


def check_persistent_allowed(site: Site, *, is_operator: bool, place: str = "") -> Rejection | None:
    """Return a rejection if the requester may not create or destroy persistent buffers at all, or None.

    Ownership is not checked here. The sentence is Slurm's.
    """
    if is_operator or allows_user_persistent(site):
        return None
    return Rejection(
        RejectionCode.PERMISSION_DENIED,
        "Burst Buffer permission denied",
        "only operators may create and destroy persistent buffers here; to permit it to all users, an operator can "
        "set Flags=EnablePersistent",
        place,
    )


def check_user_lists(site: Site, user: str, uid: int | None = None) -> Rejection | None:
    """Return a rejection if AllowUsers or DenyUsers excludes the user from buffers, or None.

    With `uid`, IDs in the lists are compared too. The sentences are Slurm's. Jobs without a buffer are not checked.
    """
    known = {user} if uid is None else {user, str(uid)}
    if site.allow_users and known.isdisjoint(site.allow_users):
        return Rejection(
            RejectionCode.PERMISSION_DENIED,
            "User not found in AllowUsers",
            "ask an operator to add the user to AllowUsers, or submit without a burst buffer",
            "user",
        )
    if not known.isdisjoint(site.deny_users):
        return Rejection(
            RejectionCode.PERMISSION_DENIED,
            "User found in DenyUsers",
            "ask an operator to take the user out of DenyUsers, or submit without a burst buffer",
            "user",
        )
    return None


def format_flags(site: Site) -> str:
    """Format the flags as `show burst` does after `Flags=`; empty without flags."""
    return ",".join(site.flags)


def provision_of(state: HasSite) -> Provision | None:
    """Return the cluster's provider; None if its own agents move the data."""
    site = state.site
    if site.provider == NATIVE:
        return None
    own = {name: getattr(site, name) for name in Provision.__struct_fields__ if hasattr(site, name)}
    return Provision(**own | {"get_sys_state": get_sys_state_of(site), "get_sys_status": get_sys_status_of(site)})


def get_sys_state_of(site: Site) -> str:
    """Return the program that reports the system's state as `show burst` prints it, empty for none."""
    return site.get_sys_state or provider_facts(site.provider).get_sys_state


def get_sys_status_of(site: Site) -> str:
    """Return the program behind `bbstat` as `show burst` prints it, empty for none."""
    return site.get_sys_status or provider_facts(site.provider).get_sys_status


# Validation of records -----------------------------------------------------------------------------------------------

_NUMBERS: dict[str, tuple[int, int]] = {
    "stage_in_timeout_s": (1, TIME_LIMIT_S_MAX),
    "stage_out_timeout_s": (1, TIME_LIMIT_S_MAX),
    "other_timeout_s": (1, TIME_LIMIT_S_MAX),
    "stage_retries": (0, 1_000),
    "retry_backoff_s": (0, 86_400),
    "retry_backoff_max_s": (0, 86_400),
    "max_passes": (0, 1_000_000),
    "staged_hold_time_s": (0, TIME_LIMIT_S_MAX),
    "finished_jobs_kept": (0, 1_000_000),
    "operations_per_stage_max": (1, 10_000),
    "validate_timeout_s": (1, SECONDS_MAX),
    "poll_interval_s": (1, SECONDS_MAX),
    "granularity": (1, SIZE_BYTES_MAX),
    "pre_run_requeues": (0, 1_000),
    "array_stage_count": (1, 100_000),
    "external_job_setup_wait_s": (0, SECONDS_MAX),
    "external_job_linger_s": (0, TIME_LIMIT_S_MAX),
}

_PROGRAMS = (
    "get_sys_state",
    "get_sys_status",
    "create_buffer",
    "destroy_buffer",
    "start_stage_in",
    "start_stage_out",
    "stop_stage_in",
    "stop_stage_out",
    "lua_script",
)
"""Fields that hold the absolute path of a program, which runs on other machines in any directory."""


def check_site(site: Site) -> Rejection | None:
    """Return a rejection if the configuration is invalid, or None; its `place` is `site.FIELD`."""
    for field, (least, most) in _NUMBERS.items():
        value = getattr(site, field)
        if not least <= value <= most:
            return _invalid(field, f"{field} is {value}", f"use a number from {least} to {most}")
    for field in _PROGRAMS:
        fault = program_fault(getattr(site, field))
        if fault is not None:
            return _invalid(field, f"{field} {fault}", "write the absolute path of a program, without ..")
    for field in ("sources", "destinations"):
        for root in getattr(site, field):
            if not root.startswith("/") or "/../" in root + "/":
                return _invalid(field, f"{root!r} is not an absolute directory", "start it with /")
    for entry in site.path_variables:
        fault = path_variable_fault(entry)
        if fault is not None:
            return _invalid("path_variables", fault, "write NAME, or NAME=/DIRECTORY/%u")
    if len(site.path_variables) > PATH_VARIABLES_MAX:
        sentence = f"{len(site.path_variables)} variables are listed"
        return _invalid("path_variables", sentence, f"list at most {PATH_VARIABLES_MAX}")
    for field, chosen, allowed in (
        ("provider", (site.provider,), PROVIDERS),
        ("restart_policy", (site.restart_policy,), RESTART_POLICIES),
        ("unknown_sbatch_options", (site.unknown_sbatch_options,), UNKNOWN_OPTIONS),
        ("flags", site.flags, FLAGS),
    ):
        for word in chosen:
            if word not in allowed:
                return _invalid(field, f"{field} contains {word!r}", f"use one of {', '.join(allowed)}")
    return _check_words(site)


def _check_words(site: Site) -> Rejection | None:
    if site.flags != sort_flags(site.flags):
        return _invalid("flags", "the flags are not in the defined order", f"use the order {','.join(FLAGS)}")
    if "DisablePersistent" in site.flags and "EnablePersistent" in site.flags:
        return _invalid("flags", "DisablePersistent and EnablePersistent contradict each other", "remove one of them")
    if site.allow_users and site.deny_users:
        return _invalid("deny_users", "AllowUsers and DenyUsers exclude each other", "use only one of them")
    for field in ("allow_users", "deny_users"):
        users = getattr(site, field)
        if len(users) > SITE_USERS_MAX:
            return _invalid(field, f"{field} has {len(users)} users", f"list at most {SITE_USERS_MAX}")
        for user in users:
            fault = name_fault(user)
            if fault is not None:
                return _invalid(field, f"a user name {fault}", "write names or ids")
    for field in ("directive", "default_pool"):
        fault = name_fault(getattr(site, field)) if getattr(site, field) or field == "directive" else None
        if fault is not None:
            return _invalid(field, f"{field} {fault}", "write one word")
    if len(site.pools) > MESSAGE_CHARACTERS_MAX:
        return _invalid("pools", "pools is too long", f"use at most {MESSAGE_CHARACTERS_MAX} characters")
    return None


def sort_flags(flags: Iterable[str]) -> tuple[str, ...]:
    """Return each known flag once, in the order of FLAGS."""
    given = set(flags)
    return tuple(flag for flag in FLAGS if flag in given)


def program_fault(path: str) -> str | None:
    """Return the fault of a program's path, to follow its field's name, or None if it is valid."""
    if not path:
        return None
    if not path.startswith("/"):
        return f"{path!r} is not an absolute path"
    if len(path.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX:
        return f"is longer than {PATH_BYTES_MAX} bytes"
    if has_control_character(path):
        return f"{path!r} has a control character"
    if ".." in path.split("/"):
        return f"{path!r} contains .."
    return None


_VARIABLE = Pattern(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)


def path_variable_fault(entry: str) -> str | None:
    """Return the fault of an entry of `path_variables`, or None if it is valid."""
    name, equals, text = entry.partition("=")
    if _VARIABLE.fullmatch(name) is None:
        return f"{name[:48]!r} is not the name of a variable"
    # USER alone permits no other variable.
    if entry.startswith("USER=") or name.startswith(("DW_", "FOREBAY_")):
        return f"{name} is defined by Forebay"
    if equals and (not text.startswith("/") or "," in text or has_control_character(text) or "/../" in text + "/"):
        return f"the value {text[:48]!r} of {name} is not an absolute path"
    if len(text.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX:
        return f"the value of {name} is longer than {PATH_BYTES_MAX} bytes"
    return None


def _invalid(field: str, sentence: str, remedy: str) -> Rejection:
    return Rejection(RejectionCode.INVALID_FIELD, sentence, remedy, f"site.{field}")


def expand_roots(roots: tuple[str, ...], user: str) -> tuple[str, ...]:
    """Return the configured roots with `%u` replaced."""
    return tuple(root.replace("%u", user) for root in roots)
