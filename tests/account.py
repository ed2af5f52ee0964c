"""Account that tests run as, and the word that an agent needs to run jobs of users who have no account as that one."""

import os
from typing import Final, Literal

OWN: Final[Literal["own", "own-as-root"]] = "own-as-root" if os.geteuid() == 0 else "own"
"""`accounts` of an agent whose jobs run as the account of the tests."""
