"""Recovery table as shown in the documentation for operators."""

import textwrap

from forebay.wal.failures import OTHERWISE_REPLACE, REPLACE, Condition, Reaction
from tests.repo.prose import LINE_MAX

_DONE = {
    Reaction.CREATE: "begins without data",
    Reaction.CONTINUE: "goes on",
    Reaction.CUT: "cuts it off and goes on",
    Reaction.REFUSE: "refuses to start",
}


def render() -> str:
    """Return the table in the format of the documentation."""
    lines = ["| | what is found | what the replica does | what the operator does |", "|---|---|---|---|"]
    for condition in Condition:
        row = condition.value
        remedy = row.remedy.replace(OTHERWISE_REPLACE, "replace it").replace(REPLACE, "Replace it")
        lines.append(f"| {condition.title} | {row.sign} | {_DONE[row.action]}: {row.reason} | {remedy} |")
    return "\n".join([*lines, "", textwrap.fill(f"Replace it: {OTHERWISE_REPLACE}.", LINE_MAX)])
