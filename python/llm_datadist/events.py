"""What ``LLMDataDist.poll`` returns, and the handle of an asynchronous call.

A program that never blocks starts calls with the ``_async`` methods of ``CacheManager`` and asks ``LLMDataDist.poll``
what has happened: calls that have ended, messages of peers, and links that came and went. The original does not have
these classes and calls.
"""

from __future__ import annotations

from llm_datadist._core import Completed, LinkDown, LinkUp, Notification, Peer, Transfer

__all__ = ["Completed", "LinkDown", "LinkUp", "Notification", "Peer", "Transfer"]
