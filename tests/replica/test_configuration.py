"""The configuration as replicated state: one entry a change, one truth for each setting, who may have a buffer."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.decide.configuration import differences, file_text, file_value, target_configuration
from forebay.replica.fold.apply import apply_batch
from forebay.replica.grammar.burst_buffer_conf import ConfSetting, parse_text
from forebay.replica.grammar.settings import KEYS, SettingOwner, ValueKind, find_key
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model.accounts import DEFAULT_SCHEDULING_RULES, Account, SchedulingRules
from forebay.replica.model.configuration import (
    DEFAULT_SITE,
    FLAGS,
    Site,
    check_persistent_allowed,
    check_site,
    check_user_lists,
    format_flags,
    get_sys_state_of,
    get_sys_status_of,
    has_private_data,
    sort_flags,
    tears_down_on_failure,
)
from forebay.replica.model.pools import Pool
from forebay.replica.model.transfers import check_transfer_rules
from forebay.replica.state.digest import state_digest
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.views.jobs import reason_of
from forebay.snapshots.image import Image, to_sections
from tests.replica.test_site_file import VALUES
from tests.replica.world import World, beside_space, user
from tests.snapshots.states import from_sections

FILE = """\
# a site's burst_buffer.conf
AllowUsers=alan,brenda
Flags=EnablePersistent,PrivateData
StageInTimeout=30
StageOutTimeout=31
OtherTimeout=32
ValidateTimeout=6
GetSysState=/opt/site/dw_wlm_cli
"""


def settings(text: str) -> tuple[ConfSetting, ...]:
    parsed = parse_text(text)
    assert parsed.faults == (), parsed.faults
    return parsed.settings


def apply(world: World, text: str, *, partial: bool = False, expected: int | None = None) -> Rejection | int:
    return world.settle(c.ConfigureSite(settings(text), partial, expected))


def applied(text: str, **fields: bool) -> World:
    world = World()
    assert apply(world, text, **fields) == 0
    return world


def changes(state: State, text: str, *, partial: bool = False) -> dict[str, tuple[str, str]]:
    wanted = target_configuration(state, settings(text), partial=partial)
    assert not isinstance(wanted, Rejection), wanted
    return {change.key: (change.before, change.after) for change in differences(state, wanted)}


def imaged(state: State) -> State:
    image = Image(state, 1, 1, b"0" * 32)
    return from_sections((piece.section, piece.payload) for piece in to_sections(image)).state


def test_a_cluster_that_nobody_configured_has_the_defaults_of_slurm() -> None:
    world = World()
    assert World(sources=(), destinations=()).state.site == DEFAULT_SITE
    assert format_flags(world.state.site) == "DisablePersistent"
    assert check_site(DEFAULT_SITE) is None


def test_a_file_is_applied_as_one_event() -> None:
    world = World()
    batches = len(world.ledger)
    assert apply(world, FILE) == 0
    assert len(world.ledger) == batches + 1
    (entry,) = world.ledger[-1].entries
    assert [type(event) for event in entry.events] == [e.SiteConfigured]
    site = world.state.site
    assert (site.stage_in_timeout_s, site.stage_out_timeout_s, site.other_timeout_s) == (30, 31, 32)
    assert (site.allow_users, site.flags) == (("alan", "brenda"), ("EnablePersistent", "PrivateData"))
    assert (site.validate_timeout_s, site.get_sys_state) == (6, "/opt/site/dw_wlm_cli")


@pytest.mark.parametrize("name", [name for name in VALUES if not name.startswith("Default")])
def test_every_key_reaches_its_record_and_is_shown_as_it_was_written(name: str) -> None:
    key = find_key(name)
    assert key is not None
    text, value = VALUES[name]
    world = World()
    assert world.settle(c.ConfigureSite((ConfSetting(name, text),), True)) == 0
    assert world.settle(c.ConfigureSite((ConfSetting("TransferTemplate", "/usr/local/sbin/move"),), True)) == 0
    records = {SettingOwner.TRANSFERS: world.state.transfer_rules, SettingOwner.RULES: world.state.scheduling_rules}
    record = records.get(key.owner, world.state.site)
    if key.owner is SettingOwner.FLAG:
        assert (key.field in world.state.site.flags) == value
    else:
        assert getattr(record, key.field) == value
        assert f"{key.name}=" in file_text(world.state)


def test_what_is_shown_is_a_file_that_changes_nothing_when_it_is_applied_again() -> None:
    world = applied(FILE)
    everything = "".join(
        f"{name}={text[0]}\n" for name, text in VALUES.items() if name != "DenyUsers" and not name.startswith("Default")
    )
    assert apply(world, everything.replace("True", "yes")) == 0
    before = state_digest(world.state)
    shown = file_text(world.state)
    assert changes(world.state, shown) == {}
    revision = world.state.site.revision
    assert apply(world, shown) == 0
    assert world.state.site.revision == revision and world.ledger[-1].entries[0].events == ()
    assert state_digest(world.state) != before  # the receipt alone


def test_shown_as_burst_buffer_conf_it_has_only_keys_that_slurm_knows() -> None:
    world = applied(FILE + "MaxPasses=3\nBurstBufferType=burst_buffer/lua\n")
    shown = file_text(world.state, slurm_only=True)
    parsed = parse_text(shown)
    keys = [find_key(setting.key) for setting in parsed.settings]
    assert parsed.faults == () and all(key is not None and key.is_slurm for key in keys)
    assert "# of Forebay: BurstBufferType=burst_buffer/lua\n" in shown and "# of Forebay: MaxPasses=3\n" in shown
    assert "StageInTimeout=30\n" in shown and "PollInterval" not in shown


def test_a_key_of_slurms_that_a_file_leaves_out_has_slurms_default_and_forebays_own_stay() -> None:
    world = applied(FILE + "MaxPasses=3\nPreRunRequeues=2\n")
    assert apply(world, "StageInTimeout=40\n") == 0
    assert world.state.site.stage_in_timeout_s == 40
    assert world.state.site.stage_out_timeout_s == DEFAULT_SITE.stage_out_timeout_s
    assert world.state.site.allow_users == () and world.state.site.flags == ("DisablePersistent",)
    assert (world.state.site.max_passes, world.state.site.pre_run_requeues) == (3, 2)


def test_a_partial_change_leaves_all_as_it_is_that_it_does_not_name() -> None:
    world = applied(FILE)
    before = world.state.site
    assert apply(world, "PollInterval=20", partial=True) == 0
    after = world.state.site
    assert after == msgspec.structs.replace(before, poll_interval_s=20, revision=after.revision)
    assert apply(world, "DenyUsers=mallory", partial=True) == 0
    assert (world.state.site.allow_users, world.state.site.deny_users) == ((), ("mallory",))


def written(state: State) -> dict[str, str]:
    """Return all that is configured, by key."""
    return {key.name: file_value(key, state.site, state.transfer_rules, state.scheduling_rules) for key in KEYS}


@pytest.mark.parametrize("name", [name for name in VALUES if not name.startswith("Default")])
def test_a_key_without_a_value_in_a_partial_change_is_as_by_default_and_nothing_else_changes(name: str) -> None:
    world = World()
    before = written(world.state)
    # What needs another key at the same time is refused and stays as it is.
    world.settle(c.ConfigureSite((ConfSetting(name, VALUES[name][0]),), True))
    assert world.settle(c.ConfigureSite((ConfSetting(name, ""),), True)) == 0
    default = {key.name: file_value(key, DEFAULT_SITE) for key in KEYS}
    after = written(world.state)
    assert after[name] == default[name]
    assert {key for key in after if after[key] != before[key]} <= {name}


def test_clearing_one_of_two_lists_leaves_the_other() -> None:
    world = applied("DenyUsers=mallory\n")
    assert world.settle(c.ConfigureSite((ConfSetting("AllowUsers", ""),), True)) == 0
    assert world.state.site.deny_users == ("mallory",)
    assert world.settle(c.ConfigureSite((ConfSetting("DenyUsers", ""),), True)) == 0
    assert world.state.site.deny_users == ()


def test_a_key_without_a_value_in_a_whole_file_stays_a_fault_and_the_flag_of_a_pool_is_not_cleared_here() -> None:
    world = World()
    refused = world.settle(c.ConfigureSite((ConfSetting("AllowUsers", ""),)))
    assert isinstance(refused, Rejection) and "AllowUsers has no value" in refused.sentence
    refused = world.settle(c.ConfigureSite((ConfSetting("DefaultPool", ""),), True))
    assert isinstance(refused, Rejection)
    assert (refused.sentence, refused.place) == ("pool fast is the default pool", "DefaultPool")
    assert refused.remedy == "use `forebay pool set fast --no-default`"


def test_a_dry_run_says_what_would_change_and_changes_nothing() -> None:
    world = World()
    before = state_digest(world.state)
    assert changes(world.state, FILE) == {
        "AllowUsers": ("", "alan,brenda"),
        "Flags": ("DisablePersistent", "EnablePersistent,PrivateData"),
        "GetSysState": ("", "/opt/site/dw_wlm_cli"),
        "OtherTimeout": ("300", "32"),
        "StageInTimeout": ("86400", "30"),
        "StageOutTimeout": ("86400", "31"),
        "ValidateTimeout": ("5", "6"),
    }
    assert state_digest(world.state) == before
    assert apply(world, FILE) == 0
    assert changes(world.state, FILE) == {}


def test_a_change_that_is_based_on_an_older_configuration_is_refused() -> None:
    world = World()
    seen = world.state.revision
    assert apply(world, FILE, expected=seen) == 0
    changed_at = world.state.site.revision
    assert changed_at == seen + 1
    refused = apply(world, "StageInTimeout=50", expected=seen)
    assert isinstance(refused, Rejection) and refused.code is RejectionCode.WRONG_STATE
    assert f"changed at revision {changed_at}" in refused.sentence and f"revision {seen}" in refused.sentence
    assert world.state.site.stage_in_timeout_s == 30
    assert apply(world, "StageInTimeout=50", expected=changed_at) == 0


@pytest.mark.parametrize("who", [user(), c.CONTROLLER, c.Actor(c.ActorRole.AGENT, "n1")])
def test_only_operators_change_the_configuration(who: c.Actor) -> None:
    world = World()
    pools: tuple[c.Command, ...] = (c.ChangePool("fast", quantity=1), c.RemovePool("fast"))
    # The leader itself changes pools where the provider tells which there are.
    for command in (c.ConfigureSite(settings(FILE)), *(() if who == c.CONTROLLER else pools)):
        refused = world.settle(command, who)
        assert isinstance(refused, Rejection) and refused.code is RejectionCode.PERMISSION_DENIED
    assert world.state.site.revision == 0


@pytest.mark.parametrize(
    ("text", "place", "sentence"),
    [
        ("StageInTimeout=0", "burst_buffer.conf line 1, column 16", "StageInTimeout is 0"),
        ("\nValidateTimeout=99999999", "burst_buffer.conf line 2, column 17", "ValidateTimeout is 99999999"),
        (
            "AllowUsers=a\nDenyUsers=b",
            "burst_buffer.conf line 2, column 11",
            "AllowUsers and DenyUsers exclude each other",
        ),
        ("Flags=PrivateData PrivateData=no", "burst_buffer.conf line 1, column 31", "PrivateData=no contradicts"),
        ("DefaultPool=ssd", "burst_buffer.conf line 1, column 13", "pool 'ssd' does not ex"),
        ("Sources=relative", "burst_buffer.conf line 1, column 9", "'relative' is not an absolute directory"),
    ],
)
def test_what_a_record_cannot_hold_is_refused_at_the_place_in_the_file(text: str, place: str, sentence: str) -> None:
    world = World()
    refused = apply(world, text)
    assert isinstance(refused, Rejection)
    assert (refused.place, refused.sentence[: len(sentence)]) == (place, sentence)
    assert refused.remedy and world.state.site.revision == 0


def test_settings_that_come_without_a_file_are_refused_by_their_key() -> None:
    world = World()
    for setting, sentence in (
        (ConfSetting("Nope", "1"), "the key 'Nope' is unknown"),
        (ConfSetting("OtherTimeout", "x"), "OtherTimeout is 'x'"),
    ):
        refused = world.settle(c.ConfigureSite((setting,)))
        assert isinstance(refused, Rejection) and refused.place == setting.key and refused.sentence == sentence
    twice = (ConfSetting("OtherTimeout", "1"), ConfSetting("othertimeout", "2"))
    refused = world.settle(c.ConfigureSite(twice))
    assert isinstance(refused, Rejection) and "written twice" in refused.sentence
    many = tuple(ConfSetting("OtherTimeout", "1") for _ in range(257))
    refused = world.settle(c.ConfigureSite(many))
    assert isinstance(refused, Rejection) and refused.code is RejectionCode.LIMIT_EXCEEDED


def test_replicas_and_snapshots_carry_the_configuration() -> None:
    world = applied(FILE + "BurstBufferType=burst_buffer/datawarp\n")
    state: State = EMPTY
    for batch in world.ledger:
        following = apply_batch(state, batch)
        assert following is not None
        state = following
    assert state.site == world.state.site and state_digest(state) == state_digest(world.state)
    assert imaged(world.state).site == world.state.site
    assert state_digest(imaged(world.state)) == state_digest(world.state)


# Which pool is the default --------------------------------------------------------------------------------------------


def defaults(world: World) -> list[str]:
    return [name for name, pool in sorted(world.state.pools.items()) if pool.is_default]


def test_default_pool_moves_the_flag_of_the_pools_and_is_kept_nowhere_else() -> None:
    world = World({"fast": 100, "bulk": 50})
    assert changes(world.state, "DefaultPool=bulk") == {"DefaultPool": ("fast", "bulk")}
    assert apply(world, "DefaultPool=bulk") == 0
    assert defaults(world) == ["bulk"] and world.state.site.revision == 0
    assert "DefaultPool=bulk\n" in file_text(world.state)
    assert apply(world, "StageInTimeout=9") == 0
    assert defaults(world) == ["bulk"]


def test_a_provider_that_tells_its_pools_may_have_a_default_pool_that_is_not_there_yet() -> None:
    world = World()
    assert apply(world, "BurstBufferType=datawarp DefaultPool=wlm") == 0
    assert defaults(world) == ["fast"] and world.state.site.default_pool == "wlm"
    assert "DefaultPool=wlm\n" in file_text(world.state)
    assert world.settle(c.SetPool(Pool("wlm", 10, 1))) == 0
    assert defaults(world) == ["wlm"] and world.state.site.default_pool == ""


def test_making_another_pool_the_default_ends_the_waiting_for_the_named_one() -> None:
    world = World({"fast": 100, "bulk": 50})
    assert apply(world, "BurstBufferType=lua DefaultPool=later") == 0
    assert world.settle(c.SetPool(msgspec.structs.replace(world.state.pools["fast"], quantity_bytes=90))) == 0
    assert world.state.site.default_pool == "later"
    assert world.settle(c.ChangePool("bulk", is_default=True)) == 0
    assert defaults(world) == ["bulk"] and world.state.site.default_pool == ""
    assert world.settle(c.ChangePool("later", exists=False, quantity=5)) == 0
    assert defaults(world) == ["bulk"]


# Who may have what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "allowed", "denied", "sentence"),
    [
        ("AllowUsers=alan", "alan", "brenda", "User not found in AllowUsers"),
        ("DenyUsers=brenda:mallory", "alan", "mallory", "User found in DenyUsers"),
        ("DenyUsers=brenda,mallory", "alan", "brenda", "User found in DenyUsers"),
    ],
)
def test_the_lists_of_users_are_enforced_at_submit_with_slurms_sentences(
    text: str, allowed: str, denied: str, sentence: str
) -> None:
    world = applied(text)
    assert isinstance(world.try_submit("capacity=1", who=allowed), int)
    refused = world.try_submit("capacity=1", who=denied)
    assert isinstance(refused, Rejection)
    assert (refused.code, refused.sentence) == (RejectionCode.PERMISSION_DENIED, sentence)
    without = world.try_submit(who=denied)
    assert isinstance(without, int), "a job without a buffer is nobody's business here"
    refused = world.try_submit(who=denied, buffer=beside_space(directives_kind="bb"))
    assert isinstance(refused, Rejection) and refused.sentence == sentence


def test_a_list_may_name_ids() -> None:
    site = Site(allow_users=("1001",))
    assert check_user_lists(site, "alan", 1001) is None
    assert check_user_lists(site, "alan", 1002) is not None
    assert check_user_lists(Site(deny_users=("1001",)), "alan", 1001) is not None


def test_the_questions_of_others_are_answered_by_the_flags() -> None:
    assert check_persistent_allowed(DEFAULT_SITE, is_operator=True) is None
    refused = check_persistent_allowed(DEFAULT_SITE, is_operator=False, place="line 2")
    assert refused is not None and (refused.sentence, refused.place) == ("Burst Buffer permission denied", "line 2")
    everything = Site(flags=sort_flags(set(FLAGS) - {"DisablePersistent"}))
    assert check_site(everything) is None
    assert check_persistent_allowed(everything, is_operator=False) is None
    assert tears_down_on_failure(everything) and has_private_data(everything)
    assert not tears_down_on_failure(DEFAULT_SITE) and not has_private_data(DEFAULT_SITE)
    datawarp = Site(provider="datawarp")
    assert (get_sys_state_of(datawarp), get_sys_status_of(datawarp)) == (
        "/opt/cray/dw_wlm/default/bin/dw_wlm_cli",
        "/opt/cray/dws/default/bin/dwstat",
    )
    assert (get_sys_state_of(DEFAULT_SITE), get_sys_status_of(DEFAULT_SITE)) == ("", "")


_GOOD = st.sampled_from([name for name in VALUES if not name.startswith("Default")])


@given(st.lists(_GOOD, unique=True, max_size=12), st.booleans())
def test_any_set_of_settings_is_applied_as_the_dry_run_said_or_refused_as_a_whole(
    names: list[str], partial: bool
) -> None:
    world = World()
    given_settings = tuple(ConfSetting(name, VALUES[name][0]) for name in names)
    wanted = target_configuration(world.state, given_settings, partial=partial)
    before = world.state
    outcome = world.settle(c.ConfigureSite(given_settings, partial))
    if isinstance(wanted, Rejection):
        assert isinstance(outcome, Rejection) and outcome.sentence == wanted.sentence
        assert world.state.site == before.site
        assert world.state.transfer_rules == before.transfer_rules
        return
    assert outcome == 0
    assert msgspec.structs.replace(world.state.site, revision=0) == msgspec.structs.replace(wanted.site, revision=0)
    assert world.state.transfer_rules == wanted.transfers and check_transfer_rules(wanted.transfers) is None
    assert check_site(world.state.site) is None
    named = {key.name for key in KEYS if key.name in names or key.name == "Flags" or (key.is_slurm and not partial)}
    assert {change.key for change in differences(before, wanted)} <= named | {"AllowUsers", "DenyUsers"}
    assert changes(world.state, file_text(world.state)) == {}


def test_every_kind_of_value_is_a_kind_of_some_key() -> None:
    assert {key.kind for key in KEYS} == set(ValueKind)


def test_what_can_never_fit_is_refused_unless_the_site_holds_it_and_then_it_stops_nobody() -> None:
    world = World(max_passes=1)
    refused = world.try_submit("capacity=500")
    assert isinstance(refused, Rejection) and refused.code is RejectionCode.CAPACITY_OVER_TOTAL
    assert apply(world, "HoldOversized=yes", partial=True) == 0
    oversized = world.submit("capacity=500", priority=9)
    small = [world.submit("capacity=10") for _ in range(10)]
    assert reason_of(world.state, oversized) == "BurstBufferResources"
    assert {reason_of(world.state, job) for job in small} == {"BurstBufferStageIn"}


def test_a_default_account_is_configured_only_if_it_exists_and_with_the_rest_in_one_entry() -> None:
    world = World()
    settings = (ConfSetting("DefaultAccount", "physics"), ConfSetting("SizePointsPerGiB", "-2"))
    rejection = world.settle(c.ConfigureSite(settings, True))
    assert isinstance(rejection, Rejection) and "'physics' does not exist" in rejection.sentence
    assert rejection.place == "DefaultAccount" and world.state.scheduling_rules == DEFAULT_SCHEDULING_RULES
    assert world.settle(c.SetAccount(Account("physics"))) == 0
    assert world.settle(c.ConfigureSite(settings, True)) == 0
    assert world.state.scheduling_rules == SchedulingRules(size_points_per_gib=-2, default_account="physics")
    assert "DefaultAccount=physics\n" in file_text(world.state)
