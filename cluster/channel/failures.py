"""What a command that fails is answered, in a frame that any program reads: bounded, and honest about a fault here."""

from cluster.api.problems import Problem
from cluster.schemas.channel_frames import Failed

WORDS_CHARACTERS_MAX = 4000
"""A sentence, a remedy or a place in an answer, characters: the longest message four times over. Three of them, with
four bytes to a character, leave room in ANSWER_BYTES_MAX; a place that a program made up can be as long as its frame.
"""

FAULT_REMEDY = "report it with the replica's log, and send it again with the same command_id"
"""What to do about a fault of this release."""


def failed(number: int, problem: Problem, leader: str) -> Failed:
    """Return the answer to command `number`; what is too long to be read is cut, and stays the refusal that it is."""
    view = problem.view
    sentence, remedy, place = (_bounded(text) for text in (view.sentence, view.remedy, view.place))
    return Failed(number, problem.status, view.code, sentence, remedy, place, view.outcome, leader)


def _bounded(text: str) -> str:
    return text if len(text) <= WORDS_CHARACTERS_MAX else text[: WORDS_CHARACTERS_MAX - 1] + "…"
