"""The configuration is loaded exactly, or rejected with file, key, finding and remedy."""

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.config import config as config_module
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import PoolSpec, quote
from forebay.cluster.config.toml import ConfigError, Document
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import create_authority, issue
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from forebay.replica.model.configuration import FOUNDING_FIELDS, Site
from forebay.replica.model.pools import Pool

TEXT = """
[cluster]
name = "demo"
id = "6f1c00000000000000000000000000aa"

[[replica]]
name = "r1"
peer = "127.0.0.1:7401"
api = "127.0.0.1:7411"

[[replica]]
name = "r2"
peer = "127.0.0.1:7402"
api = "127.0.0.1:7412"

[[replica]]
name = "r3"
peer = "[::1]:7403"
api = "r3.example:7413"

[[agent]]
name = "n1"
directory = "nodes/n1"
cpus = 2
accounts = "own"

[[agent]]
name = "n2"
cpus = 4
accounts = "switch"

[[pool]]
name = "fast"
quantity = "96MiB"
granularity = "8MiB"
default = true

[[pool]]
name = "slow"
quantity = 1000
granularity = "10"

[tls]
authority = "tls/ca.pem"
certificates = "tls"

[storage]
directory = "data"
map_size = "1GiB"
snapshot_every_entries = 500
snapshots_kept = 3

[timing]
election_min_ms = 200
election_max_ms = 500
heartbeat_ms = 50

[staging]
sources = ["/in/%u", "shared"]
destinations = ["/out"]

[policy]
stage_retries = 0
allow_root = true
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "forebay.toml"
    path.write_text(TEXT)
    return path


def load(file: Path, *changes: tuple[str, str]) -> Config:
    """Load TEXT with each first occurrence of `old` replaced by `new`."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    file.write_text(text)
    return Config.load(file)


def rejection(file: Path, *changes: tuple[str, str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(file, *changes)
    error = caught.value
    assert error.file == file
    assert error.place == f"{file} line {error.line}, column {error.column}"
    assert str(error).startswith(f"{error.place}: {error.key}: ")
    assert blamed_text(file, error).startswith(names_of(error))
    assert error.sentence
    assert error.remedy
    return error


def blamed_text(file: Path, error: ConfigError) -> str:
    """Return the line that the error names, from the column that it names."""
    return file.read_text().splitlines()[error.line - 1][error.column - 1 :]


def names_of(error: ConfigError) -> tuple[str, ...]:
    """Return the possible starts of an error's place: the key, a list element, or the table that lacks the key."""
    *tables, name = error.key.split(".")
    if name.endswith("]"):
        return ('"', "1]")
    return (name, "pear", tables[-1].split("[")[0]) if "the key is missing" in error.sentence else (name,)


def test_every_setting_in_the_file_is_loaded(file: Path) -> None:
    config, base = Config.load(file), file.parent
    assert (config.cluster.name, config.cluster.id) == ("demo", "6f1c00000000000000000000000000aa")
    assert config.members == {"r1": "127.0.0.1:7401", "r2": "127.0.0.1:7402", "r3": "[::1]:7403"}
    assert config.endpoints == (
        Address("127.0.0.1", 7411),
        Address("127.0.0.1", 7412),
        Address("r3.example", 7413),
    )
    assert [(a.name, a.directory, a.cpus, a.accounts) for a in config.agents] == [
        ("n1", base / "nodes/n1", 2, "own"),
        ("n2", base / "n2", 4, "switch"),
    ]
    assert config.pools == (
        Pool("fast", 96 * 1024**2, 8 * 1024**2, True),
        Pool("slow", 1000, 10, False),
    )
    assert config.storage.map_size_bytes == 1024**3
    assert (config.storage.snapshot_every_entries, config.storage.snapshots_kept) == (500, 3)
    assert config.wal_directory("r1") == base / "data/r1/wal"
    assert config.snapshot_directory("r1") == base / "data/r1/snapshots"
    assert (config.timing.election_min_s, config.timing.election_max_s, config.timing.heartbeat_s) == (0.2, 0.5, 0.05)
    assert config.policy == Site(
        stage_retries=0, allow_root=True, sources=("/in/%u", str(base / "shared")), destinations=("/out",)
    )
    assert (config.replica("r2").name, config.agent("n2").cpus) == ("r2", 4)


def test_paths_are_relative_to_the_configuration_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = Config.load(Path("../forebay.toml"))
    assert config == Config.load(file)
    assert config.tls.certificates == tmp_path / "tls"
    assert config.storage.directory == tmp_path / "data"
    assert ".." not in str(config.file)


def test_omitted_settings_have_defaults(file: Path) -> None:
    file.write_text(TEXT[: TEXT.index("[[agent]]")])
    config = Config.load(file)
    assert (config.agents, config.pools, config.policy) == ((), (), Site())
    assert config.tls.authority == file.parent / "tls/ca.pem"
    assert (config.timing.election_min_s, config.timing.election_max_s, config.timing.heartbeat_s) == (0.3, 0.6, 0.09)
    assert config.storage.directory == file.parent


def test_every_policy_field_can_be_set_at_founding(file: Path) -> None:
    numbers = {name: value for name, value in vars_of(Site()).items() if isinstance(value, int)}
    lines = "\n".join(f"{name} = {str(value).lower()}" for name, value in numbers.items())
    file.write_text(TEXT[: TEXT.index("[policy]")] + "[policy]\n" + lines)
    policy = Config.load(file).policy
    assert {name: getattr(policy, name) for name in numbers} == numbers
    assert set(numbers) | {"sources", "destinations"} == set(FOUNDING_FIELDS)


def vars_of(policy: Site) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in FOUNDING_FIELDS}


@pytest.mark.parametrize(
    ("old", "new", "key", "sentence", "remedy"),
    [
        # unknown keys and tables, with a suggestion
        ("allow_root", "alow_root", "policy.alow_root", "unknown key", "did you mean 'allow_root'?"),
        ("[storage]", "[storages]", "storages", "unknown key", "did you mean 'storage'?"),
        ('peer = "127.0.0.1:7402"', 'pear = "127.0.0.1:7402"', "replica[2].peer", "found 'pear'", "write peer ="),
        ("cpus = 2", "cpus = 2\ngpus = 1", "agent[1].gpus", "unknown key", "did you mean 'cpus'?"),
        ("default = true", "colour = 3", "pool[1].colour", "unknown key", "known keys here: name, quantity"),
        ("[policy]", '[policy]\nsources = ["/x"]', "policy.sources", "another table", "write it in [staging]"),
        # missing
        ('name = "demo"', "", "cluster.name", "the key is missing", 'write name = "demo"'),
        ('quantity = "96MiB"', "", "pool[1].quantity", "the key is missing", "write a size"),
        # kinds
        ("cpus = 2", "cpus = true", "agent[1].cpus", "found true or false (True)", "a whole number from 1 to 65536"),
        ("cpus = 2", 'cpus = "2"', "agent[1].cpus", "found a text ('2')", "a whole number"),
        ("cpus = 2", "cpus = 2.0", "agent[1].cpus", "found a decimal number", "a whole number"),
        ("allow_root = true", 'allow_root = "yes"', "policy.allow_root", "found a text", "true or false"),
        ('name = "r2"', "name = 2", "replica[2].name", "found a whole number (2)", 'write name = "r1"'),
        ('destinations = ["/out"]', 'destinations = "/out"', "staging.destinations", "found a text", "write dest"),
        ('destinations = ["/out"]', "destinations = [1]", "staging.destinations[1]", "found a whole number", "text"),
        ("[timing]", "[[timing]]", "timing", "found a list", "write a table [timing]"),
        ('quantity = "96MiB"', "quantity = true", "pool[1].quantity", "found true or false", "write a size"),
        # bounds
        ("cpus = 2", "cpus = 0", "agent[1].cpus", "found 0", "a whole number from 1 to 65536"),
        ("snapshots_kept = 3", "snapshots_kept = -1", "storage.snapshots_kept", "found -1", "from 1 to 1000"),
        ('map_size = "1GiB"', 'map_size = "1KiB"', "storage.map_size", "found 1024 bytes", "from 16MiB to 16TiB"),
        ("stage_retries = 0", "stage_retries = 9999", "policy.stage_retries", "9999", "a number from 0 to 1000"),
        ("election_max_ms = 500", "election_max_ms = 200", "timing.election_max_ms", "not more than", "write 400"),
        ("heartbeat_ms = 50", "heartbeat_ms = 150", "timing.heartbeat_ms", "too close", "write at most 66"),
        # sizes
        ('"96MiB"', '"96XB"', "pool[1].quantity", "unknown suffix 'XB'", "use one of K KiB"),
        ('"96MiB"', '"-5"', "pool[1].quantity", "has a sign", "without a sign"),
        ('"96MiB"', '""', "pool[1].quantity", "the size is empty", "write a number"),
        ('"96MiB"', '"0"', "pool[1].quantity", "is zero", "at least one byte"),
        ('"96MiB"', '"99999999PiB"', "pool[1].quantity", "overflows", "the largest size"),
        ('"8MiB"', '"1GiB"', "pool[1].granularity", "more than the pool's quantity", "write a smaller one"),
        # names, addresses, choices
        ('name = "r2"', 'name = "../r2"', "replica[2].name", "found '../r2'", "a name has 1 to 64 letters"),
        ('"127.0.0.1:7402"', '"127.0.0.1:99999"', "replica[2].peer", "is not a port", "from 1 to 65535"),
        ('"127.0.0.1:7402"', '"127.0.0.1"', "replica[2].peer", "has no port", "write host:port"),
        ('accounts = "own"', 'accounts = "onw"', "agent[1].accounts", "found 'onw'", "did you mean 'own'?"),
        ('id = "6f1c', 'id = "XYZ', "cluster.id", "found 'XYZ", "32 hexadecimal digits"),
        # what two cannot have
        ('name = "r2"', 'name = "r1"', "replica[2].name", "'r1' is taken by replica[1].name", "write another one"),
        ('name = "n2"', 'name = "r1"', "agent[2].name", "'r1' is taken by replica[1].name", "write another one"),
        ('name = "n2"', 'name = "ca"', "agent[2].name", "'ca' is taken by the authority", "write another one"),
        ('name = "n2"', 'name = "operator"', "agent[2].name", "taken by the operator", "write another one"),
        ('name = "n2"', 'name = "n2"\ndirectory = "nodes/../nodes/n1"', "agent[2].directory", "taken by", "another"),
        ('name = "n2"', 'name = "n2"\ndirectory = "tls"', "agent[2].directory", "taken by tls.certificates", "another"),
        ('api = "127.0.0.1:7412"', 'api = "127.0.0.1:7401"', "replica[2].api", "taken by replica[1].peer", "another"),
        ('name = "slow"', 'name = "fast"', "pool[2].name", "already a pool 'fast'", "a name of its own"),
        ('granularity = "10"', "default = true", "pool[2].default", "pool 'fast' is the default already", "one pool"),
        # staging roots
        ('"/in/%u"', '"/in/%j"', "staging.sources[1]", "found '/in/%j'", "only symbol is %u"),
        ('"/in/%u"', '"/in/../etc"', "staging.sources[1]", "found '..'", "the directory itself"),
        ('"/in/%u"', '""', "staging.sources[1]", "found a text ('')", "non-empty text"),
    ],
)  # fmt: skip
def test_each_mistake_is_rejected_with_place_and_remedy(
    file: Path, old: str, new: str, key: str, sentence: str, remedy: str
) -> None:
    error = rejection(file, (old, new))
    assert error.key == key
    assert sentence in error.sentence
    assert remedy in error.remedy


@pytest.mark.parametrize("count", [0, 2, 4, 6])
def test_an_even_number_of_replicas_is_rejected(file: Path, count: int) -> None:
    rows = "".join(
        f'[[replica]]\nname = "r{i}"\npeer = "127.0.0.1:{7000 + i}"\napi = "127.0.0.1:{7100 + i}"\n'
        for i in range(count)
    )
    file.write_text(TEXT[: TEXT.index("[[replica]]")] + rows)
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    assert caught.value.key == "replica"
    assert f"found {count}" in caught.value.sentence


def test_missing_malformed_and_oversized_files_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "forebay.toml"
    with pytest.raises(ConfigError, match="cannot be read.*forebay cluster init"):
        Config.load(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(tmp_path)
    file.write_text("[cluster\n")
    with pytest.raises(ConfigError, match="line 1, column 9: this is not TOML: Expected"):
        Config.load(file)
    file.write_bytes(b"# \xff\n")
    with pytest.raises(ConfigError, match="line 1, column 3: byte 2 is not UTF-8"):
        Config.load(file)
    monkeypatch.setattr(config_module, "CONFIG_BYTES_MAX", 10)
    file.write_text(TEXT)
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        Config.load(file)


def test_deep_nesting_is_rejected_without_a_crash(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text("x = " + "[" * 100_000)
    with pytest.raises(ConfigError):
        Config.load(file)


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.text(max_size=8), st.integers(-9, 9), st.booleans())))
def test_any_table_is_valid_or_rejected_with_a_key(values: dict[str, Any]) -> None:
    lines = "".join(
        f"{quote(key)} = {quote(v) if isinstance(v, str) else str(v).lower()}\n" for key, v in values.items()
    )
    with pytest.raises(ConfigError) as caught:
        config_module._read_config(Path("x.toml"), Document(Path("x.toml"), lines))
    assert caught.value.key


def test_an_unknown_name_gets_a_suggestion(file: Path) -> None:
    config = Config.load(file)
    with pytest.raises(ConfigError, match="no replica 'r4'; known are r1, r2, r3"):
        config.replica("r4")
    with pytest.raises(ConfigError, match="no agent 'nn1'.*did you mean 'n1'"):
        config.agent("nn1")


# Keys


@pytest.fixture
def keyed(file: Path) -> Config:
    config, now = Config.load(file), SystemClock().now()
    authority = create_authority(config.tls.certificates, cluster_name="demo", cluster_id=config.cluster.id, at=now)
    issue(authority, config.tls.certificates, role=Role.OPERATOR, name="operator", at=now)
    return config


def test_missing_certificate_files_are_reported_with_a_remedy(keyed: Config) -> None:
    files = keyed.tls_files("operator")
    assert (files.certificate.name, files.key.name, files.authority.name) == ("operator.pem", "operator.key", "ca.pem")
    with pytest.raises(ConfigError, match="there is no certificate .*alice.pem; issue one with .* issue alice"):
        keyed.tls_files("alice")
    with pytest.raises(ConfigError, match="is not a name"):
        keyed.tls_files("../../etc/operator")


@pytest.mark.parametrize("name", ["ca.key", "operator.key"])
def test_keys_readable_by_others_are_rejected(keyed: Config, name: str) -> None:
    key = keyed.tls.certificates / name
    key.chmod(0o640)
    with pytest.raises(
        ConfigError, match=f"{name} has mode 0640, so others may use it; run: chmod 600 {key}"
    ) as caught:
        Config.load(keyed.file)
    assert caught.value.key == "tls.certificates"
    key.chmod(0o600)
    assert Config.load(keyed.file) == keyed


def test_a_key_directory_writable_by_others_is_rejected(keyed: Config) -> None:
    keyed.tls.certificates.chmod(0o770)
    with pytest.raises(ConfigError, match="others may replace the keys in it; run: chmod 700"):
        Config.load(keyed.file)
    keyed.tls.certificates.chmod(0o700)


def test_the_configuration_is_readable_without_directory_listing_permission(
    keyed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(self: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", forbidden)
    assert Config.load(keyed.file) == keyed


# Writing TOML


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_quoting_round_trips(text: str) -> None:
    assert tomllib.loads(f"x = {quote(text)}") == {"x": text}


def test_pool_options_are_parsed() -> None:
    assert PoolSpec.parse("fast=96MiB/8MiB") == PoolSpec("fast", "96MiB", "8MiB", False)
    assert PoolSpec.parse("fast=1.5TB/1,default") == PoolSpec("fast", "1.5TB", "1", True)


def test_a_relative_path_is_resolved_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    config = Config.load(Path("forebay.toml"))
    monkeypatch.chdir("/")
    assert config.file == file
    assert os.path.isabs(config.wal_directory("r1"))


def test_a_channel_is_offered_only_if_configured(file: Path) -> None:
    place = 'api = "127.0.0.1:7412"\n'
    assert TEXT.count(place) == 1
    file.write_text(TEXT.replace(place, place + 'channel = "127.0.0.1:7422"\n'))
    assert [str(replica.channel) for replica in Config.load(file).replicas] == ["None", "127.0.0.1:7422", "None"]
    error = rejection(file, (place, place + 'channel = "127.0.0.1:7401"\n'))
    assert error.key == "replica[2].channel"
    assert "taken by replica[1].peer" in error.sentence


WITNESS = """
[[witness]]
name = "security"
url = "https://witness.example.org:7600/"
key = "witness.example.org/forebay+5b4aa194+BAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"

[[witness]]
name = "users"
url = "http://127.0.0.1:7601"
key = "w2+01b4f9f5+BAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"
authority = "users.pem"
"""


def test_witnesses_are_parsed_and_a_majority_is_required_by_default(file: Path) -> None:
    assert Config.load(file).witnesses_needed == 0
    file.write_text(TEXT + WITNESS)
    config = Config.load(file)
    assert [(one.name, one.url) for one in config.witnesses] == [
        ("security", "https://witness.example.org:7600"),
        ("users", "http://127.0.0.1:7601"),
    ]
    assert config.witnesses[1].authority == file.parent / "users.pem" and config.witnesses[0].authority is None
    assert (
        config.witnesses_needed,
        config.checkpoints.required_cosignatures(3),
        config.checkpoints.required_cosignatures(5),
    ) == (2, 2, 3)
    file.write_text(TEXT + WITNESS + "[checkpoints]\nwitnesses_needed = 1\n")
    assert Config.load(file).witnesses_needed == 1


@pytest.mark.parametrize(
    ("old", "new", "key", "sentence"),
    [
        ("https://witness", "http://witness", "witness[1].url", "is another machine"),
        ("https://witness", "ftp://witness", "witness[1].url", "not an HTTPS prefix"),
        ("https://witness", "https://a:b@witness", "witness[1].url", "not an HTTPS prefix"),
        (":7600/", ":7600/?a=b", "witness[1].url", "not an HTTPS prefix"),
        (":7600/", ":76000/", "witness[1].url", "not an HTTPS prefix"),
        (":7600/", ":7600/\\u00e4", "witness[1].url", "not an HTTPS prefix"),
        ("w2+01b4f9f5", "w2+01b4f9f4", "witness[2].key", "not a witness key"),
        ("w2+01b4f9f5+BA", "w2+01b4f9f5+AQ", "witness[2].key", "not a witness key"),
        ("http://127.0.0.1:7601", "https://witness.example.org:7600", "witness[2].url", "taken by witness[1]"),
        ('name = "users"', 'name = "security"', "witness[2].name", "taken by"),
        ("[[witness]]", "[checkpoints]\nwitnesses_needed = 3\n[[witness]]", "checkpoints.witnesses_needed", "found 3"),
    ],
)
def test_an_unreachable_or_unverifiable_witness_is_rejected(
    file: Path, old: str, new: str, key: str, sentence: str
) -> None:
    assert old in WITNESS
    file.write_text(TEXT + WITNESS.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    assert caught.value.key == key and sentence in caught.value.sentence and caught.value.line > 1
