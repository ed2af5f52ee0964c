"""Replicated state of transfers: rules, checkpoints and receipts, from feature level 4 on.

The momentary progress of a transfer is soft state of the leader. Replicated are a checkpoint, at most once a minute,
and a receipt at the end. Per-file lines stay on the agent's disk; the receipt has their digest.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from forebay.replica.model.requests import BufferRequest
from forebay.replica.model.stages import Stage
from forebay.replica.values import (
    MICROSECONDS_PER_SECOND,
    NEVER,
    SIZE_BYTES_MAX,
    TIME_LIMIT_S_MAX,
    Instant,
    Pattern,
    Rejection,
    RejectionCode,
)

VERIFY_LEVELS = ("none", "size", "digest", "read_back")
"""Levels of verification of a copied file: none; size and time; the digest of the data written; the digest of the data
read back. Each includes the previous ones.
"""

ALGORITHMS = ("xxh3-128", "blake3")
"""Digest algorithms for files: a fast one against accidents, and a cryptographic one against tampering."""

TIMEOUTS = ("progress", "fixed")
"""Kinds of timeouts: without progress for a time, or after StageInTimeout or StageOutTimeout."""

BACKENDS = ("native", "rsync", "rclone", "template", "command")
"""Programs that move data: Forebay itself, rsync, rclone, the site's command template, the job's own command
(`stage_in:COMMAND`).
"""

CONCURRENT_MAX = 1_000_000
"""Largest limit on concurrent transfers, count: more than the possible number of active jobs."""

LEFT_OUT_NAMED_MAX = 16
"""Skipped objects named in a receipt, count: enough to see their kind; the agent's receipt file names all."""

LEFT_OUT_CHARACTERS_MAX = 255
"""Name or reason of a skipped object, characters; the end of a path is kept."""

WORD_CHARACTERS_MAX = 64
"""A backend, level or algorithm in a receipt, characters."""

DIGEST_CHARACTERS_MAX = 160
"""A digest in a receipt, characters: `blake3:` and 64 digits, or a site's own of 512 bits."""

RECEIPTS_PER_JOB_MAX = 8
"""Receipts of one job kept in the state, count: its stage-in, its stage-out, and retries. The ledger has all."""


class LeftOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A skipped object. In `path`, bytes that are not UTF-8 are escaped as by Python's `backslashreplace`."""

    path: str
    reason: str


class TransferReceipt(msgspec.Struct, frozen=True, array_like=True):
    """Receipt of one transfer attempt, as reported by its agent.

    Counts cover the whole transfer, including work of earlier attempts, which the `resumed` fields count again. Times
    are Instants of the agent's clock.
    """

    stage: Stage
    attempt: int
    complete: bool = True
    """True if all data is at its destination; failed attempts have receipts, too."""
    backends: tuple[str, ...] = ("native",)
    """Backends that moved the data: some of BACKENDS."""
    files: int = 0
    directories: int = 0
    links: int = 0
    """Symbolic links recreated."""
    size_bytes: int = 0
    """Total size of the files, including holes."""
    written_bytes: int = 0
    """Bytes written or shared by reflink; less than `size_bytes` for sparse files."""
    resumed_files: int = 0
    resumed_bytes: int = 0
    """Files and bytes that an earlier attempt had moved."""
    retries: int = 0
    """Files or chunks moved again because they changed or did not verify."""
    removed_files: int = 0
    """Source files deleted after their copies were durable (move)."""
    left_out: int = 0
    """Skipped objects: devices, sockets, missing sources and unexported files."""
    left_out_first: tuple[LeftOut, ...] = ()
    stripped: int = 0
    """Files whose set-ID bits were removed."""
    dangling: int = 0
    """Links, among `links`, without a target at the destination, as far as can be known."""
    verify: str = "digest"
    algorithm: str = "xxh3-128"
    digest: str = ""
    """Digest over the per-file receipt lines, `ALGORITHM:HEX`."""
    manifest_digest: str = ""
    """Digest of the manifest, which lists the source."""
    started_at: Instant = NEVER
    ended_at: Instant = NEVER


class TransferCheckpoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Durable progress of a transfer; the exact position is on the agent's disk."""

    stage: Stage
    attempt: int
    files: int = 0
    size_bytes: int = 0
    files_total: int = 0
    """0 while unknown."""
    total_bytes: int = 0
    manifest_digest: str = ""
    at: Instant = NEVER
    """Time of folding; set by `fold`."""


class JobTransfers(msgspec.Struct, frozen=True, array_like=True):
    """Recent receipts of one job, oldest first, and its checkpoint; the ledger has all of them."""

    receipts: tuple[TransferReceipt, ...] = ()
    checkpoint: TransferCheckpoint | None = None
    """Latest checkpoint of the active transfer."""


class TransferRules(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rules for moving data. Rates are bytes per second: None is unlimited, 0 pauses."""

    transfer_bytes_s: int | None = None
    """For each transfer: one stage of one job."""
    user_bytes_s: int | None = None
    """For all transfers of one user in the cluster."""
    node_bytes_s: int | None = None
    """For all transfers of one node."""
    cluster_bytes_s: int | None = None
    """For all transfers together."""
    user_at_once: int | None = None
    """Active transfers of one user: None is unlimited, 0 lets none begin."""
    node_at_once: int | None = None
    cluster_at_once: int | None = None
    """Active transfers of one node, and of all; `Site.operations_per_stage_max` limits each stage."""
    verify: str = "digest"
    """One of VERIFY_LEVELS."""
    algorithm: str = "xxh3-128"
    """One of ALGORITHMS."""
    timeouts: str = "progress"
    """One of TIMEOUTS. Providers other than native always use fixed timeouts, as in Slurm."""
    stall_s: int = 600
    """With progress timeouts: maximum time without progress, seconds. A pause by a rate of 0 does not count."""
    hard_cap_s: int = 30 * 86_400
    """With progress timeouts: maximum duration of a transfer, seconds."""
    replace: bool = True
    """True if existing files at the destination are replaced; otherwise the transfer fails and names them."""
    backends: tuple[str, ...] = ("native", "command")
    """Permitted backends, some of BACKENDS; the first (except `command`) is the default."""
    template: str = ""
    """The site's command line for the backend `template`, which starts with an absolute path."""
    outside_links: bool = True
    """True if symbolic links that lead out of the staged tree may be recreated unchanged."""


DEFAULT_TRANSFER_RULES = TransferRules()
"""Transfer rules of a cluster without configuration."""


class RateShares(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Present rate limits of a node, bytes per second: None is unlimited, 0 pauses.

    An agent keeps a token bucket for each: one per transfer, one per user, one for the node.
    """

    transfer_bytes_s: int | None = None
    """This transfer."""
    user_bytes_s: int | None = None
    """All transfers of this user on this node together: the node's share of the user's rate."""
    node_bytes_s: int | None = None
    """All transfers of this node together: the smaller of the node's limit and its share of the cluster's."""


CHECKPOINT_PERIOD_S = 30
CHECKPOINT_BYTES = 64 * 1024**3
"""A checkpoint is recorded if the last one of the attempt is this many seconds old, or this many bytes behind. Agents
report at most one a minute; more would swell the ledger.
"""


def is_checkpoint_due(former: TransferCheckpoint | None, checkpoint: TransferCheckpoint, at: Instant) -> bool:
    """Return whether a checkpoint reported at `at` is to be recorded after the `former` one."""
    if former is None or (former.stage, former.attempt) != (checkpoint.stage, checkpoint.attempt):
        return True
    grown = checkpoint.size_bytes - former.size_bytes
    return at - former.at >= CHECKPOINT_PERIOD_S * MICROSECONDS_PER_SECOND or grown >= CHECKPOINT_BYTES


def clip_receipt(receipt: TransferReceipt, stage: Stage, attempt: int) -> TransferReceipt:
    """Return the attempt's receipt cut to all bounds. A receipt is never rejected, since the operation has ended."""
    return replace(
        receipt,
        stage=stage,
        attempt=attempt,
        backends=tuple(_clip(name, WORD_CHARACTERS_MAX) for name in receipt.backends[: len(BACKENDS)]),
        left_out_first=tuple(
            LeftOut(_end(one.path, LEFT_OUT_CHARACTERS_MAX), _clip(one.reason, LEFT_OUT_CHARACTERS_MAX))
            for one in receipt.left_out_first[:LEFT_OUT_NAMED_MAX]
        ),
        verify=_clip(receipt.verify, WORD_CHARACTERS_MAX),
        algorithm=_clip(receipt.algorithm, WORD_CHARACTERS_MAX),
        digest=_clip(receipt.digest, DIGEST_CHARACTERS_MAX),
        manifest_digest=_clip(receipt.manifest_digest, DIGEST_CHARACTERS_MAX),
        **{field: clip_count(getattr(receipt, field)) for field in _COUNTS},
        started_at=Instant(clip_count(receipt.started_at)),
        ended_at=Instant(clip_count(receipt.ended_at)),
    )


def clip_checkpoint(checkpoint: TransferCheckpoint, stage: Stage, attempt: int) -> TransferCheckpoint:
    """Return the attempt's checkpoint cut to all bounds, without a time."""
    return TransferCheckpoint(
        stage=stage,
        attempt=attempt,
        files=clip_count(checkpoint.files),
        size_bytes=clip_count(checkpoint.size_bytes),
        files_total=clip_count(checkpoint.files_total),
        total_bytes=clip_count(checkpoint.total_bytes),
        manifest_digest=_clip(checkpoint.manifest_digest, DIGEST_CHARACTERS_MAX),
    )


_COUNTS = (
    "files",
    "directories",
    "links",
    "size_bytes",
    "written_bytes",
    "resumed_files",
    "resumed_bytes",
    "retries",
    "removed_files",
    "left_out",
    "stripped",
    "dangling",
)


def clip_count(number: int, least: int = 0) -> int:
    """Return a number clipped to the range of the ledger."""
    return max(least, min(number, SIZE_BYTES_MAX))


def _clip(text: str, characters_max: int) -> str:
    """Return the text cut to length and escaped so that every peer can encode it."""
    return text[:characters_max].encode("utf-8", "backslashreplace").decode("utf-8")[:characters_max]


def _end(path: str, characters_max: int) -> str:
    """Return the end of a path, which is more specific than its beginning."""
    path = path.encode("utf-8", "backslashreplace").decode("utf-8")
    return path if len(path) <= characters_max else "…" + path[1 - characters_max :]


_TIMES: dict[str, tuple[int, int]] = {
    "stall_s": (1, TIME_LIMIT_S_MAX),
    "hard_cap_s": (1, TIME_LIMIT_S_MAX),
}
_RATES = ("transfer_bytes_s", "user_bytes_s", "node_bytes_s", "cluster_bytes_s")
_AT_ONCE = ("user_at_once", "node_at_once", "cluster_at_once")
_CHOICES = {"verify": VERIFY_LEVELS, "algorithm": ALGORITHMS, "timeouts": TIMEOUTS}


def check_transfer_rules(rules: TransferRules) -> Rejection | None:
    """Return a rejection if the rules are invalid, or None; its `place` is `transfers.FIELD`."""
    for field, (least, most) in _TIMES.items():
        value = getattr(rules, field)
        if not least <= value <= most:
            return _invalid(field, f"{field} is {value}", f"use a number from {least} to {most}")
    for fields, most in ((_RATES, SIZE_BYTES_MAX), (_AT_ONCE, CONCURRENT_MAX)):
        for field in fields:
            limit = getattr(rules, field)
            if limit is not None and not 0 <= limit <= most:
                return _invalid(field, f"{field} is {limit}", f"use a number from 0 to {most}, or unlimited")
    for field, allowed in _CHOICES.items():
        if getattr(rules, field) not in allowed:
            return _invalid(field, f"{field} has {getattr(rules, field)!r}", f"use one of {', '.join(allowed)}")
    if not rules.backends or len(set(rules.backends)) != len(rules.backends):
        return _invalid("backends", "backends is empty or names one twice", f"use some of {', '.join(BACKENDS)}")
    for backend in rules.backends:
        if backend not in BACKENDS:
            return _invalid("backends", f"backends contains {backend!r}", f"use some of {', '.join(BACKENDS)}")
    fault = template_fault(rules.template) if rules.template else None
    if fault is not None:
        return _invalid(
            "template",
            f"template {fault}",
            "write the absolute path of a program, then its words",
        )
    if rules.backends == ("command",):
        return _invalid("backends", "backends contains only command", "add a backend that moves files, such as native")
    if "template" in rules.backends and not rules.template:
        return _invalid(
            "backends", "backends contains template, but TransferTemplate is not set", "set TransferTemplate, too"
        )
    return None


def _invalid(field: str, sentence: str, remedy: str) -> Rejection:
    return Rejection(RejectionCode.INVALID_FIELD, sentence, remedy, f"transfers.{field}")


# ---- options of single transfers: backend, deletion of the source, links, access control lists


CHOOSABLE = tuple(backend for backend in BACKENDS if backend != "command")
"""Values of `backend=`; a command is written as `stage_in:COMMAND`."""

LINKS = ("keep", "asis", "follow", "skip", "fail")
"""Values of `links=`, the treatment of symbolic links in a tree: recreate those that stay inside, recreate all
unchanged, copy their targets, skip them, or fail the transfer. By default links that stay inside are treated as
`keep`, and others as `asis` if the site allows that.
"""

CHOICE_KEYS = ("backend", "move", "links", "acls")


class TransferChoice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Options of one transfer."""

    backend: str = ""
    """One of CHOOSABLE; empty: the site's default."""
    move: bool = False
    """True if the source is deleted once its copy is durable."""
    links: str = ""
    """One of LINKS; empty: `keep`, and `asis` for links that lead out of the tree if the site allows that."""
    acls: bool = False
    """True if POSIX access control lists are copied."""


NO_CHOICE = TransferChoice()


def choice_prefix(stage: str, index: int, *, listed: bool) -> str:
    """Return the prefix of a transfer's options, for example `stage_out:list2`."""
    return f"{stage}:{'list' if listed else ''}{index}"


def transfer_choices(request: BufferRequest, stage: str, count: int, *, listed: bool) -> tuple[TransferChoice, ...]:
    """Return the options of each of the `count` transfers of a stage; empty if none has any."""
    if not any(option.startswith(stage + ":") for option in request.options):
        return ()
    chosen: dict[str, dict[str, str]] = {}
    for option in request.options:
        verb, _, text = option.partition(" ")
        key, _, value = text.partition("=")
        chosen.setdefault(verb, {})[key] = value
    choices = []
    for index in range(count):
        mine = chosen.get(choice_prefix(stage, index, listed=listed), {})
        chosen_here = TransferChoice(
            mine.get("backend", ""), mine.get("move") == "yes", mine.get("links", ""), mine.get("acls") == "yes"
        )
        choices.append(chosen_here)
    return tuple(choices) if any(choice != NO_CHOICE for choice in choices) else ()


def default_backend(backends: tuple[str, ...]) -> str:
    """Return the backend of transfers that name none: the first permitted one except `command`."""
    return next((backend for backend in backends if backend in CHOOSABLE), "native")


# ---- the site's command line for moving data (`TransferTemplate`): a program, and words with placeholders


PLACEHOLDERS = ("{source}", "{destination}")


_WORD = Pattern(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
_QUOTED = Pattern(r"""'([^']*)'|"([^"]*)\"""")


def template_words(template: str) -> list[str]:
    """Split a command line into words, and append missing placeholders.

    Blanks separate words; text between single or double quotes is taken literally.

    Raises:
        ValueError: quotes do not match.
    """
    if _WORD.sub("", template).strip():
        raise ValueError(template)
    words = [_QUOTED.sub(lambda found: found[1] or found[2] or "", word) for word in _WORD.findall(template)]
    return words if any(place in word for place in PLACEHOLDERS for word in words) else [*words, *PLACEHOLDERS]


def template_fault(template: str) -> str | None:
    """Return the fault of a command line, to follow `the command line `, or None if it is valid."""
    try:
        words = template_words(template)
    except ValueError:
        return "has quotes that do not match"
    if not template.strip():
        return "is empty"
    if not words[0].startswith("/"):
        return f"begins with {words[0][:48]!r}, which is not an absolute path"
    for place in PLACEHOLDERS:
        if not any(place in word for word in words[1:]):
            return f"has no {place}"
    return None
