"""What Prometheus scrapes is what the API says, within bounded labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from forebay.cluster.api.metrics.work import OTHER_REASON, reason_label
from forebay.cluster.config.config import Config
from forebay.cluster.security.certificates import certificate_of
from forebay.replica.values.verdicts import Reason
from tests.cluster.api.test_reads import busy
from tests.cluster.harness import Harness, story

LABELS = {
    "certificate": {"kind", "name"},
    "of work": {"stage", "outcome", "state", "reason", "pool", "node", "scope"},
    "of requests": {"route", "status", "code"},
    "of replicas": {"peer", "role", "scenario", "witness"},
    "of histograms": {"le"},
}
"""Labels that there may be: each has a bounded number of values. Users and jobs are never labels."""


async def scraped(harness: Harness) -> dict[str, list[Sample]]:
    """Return the samples of a scrape by a monitor, by name."""
    text = (await harness.ask("GET", "/metrics", who="prometheus")).body.decode()
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def by(samples: list[Sample], label: str) -> dict[str, float]:
    return {sample.labels[label]: sample.value for sample in samples}


@story
async def test_a_scrape_says_of_jobs_pools_and_nodes_what_the_api_says(config: Config) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        report = {"command_id": harness.new_id(), "reason": "fans"}
        await harness.ask("POST", "/v1/nodes/n1/drain", report)
        found = await scraped(harness)
        jobs = (await harness.ask("GET", "/v1/jobs")).body["jobs"]
        waiting = Counter(job["reason"] for job in jobs if job["state"] == "PENDING")
        assert by(found["forebay_jobs_waiting"], "reason") == waiting and len(waiting) > 1
        assert by(found["forebay_jobs"], "state")["PENDING"] == waiting.total()
        for pool in (await harness.ask("GET", "/v1/pools")).body["pools"]:
            name = pool["name"]
            for metric, field in (
                ("forebay_pool_bytes", "quantity_bytes"),
                ("forebay_pool_held_bytes", "held_bytes"),
                ("forebay_pool_free_bytes", "free_bytes"),
                ("forebay_pool_out_of_service_bytes", "out_of_service_bytes"),
                ("forebay_pool_buffers", "buffers"),
            ):
                assert by(found[metric], "pool")[name] == pool[field], metric
        unplaced = [job for job in jobs if job["burst_buffer_state"] == "pending" and job["reason"] != "JobHeldUser"]
        assert by(found["forebay_pool_jobs_waiting"], "pool")["fast"] == len(unplaced) > 0
        assert by(found["forebay_pool_wanted_bytes"], "pool")["fast"] == sum(job["capacity_bytes"] for job in unplaced)
        (node,) = (await harness.ask("GET", "/v1/nodes")).body["nodes"]
        assert (node["state"], by(found["forebay_node_drained"], "node")) == ("DRAINING", {"n1": 1.0})
        assert by(found["forebay_node_up"], "node") == {"n1": 1.0}
        for metric, value in (
            ("forebay_node_cpus", node["cpus"]),
            ("forebay_node_cpus_in_use", node["cpus_in_use"]),
            ("forebay_node_jobs", len(node["jobs"])),
        ):
            assert by(found[metric], "node") == {"n1": value}, metric
        buffers = (await harness.ask("GET", "/v1/buffers")).body["buffers"]
        held = sum(buffer["held_bytes"] for buffer in buffers if buffer["node"] == "n1")
        assert by(found["forebay_node_held_bytes"], "node") == {"n1": held} and held > 0
        assert found["forebay_jobs_submitted_total"][0].value == len(jobs)
        assert found["forebay_job_start_wait_seconds_count"][0].value == 1


@story
async def test_a_follower_says_what_jobs_there_are_and_leaves_why_they_wait_to_the_leader(config: Config) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        harness.engine.depose("r2", lose=False)
        found = await scraped(harness)
        assert sum(by(found["forebay_jobs"], "state").values()) == 4
        assert "forebay_jobs_waiting" not in found
        assert "forebay_node_contact_age_seconds" not in found
        assert by(found["forebay_node_up"], "node") == {"n1": 1.0}


@story
async def test_after_a_restart_the_ledger_is_not_counted_again(config: Config) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        before = (await scraped(harness))["forebay_jobs_submitted_total"][0].value
        await harness.restart()
        found = await scraped(harness)
        assert (before, found["forebay_jobs_submitted_total"][0].value) == (4, 0)
        assert by(found["forebay_jobs"], "state")["RUNNING"] == 1
        assert found["forebay_job_start_wait_seconds_count"][0].value == 0


@story
async def test_a_scrape_says_until_when_certificates_are_valid_and_what_memory_the_process_has(config: Config) -> None:
    async with Harness(config) as harness:
        found = await scraped(harness)
        expiry = by(found["forebay_certificate_expiry_timestamp_seconds"], "kind")
        for kind, name in (("replica", "r1"), ("authority", "ca")):
            assert expiry[kind] == certificate_of(config.tls.certificates, name).valid_until / 1_000_000
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        resident_bytes = int(status["VmRSS"].split()[0]) * 1024
        assert found["process_resident_memory_bytes"][0].value == pytest.approx(resident_bytes, rel=0.5)
        certificate = config.tls_files("r1").certificate
        pem = certificate.read_bytes()
        try:
            certificate.write_text("")
            unreadable = by((await scraped(harness))["forebay_certificate_expiry_timestamp_seconds"], "kind")
        finally:
            certificate.write_bytes(pem)  # other tests have the same files
        assert set(unreadable) == {"authority"}, "the scrape goes on without what cannot be read"


@story
async def test_no_label_has_as_many_values_as_there_are_users_or_jobs(config: Config) -> None:
    async with Harness(config) as harness:
        await busy(harness)
        samples = [sample for found in (await scraped(harness)).values() for sample in found]
        assert {label for sample in samples for label in sample.labels} <= set().union(*LABELS.values()) | set(PYTHON)
        for sample in samples:
            assert "alice" not in sample.labels.values(), sample


PYTHON = ("implementation", "major", "minor", "patchlevel", "version")


def reasons() -> Iterator[tuple[str, str]]:
    yield from ((str(reason), str(reason)) for reason in Reason)
    yield "burst_buffer/native: stage_in: no such file: /in/alice/7", "burst_buffer/native"
    yield "burst_buffer/lua: slurm_bb_setup: job 7 may not", "burst_buffer/lua"
    yield "because alice says so", OTHER_REASON


@pytest.mark.parametrize(("reason", "label"), [*reasons()])
def test_a_reason_is_a_label_as_far_as_there_is_a_fixed_number_of_them(reason: str, label: str) -> None:
    assert reason_label(reason) == label
