"""Requests out of a seed: by the grammar, with values good and bad, and then with bytes changed."""

from __future__ import annotations

from random import Random
from typing import Final, NamedTuple

SIZES: Final = (
    "1", "0", "10GiB", "1.5TB", "32GB", "16MB", "2N", "3nodes", "0.5N", "1KX", "-5", "+5", "", "abc", "1K",
    "2kib", "1.",
    ".5", "1e3", "9223372036854775807", "9223372036854775808", "8192PiB", "99999999999999999999999", "0.0001",
    "1.025KB",
    "1GB,pool=p", "１２", "0x10", "1_000", "00007M", "1 G", "NaN", "1GiBGiB",
)  # fmt: skip
NAMES: Final = (
    "fast", "test_pool", "wlm_pool", "a", "alpha", "beta", "1abc", "", "no/pe", "a,b", "x" * 64, "x" * 65, "ü",
    "-a", "_",
    "a b",
)  # fmt: skip
MODES: Final = (
    "striped", "private", "ldbalance", "striped,private", "striped,striped", "shared", "", ",", "striped,", "STRIPED",
    "striped(client_cache=yes)", "private(MFS=1GiB),striped", "striped(", "striped()", "striped(a)(b)", "private(a,b),",
)  # fmt: skip
TYPES: Final = ("scratch", "cache", "file", "directory", "list", "tape", "", "SCRATCH", "swap")
PATHS: Final = (
    "/in/a", "/in/%j/%u", "%d/x", "/a/../b", "a", "$DW_JOB_STRIPED/a", "${DW_JOB_PRIVATE}/o", "$DW_JOB_LDBALANCE/l",
    "$FOREBAY_JOB_DIR/f", "$DW_JOB_STRIPED", "$DW_JOB_STRIPED/", "$HOME/x", "./$USER/x", "~/a",
    "%da", "/in/${USER}/$X", "b/c", "/in/*.h5", "$DW_JOB_STRIPED/[ab]?/x", "/in/**",
    "$DW_JOB_alpha/x", "${DW_JOB_STRIPED_beta}/y",
    "/a\\\\%j", "$DW_JOB_STRIPED/\\\\%x",
    "\\\\/in/%a", "/", "//", "/in/" + "x" * 5000, "${DW_JOB_STRIPED/a", "$DW_JOB_STRIPED/../x",
)  # fmt: skip
KEYS: Final = (
    "capacity",
    "pool",
    "type",
    "access",
    "access_mode",
    "source",
    "destination",
    "name",
    "pfs",
    "colour",
    "swap",
)
HEADS: Final = (
    "#DW jobdw", "#DW persistentdw", "#DW swap", "#DW stage_in", "#DW stage_out", "#BB create_persistent",
    "#BB destroy_persistent", "#BB", "#DW", "#BB_LUA", "#BB_EXAMPLE", "#BB_LUAX", "#DWARF", "#dw jobdw", " #DW jobdw",
    "#DW copy_in", "#DW copy_out",
    "#DW create_persistent", "#BB frob", "#DW frob", "# DW jobdw", "#SBATCH -n1", "#", "", "true", "#DW\tjobdw",
    "#!/bin/sh",
)  # fmt: skip
BYTES: Final = (
    "\\", "\\\\", "\n", "\r", "\t", " ", "=", ";", ":", ",", "#", "%", "\0", "\x1b", "\x7f", "é", "\u2028",
    "\ud800", "$",
    "{",
    "#DW ", "#BB ", "capacity=", "hurry", "stage_in:", " \\\n#DW ", "-", ".", "N", "0", "9" * 50,
)  # fmt: skip
PROVIDERS: Final = ("native", "native", "native", "lua", "datawarp", "generic")


class Case(NamedTuple):
    """One request: the three texts, and what the site says of its provider."""

    script: str
    bb: str
    bbf: str
    provider: str
    directive: str


def make_case(random: Random) -> Case:
    """Return the next case of this source of randomness."""
    provider = random.choice(PROVIDERS)
    directive = random.choice(("BB_LUA", "BB_LUA", "BB_EXAMPLE", "DW", "BB"))
    script = (
        _mutated(random, "#!/bin/sh\n" + _lines(random) + "true\n") if random.random() < 0.8 else "#!/bin/sh\ntrue\n"
    )
    bb = _mutated(random, _command_line(random)) if random.random() < 0.5 else ""
    bbf = _mutated(random, _lines(random)) if random.random() < 0.3 else ""
    return Case(script, bb, bbf, provider, directive)


def _value(random: Random, key: str) -> str:
    if random.random() < 0.05:
        return random.choice((*SIZES, *NAMES, *PATHS))
    if key in ("capacity", "swap"):
        return random.choice(SIZES[:1] + SIZES[2:6]) if random.random() < 0.7 else random.choice(SIZES)
    if key in ("pool", "name"):
        return random.choice(NAMES[:6]) if random.random() < 0.8 else random.choice(NAMES)
    if key in ("access", "access_mode"):
        return random.choice(MODES[:4]) if random.random() < 0.8 else random.choice(MODES)
    if key == "type":
        return random.choice(TYPES[:5]) if random.random() < 0.9 else random.choice(TYPES)
    return random.choice(PATHS)


def _option(random: Random, key: str) -> str:
    return f"{key}={_value(random, key)}"


def _line(random: Random) -> str:
    if random.random() < 0.25:
        return " ".join(
            [random.choice(HEADS), *(_option(random, random.choice(KEYS)) for _ in range(random.randrange(4)))]
        )
    outside, inside = random.choice(PATHS[:3]), random.choice(PATHS[5:9])
    kind = random.choice(TYPES[2:5])
    name, pool = random.choice(NAMES[3:6]), _option(random, "pool")
    line = random.choice(
        (
            f"#DW jobdw {_option(random, 'capacity')} {_option(random, 'access_mode')} {pool}",
            f"#DW jobdw {_option(random, 'capacity')} access_mode=striped,private,ldbalance type=scratch",
            f"#DW persistentdw name={name}",
            f"#DW swap {_value(random, 'swap')} {random.choice(('', pool))}",
            f"#DW stage_in type={kind} source={outside} destination={inside}",
            f"#DW stage_in type={kind} destination={inside} source={outside} colour=red",
            f"#DW stage_out type={kind} source={inside} destination={outside}",
            f"#DW stage_out type={kind} source={inside} destination={outside} move={random.choice(('yes', 'no', 'x'))}",
            f"#DW stage_in type={kind} source={outside} destination={inside} backend={random.choice(('rsync', 'x'))}",
            f"#DW stage_out type={kind} source={inside} destination={outside} "
            f"links={random.choice(('follow', 'skip', 'x'))} {random.choice(('move=yes', 'backend=rsync', ''))}",
            f"#DW copy_in source={outside} destination={inside} profile=p",
            f"#DW copy_out source={inside} destination={outside}/",
            f"#DW jobdw {_option(random, 'capacity')} name={name}",
            f"#DW stage_in type=file source={outside} destination=$DW_PERSISTENT_STRIPED_{name}/a",
            f"#BB create_persistent name={name} {_option(random, 'capacity')} {random.choice(('', 'access=striped'))}",
            f"#BB destroy_persistent name={name} {random.choice(('', 'hurry'))}",
            f"#BB_LUA {pool} {_option(random, 'capacity')} anything goes src=%j",
            f"#BB_EXAMPLE {pool} {_option(random, 'capacity')}",
        )
    )
    if random.random() < 0.15:
        line += " " + random.choice(("# a comment", "#pool=x", "debug", "# capacity=2GiB", "#"))
    if random.random() < 0.15:
        words = line.split(" ")
        cut = random.randrange(1, len(words) + 1)
        line = " ".join(words[:cut]) + " \\\n" + words[0] + " " + " ".join(words[cut:])
    return line


def _lines(random: Random) -> str:
    return "".join(_line(random) + "\n" for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3, 6))))


def _command_line(random: Random) -> str:
    kind = random.random()
    if kind < 0.3:
        return _lines(random).strip("\n")
    if kind < 0.65:
        keys = random.sample(("capacity", "pool", "access", "type", "swap"), random.randrange(1, 5))
        return " ".join(_option(random, key) for key in keys)
    pieces = [
        random.choice(
            (_option(random, "capacity"), "stage_in:cp /a $X", "stage_out:rm -r x", "", "stage_in:", "nonsense")
        )
        for _ in range(random.randrange(1, 5))
    ]
    return random.choice((";", "; ", " ; ")).join(pieces)


def _mutated(random: Random, text: str) -> str:
    for _ in range(random.choice((0, 0, 0, 1, 1, 2, 5))):
        at = random.randrange(len(text) + 1)
        other = random.randrange(len(text) + 1)
        low, high = sorted((at, min(other, at + 20)))
        match random.randrange(5):
            case 0:
                text = text[:at] + random.choice(BYTES) + text[at:]
            case 1:
                text = text[:low] + text[high:]
            case 2:
                text = text[:at] + text[low:high] * 2 + text[at:]
            case 3:
                text = text[:at] + chr(random.randrange(256)) + text[at + 1 :]
            case _:
                text = text[:at]
    return text
