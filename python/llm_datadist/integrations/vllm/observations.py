"""What a worker observes: times, sizes and failures of its receives and leases."""

from __future__ import annotations

from typing import Any

__all__ = ["COUNTERS", "LISTS", "empty", "is_empty"]

# ``receive_seconds`` counts from the step that begins a receive to its last byte, and ``transfer_seconds`` only the
# pull. ``model_thread_seconds`` is what the connector took from the model's thread.
LISTS = ("receive_seconds", "transfer_seconds", "bytes", "blocks")
COUNTERS = ("failed_receives", "expired_leases", "model_thread_seconds")


def empty() -> dict[str, Any]:
    """Return no observations."""
    return {**{name: [] for name in LISTS}, **dict.fromkeys(COUNTERS, 0)}


def is_empty(data: dict[str, Any]) -> bool:
    """Whether nothing but the time of steps was observed."""
    return not any(data[name] for name in (*LISTS, "failed_receives", "expired_leases"))
