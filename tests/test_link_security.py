"""Tokens on either side of a link.

Not for: strangers at a listener (`test_hostile_peers.py`), members of a communicator (`links/communicators.rs`).
"""

from __future__ import annotations

import pytest

from llm_datadist import LLMException, LLMStatusCode
from peers import LINK_FAILED, OK, Ends, Peer, check_pull, options

TOKEN = "a shared token of some length"  # noqa: S105
OTHER = "another token of some length."


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (None, None, OK),
        (TOKEN, TOKEN, OK),
        (TOKEN, OTHER, LINK_FAILED),
        (TOKEN, TOKEN[:-1], LINK_FAILED),
        (TOKEN, None, LINK_FAILED),
        (None, TOKEN, LINK_FAILED),
    ],
)
def test_both_sides_prove_the_token(
    ends: Ends, transport: str, theirs: str | None, ours: str | None, expected: str
) -> None:
    way = {"llm__LinkTransport": transport}
    tokens = [{} if token is None else {"llm__LinkToken": token} for token in (theirs, ours)]
    remote, local = ends.peer(options(**way, **tokens[0])), ends.local(options(**way, **tokens[1]))
    assert local.link_clusters([remote.at]) == (expected, [expected])
    if expected == OK:
        check_pull(local, remote)
    else:
        assert local.links() == remote.links() == []


def test_a_short_token_is_refused_and_no_token_is_ever_shown(ends: Ends) -> None:
    for text in ("", "short"):
        with pytest.raises(LLMException) as caught:
            ends.local(options(llm__LinkToken=text))
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    talker = ends.adopt(Peer(environment={"ASCEND_GLOBAL_LOG_LEVEL": "0"}))
    talker.open(options(llm__LinkToken=TOKEN), cluster=3)
    remote = ends.peer(options(llm__LinkToken=OTHER))
    assert talker.link_clusters([remote.at])[1] == [LINK_FAILED]
    assert talker.said(), "it logs"
    assert TOKEN not in talker.said() + str(talker.stats())
