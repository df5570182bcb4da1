"""What the doctor has found, one fact at a time."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NOTE", "OK", "PROBLEM", "Finding"]

OK, NOTE, PROBLEM = "ok", "note", "PROBLEM"


@dataclass(frozen=True)
class Finding:
    """One fact about the host.

    Attributes:
        subject: what was examined.
        value: what was found.
        verdict: ``OK``, ``NOTE`` (something is slower or unavailable), or ``PROBLEM`` (something fails).
        advice: what it means and what to do. Empty if the verdict is ``OK``.
    """

    subject: str
    value: str
    verdict: str = OK
    advice: str = ""
