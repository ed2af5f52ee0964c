"""Moving data, as the replicas agree on it: the rules that agents move by, and the receipt for what was moved.

Both came with feature level 4. What a transfer is doing at the moment is soft state of the leader and never in here;
what it had done is: a checkpoint every minute at most, and a receipt at its end. The per-file lines stay on the disk of
the agent; the receipt has the digest over them.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from replica.model.requests import BufferRequest
from replica.model.stages import Stage
from replica.values import (
    MICROSECONDS_PER_SECOND,
    NEVER,
    SIZE_BYTES_MAX,
    TIME_LIMIT_S_MAX,
    Instant,
    Pattern,
    Refusal,
    RefusalCode,
)

VERIFY_LEVELS = ("none", "size", "digest", "read_back")
"""What is compared before a file counts as moved: nothing, size and time, the digest of what was written, and that of
what storage gives back. Each has all that the one before it has."""

ALGORITHMS = ("xxh3-128", "blake3")
"""Digests of files: a fast one against accidents, and one for receipts that must stand up to tampering."""

TIMEOUTS = ("progress", "fixed")
"""When a transfer is late: when it makes no progress for a time, or when StageInTimeout or StageOutTimeout is over."""

BACKENDS = ("native", "rsync", "rclone", "template", "command")
"""What may move data: Forebay itself, the two programs, the site's command template, the job's own command
(`stage_in:COMMAND`)."""

CONCURRENT_MAX = 1_000_000
"""The largest number that a limit on transfers at once may have, count: more than there can be jobs under way."""

LEFT_OUT_NAMED_MAX = 16
"""Things left out that a receipt names, count: enough to see what kind they are; the agent's receipt file has all."""

LEFT_OUT_CHARACTERS_MAX = 255
"""A name, or a reason, of what was left out, characters: the end of a path says most."""

WORD_CHARACTERS_MAX = 64
"""A backend, level or algorithm in a receipt, characters."""

DIGEST_CHARACTERS_MAX = 160
"""A digest in a receipt, characters: `blake3:` and 64 digits, or a site's own of 512 bits."""

RECEIPTS_PER_JOB_MAX = 8
"""Receipts of one job kept in the state, count: its stage-in, its stage-out and what it needed to repeat. The ledger
has all."""


class LeftOut(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Thing that was not moved: `path` with bytes that are no UTF-8 escaped, as Python's `backslashreplace`."""

    path: str
    reason: str


class TransferReceipt(msgspec.Struct, frozen=True, array_like=True):
    """What one attempt of a transfer did, as its agent says it. Counts are of this transfer whole, so what an earlier
    attempt had moved is in them, and again in the `resumed` ones. Times are Instants of the agent's clock.
    """

    stage: Stage
    attempt: int
    complete: bool = True
    """Whether everything is where it should be; what failed has a receipt, too."""
    backends: tuple[str, ...] = ("native",)
    """What moved the data: some of BACKENDS."""
    files: int = 0
    directories: int = 0
    links: int = 0
    """Symbolic links that were made again."""
    size_bytes: int = 0
    """Bytes of the files, holes included."""
    written_bytes: int = 0
    """Bytes that were written or shared by reflink: less than `size_bytes` where files are sparse."""
    resumed_files: int = 0
    resumed_bytes: int = 0
    """What an earlier attempt had moved, so that this one did not have to."""
    retries: int = 0
    """Files or chunks that were moved again because they changed or did not compare."""
    removed_files: int = 0
    """Source files deleted after their copies were durable (move)."""
    left_out: int = 0
    """Things that were refused or not there at the end: devices, sockets, and what was not exported."""
    left_out_first: tuple[LeftOut, ...] = ()
    stripped: int = 0
    """Files whose set-id bits were taken away."""
    dangling: int = 0
    """Of `links`, those that lead to nothing at the destination, as far as can be known."""
    verify: str = "digest"
    algorithm: str = "xxh3-128"
    digest: str = ""
    """Digest over the per-file receipt lines, `ALGORITHM:HEX`."""
    manifest_digest: str = ""
    """Digest over the manifest: what there was at the source."""
    started_at: Instant = NEVER
    ended_at: Instant = NEVER


class TransferCheckpoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How much of a transfer is durable; where exactly it goes on stands on the agent's disk."""

    stage: Stage
    attempt: int
    files: int = 0
    size_bytes: int = 0
    files_total: int = 0
    """0 while it is not known."""
    total_bytes: int = 0
    manifest_digest: str = ""
    at: Instant = NEVER
    """When it was folded; set by `fold`, whatever the agent says."""


class JobTransfers(msgspec.Struct, frozen=True, array_like=True):
    """What is known of the transfers of one job, oldest first; the ledger has every receipt and checkpoint."""

    receipts: tuple[TransferReceipt, ...] = ()
    checkpoint: TransferCheckpoint | None = None
    """The newest one of the transfer that is under way."""


class TransferRules(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How agents move data. Rates are bytes per second: None is without limit, 0 pauses."""

    transfer_bytes_s: int | None = None
    """For each transfer: one stage of one job."""
    user_bytes_s: int | None = None
    """For all transfers of one user in the cluster."""
    node_bytes_s: int | None = None
    """For all transfers of one node."""
    cluster_bytes_s: int | None = None
    """For all transfers together."""
    user_at_once: int | None = None
    """Transfers under way, of one user: None is without limit, 0 lets none begin."""
    node_at_once: int | None = None
    cluster_at_once: int | None = None
    """Likewise of one node, and of all; those of a stage are counted by `Site.operations_per_stage_max`."""
    verify: str = "digest"
    """One of VERIFY_LEVELS."""
    algorithm: str = "xxh3-128"
    """One of ALGORITHMS."""
    timeouts: str = "progress"
    """One of TIMEOUTS. Others than the native provider always have fixed ones, as in Slurm."""
    stall_s: int = 600
    """Progress timeouts: how long a transfer may stand still, seconds. A pause by a rate of 0 does not count."""
    hard_cap_s: int = 30 * 86_400
    """Progress timeouts: how long a transfer may take however well it goes on, seconds."""
    replace: bool = True
    """Whether a file that exists at the destination is replaced; otherwise the transfer fails and names it."""
    backends: tuple[str, ...] = ("native", "command")
    """Some of BACKENDS that may be used; the first one (but `command`) is used where a request names none."""
    template: str = ""
    """The site's command line for the backend `template` (replica.model.transfers); an absolute path begins it."""
    outside_links: bool = True
    """Whether symbolic links that lead out of what is staged may be made again as they are."""


DEFAULT_TRANSFER_RULES = TransferRules()
"""The rules of a cluster where nobody set any."""


class RateShares(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a node may do at the moment, bytes per second: None is without limit, 0 pauses. An agent keeps a bucket for
    each: one per transfer, one per user, one for the node.
    """

    transfer_bytes_s: int | None = None
    """This transfer."""
    user_bytes_s: int | None = None
    """All transfers of this user on this node together: the node's share of what the user may have."""
    node_bytes_s: int | None = None
    """All transfers of this node together: the smaller of the node's limit and its share of the cluster's."""


CHECKPOINT_PERIOD_S = 30
CHECKPOINT_BYTES = 64 * 1024**3
"""A checkpoint is written down if the last one of the same attempt is so many seconds old, or so many bytes behind:
agents say one every minute at most, and the ledger is no place for more."""


def is_checkpoint_due(former: TransferCheckpoint | None, checkpoint: TransferCheckpoint, at: Instant) -> bool:
    """Return whether a checkpoint that is said at `at` is to be written down after the `former` one."""
    if former is None or (former.stage, former.attempt) != (checkpoint.stage, checkpoint.attempt):
        return True
    grown = checkpoint.size_bytes - former.size_bytes
    return at - former.at >= CHECKPOINT_PERIOD_S * MICROSECONDS_PER_SECOND or grown >= CHECKPOINT_BYTES


def clip_receipt(receipt: TransferReceipt, stage: Stage, attempt: int) -> TransferReceipt:
    """Return the receipt of the attempt within all bounds: it is never refused, since the operation has ended."""
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
    """Return the checkpoint of the attempt within all bounds, without a time."""
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
    """Return a number within what the ledger can hold."""
    return max(least, min(number, SIZE_BYTES_MAX))


def _clip(text: str, characters_max: int) -> str:
    """Return the text that fits, and that every peer can encode."""
    return text[:characters_max].encode("utf-8", "backslashreplace").decode("utf-8")[:characters_max]


def _end(path: str, characters_max: int) -> str:
    """Return the end of a path, which says more than its beginning."""
    path = path.encode("utf-8", "backslashreplace").decode("utf-8")
    return path if len(path) <= characters_max else "…" + path[1 - characters_max :]


_TIMES: dict[str, tuple[int, int]] = {
    "stall_s": (1, TIME_LIMIT_S_MAX),
    "hard_cap_s": (1, TIME_LIMIT_S_MAX),
}
_RATES = ("transfer_bytes_s", "user_bytes_s", "node_bytes_s", "cluster_bytes_s")
_AT_ONCE = ("user_at_once", "node_at_once", "cluster_at_once")
_CHOICES = {"verify": VERIFY_LEVELS, "algorithm": ALGORITHMS, "timeouts": TIMEOUTS}


def check_transfer_rules(rules: TransferRules) -> Refusal | None:
    """Return why the rules cannot be used, or None; `place` is `transfers.FIELD`."""
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
            return _invalid("backends", f"backends has {backend!r}", f"use some of {', '.join(BACKENDS)}")
    fault = template_fault(rules.template) if rules.template else None
    if fault is not None:
        return _invalid(
            "template",
            f"template {fault}",
            "write the absolute path of a program, then its words",
        )
    if rules.backends == ("command",):
        return _invalid("backends", "backends has command alone", "add what moves files, such as native")
    if "template" in rules.backends and not rules.template:
        return _invalid("backends", "backends has template, and there is none", "set TransferTemplate, too")
    return None


def _invalid(field: str, sentence: str, remedy: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_FIELD, sentence, remedy, f"transfers.{field}")


# ---- what a job chose for single transfers: who moves the data, and whether the source goes when the copy is there


CHOOSABLE = tuple(backend for backend in BACKENDS if backend != "command")
"""What `backend=` may say; a command is written as `stage_in:COMMAND`."""

LINKS = ("keep", "asis", "follow", "skip", "fail")
"""What `links=` may say of symbolic links in a tree: made again where they stay inside of it, made again whatever they
say, replaced by what they lead to, left out, or a failure of the transfer. Where nothing is said, links inside of it
count as `keep`, and others as `asis` if the site allows that."""

CHOICE_KEYS = ("backend", "move", "links", "acls")


class TransferChoice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is special about one transfer."""

    backend: str = ""
    """One of CHOOSABLE; empty: the first that the site's rules name."""
    move: bool = False
    """Whether the source is deleted once its copy is durable."""
    links: str = ""
    """One of LINKS; empty: `keep`, and `asis` for links that lead out of the tree where the site allows that."""
    acls: bool = False
    """Whether POSIX access control lists are copied."""


NO_CHOICE = TransferChoice()


def choice_prefix(stage: str, index: int, *, listed: bool) -> str:
    """Return what stands before the option of a transfer, for example `stage_out:list2`."""
    return f"{stage}:{'list' if listed else ''}{index}"


def transfer_choices(request: BufferRequest, stage: str, count: int, *, listed: bool) -> tuple[TransferChoice, ...]:
    """Return the choice for each of the `count` transfers of a stage; empty where there is none at all."""
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
    """Return what moves the data of a transfer that names nothing: the first that the rules allow and that can."""
    return next((backend for backend in backends if backend in CHOOSABLE), "native")


# ---- the site's command line for moving data (`TransferTemplate`): a program, and words in which paths stand


PLACEHOLDERS = ("{source}", "{destination}")


_WORD = Pattern(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
_QUOTED = Pattern(r"""'([^']*)'|"([^"]*)\"""")


def template_words(template: str) -> list[str]:
    """Return the words of the command line, in which both places stand; ValueError where quotes do not match.

    Blanks separate words; what is between two quotes, single or double, is taken as it is.
    """
    if _WORD.sub("", template).strip():
        raise ValueError(template)
    words = [_QUOTED.sub(lambda found: found[1] or found[2] or "", word) for word in _WORD.findall(template)]
    return words if any(place in word for place in PLACEHOLDERS for word in words) else [*words, *PLACEHOLDERS]


def template_fault(template: str) -> str | None:
    """Return what is wrong with the command line, in words that follow `the command line `, None if nothing is."""
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
