"""The table `[access]`: whose accounts may come without a certificate of their own, on which ways, and who operates.

Every machine has the same table. A replica decides by its own copy and its own name service; a client reads where the
gateway's socket is, and whether there is MUNGE.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from cluster.config.toml import InvalidValue, Name, Text, Written
from cluster.security import NAME_RULE, is_name

LISTED_MAX: Final = 256
"""Accounts, groups or gateways in one list, count: more people are a group."""

GROUP_SIGN: Final = "%"
"""What a group begins with, as in sudoers(5)."""

MUNGE: Final = "munge"
"""The way by MUNGE, among names of gateways."""

SOCKET: Final = Path("/run/forebay/gateway.sock")


class AccessTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who may come as the account that he is, and how."""

    users: Annotated[tuple[Text, ...], Meta(max_length=LISTED_MAX, examples=[["alice", "%hpc"]])] = ()
    """Accounts, and groups as %group, that may come without a certificate; none: every account."""
    operators: Annotated[tuple[Text, ...], Meta(max_length=LISTED_MAX, examples=[["%forebay-operators"]])] = ()
    """Accounts, and groups as %group, that are operators; a replica looks members up on its own machine."""
    operators_through: Annotated[tuple[Text, ...], Meta(max_length=LISTED_MAX, examples=[["login1", MUNGE]])] | None = (
        None
    )
    """Gateways whose word is good for an operator, and `munge`; None: every gateway, and not MUNGE."""
    socket: Path = SOCKET
    """Where a machine's gateway listens."""
    gateway_account: Annotated[Written[Name], Meta(examples=["forebay"])] | None = None
    """Who runs gateways, beside root and the owner of this file: clients believe no other."""
    munge: bool = False
    """Whether replicas take MUNGE credentials, and clients make them where there is no gateway."""
    munge_socket: Path | None = None
    """Where munged listens; None: where libmunge looks."""

    def __post_init__(self) -> None:
        """Refuse what can be no account, group or gateway; InvalidValue."""
        for key, listed, sign in (
            ("users", self.users, GROUP_SIGN),
            ("operators", self.operators, GROUP_SIGN),
            ("operators_through", self.operators_through or (), ""),
        ):
            for text in listed:
                if not is_name(text.removeprefix(sign) if sign else text):
                    what = "account, or group as %group" if sign else f"gateway, or {MUNGE!r}"
                    raise InvalidValue(f"found {text!r:.60}", f"write the name of an {what}: {NAME_RULE}", key)


NO_ACCESS: Final = AccessTable()
