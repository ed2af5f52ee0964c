"""Configuration: apply settings to it in one entry, compare, and format it as a file.

A complete file replaces burst_buffer.conf: Slurm's keys that it omits get Slurm's defaults, and Forebay's own keys that
it omits keep their values. A partial change keeps all keys that it does not name. The default pool is a flag of the
pool; `Site.default_pool` contains only the name of a default pool that does not exist yet. The records that hold the
values are listed in `replica.model.configuration`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from forebay.replica.decide.checks import names_remedy
from forebay.replica.decide.pools import default_pool_events
from forebay.replica.grammar import (
    KEYS,
    ConfSetting,
    SettingError,
    SettingKey,
    SettingOwner,
    ValueFormatError,
    format_value,
    parse_settings,
)
from forebay.replica.messages import events as e
from forebay.replica.model import (
    DEFAULT_SCHEDULING_RULES,
    DEFAULT_SITE,
    DEFAULT_TRANSFER_RULES,
    SchedulingRules,
    Site,
    TransferRules,
    check_rules,
    check_site,
    check_transfer_rules,
    provider_facts,
    sort_flags,
)
from forebay.replica.state import Facts
from forebay.replica.values import SETTINGS_MAX, Rejection, RejectionCode

NAMES_OF_FIELDS: Mapping[str, str] = {f"{key.owner.value}.{key.field}": key.name for key in KEYS}
"""Field of a record -> key, for example `site.max_passes` -> MaxPasses. Rejections of records name fields."""


class TargetConfiguration(msgspec.Struct, frozen=True):
    """Target configuration of a change."""

    site: Site
    transfers: TransferRules
    rules: SchedulingRules
    default_pool: str = ""
    """Existing pool that becomes the default; empty: none is named, or it does not exist yet (`site.default_pool`)."""


class SettingDifference(msgspec.Struct, frozen=True):
    """A changed key with its old and new value as written in a file; empty where a value is unset."""

    key: str
    before: str
    after: str


def target_configuration(
    state: Facts, settings: Iterable[ConfSetting], *, partial: bool = False
) -> TargetConfiguration | Rejection:
    """Return the configuration after the settings are applied, or a Rejection if one of them is invalid."""
    given = tuple(settings)
    if len(given) > SETTINGS_MAX:
        sentence = f"{len(given)} settings exceed the limit of one change"
        return Rejection(RejectionCode.LIMIT_EXCEEDED, sentence, f"change at most {SETTINGS_MAX} at once", "settings")
    try:
        values = parse_settings(given, reset_value(state) if partial else None)
    except SettingError as error:
        fault = error.fault
        return Rejection(RejectionCode.INVALID_FIELD, fault.sentence, fault.remedy, fault.place)
    site = state.site if partial else _slurm_defaults(state.site)
    changes: dict[SettingOwner, dict[str, Any]] = {owner: {} for owner in SettingOwner}
    for key, value, _ in values.values():
        changes[key.owner][key.field] = value
    site = replace(site, **changes[SettingOwner.SITE])
    for flag, wanted in changes[SettingOwner.FLAG].items():
        if flag in changes[SettingOwner.SITE].get("flags", ()) and not wanted:
            return Rejection(
                RejectionCode.INVALID_FIELD,
                f"{flag}=no contradicts Flags={','.join(site.flags)}",
                "remove one of them",
                values[flag][2].place(),
            )
        rest = tuple(other for other in site.flags if other != flag)
        site = replace(site, flags=sort_flags((*rest, flag) if wanted else rest))
    if partial:
        site = _replace_user_list(site, changes[SettingOwner.SITE])
    transfers = replace(state.transfer_rules, **changes[SettingOwner.TRANSFERS])
    rules = replace(state.scheduling_rules, **changes[SettingOwner.RULES])
    rejection = _site_rejection(state, site) or check_transfer_rules(transfers) or rules_rejection(state, rules)
    if rejection is not None:
        return _with_key_name(rejection, values)
    if site.default_pool in state.pools:
        return TargetConfiguration(replace(site, default_pool=""), transfers, rules, site.default_pool)
    return TargetConfiguration(site, transfers, rules)


def reset_value(state: Facts) -> Callable[[SettingKey], object]:
    """Return a function that returns the value of an empty setting (`KEY=`) in a partial change: the key's default."""

    def default_of(key: SettingKey) -> object:
        if key.field == "default_pool" and _current_default_pool(state):
            pool = _current_default_pool(state)
            raise ValueFormatError(f"pool {pool} is the default pool", f"use `forebay pool set {pool} --no-default`")
        return value_of(key, DEFAULT_SITE)

    return default_of


def _slurm_defaults(site: Site) -> Site:
    """Return the site with Slurm's default for each key of burst_buffer.conf."""
    slurm = {
        key.field: getattr(DEFAULT_SITE, key.field) for key in KEYS if key.is_slurm and key.owner is SettingOwner.SITE
    }
    return replace(site, **slurm)


def _replace_user_list(site: Site, named: Mapping[str, Any]) -> Site:
    """Clear AllowUsers if only DenyUsers is set by a change, and vice versa."""
    if named.get("allow_users") and "deny_users" not in named:
        return replace(site, deny_users=())
    if named.get("deny_users") and "allow_users" not in named:
        return replace(site, allow_users=())
    return site


def _site_rejection(state: Facts, site: Site) -> Rejection | None:
    rejection = check_site(site)
    if rejection is not None:
        return rejection
    name = site.default_pool
    if name and name not in state.pools and not provider_facts(site.provider).names_pools:
        remedy = names_remedy(state.pools, "create one with `forebay pool create`")
        return Rejection(
            RejectionCode.UNKNOWN_POOL,
            f"pool {name!r} does not exist",
            remedy,
            "site.default_pool",
        )
    return None


def rules_rejection(state: Facts, rules: SchedulingRules) -> Rejection | None:
    """Return the rejection of invalid scheduling rules, or None."""
    rejection = check_rules(rules)
    if rejection is not None:
        return rejection
    for field, name, known in (
        ("default_account", rules.default_account, state.accounts),
        ("default_qos", rules.default_qos, state.qos),
    ):
        if name and name not in known:
            remedy = names_remedy(sorted(known), f"leave it out: this site has defined no {field}s")
            return Rejection(RejectionCode.INVALID_FIELD, f"{field} {name!r} does not exist", remedy, f"rules.{field}")
    return None


def _with_key_name(rejection: Rejection, values: Mapping[str, tuple[SettingKey, object, ConfSetting]]) -> Rejection:
    """Return a rejection of a record's field with the field replaced by its key, and the place of the setting."""
    name = NAMES_OF_FIELDS.get(rejection.place)
    if name is None:
        return rejection
    place = values[name][2].place() if name in values else name
    field = rejection.place.partition(".")[2]
    sentence = rejection.sentence
    if sentence.startswith(f"{field} "):
        sentence = name + sentence[len(field) :]
    return Rejection(rejection.code, sentence, rejection.remedy, place)


def stale_change_rejection(state: Facts, expected_revision: int | None) -> Rejection | None:
    """Return the rejection of a change that is based on an older revision of the configuration, or None."""
    if expected_revision is None or expected_revision >= state.site.revision:
        return None
    return Rejection(
        RejectionCode.WRONG_STATE,
        f"the configuration was changed at revision {state.site.revision}, but this change is based on revision "
        f"{expected_revision}",
        "review it with `forebay config diff`, then apply with its revision as --expect-revision",
        "expect_revision",
    )


def configuration_events(
    state: Facts, settings: Iterable[ConfSetting], *, partial: bool = False, expected_revision: int | None = None
) -> tuple[e.Event, ...] | Rejection:
    """Return the events of a change, none if nothing differs, or a Rejection of the whole change."""
    rejection = stale_change_rejection(state, expected_revision)
    if rejection is not None:
        return rejection
    wanted = target_configuration(state, settings, partial=partial)
    if isinstance(wanted, Rejection):
        return wanted
    events: list[e.Event] = []
    if wanted.site != state.site:
        events.append(e.SiteConfigured(replace(wanted.site, revision=0)))
    if wanted.transfers != state.transfer_rules:
        events.append(e.TransferRulesSet(wanted.transfers))
    if wanted.rules != state.scheduling_rules:
        events.append(e.SchedulingRulesSet(wanted.rules))
    if wanted.default_pool:
        events.extend(default_pool_events(state, wanted.default_pool))
    return tuple(events)


# Display --------------------------------------------------------------------------------------------------------------


def value_of(
    key: SettingKey,
    site: Site,
    transfers: TransferRules = DEFAULT_TRANSFER_RULES,
    rules: SchedulingRules = DEFAULT_SCHEDULING_RULES,
) -> Any:
    """Return the value of a key."""
    match key.owner:
        case SettingOwner.TRANSFERS:
            return getattr(transfers, key.field)
        case SettingOwner.RULES:
            return getattr(rules, key.field)
        case SettingOwner.SITE:
            return getattr(site, key.field)
        case SettingOwner.FLAG:
            return key.field in site.flags


def file_value(
    key: SettingKey,
    site: Site,
    transfers: TransferRules = DEFAULT_TRANSFER_RULES,
    rules: SchedulingRules = DEFAULT_SCHEDULING_RULES,
) -> str:
    """Return the value of a key as written in a file; empty if the key is omitted."""
    value = value_of(key, site, transfers, rules)
    return "" if value in ("", ()) else format_value(key, value)


def differences(state: Facts, wanted: TargetConfiguration) -> tuple[SettingDifference, ...]:
    """Return the keys that the target configuration changes. Flags are compared as a whole, under `Flags`."""
    found: list[SettingDifference] = []
    default_before = configured_default_pool(state)
    default_after = wanted.default_pool or wanted.site.default_pool or _current_default_pool(state)
    site_before = replace(state.site, default_pool=default_before)
    site_after = replace(wanted.site, default_pool=default_after)
    for key in KEYS:
        if key.owner is SettingOwner.FLAG:
            continue
        before = file_value(key, site_before, state.transfer_rules, state.scheduling_rules)
        after = file_value(key, site_after, wanted.transfers, wanted.rules)
        if before != after:
            found.append(SettingDifference(key.name, before, after))
    return tuple(found)


def configured_default_pool(state: Facts) -> str:
    """Return the configured default pool, which may not exist yet; empty if there is none."""
    return state.site.default_pool or _current_default_pool(state)


def _current_default_pool(state: Facts) -> str:
    return next((name for name, pool in sorted(state.pools.items()) if pool.is_default), "")


def file_text(state: Facts, *, slurm_only: bool = False) -> str:
    """Return the configuration as a file that changes nothing when it is applied.

    With `slurm_only`, the file is accepted by Slurm: Forebay's own keys are comments, and default values are omitted.
    """
    site = replace(state.site, default_pool=configured_default_pool(state))
    lines: list[str] = []
    for key in KEYS:
        if key.owner is SettingOwner.FLAG:
            continue
        value = file_value(key, site, state.transfer_rules, state.scheduling_rules)
        is_default = value == file_value(key, DEFAULT_SITE)
        if not value or (slurm_only and is_default):
            continue
        text = f"{key.name}={_quote(value)}"
        lines.append(f"# of Forebay: {text}" if slurm_only and not key.is_slurm else text)
    return "".join(f"{line}\n" for line in lines)


def _quote(value: str) -> str:
    escaped = value.replace("#", "\\#")
    return f'"{escaped}"' if any(character.isspace() for character in value) else escaped
