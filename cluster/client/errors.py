"""Errors of calls: one exception with a code for programs and sentences for users."""

from typing import Final, Literal

import msgspec

from forebay.cluster.schemas import ErrorAnswer, ErrorView, OtherError

Outcome = Literal["rejected", "unknown"]

# Codes created by the client; all others come from the server.
UNREACHABLE: Final = "unreachable"
OUTCOME_UNKNOWN: Final = "outcome_unknown"
UNTRUSTED: Final = "untrusted"
REDIRECT_LOOP: Final = "redirect_loop"
BAD_ANSWER: Final = "bad_answer"
ANSWER_TOO_LARGE: Final = "answer_too_large"

NO_ANSWER: Final = 0
"""Status of an error without a response."""

_SENTENCE_CHARACTERS_MAX: Final = 2_000
"""Length of a foreign response quoted in an error, characters."""


class ApiError(Exception):
    """A failed call.

    `status` is the HTTP status, 0 without a response. `outcome` is `rejected` if nothing changed, and `unknown` if only
    a retry with the same `command_id` can tell.
    """

    def __init__(
        self,
        status: int,
        code: str,
        sentence: str,
        *,
        remedy: str = "",
        place: str = "",
        outcome: Outcome = "rejected",
        command_id: str | None = None,
        others: tuple[OtherError, ...] = (),
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code
        self.sentence = sentence
        self.remedy = remedy
        self.place = place
        self.outcome: Outcome = outcome
        self.command_id = command_id
        self.others = others
        """Further errors of the same request."""

    def __str__(self) -> str:
        sentence = f"{self.place}: {self.sentence}" if self.place else self.sentence
        return f"{sentence}; {self.remedy}" if self.remedy else sentence


def error_of(status: int, body: bytes, *, who: str, command_id: str | None) -> ApiError:
    """Return the error in a response with `status`; `who` describes the responder."""
    try:
        view = msgspec.json.decode(body, type=ErrorAnswer).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        text = body[:_SENTENCE_CHARACTERS_MAX].decode("utf-8", "replace").strip()
        view = ErrorView(
            code=BAD_ANSWER,
            sentence=f"{who} answered with status {status}" + (f": {text!r}" if text else ""),
            remedy="check that this is the api address of a Forebay replica",
            # A proxy or other foreign server responded, perhaps after the command took effect.
            outcome="unknown" if status >= 500 else "rejected",
        )
    return error_of_view(status, view, command_id)


def error_of_view(status: int, view: ErrorView, command_id: str | None) -> ApiError:
    """Return the error a replica gave for a call or for one command of a bulk request."""
    return ApiError(
        status,
        view.code,
        view.sentence,
        remedy=view.remedy,
        place=view.place,
        outcome=view.outcome,
        command_id=command_id,
        others=view.others or (),
    )
