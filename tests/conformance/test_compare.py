"""The comparison of what Slurm was seen to show with all that Forebay showed: what counts, and what is set aside."""

import re

import msgspec
import pytest

from tests.conformance.replayer.compare import TRANSIENT_S, Outcome, Seen, Shown, compare_sequences, normal_reason
from tests.conformance.replayer.differences import Difference, Differences, Kind, Situation, size_as_asked

NONE = Differences(())
LUA = Situation("lua", "submit", "sbatch", "#BB_LUA pool=p")


def seen(*texts: str, torn: bool = False) -> list[Seen]:
    found = []
    for number, text in enumerate(texts, start=1):
        state, reason, buffer, *held = (None if word == "?" else word for word in text.split())
        found.append(Seen(number, float(number), state, reason, "" if buffer == "-" else buffer, bool(held), torn, LUA))
    return found


def shown(*texts: str | tuple[str, float]) -> list[Shown]:
    found, at_s = [], 0.0
    for number, one in enumerate(texts, start=1):
        text, lasted_s = one if isinstance(one, tuple) else (one, 5.0)
        state, reason, buffer, *held = text.split()
        found.append(Shown(number, at_s, lasted_s, state, reason, "" if buffer == "-" else buffer, bool(held)))
        at_s += lasted_s
    return found


def row(kind: Kind, slurm: str = "", forebay: str = "", situation: str = "", provider: str = ".*") -> Difference:
    pattern = re.compile
    return Difference(
        "a-row", kind, "what", "SEMANTICS", pattern(provider), pattern(situation), pattern(slurm), pattern(forebay)
    )


def outcomes(a: list[Seen], b: list[Shown], rows: Differences = NONE) -> list[Outcome]:
    return [step.outcome for step in compare_sequences(a, b, rows)]


LIFE = (
    "PENDING BurstBufferResources pending",
    "PENDING BurstBufferStageIn staging-in",
    "PENDING None staged-in",
    "CONFIGURING None pre-run",
    "RUNNING None running",
    "STAGE_OUT burst_buffer/lua:_Stage-out_in_progress post-run",
    "STAGE_OUT burst_buffer/lua:_Stage-out_in_progress staging-out",
    "COMPLETED None teardown",
    "COMPLETED None complete",
)


def test_the_same_life_matches_step_by_step() -> None:
    assert outcomes(seen(*LIFE), shown(*LIFE)) == [Outcome.MATCHED] * len(LIFE)


def test_spaces_of_a_reason_and_a_newline_left_by_a_provider_make_no_difference() -> None:
    one = Shown(1, 0.0, 5.0, "STAGE_OUT", "burst_buffer/lua: Stage-out in progress\n", "post-run")
    assert outcomes(seen(LIFE[5]), [one]) == [Outcome.MATCHED]


def test_a_failure_in_the_words_of_25_05_is_the_same_reason_and_another_message_is_not() -> None:
    for words, same in (
        ("burst_buffer/lua: JobHeldAdmin: slurm_bb_setup failed: no space", True),
        ("burst_buffer/lua: slurm_bb_setup failed: no space", True),
        ("burst_buffer/lua: slurm_bb_setup: no space", True),
        ("burst_buffer/lua: JobHeldAdmin: slurm_bb_setup failed: no file", False),
        ("burst_buffer/lua: JobHeldAdmin: slurm_bb_data_in failed: no space", False),
    ):
        reason = normal_reason("burst_buffer/lua:_slurm_bb_setup:_no_space")
        assert (normal_reason(words) == reason) is same, words


@pytest.mark.parametrize("missing", range(1, len(LIFE) - 1))
def test_a_short_state_that_no_sampler_saw_is_set_aside(missing: int) -> None:
    whole: list[str | tuple[str, float]] = list(LIFE)
    whole[missing] = (LIFE[missing], 0.3)
    steps = outcomes(seen(*LIFE[:missing], *LIFE[missing + 1 :]), shown(*whole))
    assert steps.count(Outcome.ASIDE) == 1 and steps.count(Outcome.MATCHED) == len(LIFE) - 1


@pytest.mark.parametrize("missing", range(1, len(LIFE) - 1))
def test_a_long_state_that_slurm_never_showed_fails(missing: int) -> None:
    steps = outcomes(seen(*LIFE[:missing], *LIFE[missing + 1 :]), shown(*LIFE))
    assert steps.count(Outcome.FAILED) == 1


@pytest.mark.parametrize("missing", range(len(LIFE)))
def test_a_state_that_forebay_never_showed_fails_unless_the_sample_was_torn(missing: int) -> None:
    rest = shown(*LIFE[:missing], *LIFE[missing + 1 :])
    whole = seen(*LIFE)
    assert outcomes(whole, rest).count(Outcome.FAILED) == 1
    torn = [*whole[:missing], *seen(LIFE[missing], torn=True), *whole[missing + 1 :]]
    assert Outcome.FAILED not in outcomes(torn, rest)


@pytest.mark.parametrize("at", range(len(LIFE) - 1))
def test_two_states_the_other_way_round_fail(at: int) -> None:
    swapped = [*LIFE]
    swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
    assert Outcome.FAILED in outcomes(seen(*LIFE), shown(*swapped))


def test_another_reason_fails_and_a_row_declares_it() -> None:
    slurm, forebay = seen("PENDING BurstBufferStageIn staged-in"), shown("PENDING None staged-in")
    assert Outcome.FAILED in outcomes(slurm, forebay)
    rows = Differences((row(Kind.SHOWN, r"PENDING BurstBufferStageIn staged-in", r"PENDING \S+ staged-in"),))
    assert outcomes(slurm, forebay, rows) == [Outcome.DECLARED]


@pytest.mark.parametrize(("situation", "provider"), [("act=cancel;", ".*"), ("", "datawarp")])
def test_a_row_applies_only_to_its_provider_and_situation(situation: str, provider: str) -> None:
    rows = Differences((row(Kind.SHOWN, "PENDING A x", "PENDING B x", situation, provider),))
    assert Outcome.FAILED in outcomes(seen("PENDING A x"), shown("PENDING B x"), rows)


def test_what_only_one_side_shows_can_be_declared() -> None:
    rows = Differences((row(Kind.MISSING, slurm="PENDING A x"), row(Kind.EXTRA, forebay="PENDING B x")))
    steps = outcomes(seen("PENDING A x", "RUNNING None -"), shown("PENDING B x", "RUNNING None -"), rows)
    assert sorted(steps) == [Outcome.DECLARED, Outcome.DECLARED, Outcome.MATCHED]


def test_what_a_sample_does_not_tell_is_not_compared() -> None:
    assert outcomes(seen("PENDING ? ?"), shown("PENDING BurstBufferResources pending")) == [Outcome.MATCHED]


def test_a_listing_that_repeats_what_was_seen_is_no_second_step_of_forebay() -> None:
    steps = outcomes(seen("RUNNING None running", "RUNNING None ?"), shown("RUNNING None running"))
    assert steps == [Outcome.MATCHED, Outcome.MATCHED]


def test_a_hold_that_only_one_side_has_fails() -> None:
    assert Outcome.FAILED in outcomes(seen("PENDING None pending held"), shown("PENDING None pending"))


def only(found: Difference, **conditions: object) -> Differences:
    return Differences((msgspec.structs.replace(found, **conditions),))


WAITED = ("PENDING JobArrayTaskLimit pending", "PENDING BurstBufferStageIn staging-in")
RUN = ("CONFIGURING None pre-run", "RUNNING None running")


def test_what_was_shown_longer_than_a_lag_may_not_be_missing() -> None:
    lag = row(Kind.MISSING, slurm="PENDING Priority -")
    waited, started = seen("PENDING Priority -", "RUNNING None -")
    for lasted_s, outcome in ((3.0, Outcome.DECLARED), (300.0, Outcome.FAILED)):
        slow = [msgspec.structs.replace(waited, lasted_s=lasted_s), started]
        assert outcomes(slow, shown("RUNNING None -"), only(lag, most_s=10.0)) == [outcome, Outcome.MATCHED]


@pytest.mark.parametrize(
    ("forebay", "fails"),
    [
        ((WAITED[0], WAITED[1], *RUN), False),
        ((WAITED[0], *RUN), True),
        ((WAITED[0],), False),
        ((WAITED[1], *RUN, WAITED[0], *RUN), True),
        ((WAITED[1], *RUN, WAITED[0], WAITED[1], *RUN), False),
    ],
)
def test_a_wait_that_is_declared_still_wants_what_comes_before_the_run(forebay: tuple[str, ...], fails: bool) -> None:
    held = row(Kind.EXTRA, forebay="PENDING JobArrayTaskLimit pending")
    rows = only(held, before_run=re.compile("PENDING BurstBufferStageIn staging-in"))
    slurm = [text for text in forebay if text != WAITED[0]]
    assert (Outcome.FAILED in outcomes(seen(*slurm), shown(*forebay), rows)) == fails


def test_a_state_that_is_declared_may_want_what_stood_before_it() -> None:
    again = "PENDING burst_buffer/lua:_why staging-in held"
    rows = only(row(Kind.EXTRA, forebay=r"PENDING burst_buffer/\S+ staging-in held"),
                previous=re.compile("PENDING BurstBufferStageIn staging-in"))  # fmt: skip
    tried = outcomes(seen(WAITED[1]), shown(WAITED[1], again), rows)
    assert tried == [Outcome.MATCHED, Outcome.DECLARED]
    assert Outcome.FAILED in outcomes(seen(RUN[0]), shown(RUN[0], again), rows)


@pytest.mark.parametrize(
    ("capacity", "size", "agrees"),
    [("1.5TB", "1400GiB", True), ("1.5TB", "200GiB", False), ("0.1KiB", "200GiB", True), ("1.5TB", "1536GiB", False)],
)
def test_a_decimal_capacity_is_computed_and_not_only_another_one(capacity: str, size: str, agrees: bool) -> None:
    line = "    JobID=4 CreateTime=T Pool=wlm Size={} State=staged-in UserID=ann"
    request = f"#DW jobdw capacity={capacity}"
    assert size_as_asked(request, line.format("200GiB"), line.format(size)) is agrees
    assert not size_as_asked(request, line.format("200GiB"), "")


def test_the_allowance_for_what_nobody_saw_is_the_same_on_every_machine() -> None:
    longer = shown(*LIFE[:2], ("PENDING Resources staged-in", TRANSIENT_S + 0.1), *LIFE[2:])
    shorter = shown(*LIFE[:2], ("PENDING Resources staged-in", TRANSIENT_S - 0.1), *LIFE[2:])
    assert Outcome.FAILED in outcomes(seen(*LIFE), longer) and Outcome.FAILED not in outcomes(seen(*LIFE), shorter)
