"""The end of a measurement that waits: an engine whose caches others pull and push, and which returns messages."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from llm_datadist import LLMException
from llm_datadist.doctor.probe import ProbeEngine
from llm_datadist.events import LinkDown, LinkUp, Notification
from llm_datadist.standard_output import write

if TYPE_CHECKING:
    from llm_datadist.doctor.probe import Choice

_LONGEST_WAIT_S = 1.0


def serve(choice: Choice, seconds: float | None) -> None:
    """Serve measurements for this time, or until KeyboardInterrupt. Raises LLMException if the engine fails."""
    until = None if seconds is None else time.monotonic() + seconds
    with ProbeEngine(choice) as engine:
        engine.dist.poll()  # from now on, the engine keeps news about links
        address = engine.dist.listen_ip_info or ""
        write(f"doctor: serving at {address}; measure from the other machine with")
        write(f"doctor:   llm-datadist doctor --to HOST:{address.rpartition(':')[2]}")
        while until is None or time.monotonic() < until:
            left = _LONGEST_WAIT_S if until is None else max(until - time.monotonic(), 0)
            select.select([engine.dist], [], [], min(left, _LONGEST_WAIT_S))
            for event in engine.dist.poll():
                _answer(engine, event)


def _answer(engine: ProbeEngine, event: object) -> None:
    if isinstance(event, Notification):
        try:
            engine.dist.notify(event.cluster_id, event.payload)
        except LLMException:
            return  # the link has ended, or its peer does not poll
    elif isinstance(event, (LinkUp, LinkDown)):
        change = "linked" if isinstance(event, LinkUp) else "ended"
        write(f"doctor: {event.peer.address}: {change}")
