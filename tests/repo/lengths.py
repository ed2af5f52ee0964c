"""Bounds on modules and folders, and the exceptions from them, which only tighten (tests/repo/test_style.py)."""

BEHAVIOUR_LINES_MAX = 800
"""Lines in the bodies of a module's functions: past that, ask which second question the module answers.

Tables and declarations count for nothing: a list of every event may be long.
"""

MODULES_MAX = 20
"""Modules in a folder, its face left out: past that a folder is a corridor, and wants rooms."""

ROOMS_MAX = {"replica": 11, "cluster": 15}
"""Rooms at the top of a package, count: a new one is a room of one of these first."""

SMALL_LINES = 60
"""A module with fewer lines is a door of its own for little; faces are none."""

SMALL_MAX = 22
"""Modules below SMALL_LINES in the product, count: a ratchet."""

CROWDED: dict[str, int] = {}
"""Folders that still have more than MODULES_MAX modules, with how many; they only tighten."""
