"""Metric families as plain values, which can be sent to another process, and their text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.cluster.server import Durations

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["gauge", "counter", "histogram"]


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """Value of a family for some labels: a number, or the buckets and the sum of a histogram."""

    labels: tuple[str, ...]
    value: float
    buckets: tuple[tuple[str, int], ...] = ()


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """Metric with its samples."""

    name: str
    """For a counter without `_total`."""
    help_text: str
    kind: Kind
    labels: tuple[str, ...] = ()
    samples: list[MetricSample] = msgspec.field(default_factory=list)

    def add(self, value: float, *labels: str) -> None:
        """Add a sample."""
        self.samples.append(MetricSample(labels, float(value)))

    def add_durations(self, durations: Durations, *labels: str) -> None:
        """Add a histogram."""
        self.samples.append(MetricSample(labels, durations.sum_s, tuple(durations.buckets())))


def gauge(name: str, help_text: str, value: float) -> MetricFamily:
    """Return a gauge without labels."""
    return MetricFamily(name, help_text, "gauge", (), [MetricSample((), float(value))])


def counter(name: str, help_text: str, value: float) -> MetricFamily:
    """Return a counter without labels; `name` is without its `_total`."""
    return MetricFamily(name, help_text, "counter", (), [MetricSample((), float(value))])


def gauges(name: str, help_text: str, label: str, values: Mapping[str, float] | None = None) -> MetricFamily:
    """Return a gauge with one label, and its values."""
    return _family("gauge", name, help_text, label, values or {})


def counters(name: str, help_text: str, label: str, values: Mapping[str, float]) -> MetricFamily:
    """Return a counter with one label, and its values; `name` is without its `_total`."""
    return _family("counter", name, help_text, label, values)


def _family(kind: Kind, name: str, help_text: str, label: str, values: Mapping[str, float]) -> MetricFamily:
    samples = [MetricSample((value,), float(count)) for value, count in sorted(values.items())]
    return MetricFamily(name, help_text, kind, (label,), samples)


def histogram(name: str, help_text: str, durations: Durations) -> MetricFamily:
    """Return a histogram without labels."""
    family = MetricFamily(name, help_text, "histogram")
    family.add_durations(durations)
    return family


def histograms(name: str, help_text: str, label: str, values: Iterable[tuple[str, Durations]]) -> MetricFamily:
    """Return a histogram with one label."""
    family = MetricFamily(name, help_text, "histogram", (label,))
    for value, durations in values:
        family.add_durations(durations, value)
    return family


class _Families(Collector):
    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._families)


def _metric(family: MetricFamily) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help_text, labels=family.labels)
        for sample in family.samples:
            histogram.add_metric(sample.labels, sample.buckets, sample.value)
        return histogram
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = kind(family.name, family.help_text, labels=family.labels)
    for sample in family.samples:
        metric.add_metric(sample.labels, sample.value)
    return metric


def prometheus_text(families: Iterable[MetricFamily], pid: int) -> bytes:
    """Return families, and memory, processor time and open files of a process, in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    ProcessCollector(pid=lambda: pid, registry=registry)
    return generate_latest(registry)
