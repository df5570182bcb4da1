"""Makes random calls between two processes, and writes a line for each: `python -m differential.player`.

After every `EPISODE` calls, both engines are opened anew, with other options. The last call of an episode over TCP is a
pull whose connections are cut somewhere. How many rows arrive before depends on time, so the player itself checks that
they have the bytes of the source.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from typing import Any, TextIO

from peers import OK, End, Ends, Peer, Proxy, by_blocks, linked, options, pattern
from peers.values import Refused

from .calls import LOCAL, REMOTE, Call, Calls

EPISODE = 400
UNLINKED_FOR = 3  # calls between the end of a link and the next one
POOL = 8 << 20
CUT_ROWS, CUT_BYTES = 64, 32 << 10  # of the cache of the pull that is cut, in each of two tensors


def settings(chance: random.Random, *, accessible: bool) -> dict[str, str]:
    """Draw the options of both engines."""
    more: dict[str, Any] = {"llm__LinkTransport": chance.choice(["auto", "tcp"])}
    if chance.random() < 0.3:
        more["llm__Verify"] = chance.choice(["full", "sample"])
    return options(accessible=accessible, pool=POOL, **more)


class Episode:
    """Two engines, and calls of them."""

    def __init__(self, ends: Ends, chance: random.Random) -> None:
        accessible = chance.random() < 0.8
        given = settings(chance, accessible=accessible)
        self.tcp = given["llm.LinkTransport"] == "tcp"
        self.chance, self.calls = chance, Calls(chance, accessible=accessible)
        self.remote: Peer = ends.peer(given, REMOTE)
        self.local: End = ends.local({"llm.listenIpInfo": "127.0.0.1:0", **given})
        linked(self.local, self.remote)
        self.unlinked = 0

    def step(self) -> dict[str, Any]:
        """Make one call."""
        if self.unlinked:
            self.unlinked -= 1
            if not self.unlinked:
                linked(self.local, self.remote)
        elif self.chance.random() < 0.004:
            self.local.unlink_clusters([self.remote.at])
            self.unlinked = UNLINKED_FOR
        call = self.calls.next()
        engine = self.local if call.engine == LOCAL else self.remote
        told, text, arrived = self._made(engine, call)
        return {
            "call": [call.engine, call.method, shown(call.args), shown(call.kwargs)],
            "code": told,
            "text": text,
            "arrived": arrived,
            "sums": [self.local.sums(), self.remote.sums()],
        }

    def cut(self) -> dict[str, Any]:
        """Make a pull whose connections are cut."""
        shape = (CUT_ROWS, CUT_BYTES, 2)
        for end in (self.local, self.remote):
            end.finalize()
        given = options(pool=POOL, llm__LinkTransport="tcp")
        self.remote.open(given, REMOTE)
        self.local.init(given, LOCAL, "DECODER")
        self.remote.allocate("cut", *shape, blocks=True, keys=[by_blocks(REMOTE, 8)], seed=1)
        self.local.allocate("cut", *shape, blocks=True, seed=2)
        rows = self.chance.sample(range(CUT_ROWS), CUT_ROWS)
        with Proxy(self.remote.address) as wire:
            linked(self.local, _Behind(wire.at))
            wire.allow("down", self.chance.randrange(1000, 2 * CUT_ROWS * CUT_BYTES), cut=True)
            key = by_blocks(REMOTE, 8)
            told, _, arrived = self.local.recorded("pull_blocks", key, "$cut", list(range(CUT_ROWS)), rows)
        source = pattern(1, 2, CUT_ROWS, CUT_BYTES)
        into = self.local.read("cut")
        for tensor, ranges in arrived:
            right = dict(zip(rows, source[tensor]))
            for first, end in ranges:
                wrong = [row for row in range(first, end) if (into[tensor][row] != right[row]).any()]
                assert not wrong, f"tensor {tensor}: rows {wrong} have not arrived"
        assert told != OK, "nothing was cut"
        return {"call": ["cut"], "code": told, "text": "", "arrived": [], "sums": []}

    def _made(self, engine: Any, call: Call) -> tuple[str, str, list[Any]]:
        try:
            result = getattr(engine, call.method)(*call.args, **call.kwargs)
        except Refused as error:
            return error.code or error.kind, error.text, []
        except Exception as error:  # noqa: BLE001  (what a player cannot do is a result, too)
            status = getattr(error, "status_code", None)
            return getattr(status, "name", type(error).__name__), str(error), []
        if call.method == "recorded":
            return result[0], result[1], shown(result[2])
        self.calls.note(call, result)
        return "LLM_SUCCESS", "", []


class _Behind:
    """The remote engine, at the address of a proxy."""

    def __init__(self, address: str) -> None:
        self.at = (REMOTE, address)


def shown(value: Any) -> Any:
    """A value as JSON can have it."""
    return json.loads(json.dumps(value, default=repr))


def main() -> None:
    """Make the calls that the options name."""
    parser = argparse.ArgumentParser(prog="differential.player", description=__doc__)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--to", type=int, default=1, help="the descriptor to which the lines are written")
    given = parser.parse_args()
    out = os.fdopen(given.to, "w", encoding="utf-8")
    with out:
        play(given.calls, given.seed, out)


def play(calls: int, seed: int, out: TextIO) -> None:
    """Make calls, and write what came of each."""
    for first in range(0, calls, EPISODE):
        chance = random.Random(f"{seed} {first}")  # noqa: S311
        count = min(EPISODE, calls - first)
        with Ends() as ends:
            episode = Episode(ends, chance)
            for number in range(count):
                last = number == count - 1 and episode.tcp
                print(json.dumps(episode.cut() if last else episode.step()), file=out, flush=True)


if __name__ == "__main__":
    main()
