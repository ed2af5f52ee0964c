"""A later release, for tests: the present code, told that it knows two feature levels more, which bring nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forebay.replica.messages import features
from forebay.replica.messages.features import LEVELS, Level

MADE_UP = (*LEVELS, Level(len(LEVELS) + 1, "9.1.0", "nothing"), Level(len(LEVELS) + 2, "9.2.0", "nothing either"))


def be_later() -> None:
    """Know the made-up levels from now on, in the whole process."""
    features.LEVELS, features.FEATURE_LEVEL_KNOWN = MADE_UP, MADE_UP[-1].number


@contextmanager
def later_release() -> Iterator[None]:
    """Be the later release for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "LEVELS", MADE_UP)
        patch.setattr(features, "FEATURE_LEVEL_KNOWN", MADE_UP[-1].number)
        yield
