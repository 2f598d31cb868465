"""The layer's counters for Prometheus: an optional extra, `django-echomq[metrics]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import signals

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "echomq_app.layers.metrics needs prometheus-client: pip install django-echomq[metrics]"
    ) from error

_PREFIX = "echomq_layer_"


class LayerMetrics:
    """Turns the layer's signals into metrics of one registry. Make one per process.

    `close` ends it.
    """

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._receivers: list[tuple[Any, Callable[..., None]]] = []
        self._registry = registry
        self._collectors: list[Any] = []
        flushed = self._counter("flushed_messages", "Messages let go to the other nodes.")
        delivered = self._counter("delivered_messages", "Messages of other nodes delivered here.")
        expiries = self._counter("expiries", "Times that a node needed what is overwritten.")
        notices = self._counter("notices", "Times that the channels here were told of a hole.")
        failures = self._counter("failures", "Batches that failed or weren't acked in time.")
        retries = self._counter("retries", "Retries scheduled.")
        fill = self._keep(Gauge(f"{_PREFIX}buffer_fill", "Fullest buffer, 0 to 1.", registry=None))
        nodes = self._keep(Gauge(f"{_PREFIX}nodes", "Other nodes known.", registry=None))
        acks = self._keep(
            Histogram(f"{_PREFIX}ack_seconds", "From a batch to its ack.", registry=None)
        )

        def on_flush(count: int, fill_now: float) -> None:
            flushed.inc(count)
            fill.set(fill_now)

        self._hear(signals.buffer_flush, lambda given: on_flush(given["count"], given["fill"]))
        self._hear(signals.batch_delivered, lambda given: delivered.inc(given["count"]))
        self._hear(signals.batch_acked, lambda given: acks.observe(given["seconds"]))
        self._hear(signals.buffer_expired, lambda given: expiries.inc())
        self._hear(signals.cursor_expired, lambda given: notices.inc())
        self._hear(signals.sync_failure, lambda given: failures.inc())
        self._hear(signals.retry_scheduled, lambda given: retries.inc())
        self._hear(signals.node_joined, lambda given: nodes.set(given["nodes"]))
        self._hear(signals.node_forgotten, lambda given: nodes.set(given["nodes"]))

    def close(self) -> None:
        """Count no more, and leave the registry."""
        for signal, receiver in self._receivers:
            signal.disconnect(receiver)
        for collector in self._collectors:
            self._registry.unregister(collector)

    def _counter(self, name: str, text: str) -> Counter:
        counter: Counter = self._keep(Counter(f"{_PREFIX}{name}", text, registry=None))
        return counter

    def _keep(self, collector: Any) -> Any:
        self._registry.register(collector)
        self._collectors.append(collector)
        return collector

    def _hear(self, signal: Any, count: Callable[[dict[str, Any]], object]) -> None:
        def receiver(sender: object, **given: Any) -> None:
            count(given)

        signal.connect(receiver, weak=False)
        self._receivers.append((signal, receiver))
