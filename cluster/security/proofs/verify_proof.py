#!/usr/bin/env python3
"""Verification of a Forebay proof without Forebay: `python3 verify_proof.py --keys KEYS 42.proof`.

A proof shows that records of a job are in a cluster's ledger, as signed by a majority of its replicas. This file needs
only Python 3.11 and the package `cryptography`: no network, no Forebay. Read it: you need to trust only this file and
the keys, which the cluster's operators gave you in advance (`forebay audit keys`).

KEYS has one key per line, `name+id+key`; lines that begin with # are ignored. After a recovery the cluster signs under
another origin, with keys of that name; a majority is counted among the keys of the checkpoint's origin. KEYS also has
the keys of witnesses, who observe the cluster from outside; `--witnesses K` rejects a proof with fewer than K
cosignatures. Every signature in the proof must be of a key in KEYS; with `--others`, other signatures are ignored. Exit
codes: 0 proven, 1 rejected, 2 wrong usage.

About once a minute, if anything changed, the ledger records the number of records of each job, as counted by a majority
of the replicas. A proof with that count reveals omitted records; `--all` rejects a proof without a count.

A proof shows neither later events, nor anything that was never written to the ledger.
"""

import argparse
import base64
import hashlib
import json
import struct
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

FORMAT = "forebay-proof/1"
LEAF_HEAD = b"forebay-leaf/1\n"
LEAF = struct.Struct(">QQQQQQ32s32s")  # index, term, revision, time in microseconds, bytes, commands, digest, root
HISTORY_HEAD = b"forebay-history/1\n"
COUNTED = 182  # event with record counts: entries counted, highest job, and the root over the counts
ROLES = {1: "", 2: "operator", 3: "user", 4: "agent", 5: "scheduler"}
SUBMITTED, SUBMITTED_ARRAY = 46, 6

# Tag of each kind of event, its name, and the field with the job's ID (0: none).
EVENTS = """
    1:ClusterFounded:0 2:FeatureLevelRaised:0 3:SiteConfigured:0 4:TransferRulesSet:0 5:SchedulingRulesSet:0
    6:ClusterRecovered:0 10:PoolSet:0 11:PoolRemoved:0 12:FilesystemSet:0 13:FilesystemRemoved:0 15:NodeRegistered:0
    16:NodeDrained:0 17:NodeResumed:0 18:NodeWentDown:0 19:NodeCameBack:0 20:NodeLost:0 24:PartitionSet:0
    25:PartitionDeleted:0 28:AccountSet:0 29:AccountDeleted:0 30:QosSet:0 31:QosDeleted:0 32:LicenseSet:0
    33:LicenseDeleted:0 34:UsageReset:0 38:ReservationSet:0 39:ReservationDeleted:0 40:ReservationStarted:0
    41:ReservationEnded:0 46:JobSubmitted:1 50:JobUpdated:1 52:JobHeld:1 54:JobReleased:1 55:JobBecameEligible:1
    56:DeadlineMissed:1 57:CancelRequested:1 58:JobCancelled:1 59:RequeueRequested:1 60:JobRequeued:1
    61:JobPurged:1 66:BufferAllocated:1 67:AllocationRevoked:1 69:StagedIn:1 70:StageFailed:1 71:StageRetried:1
    72:OperationQueued:1 73:OperationOrdered:1 74:OperationsRestarted:1 75:StageOutStarted:1 76:StagedOut:1
    77:TeardownStarted:1 78:TornDown:1 79:BufferCleared:1 80:MoverChanged:1 81:BufferAbandoned:1
    82:AbandonedBufferRemoved:1 84:PersistentReserved:2 85:PersistentCreated:2 86:PersistentDeletionStarted:2
    87:PersistentDeleted:2 92:RunOrdered:1 93:RunStarted:1 94:RunEnded:1 95:PreRunFailed:1 96:JobSuspended:1
    97:JobResumed:1 98:RunRequeued:1 104:TransferRecorded:1 105:TransferCheckpointed:1 110:MailSent:1
    111:MailDropped:1 112:ExternalJobSetUp:1 113:ExternalJobSpaceAllocated:1 114:ExternalJobSetupFailed:1
    115:ExternalJobStageInOrdered:1 116:ExternalJobLingered:1 117:ExternalJobReactivated:1 118:ExternalJobRetained:1
    119:SchedulerBound:0 120:CertificateRevoked:0 121:CertificatesUnrevoked:0 122:NodeAdmitted:0
    123:SchedulerReleased:0 124:ExternalJobRunBegan:1 125:ExternalJobRunEnded:1 126:ExternalJobMissing:0
    130:SessionOpened:0 131:SessionsEnded:0 132:CachedRepliesDropped:0 140:DrillStarted:0 141:DrillAbortRequested:0
    142:DrillEnded:0 143:DrillsLocked:0 144:DrillsUnlocked:0 145:DrillConfirmed:0 146:DrillRenewed:0
    160:SinkAdvanced:0 161:SinkRemoved:0 170:ClockSet:0 180:StateDigested:0 181:DisclosureKeyDrawn:0
    182:HistoriesCounted:0
"""
KINDS = {int(tag): (name, int(field)) for tag, name, field in (row.split(":") for row in EVENTS.split())}


class InvalidProof(Exception):
    """The proof does not show its claim."""


def check(holds: object, sentence: str) -> None:
    if not holds:
        raise InvalidProof(sentence)


def decode_base64(text: object) -> bytes:
    check(isinstance(text, str), "a value is not text")
    held = base64.b64decode(str(text), validate=True)
    check(base64.b64encode(held).decode() == text, "a value is not canonical base64")
    return held


# The tree of RFC 6962 ------------------------------------------------------------------------------------------------


def hash_parts(prefix: bytes, *parts: bytes) -> bytes:
    return hashlib.sha256(prefix + b"".join(parts)).digest()


def check_inclusion(position: int, size: int, leaf: bytes, path: list[bytes], root: bytes, what: str) -> None:
    """Check an inclusion proof (RFC 9162, 2.1.3.2)."""
    check(0 <= position < size and all(len(one) == 32 for one in path), f"{what}: the position is not in the tree")
    at, last, found = position, size - 1, leaf
    for sibling in path:
        check(last, f"{what}: the path is too long")
        if at & 1 or at == last:
            found = hash_parts(b"\x01", sibling, found)
            while at and not at & 1:
                at, last = at >> 1, last >> 1
        else:
            found = hash_parts(b"\x01", found, sibling)
        at, last = at >> 1, last >> 1
    check(last == 0 and found == root, f"{what}: the path does not lead to the root")


# The signed checkpoint (C2SP signed-note, tlog-checkpoint, tlog-cosignature) -----------------------------------------


def key_of(line: str) -> tuple[tuple[str, bytes], tuple[int, bytes]]:
    """Return name and ID of a key, and its kind and value."""
    name, key_id, encoded = line.split("+", 2)
    held = decode_base64(encoded)
    check(held[:1] in (b"\x01", b"\x04") and len(held) == 33, f"the key {name} is not an Ed25519 key")
    check(
        hashlib.sha256(name.encode() + b"\n" + held).hexdigest()[:8] == key_id,
        f"the ID of the key {name} does not match it",
    )
    return (name, bytes.fromhex(key_id)), (held[0], held[1:])


def check_checkpoint(
    note: str, keys: dict[tuple[str, bytes], tuple[int, bytes]], least: int | None, witnesses: int, others: bool
) -> tuple[int, bytes]:
    """Print the signers; return size and root. `least` None: a majority of the keys of the checkpoint's origin."""
    text, empty, below = note.rpartition("\n\n")
    check(empty and below.endswith("\n"), "the checkpoint is not a signed note")
    text += "\n"
    origin, size, root = [*text.split("\n"), "", ""][:3]
    check(
        text.count("\n") == 3 and size.isascii() and size.isdigit() and str(int(size)) == size,
        "the note is not a checkpoint",
    )
    signed = set()
    print(f"checkpoint of {size} entries of {origin}")
    for line in below[:-1].split("\n"):
        dash, name, value = [*line.split(" "), "", ""][:3]
        held = decode_base64(value)
        known = (name, held[:4])
        check(line == f"— {name} {value}" and dash, f"the checkpoint has an invalid signature line: {line}")
        if known not in keys and others:
            print(f"  also signed by {name} {held[:4].hex()}, whose key was not given: this signature does not count")
            continue
        check(
            known in keys,
            f"a signature is by a key that was not given, for example of a new witness (see --others): {line}",
        )
        kind, public = keys[known]
        message, said, signature = text.encode(), "", held[4:]
        if kind == 4:
            at = int.from_bytes(signature[:8], "big")
            message, signature = f"cosignature/v1\ntime {at}\n{text}".encode(), signature[8:]
            said = f", a witness, at {datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
        except InvalidSignature as error:
            raise InvalidProof(f"the signature of {name} is not valid") from error
        check(known not in signed, f"{name} has signed twice")
        signed.add(known)
        print(f"  signed by {name} {held[:4].hex()}{said}")
    replicas = sum(keys[one][0] == 1 and one[0] == origin for one in signed)
    of_origin = sum(kind == 1 and name == origin for (name, _id), (kind, _key) in keys.items())
    wanted = of_origin // 2 + 1 if least is None else least
    check(replicas >= max(1, wanted), f"{replicas} of {wanted} required replicas of {origin} signed the checkpoint")
    cosigned = len({keys[one][1] for one in signed if keys[one][0] == 4})
    check(cosigned >= witnesses, f"{cosigned} of {witnesses} required witnesses cosigned the checkpoint")
    if not cosigned:
        print("  UNWITNESSED: a history that a majority of the replicas altered would look the same")
    return int(size), decode_base64(root)


# Records: MessagePack, as in the ledger ------------------------------------------------------------------------------


def unpack_value(held: bytes, at: int) -> tuple[Any, int]:
    """Decode the value at a position, and return it with the next position. Floats do not occur in ledgers."""
    first, at = held[at], at + 1
    if first < 0x80 or first >= 0xE0:
        return first if first < 0x80 else first - 256, at
    if first in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[first], at
    if 0xCC <= first <= 0xD3:
        end = at + (1 << (first & 3))
        check(end <= len(held), "a record is truncated")
        return int.from_bytes(held[at:end], "big", signed=first >= 0xD0), end
    for kind, base, mask, sized in (  # noqa: B007  # used behind the loop
        ("map", 0x80, 0x0F, {0xDE: 2, 0xDF: 4}),
        ("array", 0x90, 0x0F, {0xDC: 2, 0xDD: 4}),
        ("text", 0xA0, 0x1F, {0xD9: 1, 0xDA: 2, 0xDB: 4}),
        ("bytes", 0xC4, 0, {0xC4: 1, 0xC5: 2, 0xC6: 4}),
    ):
        if first in sized:
            length, at = int.from_bytes(held[at : at + sized[first]], "big"), at + sized[first]
            break
        if mask and first & ~mask == base:
            length = first & mask
            break
    else:
        raise InvalidProof(f"a record has the unknown byte {first:#x}")
    if kind in ("text", "bytes"):
        check(at + length <= len(held), "a record is truncated")
        value = held[at : at + length]
        return value.decode() if kind == "text" else value, at + length
    items = []
    for _ in range(length * (2 if kind == "map" else 1)):
        item, at = unpack_value(held, at)
        items.append(item)
    return items, at


def names_job(event: Any, job: int) -> bool:
    field = KINDS.get(event[0], ("", 0))[1]
    if event[0] == SUBMITTED and event[SUBMITTED_ARRAY:] and event[SUBMITTED_ARRAY] is not None:
        return bool(event[1] <= job < event[1] + len(event[SUBMITTED_ARRAY][0]))
    return bool(field and event[field] == job)


def command_of(record: Any, size: int, root: bytes) -> tuple[int, int, int, Any]:
    """Return the command a record proves: index of its entry, revision, time in microseconds, contents."""
    fields = ["leaf", "path", "position", "command_path", "salt", "command"]
    check([*record] == fields, "a record does not have the expected fields")
    held = decode_base64(record["leaf"])
    check(held.startswith(LEAF_HEAD) and len(held) == len(LEAF_HEAD) + LEAF.size, "a leaf has another format")
    index, _term, last, at, _bytes, commands, _digest, inner = LEAF.unpack(held[len(LEAF_HEAD) :])
    what, position = f"entry {index}", record["position"]
    check_inclusion(index - 1, size, hash_parts(b"\x00", held), [*map(decode_base64, record["path"])], root, what)
    salt, command = decode_base64(record["salt"]), decode_base64(record["command"])
    check(
        len(salt) == 16 and type(position) is int,
        f"{what}: the salt must have 16 bytes, and the position must be a number",
    )
    leaf = hash_parts(b"\x00", salt, command)
    check_inclusion(
        position, commands, leaf, [*map(decode_base64, record["command_path"])], inner, f"{what}, a command"
    )
    value, end = unpack_value(command, 0)
    check(end == len(command), f"{what}: the record has data after its end")
    return index, last - commands + 1 + position, at, value


def check_record(record: Any, job: int, size: int, root: bytes) -> tuple[int, int]:
    """Print a record; return its revision, and the index of its entry."""
    index, revision, at, value = command_of(record, size, root)
    what = f"entry {index}"
    _id, actor, name, events, rejection, *_ = value
    mine = [KINDS.get(event[0], (f"event {event[0]}",))[0] for event in events if names_job(event, job)]
    check(mine, f"{what}: the record {name} does not name job {job}")
    who = " ".join(filter(None, (ROLES.get(actor[0], "?"), actor[1])))
    when = datetime.fromtimestamp(at // 1_000_000, UTC)
    others = len(events) - len(mine)
    more = f" (and {others} of other jobs)" if others else ""
    print(f"{when:%Y-%m-%dT%H:%M:%SZ}  revision {revision}  {name} by {who}: {', '.join(mine)}{more}")
    return int(revision), int(index)


def check_history(history: Any, job: int, size: int, root: bytes, entries: list[int]) -> str:
    """Check that no record is missing up to the recorded count; return a sentence about it."""
    check([*history] == ["record", "position", "count", "salt", "path"], "the count does not have the expected fields")
    index, _revision, at, (_id, actor, _name, events, _rejection, *_) = command_of(history["record"], size, root)
    check(actor[0] == 1, f"entry {index}: its history counts were not recorded by the cluster itself")
    counted = [event for event in events if event[0] == COUNTED]
    check(len(counted) == 1, f"entry {index} does not record how many records of each job there are")
    (_tag, through, jobs, counts_root), count, salt = counted[0], history["count"], decode_base64(history["salt"])
    check(
        type(count) is int and 0 < count < 2**64 and len(salt) == 16,
        "the count is not a valid number, or its salt does not have 16 bytes",
    )
    check(through < index, f"entry {index} counts records of later entries")
    leaf = hash_parts(b"\x00", HISTORY_HEAD, salt, struct.pack(">QQ", job, count))
    position = history["position"]
    check(type(position) is int, "the position of the count is not a number")
    check_inclusion(position, jobs, leaf, [*map(decode_base64, history["path"])], counts_root, "the count of the job")
    shown = sum(entry <= through for entry in entries)
    check(shown == count, f"the proof shows {shown} of {count} records of job {job} in the first {through} entries")
    when = datetime.fromtimestamp(at // 1_000_000, UTC)
    later = len(entries) - shown
    more = f"; beyond these, {later} later records are shown, perhaps not all" if later else ""
    return f"all {count} records of job {job} in the first {through} entries, as of {when:%Y-%m-%dT%H:%M:%SZ}{more}"


def verify(
    held: bytes,
    keys: dict[tuple[str, bytes], tuple[int, bytes]],
    least: int | None,
    witnesses: int = 0,
    others: bool = False,
    whole: bool = False,
) -> None:
    """Print the facts the proof shows, or raise InvalidProof."""
    proof = json.loads(held.decode())
    # A proof has exactly one spelling, so that any change of the file is detected.
    check(
        (json.dumps(proof, ensure_ascii=False, indent=1) + "\n").encode() == held,
        "the file was changed since it was written",
    )
    fields = ["format", "job", "checkpoint", "records", "history"]
    check([*proof] == fields and proof["format"] == FORMAT, f"the file is not a {FORMAT}")
    job, records, history = proof["job"], proof["records"], proof["history"]
    check(type(job) is int and job > 0, "the job must be a positive number")
    size, root = check_checkpoint(proof["checkpoint"], keys, least, witnesses, others)
    check(isinstance(records, list) and records, "there are no records")
    shown = [check_record(record, job, size, root) for record in records]
    revisions = [revision for revision, _ in shown]
    check(revisions == sorted(set(revisions)), "the records are not in order")
    if history is None:
        check(not whole, "the proof does not show that these are all records, as --all requires")
        print(f"proven: {len(records)} records of job {job}; not proven: that there are no others")
        return
    print(f"proven: {check_history(history, job, size, root, [index for _, index in shown])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proof", type=Path, help="file that `forebay audit prove` wrote")
    parser.add_argument("--keys", type=Path, required=True, help="file with the keys that you trust, one per line")
    parser.add_argument("--least", type=int, help="required number of signing replicas; default: a majority")
    parser.add_argument("--witnesses", type=int, default=0, metavar="K", help="required number of cosigning witnesses")
    parser.add_argument("--others", action="store_true", help="ignore signatures by keys that are not given")
    parser.add_argument("--all", action="store_true", help="reject a proof that does not show all records of the job")
    options = parser.parse_args()
    try:
        lines = options.keys.read_text(encoding="utf-8").splitlines()
        keys = dict(key_of(line.strip()) for line in lines if line.strip() and not line.startswith("#"))
        verify(options.proof.read_bytes(), keys, options.least, options.witnesses, options.others, options.all)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except (InvalidProof, ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        print(f"REFUSED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
