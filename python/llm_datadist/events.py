"""What ``LLMDataDist.poll`` returns, and the handle of an asynchronous call.

A program that never blocks starts calls with the ``_async`` methods of ``CacheManager`` and asks ``LLMDataDist.poll``
what has happened: calls that have ended, messages of peers, links that came and went, and grants that have ended. The
original does not have these classes and calls.
"""

from __future__ import annotations

from llm_datadist._core import Completed, Grant, GrantEnded, LinkDown, LinkUp, Notification, Peer, Transfer

__all__ = ["Completed", "Grant", "GrantEnded", "LinkDown", "LinkUp", "Notification", "Peer", "Transfer"]
