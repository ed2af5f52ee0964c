"""Simulation of a what-if: replays a ledger window with changes, and compares the result with the record."""

from forebay.cluster.audit.whatif.changes import BadChange, ChangeRejected, ScenarioChanges
from forebay.cluster.audit.whatif.comparison import MOVED_MAX, what_if
from forebay.cluster.audit.whatif.figures import Calibration, Figures, Fit, MovedJob, PoolFigures, Waits, WhatIf
from forebay.cluster.audit.whatif.page import what_if_page
from forebay.cluster.audit.whatif.recorded import Edge, WindowRefused
from forebay.cluster.audit.whatif.services import TooManyJobs
from forebay.cluster.audit.whatif.text import show_what_if

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
