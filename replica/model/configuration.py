"""The site's configuration: what burst_buffer.conf says, what it cannot say, and what providers need.

One truth for each setting: `Site` holds all but how data is moved (`TransferRules`) and which pool is the default
(`Pool.is_default`). `replica.grammar.settings` has the key of each field, `replica.grammar.burst_buffer_conf` reads
them from a file, and `replica.decide.configuration` changes them together. Replicated state, changed by
events only (law 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from replica.model.provider import NATIVE, PROVIDERS, Provision, provider_facts
from replica.values import (
    MESSAGE_CHARACTERS_MAX,
    PATH_BYTES_MAX,
    SITE_USERS_MAX,
    SIZE_BYTES_MAX,
    TIME_LIMIT_S_MAX,
    Refusal,
    RefusalCode,
    has_control_character,
    name_fault,
)

FLAGS = ("DisablePersistent", "EmulateCray", "EnablePersistent", "PrivateData", "SetExecHost", "TeardownFailure")
"""The flags of burst_buffer.conf, in the order in which `show burst` lists them."""

UNKNOWN_OPTIONS = ("warn", "reject")
"""What becomes of a submit with options of sbatch that have no effect here."""

RESTART_POLICIES = ("forebay", "slurm")
"""What a new leader does with operations: nothing (forebay), or start them again as Slurm does (SEMANTICS.md)."""

SECONDS_MAX = 2_073_600
"""Largest timeout of a provider, seconds: Slurm's lua plugin takes no more (24 days)."""


class Site(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The configuration of the site. Times are whole seconds; names follow burst_buffer.conf where it has one."""

    stage_in_timeout_s: int = 86_400
    stage_out_timeout_s: int = 86_400
    other_timeout_s: int = 300
    stage_retries: int = 3
    """Automatic retries of a failed stage-in, stage-out or teardown before the job is held (Slurm: none, or for
    ever).
    """
    retry_backoff_s: int = 2
    """Wait before the first retry, seconds; doubled each time up to `retry_backoff_max_s`."""
    retry_backoff_max_s: int = 300
    max_passes: int = 10
    """How often smaller requests may pass the first one that does not fit (SPUR.md, 3)."""
    staged_hold_time_s: int = 0
    """A held job's staged buffer is torn down after this many seconds; 0 never."""
    finished_jobs_kept: int = 10_000
    """Finished jobs kept in the state, newest first; the ledger keeps all."""
    allow_root: bool = False
    """Whether the user root may submit (Slurm: `User root can not allocate burst buffers`)."""
    operations_per_stage_max: int = 128
    """Stage-ins, stage-outs and teardowns at once, each (Slurm's documented limit per stage)."""
    sources: tuple[str, ...] = ()
    """Directories that jobs may stage in from; `%u` is the job's user. None: nothing may."""
    destinations: tuple[str, ...] = ()
    """Directories that jobs may stage out to and have as working directory; `%u` is the job's user."""
    provider: str = "native"
    """Who performs operations: one of PROVIDERS (BurstBufferType=burst_buffer/NAME)."""
    allow_users: tuple[str, ...] = ()
    """Users (names or ids) who alone may ask for a buffer; empty: all."""
    deny_users: tuple[str, ...] = ()
    """Users (names or ids) who may not ask for a buffer."""
    directive: str = "BB_LUA"
    """The word after `#` in scripts of the lua provider."""
    flags: tuple[str, ...] = ("DisablePersistent",)
    """Some of FLAGS, in their order."""
    get_sys_state: str = ""
    """The program that tells the state of the system; empty: the provider's own (`get_sys_state_of`)."""
    get_sys_status: str = ""
    """The program behind `forebay slurm bbstat`; empty: the provider's own (`get_sys_status_of`)."""
    validate_timeout_s: int = 5
    poll_interval_s: int = 15
    """Seconds between two questions to an operation that said it is busy."""
    granularity: int = 1
    """Granularity of a pool that comes without one, in its units."""
    pools: str = ""
    """`Pools=` as it was written; without effect, as in Slurm: pools come from the provider or from commands."""
    create_buffer: str = ""
    destroy_buffer: str = ""
    start_stage_in: str = ""
    start_stage_out: str = ""
    stop_stage_in: str = ""
    stop_stage_out: str = ""
    """The six programs of the generic provider."""
    default_pool: str = ""
    """The pool that becomes the default one as soon as it is there (DefaultPool= of a provider that tells which pools
    there are). Empty: none is awaited. Which one *is* the default, Pool.is_default alone says.
    """
    lua_script: str = ""
    """Path of the site's burst_buffer.lua; empty: beside the configuration of whoever runs it."""
    pre_run_requeues: int = 0
    """How often a job whose pre-run failed is requeued by itself before it is held; 0: held at once, as documented."""
    restart_policy: str = "forebay"
    """One of RESTART_POLICIES."""
    hold_oversized: bool = False
    """Whether a request for more than its pool has in all waits (as Slurm's does for some pools) instead of being
    refused.
    """
    array_stage_count: int = 10
    """Tasks of one array that stage at a time (bb_array_stage_cnt)."""
    requeue_on_node_fail: bool = False
    """Whether a job whose node failed under it waits again by itself, unless it was submitted with --no-requeue."""
    revision: int = 0
    """The revision at which this record or the rules of transfers were changed last, 0 for never: what
    `--expect-revision` is compared with. Set by `fold`, never by a command.
    """
    external_job_setup_wait_s: int = 20
    """How long the setup of an external job waits for space, seconds; 0: not at all. Other schedulers wait for its
    end.
    """
    external_job_linger_s: int = 300
    """How long the data of an external job is kept that was torn down before it ran, seconds; 0: not at all. Slurm
    tears all staged data down when it starts, and sets it up again a minute and a half later.
    """
    unknown_sbatch_options: str = "warn"
    """One of UNKNOWN_OPTIONS."""
    node_down_restage_s: int = 300
    """How long a node may be down until jobs that have not started are staged again on another one, seconds; 0: they
    wait for the node.
    """


DEFAULT_SITE = Site()
"""The configuration of a cluster where nobody configured anything."""

FOUNDING_FIELDS = Site.__struct_fields__[: Site.__struct_fields__.index("provider")]
"""The fields that forebay.toml founds a cluster with, in [policy] and [staging]."""


class HasSite(Protocol):
    """Whatever has the site's configuration: a State, a StateBuilder, Facts."""

    @property
    def site(self) -> Site: ...


# Questions that others ask ------------------------------------------------------------------------------------------


def tears_down_on_failure(site: Site) -> bool:
    """Return whether a job whose stage-in failed for good is torn down before it is held (Flags=TeardownFailure)."""
    return "TeardownFailure" in site.flags


def has_private_data(site: Site) -> bool:
    """Return whether users see only what is their own (Flags=PrivateData)."""
    return "PrivateData" in site.flags


def allows_user_persistent(site: Site) -> bool:
    """Return whether others than operators may create and destroy persistent buffers (Flags=EnablePersistent)."""
    return "EnablePersistent" in site.flags


def check_persistent_allowed(site: Site, *, is_operator: bool, place: str = "") -> Refusal | None:
    """Return why somebody may not create or destroy persistent buffers at all, or None. Who owns which is not asked
    here. The sentence is Slurm's.
    """
    if is_operator or allows_user_persistent(site):
        return None
    return Refusal(
        RefusalCode.PERMISSION_DENIED,
        "Burst Buffer permission denied",
        "only operators create and destroy persistent buffers here; the site may let everybody do it with "
        "Flags=EnablePersistent",
        place,
    )


def check_user_lists(site: Site, user: str, uid: int | None = None) -> Refusal | None:
    """Return why the user may not ask for a buffer, or None. `uid` where it is known: a list may name ids, too.

    The sentences are Slurm's. Jobs without a buffer are not asked.
    """
    known = {user} if uid is None else {user, str(uid)}
    if site.allow_users and known.isdisjoint(site.allow_users):
        return Refusal(
            RefusalCode.PERMISSION_DENIED,
            "User not found in AllowUsers",
            "ask an operator to add the user to AllowUsers, or submit without a burst buffer",
            "user",
        )
    if not known.isdisjoint(site.deny_users):
        return Refusal(
            RefusalCode.PERMISSION_DENIED,
            "User found in DenyUsers",
            "ask an operator to take the user out of DenyUsers, or submit without a burst buffer",
            "user",
        )
    return None


def format_flags(site: Site) -> str:
    """Return the flags as `show burst` prints them after `Flags=`; empty where there are none."""
    return ",".join(site.flags)


def provision_of(state: HasSite) -> Provision | None:
    """Return the cluster's provider; None where its own agents move the data."""
    site = state.site
    if site.provider == NATIVE:
        return None
    own = {name: getattr(site, name) for name in Provision.__struct_fields__ if hasattr(site, name)}
    return Provision(**own | {"get_sys_state": get_sys_state_of(site), "get_sys_status": get_sys_status_of(site)})


def get_sys_state_of(site: Site) -> str:
    """Return the program that tells the state of the system, empty for none: as `show burst` prints it."""
    return site.get_sys_state or provider_facts(site.provider).get_sys_state


def get_sys_status_of(site: Site) -> str:
    """Return the program behind `bbstat`, empty for none: as `show burst` prints it."""
    return site.get_sys_status or provider_facts(site.provider).get_sys_status


# What a record may hold -----------------------------------------------------------------------------------------------

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
"""Fields that name a program by its absolute path: it runs on other machines, in no particular directory."""


def check_site(site: Site) -> Refusal | None:
    """Return why the configuration cannot be used, or None; `place` is `site.FIELD`."""
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
    for field, chosen, allowed in (
        ("provider", (site.provider,), PROVIDERS),
        ("restart_policy", (site.restart_policy,), RESTART_POLICIES),
        ("unknown_sbatch_options", (site.unknown_sbatch_options,), UNKNOWN_OPTIONS),
        ("flags", site.flags, FLAGS),
    ):
        for word in chosen:
            if word not in allowed:
                return _invalid(field, f"{field} has {word!r}", f"use one of {', '.join(allowed)}")
    return _check_words(site)


def _check_words(site: Site) -> Refusal | None:
    if site.flags != sort_flags(site.flags):
        return _invalid("flags", "the flags are not in their order", f"write them as {','.join(FLAGS)} are")
    if "DisablePersistent" in site.flags and "EnablePersistent" in site.flags:
        return _invalid("flags", "DisablePersistent and EnablePersistent contradict each other", "leave out one")
    if site.allow_users and site.deny_users:
        return _invalid("deny_users", "there are both AllowUsers and DenyUsers", "use only one of them")
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
    """Return the flags once each, in the order of FLAGS; unknown ones are left out."""
    given = set(flags)
    return tuple(flag for flag in FLAGS if flag in given)


def program_fault(path: str) -> str | None:
    """Return what is wrong with the path of a program, in words that follow its field's name, or None."""
    if not path:
        return None
    if not path.startswith("/"):
        return f"{path!r} is not an absolute path"
    if len(path.encode("utf-8", "surrogatepass")) > PATH_BYTES_MAX:
        return f"is longer than {PATH_BYTES_MAX} bytes"
    if has_control_character(path):
        return f"{path!r} has a control character"
    if ".." in path.split("/"):
        return f"{path!r} has .. in it"
    return None


def _invalid(field: str, sentence: str, remedy: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_FIELD, sentence, remedy, f"site.{field}")


def expand_roots(roots: tuple[str, ...], user: str) -> tuple[str, ...]:
    """Return the configured roots with `%u` replaced."""
    return tuple(root.replace("%u", user) for root in roots)
