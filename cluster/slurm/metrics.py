"""Bridge metrics in a file for Prometheus' node exporter, so that no port is opened on slurmctld's host."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, write_to_textfile

from forebay.cluster.schemas.external_jobs import ExternalJobView
from forebay.replica.operations import ExternalJobPhase

CALL_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, 10_000.0)
"""Bounds of the call histogram, seconds: from one commit to a stage-in of hours."""


class BridgeMetrics:
    """Counters of one bridge."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.calls = Histogram(
            "forebay_slurm_call_seconds",
            "Duration of Slurm's calls by function and result.",
            ["function", "word"],
            buckets=CALL_BUCKETS_S,
            registry=self._registry,
        )
        self.waiting = self._gauge("forebay_slurm_calls_waiting", "Calls under way.")
        self.answered = self._gauge(
            "forebay_slurm_leader_answered_timestamp_seconds", "Time of the leader's last response, seconds since 1970."
        )
        self.looks = self._counter(
            "forebay_slurm_comparisons",
            "Comparisons of Slurm's jobs with Forebay's external jobs, by outcome.",
            "outcome",
        )
        self.forgotten = self._counter(
            "forebay_slurm_external_jobs_forgotten",
            "External jobs that Slurm abandoned, by the action taken.",
            "end",
        )
        self.missed = Counter(
            "forebay_slurm_external_jobs_missed",
            "Buffers that Slurm listed and Forebay did not have.",
            registry=self._registry,
        )
        self._external_jobs = Gauge(
            "forebay_slurm_external_jobs",
            "External jobs at the last comparison, by phase.",
            ["phase"],
            registry=self._registry,
        )
        self._unknown = self._gauge(
            "forebay_slurm_unknown_to_slurm", "External jobs that Slurm did not know at the last comparison."
        )
        self.stuck = self._gauge(
            "forebay_slurm_jobs_stuck",
            "Pending jobs that slurmctld will never start because it lost their stage-in; cancel them with scancel.",
        )
        self._missing = self._gauge(
            "forebay_slurm_unknown_to_forebay", "Buffers of Slurm without an external job at the last comparison."
        )

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, registry=self._registry)

    def _counter(self, name: str, help_text: str, label: str) -> Counter:
        return Counter(name, help_text, [label], registry=self._registry)

    def external_jobs_are(self, external_jobs: Iterable[ExternalJobView]) -> None:
        """Set the number of external jobs in each phase."""
        count = Count(external_job.phase for external_job in external_jobs)
        for phase in ExternalJobPhase:
            self._external_jobs.labels(phase.value).set(count[phase.value])

    def differ(self, unknown: int, missing: int) -> None:
        """Set the number of external jobs unknown to Slurm, and of Slurm's buffers without an external job."""
        self._unknown.set(unknown)
        self._missing.set(missing)

    def write(self, path: Path) -> None:
        """Write all metrics, by rename.

        Raises:
            OSError: The file cannot be written.
        """
        write_to_textfile(str(path), self._registry)
