"""Call streams with rings when a process forks or has no free descriptor.

Not for: which calls use rings (`links/rings.rs` and `links/paths.rs` of the core), peers that are killed
(`test_killed_ring_peers.py`), peers that break the protocol (`test_hostile_rings.py`).
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from hostile import messages as m
from hostile.trial import SLACK, Trial
from peers import Ends, Peer, by_slot, equal, eventually, linked, options, pattern

ROW = (1, 5000, 2)
NO_DESCRIPTOR = "no file descriptor is free for the ring memory of a call stream"
TOO_LARGE = "the ring memory of a call stream is larger than a file of this process may be"


class Sides:
    """Clusters 1 and 2 in processes of their own; 1 has linked to 2. A push needs a call stream of its side."""

    def __init__(self, ends: Ends) -> None:
        self.dialing, self.accepting = (ends.peer(options(accessible=True), cluster) for cluster in (1, 2))
        linked(self.dialing, self.accepting)
        self.ids = [peer.allocate("cache", *ROW) for peer in (self.dialing, self.accepting)]
        self.seed = 0

    def push(self, *, back: bool = False) -> None:
        """Push new bytes to the other side, and check that they arrive."""
        self.seed += 1
        source, target = (self.accepting, self.dialing) if back else (self.dialing, self.accepting)
        cluster, cache = (1, self.ids[0]) if back else (2, self.ids[1])
        source.fill("cache", self.seed)
        source.push_cache(by_slot(cluster, cache), "cache")
        assert equal(target.read("cache"), pattern(self.seed, 2, *ROW[:2]))

    def rings(self) -> list[int]:
        return [peer.links()[0]["call_rings"] for peer in (self.dialing, self.accepting)]

    def refusals(self) -> list[str | None]:
        return [peer.links()[0]["call_rings_refusal"] for peer in (self.dialing, self.accepting)]


def test_forked_child_leaves_the_streams_of_its_parent_alone(ends: Ends) -> None:
    sides = Sides(ends)
    sides.push()
    sides.push(back=True)
    assert sides.rings() == [2, 2]
    for parent, cluster, cache in ((sides.dialing, 2, sides.ids[1]), (sides.accepting, 1, sides.ids[0])):
        before = [peer.sockets() for peer in (sides.dialing, sides.accepting)]
        status, text = parent.fork_and_try("push_cache", by_slot(cluster, cache), "cache")
        assert (status, "forked" in text) == (7, True), text
        sides.push()
        sides.push(back=True)
        assert [peer.sockets() for peer in (sides.dialing, sides.accepting)] == before, "a stream was replaced"
        assert sides.rings() == [2, 2]


@pytest.mark.parametrize("end", ["finalize", "kill"])
def test_forked_child_does_not_keep_streams_open(end: str) -> None:
    """The child lives on after its parent has closed the streams, or has been killed."""
    with Trial(honest=(), llm__LinkSilence=600_000) as trial:
        link = trial.link(local=True)
        rings = [link.ringed_call() for _ in range(2)]
        child = trial.victim.linger(True)
        try:
            for ring in rings:
                assert ring.ask(m.ping())["is"] == "Done"
            getattr(trial.victim, end)()
            for ring in rings:
                assert ring.wire.ended(SLACK), "the child keeps the stream open"
            os.kill(child, 0)  # the child is still there
        finally:
            os.kill(child, signal.SIGKILL)


# A limit of one process, and the reasons that the dialing and the accepting side show.
SHORTAGES = [
    ("dialing", "limit_descriptors", 1, "errno=24", None),  # the ring would take the descriptor of the stream
    ("dialing", "limit_descriptors", 2, "errno=24", None),  # the ring of the peer cannot be received
    ("dialing", "limit_files", 64 << 10, TOO_LARGE, None),
    # The ring of the peer cannot be received. The end of the stream shows in one of two ways.
    ("accepting", "limit_descriptors", 1, "the peer closed|the connection broke", None),
    ("accepting", "limit_descriptors", 2, NO_DESCRIPTOR, NO_DESCRIPTOR),
    ("accepting", "limit_files", 64 << 10, TOO_LARGE, TOO_LARGE),
]


def stable_stats(peer: Peer) -> object:
    """Wait until the sockets of a process have not changed for a while, and return them."""
    before = peer.sockets()
    while True:
        time.sleep(0.1)
        now = peer.sockets()
        if now == before:
            return now
        before = now


def test_calls_do_without_rings_while_resources_are_short(ends: Ends) -> None:
    sides = Sides(ends)
    # After a failure, no other test may get processes with these limits.
    sides.dialing.spoiled = sides.accepting.spoiled = True
    for name, limit, value, *reasons in SHORTAGES:
        # Only the other side can still list its sockets.
        limited, other = (sides.dialing, sides.accepting) if name == "dialing" else (sides.accepting, sides.dialing)
        stable_stats(limited)
        getattr(limited, limit)(value)
        sides.push()
        # A stream that was opened and lost is closed by another thread.
        eventually(lambda: sides.rings() == [0, 0], what="the end of the stream that got no rings")
        before = stable_stats(other)
        for _ in range(3):
            sides.push()
        assert other.sockets() == before, f"{name}, {limit}({value}): each call opens a stream"
        assert sides.rings() == [0, 0], f"{name}, {limit}({value})"
        for shown, expected in zip(sides.refusals(), reasons):
            matches = shown is None if expected is None else re.search(expected, shown or "") is not None
            assert matches, f"{name}, {limit}({value}): {shown}"
        getattr(limited, limit)(None)
        if (name, limit, value) == SHORTAGES[-1][:3]:
            break
        sides.dialing.unlink_clusters([sides.accepting.at])
        linked(sides.dialing, sides.accepting)

    def rings_again() -> bool:
        time.sleep(0.2)
        sides.push()
        return sides.rings() == [1, 1]

    eventually(rings_again, what="another attempt, after 30 s")
    assert sides.refusals() == [None, None]
