"""What sacctmgr did to accounts and qualities of service, as commands of `forebay`.

`forebay policy account set` and `policy qos set` say all of a record, sacctmgr what is to change of it, so what was
said is kept.
"""

import re
from typing import Final

import msgspec

from tests.conformance.replayer.words import NoSuchCommand, Parsed

_LIMITS: Final = {
    "grptres": "GrpBB",
    "grptresmins": "GrpBBMinutes",
    "grptresrunmins": "GrpBBRunMinutes",
    "maxtres": "MaxBBPerJob",
    "maxtresperjob": "MaxBBPerJob",
    "maxtrespernode": "MaxBBPerNode",
    "maxtresperuser": "MaxBBPerUser",
    "maxtresperaccount": "MaxBBPerAccount",
    "maxtresmins": "MaxBBMinutesPerJob",
    "mintres": "MinBB",
    "mintresperjob": "MinBB",
}
"""Limits of sacctmgr on TRES -> Forebay's on burst buffers."""

_PLAIN: Final = {
    "maxjobs": "MaxJobsPerUser",
    "maxjobsperuser": "MaxJobsPerUser",
    "maxsubmitjobs": "MaxSubmitJobsPerUser",
    "maxsubmitjobsperuser": "MaxSubmitJobsPerUser",
}
_TRES: Final = re.compile(r"(bb/\w+)=(\d+)([KMGTP]?)", re.IGNORECASE)
_NAMED: Final = frozenset(("account", "accounts", "name", "names"))
_KINDS: Final = {"account": "account", "accounts": "account", "user": "user", "users": "user", "qos": "qos"}


_NO_MATTER: Final = frozenset("description organization cluster clusters qos adminlevel share fairshare".split())
"""What is said of a record and changes nothing that is compared."""


class Record(msgspec.Struct):
    """One account or QOS, as it was said so far."""

    users: list[str] = []
    limits: dict[str, str] = {}
    user_limits: dict[str, str] = {}
    priority: str = ""
    parent: str = ""


class Accounting:
    """The accounts and qualities of service of one run."""

    def __init__(self) -> None:
        """Begin with none."""
        self._records: dict[tuple[str, str], Record] = {}

    def typed(self, parsed: Parsed) -> list[list[str]]:
        """Return the commands of `forebay` that do the same; none where sacctmgr only looks. NoSuchCommand if there
        are none that do.
        """
        verb, kind = parsed.words[0] if parsed.words else "", _KINDS.get("".join(parsed.words[1:2]), "")
        if verb in ("list", "show"):
            return []
        if not kind or verb not in ("add", "create", "modify", "delete", "remove"):
            raise NoSuchCommand("this command cannot be repeated")
        fields = dict(_field(word) for word in parsed.words[2:] if "=" in word)
        bare = [word for word in parsed.words[2:] if "=" not in word and word not in ("set", "where")]
        names = [name for word in bare for name in _listed(word)]
        if kind == "user":
            return self._users(verb, names or _listed(fields.pop("name", "")), fields)
        if not names:
            names = _listed(next((fields.pop(key) for key in sorted(_NAMED & set(fields))), ""))
        if verb in ("delete", "remove"):
            return [["policy", kind, "delete", name, "--yes"] for name in names]
        for name in names:
            _change(self._records.setdefault((kind, name), Record()), fields)
        return [self._set(kind, name) for name in names]

    def _users(self, verb: str, names: list[str], fields: dict[str, str]) -> list[list[str]]:
        """Return what is done to users: each is a row of the account that is named, or of all that he is in."""
        named = _listed(fields.pop("account", fields.pop("accounts", fields.pop("defaultaccount", ""))))
        changed = []
        for (kind, account), record in self._records.items():
            if kind != "account" or (named and account not in named):
                continue
            mine = [name for name in names if verb in ("add", "create") or name in record.users]
            if not mine:
                continue
            changed.append(account)
            for name in mine:
                if verb in ("delete", "remove"):
                    record.users.remove(name)
                    continue
                if name not in record.users:
                    record.users.append(name)
                one = Record()
                _change(one, fields)
                record.user_limits |= {f"{name}:{limit}": value for limit, value in one.limits.items()}
        if not changed:
            raise NoSuchCommand("the user is of no account that is known here")
        return [self._set("account", account) for account in changed]

    def _set(self, kind: str, name: str) -> list[str]:
        record = self._records[kind, name]
        words = ["policy", kind, "set", name]
        words += [f"--priority={record.priority}"] * bool(record.priority)
        words += [f"--parent={record.parent}"] * bool(record.parent)
        words += [f"--users={','.join(record.users)}"] * bool(record.users)
        words += [f"--limit={limit}={value}" for limit, value in sorted(record.limits.items())]
        return words + [f"--user-limit={limit}={value}" for limit, value in sorted(record.user_limits.items())]


def _field(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key.lower().rstrip("+"), value


def _listed(text: str) -> list[str]:
    return [one for one in text.split(",") if one]


def _change(record: Record, fields: dict[str, str]) -> None:
    for key, value in fields.items():
        if key in _LIMITS and (found := _TRES.fullmatch(value)) is not None:
            # Slurm counts the TRES of burst buffers in MB, by which it means MiB.
            record.limits[f"{_LIMITS[key]}:{found[1]}"] = f"{found[2]}{(found[3] or 'M').upper()}iB"
        elif key in _PLAIN and value.isdigit():
            record.limits[_PLAIN[key]] = value
        elif key == "priority" and value.isdigit():
            record.priority = value
        elif key == "parent":
            record.parent = value
        elif key not in _NO_MATTER:
            raise NoSuchCommand(f"{key}={value} of sacctmgr has no counterpart here")
