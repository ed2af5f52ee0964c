"""Signed notes, checkpoints and cosignatures, against the published examples of Go's sumdb."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.security.proofs import (
    Checkpoint,
    NoteError,
    VerifierKey,
    cosign,
    leaf_hash,
    parse_checkpoint,
    parse_key,
    parse_note,
    sign,
    verifier_of,
    verify_note,
    write_note,
)

# The example of package note in the Go module x/mod.
EXAMPLE_SEED = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
EXAMPLE_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
EXAMPLE_TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
EXAMPLE_LINE = (
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
# The checkpoint of package tlog there: its root is the hash of the leaf "hello world".
EXAMPLE_CHECKPOINT = "go.sum database tree\n123456789012\nTszzRgjTG6xce+z2AG31kAXYKBgQVtCSCE40HmuwBb0=\n"

LOG = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
WITNESS = Ed25519PrivateKey.from_private_bytes(bytes(range(32, 64)))
LOG_KEY = verifier_of("forebay/c1", LOG)
WITNESS_KEY = verifier_of("witness.example", WITNESS, 4)
AT_S = 1_679_315_147
TEXT = Checkpoint("forebay/c1", 42, leaf_hash(b"x")).text()
NOTE = write_note(TEXT, [sign(TEXT, "forebay/c1", LOG), cosign(TEXT, "witness.example", WITNESS, AT_S)]).encode()


def test_published_note_has_the_published_signature() -> None:
    private = Ed25519PrivateKey.from_private_bytes(EXAMPLE_SEED)
    assert str(verifier_of("PeterNeumann", private)) == EXAMPLE_KEY
    assert sign(EXAMPLE_TEXT, "PeterNeumann", private).line() == EXAMPLE_LINE


def test_published_note_is_verified_with_the_published_key() -> None:
    held = f"{EXAMPLE_TEXT}\n{EXAMPLE_LINE}".encode()
    text, [verified] = verify_note(held, [parse_key(EXAMPLE_KEY)])
    assert (text, verified.key.name, verified.at_s) == (EXAMPLE_TEXT, "PeterNeumann", None)


def test_published_checkpoint_is_read_and_written() -> None:
    found = parse_checkpoint(EXAMPLE_CHECKPOINT)
    assert found == Checkpoint("go.sum database tree", 123456789012, leaf_hash(b"hello world"))
    assert found.text() == EXAMPLE_CHECKPOINT
    assert parse_checkpoint(EXAMPLE_CHECKPOINT + "an extension\n") == found


def test_cosignature_covers_its_time_and_the_whole_text() -> None:
    cosigned = cosign(TEXT, "witness.example", WITNESS, AT_S)
    message = b"cosignature/v1\ntime 1679315147\n" + TEXT.encode()
    assert cosigned.value == AT_S.to_bytes(8, "big") + WITNESS.sign(message)
    _, verified = verify_note(NOTE, [LOG_KEY, WITNESS_KEY])
    assert [(one.key, one.at_s) for one in verified] == [(LOG_KEY, None), (WITNESS_KEY, AT_S)]


def test_note_with_any_flipped_bit_is_rejected() -> None:
    keys = [LOG_KEY, WITNESS_KEY]
    believed = []
    for at in range(len(NOTE)):
        for bit in range(8):
            changed = bytearray(NOTE)
            changed[at] ^= 1 << bit
            try:
                _, verified = verify_note(bytes(changed), keys)
            except NoteError:
                continue
            # The flip may change a key name or ID; signatures of unknown keys are ignored.
            if len(verified) == len(keys):
                believed.append((at, bit))
    assert believed == []


def test_one_false_signature_of_a_known_key_rejects_the_note() -> None:
    other = sign(TEXT.replace("42", "43"), "forebay/c1", LOG)
    held = write_note(TEXT, [cosign(TEXT, "witness.example", WITNESS, AT_S), other]).encode()
    with pytest.raises(NoteError, match="does not match this text"):
        verify_note(held, [LOG_KEY, WITNESS_KEY])


def test_signatures_of_unknown_keys_are_ignored() -> None:
    with pytest.raises(NoteError, match="no signature of a known key"):
        verify_note(NOTE, [verifier_of("forebay/c1", WITNESS)])
    _, verified = verify_note(NOTE, [LOG_KEY])
    assert [one.key for one in verified] == [LOG_KEY]


def test_two_signatures_of_one_key_count_once() -> None:
    twice = [cosign(TEXT, "witness.example", WITNESS, AT_S + more) for more in (0, 1)]
    _, verified = verify_note(write_note(TEXT, twice).encode(), [WITNESS_KEY])
    assert len(verified) == 1


def test_log_key_is_not_accepted_as_a_cosigner() -> None:
    assert verifier_of("a", LOG).key_id != verifier_of("a", LOG, 4).key_id


@given(st.text(), st.sampled_from([1, 4]), st.binary(min_size=32, max_size=32))
def test_valid_key_survives_encoding(name: str, kind: int, public: bytes) -> None:
    try:
        key = VerifierKey(name, kind, public)
    except NoteError:
        return
    assert parse_key(str(key)) == key


@pytest.mark.parametrize(
    "text",
    ["", "a", "a+b", "a+00000000+AQ==", EXAMPLE_KEY.replace("c74f", "c74e"), EXAMPLE_KEY[:-1], "+" + EXAMPLE_KEY],
)
def test_invalid_key_text_is_rejected(text: str) -> None:
    with pytest.raises(NoteError):
        parse_key(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\n1\n",
        EXAMPLE_CHECKPOINT[:-1],
        EXAMPLE_CHECKPOINT.replace("123", "0123"),
        EXAMPLE_CHECKPOINT.replace("123456789012", "0xabcdef"),
        EXAMPLE_CHECKPOINT.replace("123456789012", "-1"),
        EXAMPLE_CHECKPOINT.replace("123456789012", "١"),
        EXAMPLE_CHECKPOINT.replace("123456789012", str(2**64)),
        EXAMPLE_CHECKPOINT.replace("Bb0=", "Bb1="),
        EXAMPLE_CHECKPOINT.replace("Bb0=", "TOOBIG"),
        EXAMPLE_CHECKPOINT.replace("tree", "tr\tee"),
        EXAMPLE_CHECKPOINT + "\n",
        "\n" + EXAMPLE_CHECKPOINT,
    ],
)
def test_invalid_checkpoint_text_is_rejected(text: str) -> None:
    with pytest.raises(NoteError):
        parse_checkpoint(text)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda one: f"{one}\n\n— {one}\n".encode()))
def test_any_bytes_are_read_as_a_note_or_rejected(held: bytes) -> None:
    try:
        text, signatures = parse_note(held)
    except NoteError:
        return
    assert write_note(text, signatures).encode() == held


def test_note_that_is_too_long_or_has_too_many_signatures_is_rejected() -> None:
    with pytest.raises(NoteError, match="65536 bytes"):
        parse_note(b"a\n" * 40_000)
    with pytest.raises(NoteError, match="64 signatures"):
        parse_note(write_note(TEXT, [sign(TEXT, "a", LOG)] * 65).encode())
