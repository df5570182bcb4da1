"""A pull under a grant that has expired, which the engine must refuse.

A server may reuse blocks when their grant has ended. A pull that comes later would return the bytes of another request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, NamedTuple

from llm_datadist import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from llm_datadist.replay.node import Node
    from llm_datadist.replay.prefill import Prefill
    from llm_datadist.replay.serve import Server

_BLOCK, _LATER_BLOCK = 0, 1
_SLOT = 0
_LONG_MS, _SHORT_MS = 30_000, 100


class LatePullError(Exception):
    """A pull under a grant that has expired was not refused. The text says what happened instead."""


class Refusal(NamedTuple):
    """A late pull that was refused: why the grant had ended, and the error of the pull."""

    ended: str
    code: str
    error: str


def check(node: Node, prefill: Prefill, server: Server, note: Callable[[str], None]) -> Refusal:
    """Pull a block in time and too late. Overwrites a device slot. Raises WrongByteError, LatePullError."""
    slot, token, _ = prefill.grant(_BLOCK, _LONG_MS)
    node.pull_granted(slot, _SLOT, token)
    server.verify(server.outcome.requests, _BLOCK, _SLOT, "granted")
    note(f"grant: prefill grants a block for {_LONG_MS // 1000} s, decode pulls it: every byte is right")
    slot, token, ended = prefill.grant(_BLOCK, _SHORT_MS, _LATER_BLOCK)
    note(f"grant: prefill grants it for {_SHORT_MS} ms, then reuses it; decode pulls it too late")
    if ended is None:
        raise LatePullError(f"the grant of {_SHORT_MS} ms did not end")
    try:
        node.pull_granted(slot, _SLOT, token)
    except LLMException as error:
        if error.status_code != LLMStatusCode.LLM_GRANT_ENDED:
            raise
        note(f"grant: refused: {error.status_code.name}: {error}")
        return Refusal(ended, error.status_code.name, str(error))
    raise LatePullError("a pull under a grant that had expired was not refused")
