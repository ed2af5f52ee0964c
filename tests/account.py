"""Account that tests run as, and the word that an agent needs to run jobs of users who have no account as that one."""

import os
from typing import Final, Literal

OWN: Final[Literal["own", "own-as-root"]] = "own-as-root" if os.geteuid() == 0 else "own"
"""`accounts` of an agent whose jobs run as the account of the tests."""

UNKNOWN: Final = "forebay-tests-this-is-no-account-of-any-machine"
"""A user who has no account: longer than useradd lets a name be."""

KNOWN: Final = "nobody"
"""A user who has an account: every machine has this one."""
