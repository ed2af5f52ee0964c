"""Texts of failed operations, byte for byte as Slurm spells them: reasons and SystemComments.

Sources: SEMANTICS.md, "When something fails"; transcripts of a real Slurm.
"""

from __future__ import annotations

from forebay.replica.model.provider import provider_facts
from forebay.replica.model.stages import Stage
from forebay.replica.values import MESSAGE_CHARACTERS_MAX

CREATE_ERROR = "Burst buffer create_persistent error"
PRE_RUN_ERROR = "Burst buffer pre_run error"

_DEFAULT_OPERATION = {
    Stage.STAGE_IN: "data_in",
    Stage.RUN: "pre_run",
    Stage.POST_RUN: "post_run",
    Stage.STAGE_OUT: "data_out",
    Stage.TEARDOWN: "teardown",
}

OPERATIONS: dict[Stage, tuple[str, ...]] = {
    Stage.STAGE_IN: ("create_persistent", "destroy_persistent", "setup", "data_in", "real_size", "paths"),
    Stage.RUN: ("pre_run",),
    Stage.POST_RUN: ("post_run",),
    Stage.STAGE_OUT: ("data_out",),
    Stage.TEARDOWN: ("teardown",),
}
"""Operations of each stage, in order."""


def operation_of(stage: Stage, operation: str) -> str:
    """Return the operation named by a report if it belongs to the stage, else the stage's main operation."""
    return operation if operation in OPERATIONS[stage] else _DEFAULT_OPERATION[stage]


def plugin_name(provider: str) -> str:
    """Return the name of a provider's plugin as Slurm's reasons spell it."""
    return f"burst_buffer/{provider}"


def failure_reason(provider: str, operation: str, message: str) -> str:
    """Return the reason of a job after a failed operation. Each plugin of Slurm names its functions differently."""
    if operation == "create_persistent":
        return CREATE_ERROR
    if operation == "pre_run":
        return (
            PRE_RUN_ERROR if not message else f"{plugin_name(provider)}: {_word(provider, operation)}: {message}"[:_MAX]
        )
    return f"{plugin_name(provider)}: {_word(provider, operation)}: {message}"[:_MAX]


def failure_comment(provider: str, operation: str, message: str) -> str:
    """Return the SystemComment of a failed operation; `fold` prefixes the time.

    It is short; after the run, all providers except datawarp use the reason's text (transcripts).
    """
    long = operation in ("post_run", "data_out") and provider_facts(provider).long_comments
    word = _word(provider, operation) if long else operation
    return f"{plugin_name(provider)}: {word}: {message}"[:_MAX]


_MAX = MESSAGE_CHARACTERS_MAX


def _word(provider: str, operation: str) -> str:
    facts = provider_facts(provider)
    return operation if operation in facts.bare_functions else f"{facts.function_prefix}{operation}"


def duplicate_name_comment(provider: str) -> str:
    """Return the SystemComment of a job that creates a persistent buffer whose name another user's buffer has."""
    return f"{plugin_name(provider)}: create_persistent: Duplicate buffer name"


def different_buffer_comment(provider: str, name: str, difference: str) -> str:
    """Return the SystemComment of a job that creates a persistent buffer which exists with other properties."""
    return f"{plugin_name(provider)}: create_persistent: buffer {name} exists: {difference}"


def delete_denied_reason(provider: str, name: str) -> str:
    """Return the reason of a job that destroys another user's persistent buffer."""
    return f"{plugin_name(provider)}: Delete buffer {name} permission denied"
