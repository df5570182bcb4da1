"""Descriptors of a process with an engine: calls while none is free, and the standard streams.

Not for: rings without a free descriptor (`test_rings.py`), or descriptors that peers cost (`test_hostile_peers.py`).
"""

from __future__ import annotations

import pytest

from peers import OK, Ends, Peer, by_blocks, equal, eventually, linked, options, outcome, pattern

SHORT = "LLM_FAILED"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_calls_without_free_descriptors_fail_and_the_link_stands(ends: Ends, transport: str) -> None:
    local, remote = (ends.peer(options(accessible=True, llm__LinkTransport=transport), cluster) for cluster in (1, 2))
    local.spoiled = True  # no other test may get a process with this limit
    linked(local, remote)
    local.allocate("local", 4, 5000, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    remote.allocate("remote", 4, 5000, 2, blocks=True, keys=[by_blocks(0)], seed=2)
    remote.polled()
    assert local.downs() == []
    calls = [
        lambda: local.pull_blocks(by_blocks(2), "local", [0], [0]),
        lambda: local.push_blocks(by_blocks(2), "local", [1], [1]),
    ]
    local.limit_descriptors(0)
    for call in calls:
        name, text = outcome(call)
        assert name == SHORT, text
        for part in ("no file descriptor is free", "ulimit -n", "RLIMIT_NOFILE", "limit_open_files=", "errno=24"):
            assert part in text, text
    # The first message is accepted and waits. Once the engine knows why it cannot be sent, it accepts no more.
    local.notify(2, b"first")
    name, text = eventually(lambda: [said for said in [outcome(lambda: local.notify(2, b"more"))] if said[0] != OK])[0]
    assert (name, "limit_open_files=" in text, "errno=24" in text) == ("failed", True, True), text
    assert local.downs() == [], "the link stands"
    local.limit_descriptors(None)
    local.pull_blocks(by_blocks(2), "local", [0], [0])
    expected = pattern(1, 2, 4, 5000)
    for tensor, theirs in zip(expected, pattern(2, 2, 4, 5000)):
        tensor[0] = theirs[0]
    assert equal(local.read("local"), expected)
    eventually(lambda: outcome(lambda: local.notify(2, b"last"))[0] == OK)
    received: list[bytes] = []
    eventually(lambda: received.extend(said for _, said in remote.polled()) or received[-1:] == [b"last"])
    assert received[0] == b"first"
    assert set(received[1:-1]) <= {b"more"}
    assert local.downs() == remote.downs() == []


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_engines_keep_the_numbers_of_the_standard_streams_free(ends: Ends, transport: str) -> None:
    """A program that starts without standard streams may open them later, also over what uses their numbers."""
    chosen = options(accessible=True, llm__LinkTransport=transport)
    local, remote = (ends.adopt(Peer()) for _ in (1, 2))
    for cluster, peer in ((1, local), (2, remote)):
        peer.spoiled = True
        peer.close_standard_streams()
        peer.open(chosen, cluster)
    linked(local, remote)
    local.allocate("local", 4, 5000, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    remote.register("remote", 4, 5000, 2, blocks=True, keys=[by_blocks(0)], seed=2)

    def moves() -> None:
        local.pull_blocks(by_blocks(2), "local", [0], [0])
        local.push_blocks(by_blocks(2), "local", [1], [1])
        remote.pull_blocks(by_blocks(1), "remote", [2], [2])
        local.notify(2, b"moved")
        eventually(lambda: remote.polled() == [(1, b"moved")])

    remote.polled()
    moves()
    assert local.standard_streams() == remote.standard_streams() == []
    local.open_standard_streams()
    remote.open_standard_streams()
    moves()
