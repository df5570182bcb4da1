"""What a worker observes: times, sizes and failures of its receives and leases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.receiving import Outcome

__all__ = ["COUNTERS", "LISTS", "Observations"]

LISTS = ("receive_seconds", "transfer_seconds", "bytes", "blocks")
COUNTERS = ("failed_receives", "expired_leases", "model_thread_seconds")


class Observations:
    """The observations since they were last taken. Their owner guards them with a lock.

    ``receive_seconds`` counts from the step that begins a receive to its last byte, and ``transfer_seconds`` only the
    pull. ``model_thread_seconds`` is what the connector took from the model's thread.
    """

    def __init__(self) -> None:
        self._data = empty()

    def received(self, outcome: Outcome) -> None:
        """Count a receive that succeeded."""
        for name in LISTS:
            self._data[name].append(getattr(outcome, name))

    def count(self, name: str, by: float = 1) -> None:
        """Add to a counter."""
        self._data[name] += by

    def take(self) -> dict[str, Any] | None:
        """Return the observations, and begin anew; ``None`` if nothing but the time of steps was observed."""
        if is_empty(self._data):
            return None
        data, self._data = self._data, empty()
        return data


def empty() -> dict[str, Any]:
    """Return no observations."""
    return {**{name: [] for name in LISTS}, **dict.fromkeys(COUNTERS, 0)}


def is_empty(data: dict[str, Any]) -> bool:
    """Whether nothing but the time of steps was observed."""
    return not any(data[name] for name in (*LISTS, "failed_receives", "expired_leases"))
