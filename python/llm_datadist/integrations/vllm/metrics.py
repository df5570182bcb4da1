"""The observations of the workers in vLLM's log and in Prometheus."""

from __future__ import annotations

from typing import Any, Union

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from llm_datadist.integrations.vllm.observations import COUNTERS, LISTS, empty, is_empty

__all__ = ["PrometheusMetrics", "TransferStats"]


class TransferStats(KVConnectorStats):  # type: ignore[misc]
    """The observations of one interval. vLLM sends ``data`` from the workers to the process that logs."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data or empty())

    def reset(self) -> None:
        """Forget all observations."""
        self.data = empty()

    def is_empty(self) -> bool:
        """Whether nothing but the time of steps was observed."""
        return is_empty(self.data)

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        """Add the observations of another worker or interval."""
        for name in LISTS:
            self.data[name].extend(other.data[name])
        for name in COUNTERS:
            self.data[name] += other.data[name]
        return self

    def reduce(self) -> dict[str, Union[int, float]]:
        """Return the figures of vLLM's log line."""
        count, moved = len(self.data["bytes"]), sum(self.data["bytes"])
        seconds = sum(self.data["transfer_seconds"])
        return {
            "Receives": count,
            "Failed receives": self.data["failed_receives"],
            "Expired leases": self.data["expired_leases"],
            "Avg receive (ms)": round(1e3 * sum(self.data["receive_seconds"]) / max(1, count), 3),
            "Avg transfer (ms)": round(1e3 * seconds / max(1, count), 3),
            "MiB": round(moved / 2**20, 3),
            "GB/s": round(moved / seconds / 1e9, 3) if seconds else 0,
            "Model thread (ms)": round(1e3 * self.data["model_thread_seconds"], 3),
        }


class PrometheusMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics ``vllm:llm_datadist_*`` of one vLLM, which gives the arguments."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def make(kind: Any, name: str, text: str, **options: Any) -> Any:
            metric = kind(name=f"vllm:llm_datadist_{name}", documentation=text, labelnames=labelnames, **options)
            return create_metric_per_engine(metric, self.per_engine_labelvalues)

        seconds = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10]
        sizes = [2**power for power in range(12, 38, 2)]
        counts = [2**power for power in range(17)]
        histogram, counter = self._histogram_cls, self._counter_cls
        self._lists = {
            "receive_seconds": make(histogram, "receive_seconds", "Time from step to last byte.", buckets=seconds),
            "transfer_seconds": make(histogram, "transfer_seconds", "Time of the pull alone.", buckets=seconds),
            "bytes": make(histogram, "receive_bytes", "Bytes of one receive.", buckets=sizes),
            "blocks": make(histogram, "receive_blocks", "Blocks of one receive.", buckets=counts),
        }
        self._counters = {
            "failed_receives": make(counter, "failed_receives", "Receives that failed."),
            "expired_leases": make(counter, "expired_leases", "Requests whose blocks no decode has read in time."),
            "model_thread_seconds": make(counter, "model_thread_seconds", "Time taken from the model's thread."),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take the observations of one interval."""
        for name, metric in self._lists.items():
            for value in transfer_stats_data[name]:
                metric[engine_idx].observe(value)
        for name, metric in self._counters.items():
            metric[engine_idx].inc(transfer_stats_data[name])
