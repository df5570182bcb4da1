"""Random calls on three engines of the module `hixl`, compared with a model: codes, connections, regions and bytes."""

from __future__ import annotations

import random

import pytest

import hixl
from conftest import THOROUGH
from hixl_ends import LIMIT, End, ends, listener, pattern

SIZE = 4096
ENGINES = 3


class Model:
    """What three engines have: memory, registered ranges by handle, and the connections that each has made."""

    def __init__(self) -> None:
        self.memory = [bytearray(pattern(seed, SIZE)) for seed in range(ENGINES)]
        self.regions: list[dict[int, tuple[int, int]]] = [{} for _ in range(ENGINES)]
        self.connected: set[tuple[int, int]] = set()

    def registered(self, engine: int, start: int, size: int) -> bool:
        return any(at <= start and start + size <= at + length for at, length in self.regions[engine].values())

    def register(self, engine: int, start: int, size: int) -> int | None:
        """Return the code of a registration; `None` if it makes a new region."""
        ranges = self.regions[engine].values()
        if (start, size) in ranges:
            return hixl.SUCCESS
        overlaps = any(start < at + length and at < start + size for at, length in ranges)
        return hixl.PARAM_INVALID if overlaps else None

    def move(self, here: int, there: int, op: int, ops: list[tuple[int, int, int]]) -> int:
        if (here, there) not in self.connected:
            return hixl.NOT_CONNECTED
        for local, remote, size in ops:
            if not (self.registered(here, local, size) and self.registered(there, remote, size)):
                return hixl.PARAM_INVALID
        for local, remote, size in ops:
            if op == 0:
                self.memory[here][local : local + size] = self.memory[there][remote : remote + size]
            else:
                self.memory[there][remote : remote + size] = self.memory[here][local : local + size]
        return hixl.SUCCESS


@pytest.mark.usefixtures("hixl_way")
@pytest.mark.parametrize("seed", range(40 if THOROUGH else 6))
def test_random_calls(seed: int) -> None:
    draw, model = random.Random(seed), Model()  # noqa: S311
    addresses = [listener() for _ in range(ENGINES)]
    with ends(*[End] * ENGINES) as engines:
        bases = [end.add("m", SIZE, number) for number, end in enumerate(engines)]
        for end, address in zip(engines, addresses):
            assert end.initialize(address) == hixl.SUCCESS
        for _ in range(300):
            here, there = draw.sample(range(ENGINES), 2)
            end, address, pair = engines[here], addresses[there], (here, there)
            call = draw.choice(["connect", "disconnect", "register", "deregister", "move", "move", "move"])
            if call == "connect":
                expected = hixl.ALREADY_CONNECTED if pair in model.connected else hixl.SUCCESS
                assert end.call("connect", address, LIMIT) == expected
                model.connected.add(pair)
            elif call == "disconnect":
                expected = hixl.SUCCESS if pair in model.connected else hixl.NOT_CONNECTED
                assert end.call("disconnect", address, LIMIT) == expected
                model.connected.discard(pair)
            elif call == "register":
                start, size = 512 * draw.randrange(8), draw.choice([1, 511, 512, 1024])
                size = min(size, SIZE - start)
                expected = model.register(here, start, size)
                status, handle = end.register_range(bases[here] + start, size)
                assert status == (hixl.SUCCESS if expected is None else expected)
                known = [one for one, found in model.regions[here].items() if found == (start, size)]
                assert (handle in known) == (expected == hixl.SUCCESS)
                if expected is None:
                    model.regions[here][handle] = (start, size)
            elif call == "deregister":
                handle = draw.choice([*model.regions[here], 10**6])
                assert end.call("deregister_mem", handle) == hixl.SUCCESS
                model.regions[here].pop(handle, None)
            else:
                op, count = draw.randrange(2), draw.choice([1, 1, 2, 5])
                # Destinations do not overlap, nor do they overlap sources within one engine's memory.
                slots = draw.sample(range(32), 2 * count)
                size = draw.choice([1, 50, 128])
                ops = [(128 * slots[2 * k], 128 * slots[2 * k + 1], size) for k in range(count)]
                expected = model.move(here, there, op, ops)
                real = [(bases[here] + local, bases[there] + remote, size) for local, remote, size in ops]
                assert end.move(address, op, real) == expected
            assert [end.bytes("m") for end in engines] == model.memory
