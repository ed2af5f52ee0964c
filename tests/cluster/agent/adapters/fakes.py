"""FakePrograms that answer as the documentation of Lustre, BeeGFS and GPFS says, with their state in a file.

They limit nothing: no real system was at hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from forebay.cluster.agent.adapters import Tools

PROLOGUE: Final = """#!{python} -IS
import json, os, sys
STATE = {state!r}
state = json.load(open(STATE)) if os.path.exists(STATE) else {{}}
words = sys.argv[1:]
with open(STATE + ".calls", "a") as calls:
    print(os.path.basename(sys.argv[0]), *words, file=calls)
assert set(os.environ) <= {{"PATH", "LC_ALL", "LC_CTYPE"}}, sorted(os.environ)
def keep():
    json.dump(state, open(STATE, "w"))
def used(top):
    size = count = 0
    for at, below, files in os.walk(top):
        count += 1 + len(files)
        size += sum(os.lstat(os.path.join(at, name)).st_blocks * 512 for name in files)
    return size, count
def option(name, default=None):
    return words[words.index(name) + 1] if name in words else default
"""

LFS: Final = """
ids, limits, stripes = (state.setdefault(key, {}) for key in ("ids", "limits", "stripes"))
verb, path = words[0], words[-1]
if verb == "project" and "-d" in words:
    print(f"{ids.get(path, 0):5d} {'P' if path in ids else '-'} {path}")
elif verb == "project":
    assert "-s" in words and "-r" in words
    ids[path] = int(option("-p"))
elif verb == "setquota":
    found = limits.setdefault(option("-p"), {})
    found.update({flag: int(option(flag)) for flag in ("-B", "-I") if flag in words})
elif verb == "quota":
    project = option("-p")
    tops = [top for top, number in ids.items() if str(number) == project and os.path.isdir(top)]
    size, count = map(sum, zip(*map(used, tops))) if tops else (0, 0)
    found = limits.get(project, {})
    hard, hard_inodes = found.get("-B", 0), found.get("-I", 0)
    star = "*" if hard and size // 1024 > hard else ""
    # A long name has a line of its own.
    print(f"{path:>15}")
    print(f"{'':15} {size // 1024:7d}{star} {0:7d} {hard:7d} {'-':>7} {count:7d} {0:7d} {hard_inodes:7d} {'-':>7}")
    if not found:
        print(f"pid {project} is using default block quota setting")
elif verb == "setstripe":
    stripes[path] = words[1:-1]
elif verb == "getstripe":
    print("stripe_count:  1 stripe_size:   1048576 pattern:       0 stripe_offset: -1")
else:
    sys.exit("unknown verb")
keep()
"""

BEEGFS: Final = """
limits = state.setdefault("limits", {})
if words[:2] == ["quota", "set-limits"]:
    assert words[-1] == "1"
    space, inode = option("--space"), option("--inode")
    if "reset" in (space, inode):
        limits.pop(option("--gid"), None)
    else:
        limits[option("--gid")] = [space, inode]
elif words[:2] == ["quota", "list-usage"]:
    gid = option("--gids")
    space, inode = limits.get(gid, ["unlimited", "unlimited"])
    print("NAME     ID       TYPE   POOL                 SPACE        INODE")
    print(f"{gid} {gid} group storage_pool_default 0/{space} 0/{inode}")
    print("Note: Quota usage information is fetched every 60s from the nodes.")
elif words[:2] == ["entry", "set"]:
    state["pattern"] = words[2:]
elif words[:2] == ["entry", "info"]:
    print("RAID0 (4x1M)")
else:
    sys.exit("unknown mode")
keep()
"""

BEEGFS_CTL: Final = """
limits = state.setdefault("limits", {})
if words[0] == "--setquota":
    values = dict(word[2:].split("=") for word in words if "=" in word)
    if "reset" in values.values():
        limits.pop(option("--gid"), None)
    else:
        limits[option("--gid")] = [values["sizelimit"], values["inodelimit"]]
elif words[0] == "--getquota":
    gid = option("--gid")
    size, files = limits.get(gid, ["unlimited", "unlimited"])
    print("name,id,size,hard,files,hard")
    print(f"{gid},{gid},0,{size},0,{files}")
elif words[0] == "--setpattern":
    state["pattern"] = words[1:]
elif words[0] == "--getentryinfo":
    print("Stripe pattern details:")
else:
    sys.exit("unknown mode")
keep()
"""

GPFS: Final = """
filesets = state.setdefault("filesets", {})
program = os.path.basename(sys.argv[0])
def need(name):
    if name not in filesets:
        sys.exit(f"Fileset {name} not found.")
    return filesets[name]
if program == "mmcrfileset":
    if words[1] in filesets:
        sys.exit("Fileset name already used.")
    filesets[words[1]] = {"block": 0, "files": 0}
elif program == "mmlinkfileset":
    os.mkdir(words[3], 0o755)
    need(words[1])["path"] = words[3]
elif program == "mmunlinkfileset":
    os.rmdir(need(words[1]).pop("path"))
elif program == "mmdelfileset":
    if "path" in need(words[1]):
        sys.exit("Fileset is linked.")
    del filesets[words[1]]
elif program == "mmsetquota":
    fileset = need(words[0].partition(":")[2])
    if "--block" in words:
        fileset["block"] = int(option("--block").split(":")[1].rstrip("K"))
    if "--files" in words:
        fileset["files"] = int(option("--files").split(":")[1])
elif program == "mmlsfileset":
    need(words[1])
    print("mmlsfileset::HEADER:version:reserved:reserved:filesystemName:filesetName:")
    print(f"mmlsfileset::0:1:::{words[0]}:{words[1]}:")
elif program == "mmlsfs":
    print("mmlsfs::HEADER:version:reserved:reserved:deviceName:fieldName:data:remarks:")
    print(f"mmlsfs::0:1:::{words[0]}:quotasEnforced:user;group;fileset::")
elif program == "mmlsquota":
    name = option("-j")
    fileset = need(name)
    size, count = used(fileset["path"])
    names = "filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:blockInDoubt:blockGrace:filesUsage"
    print(f"mmlsquota::HEADER:version:reserved:reserved:{names}:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:")
    block = fileset["block"]
    print(f"mmlsquota::0:1:::gpfs0:FILESET:7:{name}:{size // 1024}:{block}:{block}:0:none:{count}:0:0:0:none::")
keep()
"""

GPFS_PROGRAMS: Final = (
    "mmcrfileset",
    "mmlinkfileset",
    "mmunlinkfileset",
    "mmdelfileset",
    "mmsetquota",
    "mmlsfileset",
    "mmlsfs",
    "mmlsquota",
)


class FakePrograms:
    """Directory of fake programs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = directory.parent / "state.json"
        directory.mkdir()

    def write(self, name: str, body: str) -> Path:
        """Write a program."""
        path = self.directory / name
        path.write_text(PROLOGUE.format(python=sys.executable, state=str(self.state)) + body)
        path.chmod(0o755)
        return path

    def calls(self) -> list[str]:
        """Return the calls until now."""
        path = Path(f"{self.state}.calls")
        return path.read_text().splitlines() if path.exists() else []

    def tools(self, **settings: object) -> Tools:
        """Return the settings of a machine that has these programs only."""
        return Tools(directories=(str(self.directory),), **settings)  # type: ignore[arg-type]
