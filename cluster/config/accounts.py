"""Table `[access]`: accounts that may authenticate without a certificate, the permitted methods, and operators.

Every machine has the same table. A replica uses its own copy and its own name service. A client reads only the
gateway's socket and whether to use MUNGE.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from forebay.cluster.config.toml import InvalidValue, Name, Text, Written
from forebay.cluster.security import NAME_RULE, is_name

LISTED_MAX: Final = 256
"""Maximum number of accounts, groups or gateways in one list; use a group for more."""

GROUP_SIGN: Final = "%"
"""Prefix of group names, as in sudoers(5)."""

MUNGE: Final = "munge"
"""Word for the method MUNGE in lists of gateways."""

SOCKET: Final = Path("/run/forebay/gateway.sock")


class AccessTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Accounts and methods for access without a certificate."""

    users: Annotated[tuple[Text, ...], Meta(max_length=LISTED_MAX, examples=[["alice", "%hpc"]])] = ()
    """Permitted accounts, and groups as %group; empty permits every account."""
    operators: Annotated[tuple[Text, ...], Meta(max_length=LISTED_MAX, examples=[["%forebay-operators"]])] = ()
    """Accounts, and groups as %group, with the operator role; a replica looks up group members on its own machine."""
    operators_through: Annotated[tuple[Text, ...], Meta(max_length=LISTED_MAX, examples=[["login1", MUNGE]])] | None = (
        None
    )
    """Gateways (and `munge`) through which operators may authenticate; None means every gateway, but not MUNGE."""
    socket: Path = SOCKET
    """Socket of the local gateway."""
    gateway_account: Annotated[Written[Name], Meta(examples=["forebay"])] | None = None
    """Account that runs gateways, besides root and the owner of this file; clients trust no other."""
    munge: bool = False
    """True if replicas accept MUNGE credentials, which clients create if they find no gateway."""
    munge_socket: Path | None = None
    """Socket of munged; None for libmunge's default."""

    def __post_init__(self) -> None:
        """Check that the names can be accounts, groups or gateways.

        Raises:
            InvalidValue: A name is invalid.
        """
        for key, listed, sign in (
            ("users", self.users, GROUP_SIGN),
            ("operators", self.operators, GROUP_SIGN),
            ("operators_through", self.operators_through or (), ""),
        ):
            for text in listed:
                if not is_name(text.removeprefix(sign) if sign else text):
                    what = "an account, or of a group as %group" if sign else f"a gateway, or {MUNGE!r}"
                    raise InvalidValue(f"found {text!r:.60}", f"write the name of {what}: {NAME_RULE}", key)


NO_ACCESS: Final = AccessTable()
