"""Configuration keys: name, record and field, value format and description of each.

Slurm's keys are those of burst_buffer.conf, including the unused ones of the generic plugin. Forebay's own keys cover
further settings. Names are case-insensitive.
"""

from __future__ import annotations

import difflib
from enum import StrEnum
from typing import Any

import msgspec

from forebay.replica.model import (
    ALGORITHMS,
    BACKENDS,
    FLAGS,
    PROVIDERS,
    RESTART_POLICIES,
    TIMEOUTS,
    UNKNOWN_OPTIONS,
    VERIFY_LEVELS,
    path_variable_fault,
    program_fault,
    sort_flags,
    template_fault,
)
from forebay.replica.values import SizeError, format_slurm_size, name_fault, parse_size

PROVIDER_PREFIX = "burst_buffer/"
"""Prefix of a provider in slurm.conf: BurstBufferType=burst_buffer/lua."""

UNLIMITED = "unlimited"
"""Value of a transfer limit that is off; 0 would pause transfers."""

DIGITS_MAX = 18
"""Digits of a number, count: more than any bound has, and few enough for a signed 64-bit field."""


class SettingOwner(StrEnum):
    """Records that hold settings."""

    SITE = "site"
    FLAG = "flag"
    """A flag of the site that has a key of its own."""
    TRANSFERS = "transfers"
    """Transfer settings."""
    RULES = "rules"
    """Scheduling rules: priority, accounts, revocation."""


class ValueKind(StrEnum):
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
    RATE = "a size per second, 0 or unlimited"
    AT_ONCE = "a whole number or unlimited"
    VERIFY = "none, size, digest or read_back"
    ALGORITHM = "xxh3-128 or blake3"
    TIMEOUTS = "progress or fixed"
    BACKENDS = "backends, separated by commas"
    TEMPLATE = "a command line that begins with an absolute path"
    VARIABLES = "NAME or NAME=/DIRECTORY/%u, separated by commas"


class SettingKey(msgspec.Struct, frozen=True):
    """A configuration key. `about` describes its effect; `is_slurm` marks a key of burst_buffer.conf."""

    name: str
    owner: SettingOwner
    field: str
    kind: ValueKind
    about: str
    is_slurm: bool = True


class ValueFormatError(ValueError):
    """An invalid value; `offset` is the position of the fault, counted in characters from 0."""

    def __init__(self, sentence: str, remedy: str, offset: int = 0) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.remedy = remedy
        self.offset = offset


def _program_key(name: str, field: str, about: str) -> SettingKey:
    return SettingKey(name, SettingOwner.SITE, field, ValueKind.PROGRAM, about)


def _forebay_key(name: str, owner: SettingOwner, field: str, kind: ValueKind, about: str) -> SettingKey:
    return SettingKey(name, owner, field, kind, about, is_slurm=False)


def _transfer_key(name: str, field: str, kind: ValueKind, about: str) -> SettingKey:
    return SettingKey(name, SettingOwner.TRANSFERS, field, kind, about, is_slurm=False)


def _scheduling_key(name: str, field: str, kind: ValueKind, about: str) -> SettingKey:
    return SettingKey(name, SettingOwner.RULES, field, kind, about, is_slurm=False)


_GENERIC = "program of the generic provider"

KEYS: tuple[SettingKey, ...] = (
    SettingKey(
        "AllowUsers",
        SettingOwner.SITE,
        "allow_users",
        ValueKind.USERS,
        "the only users who may request buffers; excludes DenyUsers",
    ),
    _program_key("CreateBuffer", "create_buffer", f"{_GENERIC}: creates a buffer"),
    SettingKey("DefaultPool", SettingOwner.SITE, "default_pool", ValueKind.WORD, "the pool of requests that name none"),
    SettingKey(
        "DenyUsers",
        SettingOwner.SITE,
        "deny_users",
        ValueKind.DENIED,
        "users who may not request buffers; excludes AllowUsers",
    ),
    _program_key("DestroyBuffer", "destroy_buffer", f"{_GENERIC}: removes a buffer"),
    SettingKey(
        "Directive",
        SettingOwner.SITE,
        "directive",
        ValueKind.WORD,
        "directive word of the lua provider, after #",
    ),
    SettingKey("Flags", SettingOwner.SITE, "flags", ValueKind.FLAGS, f"some of {', '.join(FLAGS)}"),
    _program_key(
        "GetSysState", "get_sys_state", "program that reports pools and performs the datawarp provider's operations"
    ),
    _program_key("GetSysStatus", "get_sys_status", "program that answers `forebay slurm bbstat`"),
    SettingKey(
        "Granularity",
        SettingOwner.SITE,
        "granularity",
        ValueKind.SIZE,
        "granularity of a pool that is reported without one",
    ),
    SettingKey(
        "OtherTimeout",
        SettingOwner.SITE,
        "other_timeout_s",
        ValueKind.SECONDS,
        "time limit of setup, pre-run, post-run and teardown",
    ),
    SettingKey(
        "PollInterval",
        SettingOwner.SITE,
        "poll_interval_s",
        ValueKind.SECONDS,
        "time between two polls of a busy operation",
    ),
    SettingKey(
        "Pools",
        SettingOwner.SITE,
        "pools",
        ValueKind.TEXT,
        "kept without effect, as in Slurm: use `forebay pool create`",
    ),
    SettingKey(
        "PrivateData",
        SettingOwner.FLAG,
        "PrivateData",
        ValueKind.YES_NO,
        "users see only their own buffers (also a flag)",
    ),
    SettingKey("StageInTimeout", SettingOwner.SITE, "stage_in_timeout_s", ValueKind.SECONDS, "time limit of stage-in"),
    SettingKey(
        "StageOutTimeout", SettingOwner.SITE, "stage_out_timeout_s", ValueKind.SECONDS, "time limit of stage-out"
    ),
    _program_key("StartStageIn", "start_stage_in", f"{_GENERIC}: starts stage-in"),
    _program_key("StartStageOut", "start_stage_out", f"{_GENERIC}: starts stage-out"),
    _program_key("StopStageIn", "stop_stage_in", f"{_GENERIC}: stops stage-in"),
    _program_key("StopStageOut", "stop_stage_out", f"{_GENERIC}: stops stage-out"),
    SettingKey(
        "ValidateTimeout",
        SettingOwner.SITE,
        "validate_timeout_s",
        ValueKind.SECONDS,
        "time limit of the validation of a submit",
    ),
    _forebay_key("AllowRoot", SettingOwner.SITE, "allow_root", ValueKind.YES_NO, "whether the user root may submit"),
    _forebay_key(
        "ArrayStageCount",
        SettingOwner.SITE,
        "array_stage_count",
        ValueKind.NUMBER,
        "tasks of an array that stage concurrently",
    ),
    _forebay_key(
        "BurstBufferType", SettingOwner.SITE, "provider", ValueKind.PROVIDER, f"the provider: {', '.join(PROVIDERS)}"
    ),
    _forebay_key(
        "Destinations",
        SettingOwner.SITE,
        "destinations",
        ValueKind.ROOTS,
        "directories that jobs may stage out to; %u is the user",
    ),
    _forebay_key(
        "FinishedJobsKept", SettingOwner.SITE, "finished_jobs_kept", ValueKind.NUMBER, "finished jobs kept in the state"
    ),
    _forebay_key(
        "ExternalJobLinger",
        SettingOwner.SITE,
        "external_job_linger_s",
        ValueKind.SECONDS,
        "time that an external job's data is kept after a teardown before its run",
    ),
    _forebay_key(
        "ExternalJobSetupWait",
        SettingOwner.SITE,
        "external_job_setup_wait_s",
        ValueKind.SECONDS,
        "longest time that an external job's setup waits for space",
    ),
    _forebay_key(
        "HoldOversized",
        SettingOwner.SITE,
        "hold_oversized",
        ValueKind.YES_NO,
        "whether requests that exceed their pool wait instead of being rejected",
    ),
    _forebay_key(
        "LuaScript", SettingOwner.SITE, "lua_script", ValueKind.PROGRAM, "path of the lua provider's burst_buffer.lua"
    ),
    _forebay_key(
        "MaxPasses",
        SettingOwner.SITE,
        "max_passes",
        ValueKind.NUMBER,
        "times that smaller requests may overtake the first one in the queue",
    ),
    _forebay_key(
        "NodeDownRestageTime",
        SettingOwner.SITE,
        "node_down_restage_s",
        ValueKind.SECONDS,
        "time until jobs that have not started leave a node that is down; 0: never",
    ),
    _forebay_key(
        "OperationsPerStage",
        SettingOwner.SITE,
        "operations_per_stage_max",
        ValueKind.NUMBER,
        "concurrent operations of a stage",
    ),
    _forebay_key(
        "PathVariables",
        SettingOwner.SITE,
        "path_variables",
        ValueKind.VARIABLES,
        "variables that paths in directives may contain, besides $USER",
    ),
    _forebay_key(
        "PreRunRequeues",
        SettingOwner.SITE,
        "pre_run_requeues",
        ValueKind.NUMBER,
        "requeues after a failed pre-run before the job is held",
    ),
    _forebay_key(
        "RequeueOnNodeFail",
        SettingOwner.SITE,
        "requeue_on_node_fail",
        ValueKind.YES_NO,
        "whether jobs of a failed node are requeued",
    ),
    _forebay_key(
        "RestartPolicy",
        SettingOwner.SITE,
        "restart_policy",
        ValueKind.RESTART,
        "treatment of running operations by a new leader",
    ),
    _forebay_key(
        "RetryBackoff",
        SettingOwner.SITE,
        "retry_backoff_s",
        ValueKind.SECONDS,
        "wait before the first retry, doubled each time",
    ),
    _forebay_key(
        "RetryBackoffMax",
        SettingOwner.SITE,
        "retry_backoff_max_s",
        ValueKind.SECONDS,
        "longest wait before a retry",
    ),
    _forebay_key(
        "Sources",
        SettingOwner.SITE,
        "sources",
        ValueKind.ROOTS,
        "directories that jobs may stage in from; %u is the user",
    ),
    _forebay_key(
        "StagedHoldTime",
        SettingOwner.SITE,
        "staged_hold_time_s",
        ValueKind.SECONDS,
        "time until a held job's buffer is removed",
    ),
    _forebay_key(
        "StageRetries",
        SettingOwner.SITE,
        "stage_retries",
        ValueKind.NUMBER,
        "retries of an operation before the job is held",
    ),
    _forebay_key(
        "UnknownSbatchOptions",
        SettingOwner.SITE,
        "unknown_sbatch_options",
        ValueKind.UNKNOWN_OPTIONS,
        "treatment of sbatch options without effect here",
    ),
    _transfer_key(
        "TransferAlgorithm",
        "algorithm",
        ValueKind.ALGORITHM,
        "digest of files: xxh3-128 is fast, blake3 resists tampering",
    ),
    _transfer_key(
        "TransferBackends",
        "backends",
        ValueKind.BACKENDS,
        f"some of {', '.join(BACKENDS)}; the first one is the default",
    ),
    _transfer_key(
        "TransferOutsideLinks",
        "outside_links",
        ValueKind.YES_NO,
        "whether links that lead out of the staged tree may be recreated unchanged",
    ),
    _transfer_key("TransferRate", "transfer_bytes_s", ValueKind.RATE, "rate limit of one transfer; 0 pauses"),
    _transfer_key("TransferRateOfCluster", "cluster_bytes_s", ValueKind.RATE, "rate limit of all transfers together"),
    _transfer_key("TransferRatePerNode", "node_bytes_s", ValueKind.RATE, "rate limit of a node's transfers together"),
    _transfer_key("TransferRatePerUser", "user_bytes_s", ValueKind.RATE, "rate limit of a user's transfers together"),
    _transfer_key("TransferReplace", "replace", ValueKind.YES_NO, "whether files at the destination are replaced"),
    _transfer_key("TransferStallTime", "stall_s", ValueKind.SECONDS, "longest time without progress in a transfer"),
    _transfer_key("TransferTemplate", "template", ValueKind.TEMPLATE, "command line of the backend template"),
    _transfer_key(
        "TransferTimeMax", "hard_cap_s", ValueKind.SECONDS, "longest duration of a transfer that makes progress"
    ),
    _transfer_key(
        "TransferTimeouts",
        "timeouts",
        ValueKind.TIMEOUTS,
        "whether transfers time out without progress, or after a fixed time",
    ),
    _transfer_key("TransferVerify", "verify", ValueKind.VERIFY, "verification before a file counts as moved"),
    _transfer_key("TransfersAtOnce", "cluster_at_once", ValueKind.AT_ONCE, "concurrent transfers in total"),
    _transfer_key("TransfersPerNode", "node_at_once", ValueKind.AT_ONCE, "concurrent transfers of a node"),
    _transfer_key("TransfersPerUser", "user_at_once", ValueKind.AT_ONCE, "concurrent transfers of a user"),
    _scheduling_key("AccountsRequired", "accounts_required", ValueKind.YES_NO, "reject jobs without an account"),
    _scheduling_key("DefaultAccount", "default_account", ValueKind.WORD, "account of jobs that name none"),
    _scheduling_key("DefaultQOS", "default_qos", ValueKind.WORD, "QOS of jobs that name none"),
    _scheduling_key(
        "RevocationsMax", "revocations_max", ValueKind.NUMBER, "revocations of one job's staged buffer; 0: none"
    ),
    _scheduling_key(
        "RevokeAfter", "revoke_after_s", ValueKind.SECONDS, "wait of a staged job before its buffer is revoked"
    ),
    _scheduling_key(
        "SizePointsPerGiB", "size_points_per_gib", ValueKind.POINTS, "priority points for each GiB of a request"
    ),
)
"""All keys: Slurm's first, then Forebay's own, grouped by record."""

_BY_NAME = {key.name.lower(): key for key in KEYS}

_ELSEWHERE = {
    "altpool": "create further pools with `forebay pool create`",
    "gres": "create pools with `forebay pool create NAME --unit count --quantity N`",
    "jobsizelimit": "set limits per job in accounts and QOS",
    "usersizelimit": "set limits per user in accounts and QOS",
    "prioboostalloc": "set SizePointsPerGiB for a priority by size",
    "prioboostuse": "set SizePointsPerGiB for a priority by size",
    "bb_array_stage_cnt": "write ArrayStageCount=10",
    "restart_policy": "write RestartPolicy=slurm",
    "mailprog": "name the mail program in forebay.toml, [mail]",
}
"""Keys of other releases or files, with their equivalents."""


def find_key(name: str) -> SettingKey | None:
    """Return the key of this name, case-insensitive, or None."""
    return _BY_NAME.get(name.lower())


def unknown_key_remedy(name: str) -> str:
    """Return the remedy for an unknown key."""
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


def parse_value(key: SettingKey, text: str) -> Any:
    """Return the value of a key's text. Records check bounds.

    Raises:
        ValueFormatError: the text is not a value of the key.
    """
    if not text:
        raise ValueFormatError(
            f"{key.name} has no value",
            f"write {key.kind.value}; for the default, apply a settings file without this key",
        )
    match key.kind:
        case ValueKind.NUMBER | ValueKind.SECONDS:
            return _number(key, text)
        case ValueKind.POINTS:
            return -_number(key, text[1:]) if text.startswith("-") else _number(key, text)
        case ValueKind.SIZE:
            return _size(text)
        case ValueKind.USERS | ValueKind.DENIED:
            return _users(key, text)
        case ValueKind.FLAGS:
            return _flags(text)
        case ValueKind.YES_NO:
            return _yes_no(key, text)
        case ValueKind.PROGRAM:
            return _program_path(key, text)
        case ValueKind.PROVIDER:
            return _choice(key, text.lower().removeprefix(PROVIDER_PREFIX), PROVIDERS)
        case ValueKind.RESTART:
            return _choice(key, text.lower(), RESTART_POLICIES)
        case ValueKind.UNKNOWN_OPTIONS:
            return _choice(key, text.lower(), UNKNOWN_OPTIONS)
        case ValueKind.ROOTS:
            return tuple(root for root in text.split(",") if root)
        case ValueKind.RATE:
            return _rate(text)
        case ValueKind.AT_ONCE:
            return None if text.lower() == UNLIMITED else _number(key, text)
        case ValueKind.VERIFY:
            return _choice(key, text.lower(), VERIFY_LEVELS)
        case ValueKind.ALGORITHM:
            return _choice(key, text.lower(), ALGORITHMS)
        case ValueKind.TIMEOUTS:
            return _choice(key, text.lower(), TIMEOUTS)
        case ValueKind.TEMPLATE:
            return _template(key, text)
        case ValueKind.VARIABLES:
            return _path_variables(key, text)
        case ValueKind.BACKENDS:
            return tuple(dict.fromkeys(_choice(key, word, BACKENDS) for word in text.lower().split(",") if word))
        case ValueKind.WORD:
            fault = name_fault(text.removeprefix("#") if key.field == "directive" else text)
            if fault is not None or text.startswith("#"):
                raise ValueFormatError(f"{key.name} {fault or 'starts with #'}", "write one word, without #")
            return text
        case ValueKind.TEXT:
            return text


def format_value(key: SettingKey, value: Any) -> str:
    """Format a value as files write it; "" for an unset one."""
    match key.kind:
        case ValueKind.SIZE:
            return format_slurm_size(value)
        case ValueKind.RATE | ValueKind.AT_ONCE if value is None:
            return UNLIMITED
        case ValueKind.RATE:
            return format_slurm_size(value)
        case ValueKind.USERS | ValueKind.FLAGS | ValueKind.ROOTS | ValueKind.BACKENDS | ValueKind.VARIABLES:
            return ",".join(value)
        case ValueKind.DENIED:
            return ":".join(value)
        case ValueKind.YES_NO:
            return "yes" if value else "no"
        case ValueKind.PROVIDER:
            return f"{PROVIDER_PREFIX}{value}"
        case _:
            return str(value)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except SizeError as error:
        raise ValueFormatError(error.sentence, error.remedy, error.offset) from None


def _rate(text: str) -> int | None:
    if text.lower() == UNLIMITED:
        return None
    return 0 if text == "0" else _size(text.removesuffix("/s"))


def _number(key: SettingKey, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueFormatError(f"{key.name} is {text!r}", f"write {key.kind.value}")
    if len(text) > 1 and text[0] == "0":
        raise ValueFormatError(f"{key.name} is {text!r}, which Slurm reads as octal", "write it without a leading 0")
    if len(text) > DIGITS_MAX:
        raise ValueFormatError(f"{key.name} has {len(text)} digits", f"write {key.kind.value} that fits")
    return int(text)


def _users(key: SettingKey, text: str) -> tuple[str, ...]:
    if key.kind is ValueKind.USERS and ":" in text:
        raise ValueFormatError(f"{key.name} has a colon", "separate users with commas", text.index(":"))
    found: dict[str, None] = {}
    offset = 0
    for user in text.replace(":", ",").split(","):
        fault = name_fault(user) if user else None
        if fault is not None:
            raise ValueFormatError(f"a user name {fault}", f"write {key.kind.value}", offset)
        if user:
            found[user] = None
        offset += len(user) + 1
    if not found:
        raise ValueFormatError(f"{key.name} names no user", f"write {key.kind.value}, or leave the key out")
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
                raise ValueFormatError(f"the flag {word!r} is unknown", remedy, offset)
            found.append(flag)
        offset += len(word) + 1
    if "DisablePersistent" in found and "EnablePersistent" in found:
        raise ValueFormatError("DisablePersistent and EnablePersistent contradict each other", "leave out one of them")
    return sort_flags(found)


def _yes_no(key: SettingKey, text: str) -> bool:
    word = text.lower()
    if word in ("yes", "true", "1", "on"):
        return True
    if word in ("no", "false", "0", "off"):
        return False
    raise ValueFormatError(f"{key.name} is {text!r}", "write yes or no")


def _program_path(key: SettingKey, text: str) -> str:
    fault = program_fault(text)
    if fault is not None:
        raise ValueFormatError(f"{key.name} {fault}", "write the absolute path of a program, without ..")
    return text


def _template(key: SettingKey, text: str) -> str:
    fault = "has a double quote, which a file cannot hold" if '"' in text else template_fault(text)
    if fault is not None:
        raise ValueFormatError(f"{key.name} {fault}", f"write {key.kind.value}")
    return text


def _path_variables(key: SettingKey, text: str) -> tuple[str, ...]:
    found: dict[str, str] = {}
    offset = 0
    for entry in text.split(","):
        fault = path_variable_fault(entry) if entry else None
        name = entry.partition("=")[0]
        if fault is None and name in found:
            fault = f"{name} is written twice"
        if fault is not None:
            raise ValueFormatError(fault, f"write {key.kind.value}", offset)
        if entry:
            found[name] = entry
        offset += len(entry) + 1
    return tuple(found.values())


def _choice(key: SettingKey, word: str, allowed: tuple[str, ...]) -> str:
    if word not in allowed:
        raise ValueFormatError(f"{key.name} has {word!r}", f"use one of {', '.join(allowed)}")
    return word
