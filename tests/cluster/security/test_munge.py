"""Payload of a credential: the same in clients and replicas of all releases, and valid for one request only."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.security import purpose_of
from forebay.cluster.security.munge import PURPOSE

texts = st.text(alphabet="ab", max_size=3)
requests = st.tuples(texts, texts, texts, texts, texts)


def test_payload_is_the_digest_of_each_part_after_its_length() -> None:
    parts = (b"1f", b"127.0.0.1:7411", b"POST", b"/v1/jobs", b"{}")
    digest = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()
    assert purpose_of("1f", "127.0.0.1:7411", "POST", "/v1/jobs", b"{}") == PURPOSE + digest.encode()


@given(requests, requests)
def test_requests_with_different_parts_have_different_payloads(
    one: tuple[str, str, str, str, str], other: tuple[str, str, str, str, str]
) -> None:
    payloads = {purpose_of(*parts[:4], parts[4].encode()) for parts in (one, other)}
    assert len(payloads) == len({one, other})
