"""Simulation of a what-if: replays a ledger window with changes, and compares the result with the record."""

from cluster.audit.whatif.changes import BadChange, ChangeRejected, ScenarioChanges
from cluster.audit.whatif.comparison import MOVED_MAX, what_if
from cluster.audit.whatif.figures import Calibration, Figures, Fit, MovedJob, PoolFigures, Waits, WhatIf
from cluster.audit.whatif.page import what_if_page
from cluster.audit.whatif.recorded import Edge, WindowRefused
from cluster.audit.whatif.services import TooManyJobs
from cluster.audit.whatif.text import show_what_if

__all__ = [
    "MOVED_MAX",
    "BadChange",
    "Calibration",
    "ChangeRejected",
    "ScenarioChanges",
    "Edge",
    "Figures",
    "Fit",
    "MovedJob",
    "PoolFigures",
    "TooManyJobs",
    "Waits",
    "WhatIf",
    "WindowRefused",
    "show_what_if",
    "what_if",
    "what_if_page",
]
