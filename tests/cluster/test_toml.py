"""Mistakes in a TOML file: each has its file, line, column, key and remedy, whatever the file looks like."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.cluster.config import config as config_module
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import quote
from forebay.cluster.config.toml import TEXT_CHARACTERS_MAX, ConfigError, Document, KeyPath, key_text, redact
from forebay.cluster.config.toml import _find as find
from forebay.cluster.config.toml import _keys as keys_in
from forebay.replica.model.configuration import DEFAULT_SITE, FOUNDING_FIELDS
from tests.repo.tree import ROOT

TABLES: dict[str, dict[str, str]] = {
    "[cluster]": {"name": '"demo"', "id": '"6f1c00000000000000000000000000aa"'},
    "[[replica]]": {
        "name": '"r1"',
        "peer": '"127.0.0.1:7401"',
        "api": '"127.0.0.1:7411"',
        "channel": '"127.0.0.1:7421"',
        "joins": "false",
        "api_workers": "1",
    },
    "[[agent]]": {
        "name": '"n1"',
        "cpus": "2",
        "directory": '"n1"',
        "accounts": '"own"',
        "cgroup": '"none"',
        "buffer_image": '"ext4"',
        "copy_rate": '"1GiB"',
        "kill_wait_s": "30",
        "tool_directories": '["/usr/bin"]',
        "filesystem_command": '"/etc/forebay/quota"',
        "quota_groups": '"2000000-2099999"',
    },
    "[[pool]]": {
        "name": '"fast"',
        "quantity": '"96MiB"',
        "granularity": '"8MiB"',
        "default": "true",
        "filesystem": '"bb"',
    },
    "[[filesystem]]": {
        "name": '"bb"',
        "path": '"/bb/fast"',
        "quota": '"lustre"',
        "layout": '"lustre"',
        "stripe_count": "4",
        "stripe_size": '"1MiB"',
        "stripe_pool": '"flash"',
    },
    "[tls]": {"authority": '"tls/ca.pem"', "certificates": '"tls"'},
    "[storage]": {"directory": '"."', "map_size": '"1GiB"', "snapshot_every_entries": "500", "snapshots_kept": "3"},
    "[timing]": {"election_min_ms": "200", "election_max_ms": "500", "heartbeat_ms": "50", "node_down_s": "30"},
    "[access]": {
        "users": '["%hpc"]',
        "operators": '["%forebay-operators"]',
        "operators_through": '["login1"]',
        "socket": '"gateway.sock"',
        "gateway_account": '"gates"',
        "munge": "false",
        "munge_socket": '"/run/munge/munge.socket.2"',
    },
    "[staging]": {"sources": '["/in/%u"]', "destinations": '["/out"]'},
    "[policy]": {
        name: str(getattr(DEFAULT_SITE, name)).lower()
        for name in FOUNDING_FIELDS
        if name not in ("sources", "destinations")
    },
    "[mail]": {"program": '"/usr/bin/mail"', "sender": '"forebay"', "domain": '"example.org"'},
    "[provider]": {
        "lua_script": '"bb.lua"',
        "get_sys_state": '"bin/state"',
        "get_sys_status": '"bin/status"',
        "allowed_programs": '["/bin/cp"]',
        "environment": "{ A = 'b' }",
        "status_identity": "true",
        "lua_version": '"5.1"',
    },
    "[job_process]": {
        "umask": '"0077"',
        "nice": "5",
        "core_size": '"1GiB"',
        "locked_memory": '"unlimited"',
        "stack_size": '"16MiB"',
        "open_files": "65536",
        "processes": "4096",
        "no_new_privs": "false",
        "capabilities": '["CAP_NET_RAW"]',
    },
    "[limits]": {
        "commands_per_minute": "1000",
        "command_bytes_per_minute": '"16MiB"',
        "jobs": "200",
        "scripts": '"1MiB"',
    },
    "[[helper]]": {"name": '"h1"', "address": '"127.0.0.1:7431"', "targets": '["r1", "n1"]'},
    "[drill]": {
        "allow": '["process", "disk"]',
        "directory": '"drill"',
        "start": '["/usr/bin/systemctl", "start", "forebay-{name}"]',
        "never": '["Mon-Fri 08:00-18:00"]',
        "require_second": "true",
        "every_days": "{switchover = 30, leader-kill = 90}",
        "remind": '["ops@example.org"]',
        "automatic": '["switchover"]',
        "prometheus": '"http://10.0.0.9:9090"',
        "stop_when": '"forebay_ready == 0"',
    },
    "[[witness]]": {
        "name": '"security"',
        "url": '"https://witness.example.org:7600/forebay"',
        "key": '"witness.example.org/forebay+5b4aa194+BAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"',
        "authority": '"keys/security.pem"',
    },
    "[checkpoints]": {"witnesses_needed": "1"},
    "[retention]": {
        "archives": '["/archive/one", "archive/two"]',
        "keys": '"ledger.keys"',
        "keep_days": "90",
        "keep": '"8GiB"',
    },
    "[traces]": {"endpoint": '"http://127.0.0.1:4318"'},
    "[[sink]]": {
        "name": '"audit"',
        "url": '"https://events.example.org/forebay"',
        "secret_file": '"audit.secret"',
        "kinds": '["job", "pool_set"]',
        "authority": '"keys/events.pem"',
        "batch": "50",
    },
}
"""A configuration with every key but mail.smtp, which excludes mail.program."""


def written(tables: dict[str, dict[str, str]]) -> str:
    """Return the tables as TOML."""
    return "\n".join(
        "\n".join([header, *(f"{key} = {value}" for key, value in rows.items()), ""]) for header, rows in tables.items()
    )


TEXT = written(TABLES)


def refused(text: str) -> ConfigError:
    """Return the error for a configuration with this text."""
    file = Path("/proc/nowhere/forebay.toml")
    with pytest.raises(ConfigError) as caught:
        config_module._read_config(file, Document(file, text))
    error = caught.value
    assert (error.file, bool(error.sentence), bool(error.remedy)) == (file, True, True)
    assert str(error) == f"{error.place}: {f'{error.key}: ' if error.key else ''}{error.sentence}; {error.remedy}"
    return error


def blamed(text: str, error: ConfigError) -> str:
    """Return the line that the error names, from the column that it names."""
    assert error.place == f"/proc/nowhere/forebay.toml line {error.line}, column {error.column}"
    return text.split("\n")[error.line - 1][error.column - 1 :]


def misspelt(word: str) -> Iterator[str]:
    """Yield the word with each of its letters wrong in turn: another one, left out, or twice."""
    for number, letter in enumerate(word):
        instead = ("j" if letter != "j" else "v", "", letter * 2)[number % 3]
        yield word[:number] + instead + word[number + 1 :]


def test_every_key_is_in_the_text_that_these_tests_misspell(tmp_path: Path) -> None:
    (tmp_path / "forebay.toml").write_text(TEXT)
    assert Config.load(tmp_path / "forebay.toml").provider.environment == (("A", "b"),)
    root = msgspec.inspect.type_info(config_module._ConfigFile)
    assert isinstance(root, msgspec.inspect.StructType)
    known: dict[str, set[str]] = {}
    for field in root.fields:
        table, header = field.type, f"[{field.encode_name}]"
        if isinstance(table, msgspec.inspect.VarTupleType):
            table, header = table.item_type, f"[{header}]"
        if isinstance(table, msgspec.inspect.UnionType):  # one that need not be there
            (table,) = (one for one in table.types if isinstance(one, msgspec.inspect.StructType))
        assert isinstance(table, msgspec.inspect.StructType)
        known[header] = {one.encode_name for one in table.fields}
    assert {header: {*rows} | ({"smtp"} if header == "[mail]" else set()) for header, rows in TABLES.items()} == known


@pytest.mark.parametrize("header", TABLES)
def test_a_key_with_one_letter_wrong_is_refused_in_its_line_with_the_right_one(header: str) -> None:
    for key in TABLES[header]:
        for wrong in misspelt(key):
            assert wrong not in TABLES[header]
            changed = TABLES | {header: {wrong if one == key else one: value for one, value in TABLES[header].items()}}
            text = written(changed)
            error = refused(text)
            assert blamed(text, error).startswith(f"{wrong} = "), (key, wrong)
            table = header.strip("[]") + ("[1]" if header.startswith("[[") else "")
            if "the key is missing" in error.sentence:
                assert (error.key, repr(wrong) in error.sentence) == (f"{table}.{key}", True)
                assert f"{key} = " in error.remedy or error.remedy.startswith("write a whole number"), error.remedy
            else:
                assert (error.key, error.sentence) == (f"{table}.{wrong}", "unknown key")
                assert error.remedy.startswith(f"did you mean {key!r}? known keys here: ")


@pytest.mark.parametrize("header", TABLES)
def test_a_table_with_one_letter_wrong_is_refused_in_its_line_with_the_right_one(header: str) -> None:
    name = header.strip("[]")
    for wrong in misspelt(name):
        text = TEXT.replace(header, header.replace(name, wrong))
        error = refused(text)
        assert blamed(text, error).startswith(f"{wrong}]")
        assert f"did you mean {name!r}?" in error.remedy or f"[{name}]" in error.remedy


@pytest.mark.parametrize(
    ("old", "new", "at", "key", "sentence", "remedy"),
    [
        # a key twice, in each way to write one
        ("cpus = 2", "cpus = 2\ncpus = 3", "cpus = 3", "agent[1].cpus", "twice, first in line 15", "one of the two"),
        ("[timing]", "[cluster]\n[timing]", "cluster]", "cluster", "twice, first in line 1", "one of the two"),
        ("{ A = 'b' }", "{ A = 1, A = 2 }", "A = 2", "provider.environment.A", "twice", "leave one"),
        ('"n1"\ncpus', "'''n\n1'''\nname = 3\ncpus", "name = 3", "agent[1].name", "twice, first in line 14", "leave"),
        # what is TOML, and no value that is asked for
        ("[cluster]", "x = 1\n[cluster]", "x = 1", "x", "unknown key", "remove it; known keys here: cluster, rep"),
        ("[cluster]", "heartbeat_ms = 1\n[cluster]", "heart", "heartbeat_ms", "another table", "write it in [timing]"),
        ("cpus = 2", "cpus = 1979-05-27", "cpus", "agent[1].cpus", "found datetime.date(1979", "from 1 to 65536"),
        ("cpus = 2", "cpus = 99999999999999999999", "cpus", "agent[1].cpus", "more than 63 bits", "from 1 to 65536"),
        ("cpus = 2", f"cpus = 0x{'f' * 9000}", "cpus", "agent[1].cpus", "more than 63 bits", "from 1 to 65536"),
        ("cpus = 2", "cpus = inf", "cpus", "agent[1].cpus", "found a decimal number (inf)", "from 1 to 65536"),
        ("cpus = 2", "cpus.a = 2", "cpus.a", "agent[1].cpus", "found a table", "from 1 to 65536"),
        ('"96MiB"', "99999999999999999999", "quantity", "pool[1].quantity", "more than 63 bits", "write at most"),
        ('"96MiB"', "1.5", "quantity", "pool[1].quantity", "found a decimal number (1.5)", 'quantity = "96MiB"'),
        ('"1GiB"\nsn', '""\nsn', "map_size", "storage.map_size", "the size is empty", "write a number"),
        ('"127.0.0.1:7401"', "7401", "peer", "replica[1].peer", "found a whole", 'write peer = "127.0.0.1:7401"'),
        ('"127.0.0.1:7421"', '""', "channel", "replica[1].channel", "found a text ('')", "a non-empty text"),
        ('directory = "n1"', "directory = 3", "directory", "agent[1].directory", "found a whole", "write directory ="),
        ('directory = "n1"', 'directory = "a\\u0000"', "dir", "agent[1].directory", "found a text", "one line"),
        ('sender = "forebay"', 'sender = ""', "sender", "mail.sender", "found a text ('')", "a non-empty text"),
        ('sender = "forebay"', 'sender = "a\\nb"', "sender", "mail.sender", "found a text ('a\\nb')", "of one line"),
        ('domain = "example.org"', 'smtp = "127.0.0.1:25"', "smtp", "mail.smtp", "program is set as well", "leave out"),
        ("accounts = \"own\"", "accounts = 1", "accounts", "agent[1].accounts", "found a whole", "one of 'own', 'ow"),
        ('"/in/%u"', '"/in/%u", 3', "3]", "staging.sources[2]", "found a whole number (3)", "a non-empty text of one"),
        ('"/in/%u"', '"/in",\n  # two\n  "/a/%j"', '"/a/%j"', "staging.sources[2]", "found '/a/%j'", "is %u"),
        ("{ A = 'b' }", '"A=b"', "env", "provider.environment", "found a text", "a table [provider.environment]"),
        ("{ A = 'b' }", "{ A = 1 }", "A = 1", "provider.environment.A", "found a whole number (1)", "of one line"),
        ("{ A = 'b' }", "{ 'A b' = '1' }", "'A b'", "provider.environment.'A b'", "not a valid variable", "letters"),
        ("[[pool]]", "[pool]", "pool]", "pool", "found a table", "write tables [[pool]]"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_where_it_stands(
    old: str, new: str, at: str, key: str, sentence: str, remedy: str
) -> None:
    assert old in TEXT
    text = TEXT.replace(old, new, 1)
    error = refused(text)
    assert blamed(text, error).startswith(at)
    assert error.key == key
    assert sentence in error.sentence
    assert remedy in error.remedy


@pytest.mark.parametrize("path", ["$.tls", "$.cluster.name", "$.replica[0]", "$[3]", "$.none", "$"])
def test_a_key_that_reads_like_the_path_of_an_error_is_still_the_one_that_is_unknown(path: str) -> None:
    line = f'"x` - at `{path}" = 1\n'
    cluster = written({"[cluster]": TABLES["[cluster]"]})
    for text in (line + cluster, line + TEXT, cluster + line, TEXT.replace("cpus = 2\n", "cpus = 2\n" + line)):
        error = refused(text)
        assert (error.sentence, blamed(text, error)) == ("unknown key", line.rstrip("\n"))


def test_a_list_that_should_be_tables_is_refused_at_its_item() -> None:
    error = refused("pool = [1]\n" + written({"[cluster]": TABLES["[cluster]"]}))
    assert (error.key, error.line, error.column) == ("pool[1]", 1, 9)
    assert (error.sentence, error.remedy) == ("found a whole number (1)", "write a table [[pool]]")


@pytest.mark.parametrize(
    ("text", "line", "column", "sentence"),
    [
        ("", 1, 1, "the key is missing"),
        ("# nothing", 1, 1, "the key is missing"),
        ("[cluster]\nname = \n", 2, 8, "this is not TOML: Invalid value"),
        ("[cluster]\nname", 2, 5, "this is not TOML: Expected '=' after a key"),
        ("[cluster]\r\nname = \"a\r\n", 2, 10, "this is not TOML: Illegal character"),
        ("[cluster\n", 1, 9, "this is not TOML: Expected ']'"),
        ("[cluster]\nname = '''\n\n", 4, 1, "this is not TOML: Expected"),
        ("\ufeff[cluster]", 1, 1, "this is not TOML: Invalid statement"),
        ("a = 1\na.b = 2\n", 2, 8, "this is not TOML: Cannot overwrite a value"),
        ("x = \"\"\"" + "\\\"\"\"" * 100_000 + "\x00", 1, 400_008, "this is not TOML: Illegal character"),
    ],
    ids=range(10),
)  # fmt: skip
def test_a_text_that_is_no_toml_or_empty_is_refused_with_line_and_column(
    text: str, line: int, column: int, sentence: str
) -> None:
    error = refused(text)
    assert error.sentence.startswith(sentence)
    assert (error.line, error.column) == (line, column)


@pytest.mark.parametrize("text", [f"x = {'9' * 5_000}", f"x = {'[' * 9_000}", f"x = {'{a=' * 9_000}"], ids=range(3))
def test_what_python_does_not_parse_is_refused_not_a_crash(text: str) -> None:
    assert refused(text).sentence.startswith("this is not TOML: ")


def test_lists_and_texts_have_a_bound() -> None:
    rows = "\n".join(f'[[replica]]\nname = "r{i}"\npeer = "h:{i + 1}"\napi = "h:{i + 99}"' for i in range(17))
    assert "found 17 tables" in refused(f"[cluster]\nname = 'a'\nid = '{'0' * 32}'\n{rows}").sentence
    error = refused(TEXT.replace('"forebay"', f'"{"a" * (TEXT_CHARACTERS_MAX + 1)}"'))
    assert (error.key, error.remedy) == ("mail.sender", f"at most {TEXT_CHARACTERS_MAX} are possible")
    for old in ('"127.0.0.1:7401"', '"tls"', "'b'"):
        assert len(str(refused(TEXT.replace(old, f'"{"a" * (TEXT_CHARACTERS_MAX + 1)}"')))) < 300
    assert "found 257 entries" in refused(TEXT.replace('["/out"]', "[" + 257 * '"/out",' + "]")).sentence
    many = ", ".join(f"A{number} = ''" for number in range(65))
    assert "found 65 variables" in refused(TEXT.replace("A = 'b'", many)).sentence


# Where a key is


NASTY = '''
# [not.a.header] and = no "string'
bare = 1 # x = 2
"quoted.key" = 'a # [b] = "c"'
'li\\teral' = "esc \\" ] } # \\\\"
dotted . "in side" .words = 1979-05-27 07:32:00
floats = [1.5, -0.0, 1e5,]
text = """
[header]
x = 'y' \\""" still ""two"" """""
lines = \'\'\'
]]
"""\'\'\'
inline = { a = 1, b.c = [ { d = 2 }, { d = [[3], [4, "[5]"]] } ], "e=" = {} }
nested = [ # [
  [ 1, 2 ], # ]
  "]", \'\'\'
]\'\'\',
  { x = [] },
]
[ table . "sub.table" ]
x = 07:32:00
[[ rows ]]
x = 1
[[rows.inner]]
x = 2
[[rows.inner]]
x = 3
[rows.inner.deep]
y = 4
[[rows]]
[[rows.inner]]
x = 5
'''


def leaves(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of each value that is no table and no list, of each item, and of what is empty."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from leaves(one, (*path, key))
    elif isinstance(value, list) and value:
        for number, one in enumerate(value):
            yield from leaves(one, (*path, number))
    else:
        yield path


def value_at(values: Any, path: KeyPath) -> Any:
    for step in path:
        values = values[step]
    return values


def assert_all_are_found(text: str) -> None:
    """Hold what is found in a text against what it says: all of it, in the order of the text, where it begins."""
    values = tomllib.loads(text)
    found = list(keys_in(text))
    assert {*leaves(values)} <= {path for path, _ in found} | {()}
    assert [offset for _, offset in found] == sorted({offset for _, offset in found})
    for path, offset in found:
        value_at(values, path)
        assert find(text, path) <= offset
        if isinstance(path[-1], str):
            word = text[offset:].lstrip("[ ").split("=")[0]
            assert word[0] in "\"'" or word[0] in "".join(map(str, path)), (path, word)


@pytest.mark.parametrize("text", [NASTY, TEXT, (ROOT / "pyproject.toml").read_text(encoding="utf-8")], ids=range(3))
def test_every_key_of_a_file_is_found(text: str) -> None:
    assert_all_are_found(text)
    assert_all_are_found(text.replace("\n", "\r\n"))


def test_a_key_is_found_where_it_is_written() -> None:
    def line_of(*path: str | int) -> str:
        return NASTY[find(NASTY, path) :].split("\n")[0]

    assert line_of("quoted.key").startswith('"quoted.key"')
    assert line_of("dotted", "in side", "words").startswith('dotted . "in side"')
    assert line_of("floats", 2) == "1e5,]"
    assert line_of("inline", "b", "c", 1, "d", 1, 1).startswith('"[5]"]]')
    assert line_of("nested", 3, "x") == "x = [] },"
    assert line_of("rows", 0, "inner", 1, "x") == "x = 3"
    assert line_of("rows", 1, "inner", 0, "x") == "x = 5"
    assert line_of("rows", 1) == "rows]]"
    assert line_of("rows", 0, "inner", 1, "missing") == "rows.inner]]" and find(NASTY, ("missing",)) == 0


NAMES = st.sampled_from(["a", "b-c", "1", "x.y", "", "é", 'q"', "it's", "[", "#", "\n"])
SCALARS = st.one_of(
    st.integers(-9, 9).map(str),
    st.sampled_from(["1.5", "true", "1979-05-27 07:32:00Z", "'''\n]#'''", "'='", '"""a""\n""b"""', '""', "''"]),
    st.text(alphabet='ab"\\#[]{}=,\n', max_size=5).map(quote),
)


def in_table(rows: dict[str, str]) -> str:
    return "{" + ", ".join(f"{quote(key)} = {value}" for key, value in rows.items()) + "}"


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[ # [\n" + " ,\n".join(items) + "\n]"),
        st.dictionaries(NAMES, inner, max_size=3).map(in_table),
    ),
    max_leaves=8,
)
SECTIONS = st.dictionaries(NAMES, VALUES, max_size=3).map(
    lambda rows: "".join(f" {quote(key)}\t= {value} # =\n" for key, value in rows.items())
)


@given(SECTIONS, st.lists(st.tuples(st.sampled_from(["[[t]]", "[[ t.u ]]", "[[t.u.'v.w']]"]), SECTIONS), max_size=5))
def test_every_key_of_any_file_is_found(top: str, sections: list[tuple[str, str]]) -> None:
    text = top + "".join(f"{header}\n{rows}" for header, rows in sections)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        with pytest.raises(ConfigError):
            Document(Path("x.toml"), text)
        return
    assert {*leaves(values)} <= {path for path, _ in keys_in(text)} | {()}
    assert all(value_at(values, path) is not None for path, _ in keys_in(text))


@given(st.text(alphabet="a.=[]{},#\"'\\\n ", max_size=60))
def test_no_text_is_too_odd_to_be_searched(text: str) -> None:
    assert all(0 <= offset < len(text) for _, offset in keys_in(text))
    try:
        document = Document(Path("x.toml"), text)
    except ConfigError as error:
        assert error.line >= 1 and error.column >= 1
    else:
        assert document.refuse(("a", 1), "wrong", "right").line >= 1


def test_a_path_reads_as_in_toml_with_positions_from_one() -> None:
    assert key_text(("replica", 1, "peer")) == "replica[2].peer"
    assert key_text(("provider", "environment", "a\x1b[31m")) == "provider.environment.'a\\x1b[31m'"
    assert len(key_text(("k" * 1000 + " ",))) < 100


@given(st.text(alphabet="ab.=[]{},#\"'\n ", max_size=40))
@example("[a]\nb =")
@example("a = {b = 'x', c.d = 1}")
@example("[a]\n[a.b]\nc = 'x'\nd = 'y'")
@example("[a]\nb = ['x']\nc = []")
def test_of_any_text_all_values_of_a_table_are_redacted_or_it_is_refused(text: str) -> None:
    try:
        redacted = redact(f"{text}\n", ("a",), "SECRET")
    except ValueError:
        return
    except AttributeError:
        assert not isinstance(tomllib.loads(text)["a"], dict)
        return
    found = tomllib.loads(redacted).get("a", {})
    assert set(found.values()) <= {"SECRET"} and found.keys() == tomllib.loads(text).get("a", {}).keys()
