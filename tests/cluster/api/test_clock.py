"""The cluster's time over HTTP: shown, and set back by an operator to what a majority's clocks say."""

from forebay.cluster.config.config import Config
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.system.clock import format_instant
from forebay.replica.values import Instant, seconds
from tests.clocks import ManualClock
from tests.cluster.harness import Harness, story

TRUTH = Instant(1_750_000_000_000_000)
HOUR_S = 3600


@story
async def test_an_operator_sets_the_time_back_to_what_a_majority_says_and_nothing_else(config: Config) -> None:
    clock = ManualClock(Instant(TRUTH + seconds(HOUR_S)))
    async with Harness(config, clock=clock) as harness:
        assert harness.controller.state.at >= TRUTH + seconds(HOUR_S)
        clock.set_wall(TRUTH)
        shown = (await harness.ask("GET", "/v1/clock", who="alice")).body
        assert shown["ahead_s"] >= HOUR_S and shown["latest"] == format_instant(TRUTH)
        # Whoever's clock is right is not refused meanwhile.
        assert (await harness.submit()).status == 201

        wanted = {"command_id": new_command_id(clock), "at": format_instant(TRUTH)}
        assert (await harness.ask("POST", "/v1/clock", wanted, who="alice")).status == 403
        far = {**wanted, "command_id": new_command_id(clock), "at": format_instant(Instant(TRUTH - seconds(60)))}
        refused = await harness.ask("POST", "/v1/clock", far)
        assert (refused.status, refused.code) == (409, "clock_off")

        answer = await harness.ask("POST", "/v1/clock", wanted)
        assert (answer.status, answer.body["ahead_s"]) == (200, 0.0), answer.body
        assert TRUTH <= harness.controller.state.at < TRUTH + seconds(10)
        # A retry gets the first answer, and what comes next is later.
        clock.advance(20)
        assert (await harness.ask("POST", "/v1/clock", wanted)).revision >= answer.revision
        assert (await harness.submit()).status == 201
        assert TRUTH + seconds(20) <= harness.controller.state.at < TRUTH + seconds(40)
        again = {**wanted, "command_id": new_command_id(clock), "at": format_instant(clock.now())}
        assert (await harness.ask("POST", "/v1/clock", again)).code == "wrong_state"
        history = (await harness.ask("GET", "/v1/jobs/1/history")).body
        assert history["entries"] if "entries" in history else history

    async with Harness(config, clock=clock) as harness:
        assert harness.controller.state.at < TRUTH + seconds(60), "the ledger and its snapshots say so, too"
