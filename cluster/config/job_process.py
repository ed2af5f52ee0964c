"""Table [job_process] of forebay.toml: settings of the processes of jobs."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from forebay.cluster.config.toml import InvalidValue, Text, near
from forebay.cluster.system import CAPABILITIES, UNLIMITED, JobProcess
from forebay.replica.values import SizeError, parse_size

LIMIT_MAX: Final = 2**31 - 1
"""Largest number of descriptors or processes: more than Linux permits of either."""

NO_LIMIT: Final = "unlimited"

_UMASK_BITS: Final = 0o777


class JobProcessTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Table [job_process]; `JobProcess` documents its keys."""

    umask: Annotated[Text, Meta(examples=["0022"])] = "0022"
    nice: Annotated[int, Meta(ge=-20, le=19)] = 0
    core_size: Annotated[Text, Meta(examples=["0", "1GiB", NO_LIMIT])] = "0"
    locked_memory: Annotated[Text, Meta(examples=["8MiB", NO_LIMIT])] = "8MiB"
    stack_size: Annotated[Text, Meta(examples=["8MiB", NO_LIMIT])] = "8MiB"
    open_files: Annotated[int, Meta(ge=16, le=LIMIT_MAX)] = JobProcess().open_files
    processes: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] | None = None
    no_new_privs: bool = True
    capabilities: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidValue: The umask, a size or a capability is invalid.
        """
        self.settings()

    def settings(self) -> JobProcess:
        """Convert to bytes and numbers.

        Raises:
            InvalidValue: A value is malformed.
        """
        for place, name in enumerate(self.capabilities):
            if (known := name.lower().removeprefix("cap_")) not in CAPABILITIES:
                remedy = f"write a name of capabilities(7){near(known, CAPABILITIES)}"
                raise InvalidValue(f"found {name!r:.60}", remedy, "capabilities", place)
        if self.capabilities and self.no_new_privs:
            remedy = "also write no_new_privs = false, without which capabilities have no effect"
            raise InvalidValue("found capabilities without effect", remedy, "capabilities")
        return JobProcess(
            umask=_umask(self.umask),
            nice=self.nice,
            core_bytes=_bytes(self.core_size, "core_size"),
            locked_bytes=_bytes(self.locked_memory, "locked_memory"),
            stack_bytes=_bytes(self.stack_size, "stack_size"),
            open_files=self.open_files,
            processes=self.processes or 0,
            no_new_privs=self.no_new_privs,
            capabilities=self.capabilities,
        )


def _umask(text: str) -> int:
    if len(text) <= 4 and set(text) <= set("01234567") and int(text, 8) <= _UMASK_BITS:
        return int(text, 8)
    raise InvalidValue(f"found {text!r:.60}", 'write the bits that files do not get in octal, such as "0022"', "umask")


def _bytes(text: str, key: str) -> int:
    if text == NO_LIMIT:
        return UNLIMITED
    try:
        return 0 if text == "0" else parse_size(text)
    except SizeError as error:
        raise InvalidValue(f"found {text!r:.60}", f'write a size such as "1GiB", "0" or "{NO_LIMIT}"', key) from error
