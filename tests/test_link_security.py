"""Tokens on either side of a link, and a listener under garbage, incomplete frames, silence and floods.

Raw sockets play unauthenticated clients; a real peer must link and pull meanwhile. Not for: the frames themselves
(`crates/core/tests/integration/wire.rs`).
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from llm_datadist import LLMException, LLMStatusCode
from peers import (
    LINK_FAILED,
    OK,
    THOROUGH,
    End,
    Ends,
    Peer,
    by_blocks,
    equal,
    eventually,
    free_ports,
    linked,
    options,
    pattern,
    split,
)

TOKEN = "a shared token of some length"  # noqa: S105
OTHER = "another token of some length."
MARK = b"LD"


def dial(peer: Peer | str) -> socket.socket:
    made = socket.create_connection(split(peer if isinstance(peer, str) else peer.address), timeout=5)
    made.settimeout(5)
    return made


def works(near: End, far: Peer, seed: int = 1) -> None:
    assert near.link_clusters([far.at]) == (OK, [OK])
    uses(near, far, seed)
    assert near.unlink_clusters([far.at]) == (OK, [OK])


def uses(near: End, far: Peer, seed: int = 1) -> None:
    far.allocate("f", 4, 5000, 2, blocks=True, keys=[by_blocks(0)], seed=seed)
    near.allocate("n", 4, 5000, 2, blocks=True)
    near.pull_blocks(by_blocks(far.cluster), "n", range(4), range(4))
    assert equal(near.read("n"), pattern(seed, 2, 4, 5000))
    far.deallocate("f")
    near.deallocate("n")


@pytest.mark.parametrize("transport", ["auto", "tcp"])
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
        uses(near, far)
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
    assert TOKEN not in str(talker.stats())
    assert talker.said(), "it logs"
    assert TOKEN not in talker.said()


def test_a_rank_table_link_needs_the_token_too(ends: Ends) -> None:
    devices = [{"device_id": str(number), "rank_id": str(number)} for number in range(2)]
    table = json.dumps({"server_count": "1", "server_list": [{"server_id": "127.0.0.1", "device": devices}]})
    chosen = {"llm__RankPort": free_ports(), "llm__LinkTotalTime": 1}
    far = ends.peer(options(llm__LinkToken=OTHER, **chosen))
    near = ends.near(options(llm__LinkToken=TOKEN, **chosen))
    comms = near.link("pair", {1: 0, 2: 1}, table), far.link("pair", {1: 0, 2: 1}, table)
    assert near.settled(comms[0]) == far.settled(comms[1]) == "FAILED"


def frame(body: bytes, version: int = 5, kind: int = 1, length: int | None = None) -> bytes:
    """A frame; `length` may lie."""
    return MARK + bytes([version, kind]) + struct.pack("<I", len(body) if length is None else length) + body


NOISE = random.Random(1)  # noqa: S311
STRANGERS: dict[str, bytes] = {
    "silence": b"",
    "one byte": b"L",
    "garbage": NOISE.randbytes(64),
    "much garbage": NOISE.randbytes(1 << 20),
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "half a header": frame(b"")[:5],
    "half a frame": frame(b"x" * 100)[:50],
    "a frame of 4 GiB": frame(b"x" * 4000, length=2**32 - 1),
    "a frame just too long": frame(b"x" * 4097),
    "nonsense in a frame": frame(NOISE.randbytes(500)),
    "an empty frame": frame(b""),
    "a later version": frame(b"x" * 40, version=6),
    "a refusal": frame(struct.pack("<I", 3) + b"no", kind=255),
    "another kind": frame(b"x", kind=77),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_borne_and_forgotten(ends: Ends, name: str) -> None:
    far, near = ends.peer(), ends.near()
    works(near, far)
    before = far.resources()
    with ExitStack() as held:
        for _ in range(10):
            stranger = held.enter_context(dial(far))
            with suppress(ConnectionResetError, BrokenPipeError):
                stranger.sendall(STRANGERS[name])
        works(near, far, 2)
    after = eventually(
        lambda: (
            (now := far.resources())["threads"] <= before["threads"]
            and now["descriptors"] <= before["descriptors"]
            and now
        ),
        what="the end of the strangers' threads and descriptors",
    )
    assert after["resident"] < before["resident"] + (8 << 20)
    works(near, far, 3)
    assert far.links() == []


def test_another_version_of_the_wire_is_told_so(ends: Ends) -> None:
    far = ends.peer()
    for version in (0, 1, 2, 3, 4, 6, 255):
        with dial(far) as stranger:
            stranger.sendall(frame(b"from the future", version=version))
            told = b""
            with suppress(ConnectionResetError):
                while more := stranger.recv(4096):
                    told += more
        assert told[:2] == MARK
        assert told[3] == 255, "a refusal, which every version can read"
        (length,) = struct.unpack("<I", told[4:8])
        assert len(told) == 8 + length
        assert "version" in told[12:].decode()


def test_a_flood_of_silent_connections_keeps_nobody_out(ends: Ends) -> None:
    count = 3000 if THOROUGH else 500
    far, near = ends.peer(), ends.near()
    works(near, far)
    linked(near, far)
    before = far.resources()
    with ExitStack() as held:
        for _ in range(count):
            held.enter_context(dial(far))
        uses(near, far)
        assert near.unlink_clusters([far.at])[0] == OK
        works(near, far)
        crowd = far.resources()
        assert crowd["resident"] < before["resident"] + (64 << 20)
        assert crowd["threads"] < before["threads"] + 400
    eventually(lambda: far.resources()["descriptors"] <= before["descriptors"])
    eventually(lambda: far.resources()["threads"] <= before["threads"])
    works(near, far)


def test_links_while_strangers_keep_coming(ends: Ends) -> None:
    far, near = ends.peer(), ends.near()
    stop = threading.Event()
    came = [0]

    def pester(seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311
        held: list[socket.socket] = []
        while not stop.is_set():
            with suppress(OSError):
                held.append(dial(far))
                held[-1].sendall(chance.choice(list(STRANGERS.values()))[: chance.randint(0, 2000)])
                came[0] += 1
            time.sleep(0.0005)
            if len(held) > 40:
                held.pop(chance.randrange(len(held))).close()
        for each in held:
            each.close()

    crew = [threading.Thread(target=pester, args=(seed,)) for seed in range(3)]
    for thread in crew:
        thread.start()
    try:
        until = time.monotonic() + (10 if THOROUGH else 1.5)
        rounds = 0
        while time.monotonic() < until:
            works(near, far, rounds)
            rounds += 1
    finally:
        stop.set()
        for thread in crew:
            thread.join(20)
    assert rounds > 3
    assert came[0] > 20
    works(near, far)


def test_an_established_link_survives_strangers_on_its_port(ends: Ends) -> None:
    far, near = ends.peer(options(llm__LinkTransport="tcp")), ends.near(options(llm__LinkTransport="tcp"))
    linked(near, far)
    for words in STRANGERS.values():
        with dial(far) as stranger:
            with suppress(OSError):
                stranger.sendall(words)
            uses(near, far)
    assert len(near.links()) == len(far.links()) == 1
