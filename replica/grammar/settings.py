"""The keys of the configuration: what each is called, which record holds it, how its value is read and written.

Slurm's keys are those of burst_buffer.conf, every one that its plugins know, the dead ones of the generic plugin
included. Forebay's own keys say what burst_buffer.conf cannot. Names are without regard to case.
"""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import Any

import msgspec

from replica.model import (
    ALGORITHMS,
    BACKENDS,
    FLAGS,
    PROVIDERS,
    RESTART_POLICIES,
    TIMEOUTS,
    UNKNOWN_OPTIONS,
    VERIFY_LEVELS,
    ordered_flags,
    program_fault,
    template_fault,
)
from replica.values import SizeError, format_slurm_size, name_fault, parse_size

PROVIDER_PREFIX = "burst_buffer/"
"""Prefix of a provider in slurm.conf: BurstBufferType=burst_buffer/lua."""

UNLIMITED = "unlimited"
"""Value of a transfer limit that is off; 0 would pause transfers."""

DIGITS_MAX = 18
"""Digits of a number, count: more than any bound has, and few enough for a signed 64-bit field."""


class Owner(StrEnum):
    """Which record holds a key's value."""

    SITE = "site"
    FLAG = "flag"
    """A flag of the site that has a key of its own."""
    TRANSFERS = "transfers"
    """Transfer settings."""
    RULES = "rules"
    """Scheduling rules: priority, accounts, revocation."""


class Kind(StrEnum):
    """Formats of values."""

    NUMBER = "a whole number"
    POINTS = "a whole number, negative or not"
    SECONDS = "a whole number of seconds"
    SIZE = "a size, such as 16MiB"
    USERS = "names or ids, separated by commas"
    DENIED = "names or ids, separated by colons"
    FLAGS = "flags, separated by commas"
    PROGRAM = "an absolute path"
    WORD = "one word"
    TEXT = "a text"
    YES_NO = "yes or no"
    PROVIDER = "burst_buffer/NAME"
    RESTART = "forebay or slurm"
    UNKNOWN_OPTIONS = "warn or reject"
    ROOTS = "absolute directories, separated by commas"
    RATE = "a size for each second, 0 or unlimited"
    AT_ONCE = "a whole number or unlimited"
    VERIFY = "none, size, digest or read_back"
    ALGORITHM = "xxh3-128 or blake3"
    TIMEOUTS = "progress or fixed"
    BACKENDS = "backends, separated by commas"
    TEMPLATE = "a command line, its program by absolute path"


class Key(msgspec.Struct, frozen=True):
    """A configuration key. `about` describes its effect; `is_slurm` marks a key of burst_buffer.conf."""

    name: str
    owner: Owner
    field: str
    kind: Kind
    about: str
    is_slurm: bool = True


class ValueFault(ValueError):
    """A value that cannot be read: `offset` is where in it, counted in characters from 0."""

    def __init__(self, sentence: str, remedy: str, offset: int = 0) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.remedy = remedy
        self.offset = offset


def _program(name: str, field: str, about: str) -> Key:
    return Key(name, Owner.SITE, field, Kind.PROGRAM, about)


def _own(name: str, owner: Owner, field: str, kind: Kind, about: str) -> Key:
    return Key(name, owner, field, kind, about, is_slurm=False)


def _moving(name: str, field: str, kind: Kind, about: str) -> Key:
    return Key(name, Owner.TRANSFERS, field, kind, about, is_slurm=False)


def _scheduling(name: str, field: str, kind: Kind, about: str) -> Key:
    return Key(name, Owner.RULES, field, kind, about, is_slurm=False)


_GENERIC = "program of the generic provider"

KEYS: tuple[Key, ...] = (
    Key("AllowUsers", Owner.SITE, "allow_users", Kind.USERS, "who alone may ask for a buffer; not with DenyUsers"),
    _program("CreateBuffer", "create_buffer", f"{_GENERIC}: makes a buffer"),
    Key("DefaultPool", Owner.SITE, "default_pool", Kind.WORD, "the pool of requests that name none"),
    Key("DenyUsers", Owner.SITE, "deny_users", Kind.DENIED, "who may not ask for a buffer; not with AllowUsers"),
    _program("DestroyBuffer", "destroy_buffer", f"{_GENERIC}: removes a buffer"),
    Key("Directive", Owner.SITE, "directive", Kind.WORD, "what directives of the lua provider begin with, after #"),
    Key("Flags", Owner.SITE, "flags", Kind.FLAGS, f"some of {', '.join(FLAGS)}"),
    _program("GetSysState", "get_sys_state", "tells pools and performs the datawarp provider's operations"),
    _program("GetSysStatus", "get_sys_status", "answers `forebay slurm bbstat`"),
    Key("Granularity", Owner.SITE, "granularity", Kind.SIZE, "granularity of a pool that comes without one"),
    Key("OtherTimeout", Owner.SITE, "other_timeout_s", Kind.SECONDS, "for setup, pre-run, post-run and teardown"),
    Key("PollInterval", Owner.SITE, "poll_interval_s", Kind.SECONDS, "between two questions to a busy operation"),
    Key("Pools", Owner.SITE, "pools", Kind.TEXT, "kept without effect, as in Slurm: use `forebay pool create`"),
    Key("PrivateData", Owner.FLAG, "PrivateData", Kind.YES_NO, "users see their own buffers only (also a flag)"),
    Key("StageInTimeout", Owner.SITE, "stage_in_timeout_s", Kind.SECONDS, "for stage-in"),
    Key("StageOutTimeout", Owner.SITE, "stage_out_timeout_s", Kind.SECONDS, "for stage-out"),
    _program("StartStageIn", "start_stage_in", f"{_GENERIC}: begins stage-in"),
    _program("StartStageOut", "start_stage_out", f"{_GENERIC}: begins stage-out"),
    _program("StopStageIn", "stop_stage_in", f"{_GENERIC}: ends stage-in"),
    _program("StopStageOut", "stop_stage_out", f"{_GENERIC}: ends stage-out"),
    Key("ValidateTimeout", Owner.SITE, "validate_timeout_s", Kind.SECONDS, "for the check of a submit"),
    _own("AllowRoot", Owner.SITE, "allow_root", Kind.YES_NO, "whether the user root may submit"),
    _own("ArrayStageCount", Owner.SITE, "array_stage_count", Kind.NUMBER, "tasks of an array that stage at a time"),
    _own("BurstBufferType", Owner.SITE, "provider", Kind.PROVIDER, f"the provider: {', '.join(PROVIDERS)}"),
    _own("Destinations", Owner.SITE, "destinations", Kind.ROOTS, "where jobs may stage out to; %u is the user"),
    _own("FinishedJobsKept", Owner.SITE, "finished_jobs_kept", Kind.NUMBER, "finished jobs kept in the state"),
    _own(
        "ExternalJobLinger",
        Owner.SITE,
        "external_job_linger_s",
        Kind.SECONDS,
        "data of an external job torn down before its run is kept",
    ),
    _own(
        "ExternalJobSetupWait",
        Owner.SITE,
        "external_job_setup_wait_s",
        Kind.SECONDS,
        "the setup of an external job waits for space",
    ),
    _own(
        "HoldOversized", Owner.SITE, "hold_oversized", Kind.YES_NO, "whether what exceeds its pool waits or is refused"
    ),
    _own("LuaScript", Owner.SITE, "lua_script", Kind.PROGRAM, "the burst_buffer.lua of the lua provider"),
    _own("MaxPasses", Owner.SITE, "max_passes", Kind.NUMBER, "how often smaller requests may pass the first in line"),
    _own(
        "NodeDownRestageTime",
        Owner.SITE,
        "node_down_restage_s",
        Kind.SECONDS,
        "until jobs that have not started leave a node that is down; 0: never",
    ),
    _own("OperationsPerStage", Owner.SITE, "operations_per_stage_max", Kind.NUMBER, "operations at once in a stage"),
    _own(
        "PreRunRequeues", Owner.SITE, "pre_run_requeues", Kind.NUMBER, "requeues after a failed pre-run before a hold"
    ),
    _own(
        "RequeueOnNodeFail", Owner.SITE, "requeue_on_node_fail", Kind.YES_NO, "whether jobs of a failed node wait again"
    ),
    _own("RestartPolicy", Owner.SITE, "restart_policy", Kind.RESTART, "what a new leader does with operations"),
    _own("RetryBackoff", Owner.SITE, "retry_backoff_s", Kind.SECONDS, "before the first retry, doubled each time"),
    _own("RetryBackoffMax", Owner.SITE, "retry_backoff_max_s", Kind.SECONDS, "the longest wait before a retry"),
    _own("Sources", Owner.SITE, "sources", Kind.ROOTS, "where jobs may stage in from; %u is the user"),
    _own("StagedHoldTime", Owner.SITE, "staged_hold_time_s", Kind.SECONDS, "until a held job's buffer is removed"),
    _own("StageRetries", Owner.SITE, "stage_retries", Kind.NUMBER, "retries of an operation before the job is held"),
    _own(
        "UnknownSbatchOptions",
        Owner.SITE,
        "unknown_sbatch_options",
        Kind.UNKNOWN_OPTIONS,
        "what options of sbatch without effect here lead to",
    ),
    _moving(
        "TransferAlgorithm", "algorithm", Kind.ALGORITHM, "the digest of files: the fast one, or one against tampering"
    ),
    _moving(
        "TransferBackends", "backends", Kind.BACKENDS, f"some of {', '.join(BACKENDS)}; the first one is the default"
    ),
    _moving(
        "TransferOutsideLinks",
        "outside_links",
        Kind.YES_NO,
        "whether links that lead out of what is staged may be made again as they are",
    ),
    _moving("TransferRate", "transfer_bytes_s", Kind.RATE, "how fast one transfer may go; 0 pauses"),
    _moving("TransferRateOfCluster", "cluster_bytes_s", Kind.RATE, "how fast all transfers may go together"),
    _moving("TransferRatePerNode", "node_bytes_s", Kind.RATE, "how fast the transfers of a node may go together"),
    _moving("TransferRatePerUser", "user_bytes_s", Kind.RATE, "how fast the transfers of a user may go together"),
    _moving("TransferReplace", "replace", Kind.YES_NO, "whether files at the destination are replaced"),
    _moving("TransferStallTime", "stall_s", Kind.SECONDS, "how long a transfer may stand still before it is late"),
    _moving("TransferTemplate", "template", Kind.TEMPLATE, "how the backend template calls its program"),
    _moving("TransferTimeMax", "hard_cap_s", Kind.SECONDS, "how long a transfer may take however well it goes on"),
    _moving(
        "TransferTimeouts", "timeouts", Kind.TIMEOUTS, "late by progress, or after StageInTimeout and StageOutTimeout"
    ),
    _moving("TransferVerify", "verify", Kind.VERIFY, "what is compared before a file counts as moved"),
    _moving("TransfersAtOnce", "cluster_at_once", Kind.AT_ONCE, "transfers under way in all"),
    _moving("TransfersPerNode", "node_at_once", Kind.AT_ONCE, "transfers under way on a node"),
    _moving("TransfersPerUser", "user_at_once", Kind.AT_ONCE, "transfers under way of a user"),
    _scheduling("AccountsRequired", "accounts_required", Kind.YES_NO, "reject jobs without an account"),
    _scheduling("DefaultAccount", "default_account", Kind.WORD, "account of jobs that name none"),
    _scheduling("DefaultQOS", "default_qos", Kind.WORD, "QOS of jobs that name none"),
    _scheduling("RevocationsMax", "revocations_max", Kind.NUMBER, "revocations of one job's staged buffer; 0: none"),
    _scheduling("RevokeAfter", "revoke_after_s", Kind.SECONDS, "wait of a staged job before its buffer is revoked"),
    _scheduling("SizePointsPerGiB", "size_points_per_gib", Kind.POINTS, "priority points for each GiB of a request"),
)
"""Every key, Slurm's first, each part by name."""

_BY_NAME = {key.name.lower(): key for key in KEYS}

_ELSEWHERE = {
    "altpool": "make further pools with `forebay pool create`",
    "gres": "make pools with `forebay pool create NAME --unit count --quantity N`",
    "jobsizelimit": "limits by job are limits of users, accounts and QOS",
    "usersizelimit": "limits by user are limits of users, accounts and QOS",
    "prioboostalloc": "the priority takes the size of a request into account by its own settings",
    "prioboostuse": "the priority takes the size of a request into account by its own settings",
    "bb_array_stage_cnt": "write ArrayStageCount=10",
    "restart_policy": "write RestartPolicy=slurm",
    "mailprog": "which program sends mail is said in forebay.toml, [mail]",
}
"""Keys of other releases or other files, and what says the same here."""


def find_key(name: str) -> Key | None:
    """Return the key of this name, without regard to case; None if there is none."""
    return _BY_NAME.get(name.lower())


def unknown_key_remedy(name: str) -> str:
    """Return what would be right instead of a key that is unknown."""
    elsewhere = _ELSEWHERE.get(name.lower())
    if elsewhere is not None:
        return elsewhere
    near = difflib.get_close_matches(name.lower(), _BY_NAME, n=1)
    if near:
        return f"did you mean {_BY_NAME[near[0]].name}?"
    return (
        f"the keys are {', '.join(key.name for key in KEYS if key.is_slurm)}, "
        "and Forebay's own (docs/reference/configuration.md)"
    )


def parse_value(key: Key, text: str) -> Any:
    """Return the value that `text` says for `key`; ValueFault where it says none. Bounds are checked by the records."""
    if not text:
        raise ValueFault(f"{key.name} has no value", f"write {key.kind.value}, or apply a file that leaves it out")
    match key.kind:
        case Kind.NUMBER | Kind.SECONDS:
            return _number(key, text)
        case Kind.POINTS:
            return -_number(key, text[1:]) if text.startswith("-") else _number(key, text)
        case Kind.SIZE:
            return _size(text)
        case Kind.USERS | Kind.DENIED:
            return _users(key, text)
        case Kind.FLAGS:
            return _flags(text)
        case Kind.YES_NO:
            return _yes_no(key, text)
        case Kind.PROGRAM:
            return _program_path(key, text)
        case Kind.PROVIDER:
            return _choice(key, text.lower().removeprefix(PROVIDER_PREFIX), PROVIDERS)
        case Kind.RESTART:
            return _choice(key, text.lower(), RESTART_POLICIES)
        case Kind.UNKNOWN_OPTIONS:
            return _choice(key, text.lower(), UNKNOWN_OPTIONS)
        case Kind.ROOTS:
            return tuple(root for root in text.split(",") if root)
        case Kind.RATE:
            return _rate(text)
        case Kind.AT_ONCE:
            return None if text.lower() == UNLIMITED else _number(key, text)
        case Kind.VERIFY:
            return _choice(key, text.lower(), VERIFY_LEVELS)
        case Kind.ALGORITHM:
            return _choice(key, text.lower(), ALGORITHMS)
        case Kind.TIMEOUTS:
            return _choice(key, text.lower(), TIMEOUTS)
        case Kind.TEMPLATE:
            return _template(key, text)
        case Kind.BACKENDS:
            return tuple(dict.fromkeys(_choice(key, word, BACKENDS) for word in text.lower().split(",") if word))
        case Kind.WORD:
            fault = name_fault(text.removeprefix("#") if key.field == "directive" else text)
            if fault is not None or text.startswith("#"):
                raise ValueFault(f"{key.name} {fault or 'starts with #'}", "write one word, without #")
            return text
        case Kind.TEXT:
            return text


def format_value(key: Key, value: Any) -> str:
    """Return a value as it is written in a file; "" where it is not written at all (nothing was said)."""
    match key.kind:
        case Kind.SIZE:
            return format_slurm_size(value)
        case Kind.RATE | Kind.AT_ONCE if value is None:
            return UNLIMITED
        case Kind.RATE:
            return format_slurm_size(value)
        case Kind.USERS | Kind.FLAGS | Kind.ROOTS | Kind.BACKENDS:
            return ",".join(value)
        case Kind.DENIED:
            return ":".join(value)
        case Kind.YES_NO:
            return "yes" if value else "no"
        case Kind.PROVIDER:
            return f"{PROVIDER_PREFIX}{value}"
        case _:
            return str(value)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except SizeError as error:
        raise ValueFault(error.sentence, error.remedy, error.offset) from None


def _rate(text: str) -> int | None:
    if text.lower() == UNLIMITED:
        return None
    return 0 if text == "0" else _size(text.removesuffix("/s"))


def _number(key: Key, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueFault(f"{key.name} is {text!r}", f"write {key.kind.value}")
    if len(text) > 1 and text[0] == "0":
        raise ValueFault(f"{key.name} is {text!r}, which Slurm reads as octal", "write it without a leading 0")
    if len(text) > DIGITS_MAX:
        raise ValueFault(f"{key.name} has {len(text)} digits", f"write {key.kind.value} that fits")
    return int(text)


def _users(key: Key, text: str) -> tuple[str, ...]:
    if key.kind is Kind.USERS and ":" in text:
        raise ValueFault(f"{key.name} has a colon", "separate users with commas", text.index(":"))
    found: dict[str, None] = {}
    offset = 0
    for user in text.replace(":", ",").split(","):
        fault = name_fault(user) if user else None
        if fault is not None:
            raise ValueFault(f"a user name {fault}", f"write {key.kind.value}", offset)
        if user:
            found[user] = None
        offset += len(user) + 1
    if not found:
        raise ValueFault(f"{key.name} names nobody", f"write {key.kind.value}, or leave the key out")
    return tuple(found)


def _flags(text: str) -> tuple[str, ...]:
    known = {flag.lower(): flag for flag in FLAGS}
    found: list[str] = []
    offset = 0
    for word in text.split(","):
        if word:
            flag = known.get(word.lower())
            if flag is None:
                near = difflib.get_close_matches(word.lower(), known, n=1)
                remedy = f"did you mean {known[near[0]]}?" if near else f"use some of {', '.join(FLAGS)}"
                raise ValueFault(f"the flag {word!r} is unknown", remedy, offset)
            found.append(flag)
        offset += len(word) + 1
    if "DisablePersistent" in found and "EnablePersistent" in found:
        raise ValueFault("DisablePersistent and EnablePersistent contradict each other", "leave out one of them")
    return ordered_flags(found)


def _yes_no(key: Key, text: str) -> bool:
    word = text.lower()
    if word in ("yes", "true", "1", "on"):
        return True
    if word in ("no", "false", "0", "off"):
        return False
    raise ValueFault(f"{key.name} is {text!r}", "write yes or no")


def _program_path(key: Key, text: str) -> str:
    fault = program_fault(text)
    if fault is not None:
        raise ValueFault(f"{key.name} {fault}", "write the absolute path of a program, without ..")
    return text


def _template(key: Key, text: str) -> str:
    fault = "has a double quote, which a file cannot hold" if '"' in text else template_fault(text)
    if fault is not None:
        raise ValueFault(f"{key.name} {fault}", f"write {key.kind.value}")
    return text


def _choice(key: Key, word: str, allowed: tuple[str, ...]) -> str:
    if word not in allowed:
        raise ValueFault(f"{key.name} has {word!r}", f"use one of {', '.join(allowed)}")
    return word
