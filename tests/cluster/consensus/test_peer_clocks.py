"""Bounds from a majority's wall clocks, read over links of any delay: no minority moves them."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.consensus.frames import ClockReply
from forebay.cluster.consensus.peer_clocks import OFF_US, STALE_S, ClockBounds, PeerClocks
from forebay.replica.values import Instant

TRUTH_US = 1_800_000_000_000_000


class Machine:
    """Clocks of one machine in a world whose time is `passed_s`."""

    def __init__(self, world: list[float], off_us: int) -> None:
        self.world = world
        self.off_us = off_us

    def now(self) -> Instant:
        return Instant(TRUTH_US + round(self.world[0] * 1_000_000) + self.off_us)

    def monotonic_s(self) -> float:
        return self.world[0]


def read_all(offs_us: list[int], delays_s: list[tuple[float, float]]) -> tuple[PeerClocks, list[str], list[float]]:
    """Let the first machine read the others' clocks, each over a link with a delay in each direction."""
    world = [0.0]
    machines = [Machine(world, off_us) for off_us in offs_us]
    names = [f"r{number}" for number in range(len(machines))]
    clocks = PeerClocks("r0", machines[0])
    for name, machine, (there_s, back_s) in zip(names[1:], machines[1:], delays_s, strict=False):
        asked = clocks.ask(name)
        world[0] += there_s
        reply = PeerClocks(name, machine).answer(asked)
        world[0] += back_s
        clocks.heard(name, reply)
    return clocks, names, world


FAR = st.integers(-10_000_000_000, 10_000_000_000)
NEAR = st.integers(-100_000, 100_000)
DELAYS = st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)), min_size=6, max_size=6)


@given(st.integers(1, 7), st.data(), DELAYS)
def test_no_minority_of_clocks_moves_the_bounds(
    voters: int, data: st.DataObject, delays: list[tuple[float, float]]
) -> None:
    wrong = data.draw(st.integers(0, (voters - 1) // 2))
    far, near = ([data.draw(kind) for _ in range(count)] for kind, count in ((FAR, wrong), (NEAR, voters - wrong)))
    offs = data.draw(st.permutations([*far, *near]))
    clocks, names, world = read_all(offs, delays)
    bounds = clocks.bounds(names)
    truth = TRUTH_US + round(world[0] * 1_000_000)
    assert bounds.earliest is not None and bounds.latest is not None
    assert bounds.earliest <= truth + 100_001, "a minority moved the bound ahead"
    assert bounds.latest >= truth - 100_001, "a minority held the bound back"


@given(st.integers(1, 7), st.data(), DELAYS)
def test_final_bounds_are_right_for_any_set_of_voters_read(
    voters: int, data: st.DataObject, delays: list[tuple[float, float]]
) -> None:
    wrong = data.draw(st.integers(0, (voters - 1) // 2))
    far, near = ([data.draw(kind) for _ in range(count)] for kind, count in ((FAR, wrong), (NEAR, voters - wrong)))
    offs = data.draw(st.permutations([*far, *near]))
    read = data.draw(st.integers(1, voters))
    clocks, names, world = read_all(offs[:read], delays)
    bounds = clocks.bounds([*names, *(f"away{number}" for number in range(voters - read))])
    if bounds.earliest is None or bounds.latest is None:
        return
    truth = TRUTH_US + round(world[0] * 1_000_000)
    if bounds.is_final:
        assert max(abs(bounds.earliest - truth), abs(bounds.latest - truth)) <= OFF_US + 1_100_000
    else:
        assert read < voters and bounds.latest - bounds.earliest > OFF_US


@given(st.integers(1, 7), st.data(), DELAYS)
def test_median_lies_between_the_bounds_and_never_deviates(
    voters: int, data: st.DataObject, delays: list[tuple[float, float]]
) -> None:
    offs = data.draw(st.lists(FAR, min_size=voters, max_size=voters))
    clocks, names, world = read_all(offs, delays)
    bounds = clocks.bounds(names)
    assert bounds.earliest is not None and bounds.latest is not None
    middle = TRUTH_US + round(world[0] * 1_000_000) + sorted(offs)[voters // 2 if voters % 2 else voters // 2 - 1]
    assert bounds.earliest <= middle + 2
    lower = sorted(offs)[(voters - 1) // 2]
    assert not clocks.is_off(names[offs.index(lower)], names)


@given(st.integers(0, 1), st.integers(OFF_US + 1_000_001, 10_000_000_000), st.sampled_from((1, -1)), DELAYS)
def test_one_of_three_clocks_far_from_both_others_deviates(
    wrong: int, far_us: int, sign: int, delays: list[tuple[float, float]]
) -> None:
    offs = [0, 0, 0]
    offs[wrong] = sign * far_us
    clocks, names, _ = read_all(offs, delays)
    assert [clocks.is_off(name, names) for name in names] == [number == wrong for number in range(3)]


def test_two_differing_clocks_do_not_deviate_and_time_stays_between_them() -> None:
    clocks, names, _ = read_all([0, 60_000_000], [(0.0, 0.0)])
    assert [clocks.is_off(name, names) for name in names] == [False, False]
    assert clocks.bounds(names) == (TRUTH_US, TRUTH_US + 60_000_000, True)


def test_without_readings_of_a_majority_there_are_no_bounds() -> None:
    clocks, names, world = read_all([0, 0], [(0.0, 0.0)])
    assert clocks.bounds([*names, "r8", "r9"]) == ClockBounds(None, None)
    assert clocks.bounds(names) != ClockBounds(None, None)
    world[0] += STALE_S + 0.1
    assert clocks.bounds(names) == ClockBounds(None, None)
    assert clocks.offset("r1") is None


def test_reply_without_a_pending_request_is_ignored() -> None:
    clocks = PeerClocks("r0", Machine([0.0], 0))
    clocks.heard("r1", ClockReply(0, 1, TRUTH_US))
    first, second = clocks.ask("r1"), clocks.ask("r1")
    clocks.heard("r1", ClockReply(0, first.seq, TRUTH_US))
    assert clocks.offset("r1") is None
    clocks.heard("r2", ClockReply(0, second.seq, TRUTH_US))
    assert clocks.offset("r2") is None
    clocks.heard("r1", ClockReply(0, second.seq, TRUTH_US))
    assert clocks.offset("r1") is not None
