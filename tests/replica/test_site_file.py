"""burst_buffer.conf as it is: every key, every form of a value, and faults that say where they are."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.grammar.burst_buffer_conf import ConfLine, included_file, parse_lines, parse_text, split_lines
from forebay.replica.grammar.settings import (
    KEYS,
    SettingOwner,
    ValueFormatError,
    ValueKind,
    find_key,
    format_value,
    parse_value,
)
from forebay.replica.model.accounts import DEFAULT_SCHEDULING_RULES
from forebay.replica.model.configuration import DEFAULT_SITE, FLAGS
from forebay.replica.model.transfers import DEFAULT_TRANSFER_RULES
from forebay.replica.values import SETTING_CHARACTERS_MAX

VALUES: dict[str, tuple[str, Any]] = {
    "AllowUsers": ("alan,1001", ("alan", "1001")),
    "CreateBuffer": ("/usr/local/sbin/CB", "/usr/local/sbin/CB"),
    "DefaultPool": ("wlm_pool", "wlm_pool"),
    "DenyUsers": ("alan:brenda", ("alan", "brenda")),
    "DestroyBuffer": ("/usr/local/sbin/DB", "/usr/local/sbin/DB"),
    "Directive": ("BB_EXAMPLE", "BB_EXAMPLE"),
    "Flags": ("teardownfailure,EnablePersistent", ("EnablePersistent", "TeardownFailure")),
    "GetSysState": ("/opt/cray/dw_wlm_cli", "/opt/cray/dw_wlm_cli"),
    "GetSysStatus": ("/opt/cray/dwstat", "/opt/cray/dwstat"),
    "Granularity": ("100G", 100 * 2**30),
    "OtherTimeout": ("300", 300),
    "PollInterval": ("15", 15),
    "Pools": ("fast:20g", "fast:20g"),
    "PrivateData": ("True", True),
    "StageInTimeout": ("30", 30),
    "StageOutTimeout": ("30", 30),
    "StartStageIn": ("/usr/local/sbin/SSI", "/usr/local/sbin/SSI"),
    "StartStageOut": ("/usr/local/sbin/SSO", "/usr/local/sbin/SSO"),
    "StopStageIn": ("/usr/local/sbin/PSI", "/usr/local/sbin/PSI"),
    "StopStageOut": ("/usr/local/sbin/PSO", "/usr/local/sbin/PSO"),
    "ValidateTimeout": ("5", 5),
    "AllowRoot": ("no", False),
    "ArrayStageCount": ("10", 10),
    "BurstBufferType": ("burst_buffer/lua", "lua"),
    "Destinations": ("/out/%u,/scratch", ("/out/%u", "/scratch")),
    "FinishedJobsKept": ("100", 100),
    "ExternalJobLinger": ("0", 0),
    "ExternalJobSetupWait": ("30", 30),
    "HoldOversized": ("yes", True),
    "LuaScript": ("/etc/slurm/burst_buffer.lua", "/etc/slurm/burst_buffer.lua"),
    "MaxPasses": ("3", 3),
    "NodeDownRestageTime": ("300", 300),
    "OperationsPerStage": ("128", 128),
    "PathVariables": ("HOME,PROJECT=/proj/%u", ("HOME", "PROJECT=/proj/%u")),
    "PreRunRequeues": ("3", 3),
    "RequeueOnNodeFail": ("yes", True),
    "RestartPolicy": ("Slurm", "slurm"),
    "RetryBackoff": ("2", 2),
    "RetryBackoffMax": ("300", 300),
    "Sources": ("/in", ("/in",)),
    "StagedHoldTime": ("600", 600),
    "StageRetries": ("0", 0),
    "UnknownSbatchOptions": ("Reject", "reject"),
    "TransferAlgorithm": ("BLAKE3", "blake3"),
    "TransferBackends": ("rsync,native", ("rsync", "native")),
    "TransferOutsideLinks": ("no", False),
    "TransferRate": ("100MiB", 100 * 2**20),
    "TransferRateOfCluster": ("0", 0),
    "TransferRatePerNode": ("1GiB/s", 2**30),
    "TransferRatePerUser": ("Unlimited", None),
    "TransferReplace": ("no", False),
    "TransferStallTime": ("600", 600),
    "TransferTemplate": ("/usr/local/sbin/move", "/usr/local/sbin/move"),
    "TransferTimeMax": ("86400", 86_400),
    "TransferTimeouts": ("Fixed", "fixed"),
    "TransferVerify": ("read_back", "read_back"),
    "TransfersAtOnce": ("128", 128),
    "TransfersPerNode": ("unlimited", None),
    "TransfersPerUser": ("0", 0),
    "AccountsRequired": ("yes", True),
    "DefaultAccount": ("physics", "physics"),
    "DefaultQOS": ("high", "high"),
    "RevocationsMax": ("0", 0),
    "RevokeAfter": ("20", 20),
    "SizePointsPerGiB": ("-5", -5),
}
"""One good value of each key, as it is written and as it is kept."""

WRONG: dict[str, tuple[str, str]] = {
    "AllowUsers": ("alan:brenda", "has a colon"),
    "DenyUsers": ("a,b/c", "character other than"),
    "DefaultPool": ("a/b", "character other than"),
    "DefaultAccount": ("a/b", "character other than"),
    "DefaultQOS": ("a/b", "character other than"),
    "Directive": ("#BB", "starts with #"),
    "Flags": ("TeardownFailures", "the flag 'TeardownFailures' is unknown"),
    "Granularity": ("-5", "has a sign"),
    "PrivateData": ("perhaps", "write yes or no"),
    "BurstBufferType": ("burst_buffer/tape", "has 'tape'"),
    "RestartPolicy": ("never", "has 'never'"),
    "UnknownSbatchOptions": ("ignore", "has 'ignore'"),
    "TransferBackends": ("native,tape", "has 'tape'"),
    "TransferVerify": ("md5", "has 'md5'"),
    "TransferAlgorithm": ("md5", "has 'md5'"),
    "TransferTimeouts": ("never", "has 'never'"),
}
"""A wrong value of a key, and what is said about it; keys of a kind share one below."""

WRONG_OF_KIND = {
    ValueKind.NUMBER: ("1.5", "is '1.5'"),
    ValueKind.POINTS: ("-1.5", "is '1.5'"),
    ValueKind.SECONDS: ("010", "octal"),
    ValueKind.PROGRAM: ("bin/CB", "is not an absolute path"),
    ValueKind.YES_NO: ("maybe", "write yes or no"),
    ValueKind.TEMPLATE: ("bin/cp", "is not an absolute path"),
    ValueKind.RATE: ("fast", "does not start with a number"),
    ValueKind.AT_ONCE: ("-1", "is '-1'"),
    ValueKind.VARIABLES: ("HOME,1A", "is not the name of a variable"),
}


def the_fault(text: str) -> str:
    parsed = parse_text(text)
    assert len(parsed.faults) == 1, parsed
    return str(parsed.faults[0])


def test_the_table_has_a_good_value_of_every_key() -> None:
    assert set(VALUES) == {key.name for key in KEYS}
    assert len({key.name.lower() for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("name", VALUES)
def test_every_key_is_read_in_any_case_and_written_so_that_it_is_read_again(name: str) -> None:
    text, value = VALUES[name]
    for spelling in (name, name.lower(), name.upper()):
        quoted = text.replace("#", "\\#")
        parsed = parse_text(f"  {spelling} = {quoted}  # a remark\n")
        assert parsed.faults == ()
        assert [(setting.key, setting.value) for setting in parsed.settings] == [(name, text)]
    key = find_key(name)
    assert key is not None
    assert parse_value(key, text) == value
    assert parse_value(key, format_value(key, value)) == value


@pytest.mark.parametrize("name", VALUES)
def test_every_key_names_a_field_of_its_record(name: str) -> None:
    key = find_key(name)
    assert key is not None
    if key.owner is SettingOwner.FLAG:
        assert key.field in FLAGS
    else:
        records = {
            SettingOwner.SITE: DEFAULT_SITE,
            SettingOwner.TRANSFERS: DEFAULT_TRANSFER_RULES,
            SettingOwner.RULES: DEFAULT_SCHEDULING_RULES,
        }
        assert hasattr(records[key.owner], key.field)


@pytest.mark.parametrize("name", VALUES)
def test_a_wrong_or_missing_value_of_every_key_is_a_fault_at_its_place(name: str) -> None:
    key = find_key(name)
    assert key is not None
    missing = the_fault(f"# nothing\n  {name}=\n")
    assert missing.startswith("burst_buffer.conf line 2, column ") and "has no value" in missing
    wrong = WRONG.get(name) or WRONG_OF_KIND.get(key.kind)
    if wrong is None:
        assert key.kind in (ValueKind.TEXT, ValueKind.ROOTS), f"{name} needs a wrong value in this table"
        return
    value, said = wrong
    quoted = value.replace("#", "\\#")
    fault = the_fault(f"\n{name}={quoted}\n")
    assert fault.startswith("burst_buffer.conf line 2, column ") and said in fault


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("DenyUser=x", "line 1, column 1: the key 'DenyUser' is unknown; did you mean DenyUsers?"),
        ("\n  Gres=nvme:4", "line 2, column 3: the key 'Gres' is unknown; create pools with"),
        ("Nonsense=1", "line 1, column 1: the key 'Nonsense' is unknown; the keys are AllowUsers, "),
        ("Flags=PrivateData\nflags=EmulateCray", "line 2, column 1: Flags is written twice; keep one: the first is"),
        ("OtherTimeout 300", "line 1, column 1: OtherTimeout has no =; write OtherTimeout=VALUE"),
        ("AllowUsers=alan, brenda", "line 1, column 18: 'brenda' is not Key=Value; write Key=Value; a value with"),
        ('GetSysState="/opt/x', "line 1, column 13: the quotes of GetSysState are not closed"),
        ("=5", "line 1, column 1: '=5' is not a key; write Key=Value"),
        ("Flags=PrivateData,Nope", "line 1, column 19: the flag 'Nope' is unknown; use some of DisablePersistent"),
        ("AllowUsers=alan,\\\nbr*nda", "line 2, column 1: a user name 'br*nda' has a character other than"),
        ("Directive=a\\#b", "line 1, column 11: Directive 'a#b' has a character other than"),
        ("Include a.conf b.conf", "line 1, column 1: Include is not alone on its line"),
        ("Flags=EnablePersistent,DisablePersistent", "column 7: DisablePersistent and EnablePersistent contradict"),
    ],
)
def test_a_fault_names_file_line_and_column_and_what_would_be_right(text: str, said: str) -> None:
    assert the_fault(text).startswith("burst_buffer.conf ") and said in the_fault(text)


def test_a_line_that_includes_is_known_in_any_case_and_never_a_setting() -> None:
    assert included_file(ConfLine("f", 1, "  INCLUDE more.conf # rest")) == "more.conf"
    assert included_file(ConfLine("f", 1, "Include a.conf b.conf")) is None
    assert included_file(ConfLine("f", 1, "#Include a.conf")) is None


def test_a_value_longer_than_the_bound_is_a_fault_at_its_place() -> None:
    users = ("a," * SETTING_CHARACTERS_MAX)[: SETTING_CHARACTERS_MAX - 1] + "b"
    assert len(parse_text(f"AllowUsers={users}").settings) == 1
    parsed = parse_text(f"AllowUsers={users}c")
    assert ([fault.place for fault in parsed.faults], parsed.settings) == (["burst_buffer.conf line 1, column 12"], ())


def test_several_settings_stand_in_one_line_and_one_in_several() -> None:
    parsed = parse_text('StageInTimeout=30 StageOutTimeout=40\\\n Flags="PrivateData" # x\nAllowUsers=a,\\\nb')
    assert [(one.key, one.value, one.line, one.column) for one in parsed.settings] == [
        ("StageInTimeout", "30", 1, 16),
        ("StageOutTimeout", "40", 1, 35),
        ("Flags", "PrivateData", 2, 9),
        ("AllowUsers", "a,b", 3, 12),
    ]
    assert parsed.faults == ()


def test_all_faults_of_a_file_are_found_at_once() -> None:
    parsed = parse_text("A=1\nOtherTimeout=x\nB=2\n")
    assert [fault.place for fault in parsed.faults] == [
        "burst_buffer.conf line 1, column 1",
        "burst_buffer.conf line 2, column 14",
        "burst_buffer.conf line 3, column 1",
    ]


def test_the_generic_plugins_configuration_of_the_older_guide_is_accepted_as_it_is() -> None:
    parsed = parse_text(
        "DefaultPool=ssd\nGranularity=100G\nStageInTimeout=30\nStageOutTimeout=30\n"
        "Flags=EnablePersistent,PrivateData\nAllowUsers=alan,brenda\nCreateBuffer=/usr/local/slurm/sbin/CB\n"
        "DestroyBuffer=/usr/local/slurm/sbin/DB\nGetSysState=/usr/local/slurm/sbin/GSS\n"
        "StartStageIn=/usr/local/slurm/sbin/SSI\nStartStageOut=/usr/local/slurm/sbin/SSO\n"
        "StopStageIn=/usr/local/slurm/sbin/PSI\nStopStageOut=/usr/local/slurm/sbin/PSO\n"
    )
    assert parsed.faults == () and len(parsed.settings) == 13


_PLACE = re.compile(r"f line ([0-9]+), column ([0-9]+)", re.ASCII)
_PIECES = st.sampled_from(
    [
        *VALUES,
        "=",
        " ",
        "\t",
        "\\",
        "\\\n",
        "\n",
        "#",
        "\\#",
        '"',
        ",",
        ":",
        "alan",
        "300",
        "1.5TB",
        "/opt/x",
        "é",
        "\r\n",
    ]
)


@given(st.one_of(st.text(max_size=200), st.lists(_PIECES, max_size=40).map("".join)))
def test_any_text_is_read_or_refused_at_a_place_that_is_in_it(text: str) -> None:
    lines = split_lines(text, "f")
    parsed = parse_lines(lines)
    for place in [fault.place for fault in parsed.faults] + [setting.place() for setting in parsed.settings]:
        found = _PLACE.fullmatch(place)
        assert found is not None, place
        line, column = int(found.group(1)), int(found.group(2))
        assert 1 <= line <= len(lines) and 1 <= column <= len(lines[line - 1].text) + 1
    if not parsed.faults:
        for setting in parsed.settings:
            key = find_key(setting.key)
            assert key is not None
            parse_value(key, setting.value)


@given(st.sampled_from([key for key in KEYS if key.kind is not ValueKind.TEXT]), st.text(max_size=40))
def test_any_value_is_read_or_refused_and_what_is_read_is_written_back(key: Any, text: str) -> None:
    try:
        value = parse_value(key, text)
    except ValueFormatError as fault:
        assert fault.sentence and fault.remedy and 0 <= fault.offset <= len(text)
        return
    if value != ():
        assert parse_value(key, format_value(key, value)) == value
