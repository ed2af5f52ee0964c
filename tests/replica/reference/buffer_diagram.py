"""Diagram of the buffer states for `docs/reference/buffer-states.md`, generated from the transition table."""

from __future__ import annotations

from forebay.replica.model.buffers import HOLDING, TRANSITIONS, BufferInput, BufferState


def _identifier(state: BufferState) -> str:
    return state.name.lower()


def render() -> str:
    """Return a Mermaid diagram, and the product of all states and inputs as a table."""
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    {_identifier(state)}: {state.word}" for state in BufferState]
    lines.append("    [*] --> pending: submitted")
    for (state, happening), following in TRANSITIONS.items():
        if state is not following:
            lines.append(f"    {_identifier(state)} --> {_identifier(following)}: {happening.name.lower()}")
    lines += ["    complete --> [*]", "    deleted --> [*]"]
    lines.append("    classDef holding stroke-width:3px")
    lines.append(f"    class {','.join(_identifier(state) for state in BufferState if state in HOLDING)} holding")
    lines += ["```", "", "## Every state and every input", ""]
    lines.append("A dash: the input is rejected. If it is found in a ledger, it ends the replica.")
    lines.append("")
    lines.append("| input | " + " | ".join(state.word for state in BufferState) + " |")
    lines.append("|---" * (len(BufferState) + 1) + "|")
    for happening in BufferInput:
        row = [TRANSITIONS.get((state, happening)) for state in BufferState]
        cells = ["–" if following is None else following.word for following in row]
        lines.append(f"| {happening.name.lower()} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
