"""Tokens on either side of a link, and a listener under garbage, incomplete frames, silence and floods.

Raw sockets play unauthenticated clients; a real peer must link and pull meanwhile. Not for: the frames themselves
(`crates/core/tests/integration/protocol.rs`).
"""

from __future__ import annotations

import random
import socket
import time
from contextlib import ExitStack, suppress

import pytest

from hostile.client import frame, header
from llm_datadist import LLMException, LLMStatusCode
from peers import (
    LINK_FAILED,
    OK,
    THOROUGH,
    End,
    Ends,
    Peer,
    check_pull,
    eventually,
    free_ports,
    linked,
    meanwhile,
    one_server,
    options,
    split,
)

TOKEN = "a shared token of some length"  # noqa: S105
OTHER = "another token of some length."


def dial(peer: Peer) -> socket.socket:
    made = socket.create_connection(split(peer.address), timeout=5)
    made.settimeout(5)
    return made


def works(near: End, far: Peer, seed: int = 1) -> None:
    linked(near, far)
    check_pull(near, far, seed=seed)
    assert near.unlink_clusters([far.at]) == (OK, [OK])


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
    def given(token: str | None) -> dict[str, str]:
        extra = {} if token is None else {"llm__LinkToken": token}
        return options(llm__LinkTransport=transport, **extra)

    far, near = ends.peer(given(theirs)), ends.near(given(ours))
    assert near.link_clusters([far.at]) == (expected, [expected])
    if expected == OK:
        check_pull(near, far)
    else:
        assert near.links() == far.links() == []


def test_a_short_token_is_refused_and_no_token_is_ever_shown(ends: Ends) -> None:
    for text in ("", "short"):
        with pytest.raises(LLMException) as caught:
            ends.near(options(llm__LinkToken=text))
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    talker = ends.adopt(Peer(environment={"ASCEND_GLOBAL_LOG_LEVEL": "0"}))
    talker.open(options(llm__LinkToken=TOKEN), cluster=3)
    far = ends.peer(options(llm__LinkToken=OTHER))
    assert talker.link_clusters([far.at])[1] == [LINK_FAILED]
    assert talker.said(), "it logs"
    assert TOKEN not in talker.said() + str(talker.stats())


def test_a_rank_table_link_needs_the_token_too(ends: Ends) -> None:
    chosen = {"llm__RankPort": free_ports(), "llm__LinkTotalTime": 1}
    far = ends.peer(options(llm__LinkToken=OTHER, **chosen))
    near = ends.near(options(llm__LinkToken=TOKEN, **chosen))
    mine, theirs = (end.link("pair", {1: 0, 2: 1}, one_server()) for end in (near, far))
    assert near.settled(mine) == far.settled(theirs) == "FAILED"


NOISE = random.Random(1)  # noqa: S311
STRANGERS: dict[str, bytes] = {
    "silence": b"",
    "one byte": b"L",
    "garbage": NOISE.randbytes(64),
    "much garbage": NOISE.randbytes(1 << 20),
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a header": header(0)[:5],
    "half a frame": frame(b"x" * 100)[:50],
    "a frame of 4 GiB": header(2**32 - 1) + b"x" * 4000,
    "a frame just too long": frame(b"x" * 4097),
    "nonsense in a frame": frame(NOISE.randbytes(500)),
    "an empty frame": frame(b""),
    "a later version": frame(b"x" * 40, version=6),
    "a refusal": frame(b"\3\0\0\0no", kind=255),
    "another kind": frame(b"x", kind=77),
}


def test_strangers_are_borne_and_forgotten(ends: Ends) -> None:
    """While strangers of all kinds keep coming, links are made and an established one goes on."""
    settings = options(llm__LinkTransport="tcp")
    far, near, third = ends.peer(settings), ends.near(settings), ends.peer(settings, cluster=3)
    works(near, far)
    linked(third, far)
    check_pull(third, far)  # its streams are open now
    before = far.resources()
    chance = random.Random(1)  # noqa: S311
    came: list[socket.socket] = []

    def pester() -> None:
        with suppress(OSError):
            came.append(dial(far))
            words = list(STRANGERS.values())[len(came) % len(STRANGERS)]
            came[-1].sendall(words[: chance.choice([len(words), chance.randint(0, 2000)])])
        if len(came) > 100:
            chance.choice(came).close()
        time.sleep(0.0005)

    with ExitStack() as held:
        with meanwhile(pester, pester, pester):
            eventually(lambda: len(came) > 3 * len(STRANGERS), what="strangers")
            until = time.monotonic() + (10 if THOROUGH else 1.5)
            for seed in range(1000):
                works(near, far, seed)
                check_pull(third, far, seed=seed)
                if seed > 3 and time.monotonic() > until:
                    break
        for each in came:
            held.enter_context(each)

    def forgotten() -> bool:
        now = far.resources()
        return all(now[name] <= before[name] for name in ("threads", "descriptors"))

    eventually(forgotten, what="the end of the strangers' threads and descriptors")
    assert far.resources()["resident"] < before["resident"] + (16 << 20)
    works(near, far, 3)
    assert [link["cluster"] for link in far.links()] == [3]
