"""Bounds on modules and folders, and the exceptions from them, which only tighten (tests/repo/test_style.py)."""

BEHAVIOUR_LINES_MAX = 800
"""Lines in the bodies of a module's functions: past that, ask which second question the module answers.

Tables and declarations count for nothing: a list of every event may be long.
"""

MODULES_MAX = 20
"""Modules in a folder, its face left out: past that a folder is a corridor, and wants rooms."""

CROWDED: dict[str, int] = {}
"""Folders that still have more than MODULES_MAX modules, with how many; they only tighten."""
