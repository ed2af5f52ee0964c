"""The texts of failed operations, byte for byte as Slurm spells them: the reason that is shown, and the SystemComment.

Sources: SEMANTICS.md, "When something fails"; transcripts of a real Slurm.
"""

from __future__ import annotations

from replica.model.provider import provider_facts
from replica.model.stages import Stage
from replica.values import MESSAGE_CHARACTERS_MAX

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
"""The operations of each stage, in their order."""


def operation_of(stage: Stage, operation: str) -> str:
    """Return the operation of a stage that a report names; the stage's main one where it names none or a wrong one."""
    return operation if operation in OPERATIONS[stage] else _DEFAULT_OPERATION[stage]


def plugin_name(provider: str) -> str:
    """Return how Slurm names the plugin of a provider in reasons."""
    return f"burst_buffer/{provider}"


def failure_reason(provider: str, operation: str, message: str) -> str:
    """Return the reason of a job whose operation failed: each plugin of Slurm names its functions in its own way."""
    if operation == "create_persistent":
        return CREATE_ERROR
    if operation == "pre_run":
        return (
            PRE_RUN_ERROR if not message else f"{plugin_name(provider)}: {_word(provider, operation)}: {message}"[:_MAX]
        )
    return f"{plugin_name(provider)}: {_word(provider, operation)}: {message}"[:_MAX]


def failure_comment(provider: str, operation: str, message: str) -> str:
    """Return the SystemComment of a failed operation: short, and where it follows the run as the reason, but for
    datawarp (transcripts). `fold` puts the time before it.
    """
    long = operation in ("post_run", "data_out") and provider_facts(provider).long_comments
    word = _word(provider, operation) if long else operation
    return f"{plugin_name(provider)}: {word}: {message}"[:_MAX]


_MAX = MESSAGE_CHARACTERS_MAX


def _word(provider: str, operation: str) -> str:
    facts = provider_facts(provider)
    return operation if operation in facts.bare_functions else f"{facts.function_prefix}{operation}"


def duplicate_name_comment(provider: str) -> str:
    """Return the SystemComment of a job that creates a persistent buffer whose name is another user's."""
    return f"{plugin_name(provider)}: create_persistent: Duplicate buffer name"


def different_buffer_comment(provider: str, name: str, difference: str) -> str:
    """Return the SystemComment of a job that creates a persistent buffer which exists and is not the same."""
    return f"{plugin_name(provider)}: create_persistent: buffer {name} exists: {difference}"


def delete_denied_reason(provider: str, name: str) -> str:
    """Return the reason of a job that destroys another user's persistent buffer."""
    return f"{plugin_name(provider)}: Delete buffer {name} permission denied"
