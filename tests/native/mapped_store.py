"""A client of a keeper that compares what it reads with a naive map, and may be killed at any moment.

`test_keeper_kills.py` runs it. The map is in a file, so the next client continues where a killed one has stopped. For
each of its keys, the map has the set of values that the keeper may have: before a call, all that the call may leave;
after it, what its result has proved.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Callable, NamedTuple

from llm_datadist import PeerLost, Store

ABSENT = 1 << 7
VERSIONS = 7
"""How many values a key may have. Each has random bytes, so that a mixture of two is noticed."""
COUNTS = ("hits", "misses", "stored", "dropped", "leased", "leases held", "away")
TTL = 10.0
"""Seconds of a lease."""
NAMESPACE = "killed clients"


class Setting(NamedTuple):
    """What all clients of a keeper share."""

    socket: Path
    folder: Path
    keys: int
    """Keys of each client, which no other one puts or drops."""
    value: int
    """Bytes of a value."""
    fits: bool
    """Whether the keeper has room for all values, so that none is replaced."""


class WrongError(Exception):
    """The keeper has broken a promise."""


def key(client: int, number: int) -> bytes:
    return hashlib.sha224(b"%d %d" % (client, number)).digest()


@lru_cache(maxsize=32)
def value(size: int, client: int, number: int, version: int) -> bytes:
    return random.Random(f"{client} {number} {version}").randbytes(size)  # noqa: S311


def numbers_in(path: Path, count: int) -> memoryview:
    """Map a file of numbers of 8 bytes, which others see at once, and which stay if this process is killed."""
    if not path.exists():
        path.write_bytes(bytes(8 * count))
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")


class Losses:
    """How often the keeper has lost its values. The number is odd while it does."""

    def __init__(self, folder: Path) -> None:
        self._number = numbers_in(folder / "losses", 1)

    def get(self) -> int:
        return int(self._number[0])

    def add(self) -> None:
        self._number[0] += 1


class Map:
    """The map of a client, and what its calls have moved."""

    def __init__(self, setting: Setting, client: int) -> None:
        self._rows = numbers_in(setting.folder / f"map {client}", setting.keys)
        self._counts = numbers_in(setting.folder / f"counts {client}", len(COUNTS))

    def row(self, number: int) -> tuple[int, int]:
        """Return the possible values of a key as bits, and how many losses there were when they were proved."""
        return (self._rows[number] & 0xFF) or ABSENT, self._rows[number] >> 8

    def write(self, number: int, possible: int, losses: int) -> None:
        self._rows[number] = possible | losses << 8

    def count(self, name: str, more: int) -> None:
        self._counts[COUNTS.index(name)] += more

    def counts(self) -> dict[str, int]:
        return dict(zip(COUNTS, self._counts))


class MappedStore:
    """A store whose results are compared with the map of one client."""

    def __init__(self, setting: Setting, client: int, seed: int) -> None:
        self.setting, self.client, self.dice = setting, client, random.Random(seed)  # noqa: S311
        self.map, self.losses = Map(setting, client), Losses(setting.folder)
        self.store = Store(setting.socket, namespace=NAMESPACE, value=setting.value, timeout=60.0)

    def some(self, most: int) -> list[int]:
        return self.dice.sample(range(self.setting.keys), self.dice.randint(1, min(most, self.setting.keys)))

    def keys(self, numbers: list[int]) -> list[bytes]:
        return [key(self.client, number) for number in numbers]

    def call(self, numbers: list[int], left: Callable[[int, int], int], calls: Callable[[], list[int | None]]) -> None:
        """Make a call, and write to the map what it may leave, and then what it has proved.

        Args:
            numbers: the keys.
            left: the possible values after the call, given the index of a key and those before.
            calls: makes the call, and returns the possible values that it has proved; `None` for nothing.
        """
        losses = self.losses.get()
        for index, number in enumerate(numbers):
            possible, proved = self.map.row(number)
            if not self.setting.fits or proved < losses or losses % 2:
                possible |= ABSENT
            self.map.write(number, possible | left(index, possible), min(proved, losses))
        found = calls()
        # Values that are lost during the call, or right after its answer, are not proved to be there.
        lasting = losses % 2 == 0 and self.losses.get() == losses
        for number, possible in zip(numbers, found):
            if possible is not None:
                self.map.write(number, possible if lasting else possible | self.map.row(number)[0], losses)

    def put(self) -> None:
        numbers = self.some(8)
        versions = [self.dice.randrange(VERSIONS) for _ in numbers]
        values = [value(self.setting.value, self.client, *pair) for pair in zip(numbers, versions)]

        def left(index: int, possible: int) -> int:
            return 1 << versions[index] if possible & ABSENT else 0

        def calls() -> list[int | None]:
            stored = self.store.put(self.keys(numbers), values)
            self.map.count("stored", sum(stored))
            self.map.count("away", len(stored) - sum(stored))
            if not any(stored):
                time.sleep(0.01)  # the keeper starts again, and needs the processor
            rows = [self.map.row(number)[0] for number in numbers]
            return [row & ~ABSENT if known else None for row, known in zip(rows, stored)]

        self.call(numbers, left, calls)

    def drop(self) -> None:
        numbers = self.some(3)

        def calls() -> list[int | None]:
            try:
                dropped = self.store.drop(self.keys(numbers))
            except PeerLost:
                return [None for _ in numbers]
            self.map.count("dropped", dropped)
            return [ABSENT for _ in numbers]

        self.call(numbers, lambda _index, _possible: ABSENT, calls)

    def get(self, numbers: list[int]) -> list[bool]:
        """Read values and compare them with the map."""
        buffers = [bytearray(self.setting.value) for _ in numbers]
        hits: list[bool] = []

        def calls() -> list[int | None]:
            losses, before = self.losses.get(), self.store.stats(keeper=False)
            hits.extend(self.store.get(self.keys(numbers), buffers))
            missed = len(hits) - sum(hits)
            absent = self.store.stats(keeper=False)["misses_absent"] - before["misses_absent"]
            self.map.count("hits", sum(hits))
            self.map.count("misses", missed)
            certain = losses % 2 == 0 and self.losses.get() == losses
            found: list[int | None] = []
            for number, hit, buffer in zip(numbers, hits, buffers):
                possible = self.map.row(number)[0]
                if hit:
                    found.append(self.version(number, possible, bytes(buffer)))
                elif absent != missed:
                    found.append(None)  # the keeper was away, or a value was replaced while it was read
                elif possible & ABSENT or not certain:
                    found.append(ABSENT)
                else:
                    raise self.wrong(f"key {number} was confirmed ({possible:08b}), and is lost", buffer)
            return found

        self.call(numbers, lambda _index, _possible: 0, calls)
        return hits

    def version(self, number: int, possible: int, found: bytes) -> int:
        """Return the bit of the value that was read."""
        for version in range(VERSIONS):
            if found == value(self.setting.value, self.client, number, version):
                if possible & 1 << version:
                    return 1 << version
                raise self.wrong(f"key {number} has version {version}, not one of {possible:08b}", found)
        raise self.wrong(f"key {number} has wrong bytes", found)

    def get_from_others(self, clients: int) -> None:
        """Read values of other clients. Each is complete, and one of its key."""
        client, number = self.dice.randrange(clients), self.dice.randrange(self.setting.keys)
        buffer = bytearray(self.setting.value)
        if self.store.get([key(client, number)], [buffer]) == [True]:
            self.map.count("hits", 1)
            versions = (value(self.setting.value, client, number, version) for version in range(VERSIONS))
            if not any(bytes(buffer) == one for one in versions):
                raise self.wrong(f"key {number} of client {client} has wrong bytes", buffer)

    def lease(self) -> None:
        """Leased values stay while other values are put, unless the keeper has crashed."""
        numbers, begin = self.some(4), time.monotonic()
        attached = self.store.stats(keeper=False)["attached"]
        leased = [number for number, ok in zip(numbers, self.store.lease(self.keys(numbers), ttl=TTL)) if ok]
        self.map.count("leased", len(leased))
        self.put()
        found = self.store.exists(self.keys(leased))
        answered = self.store.stats()["keeper"] is not None
        same = answered and self.store.stats(keeper=False)["attached"] == attached
        if not same or time.monotonic() - begin >= TTL:
            return
        if not all(found):
            raise self.wrong(f"keys {leased} were leased for {TTL} s, and are replaced: {found}", b"")
        self.map.count("leases held", len(found))

    def unlease(self) -> None:
        self.store.unlease(self.keys(self.some(8)))

    def wrong(self, text: str, found: bytes | bytearray) -> WrongError:
        (self.setting.folder / f"found {self.client}").write_bytes(found)
        return WrongError(f"client {self.client}: {text}; {self.store.stats()}")

    def run_round(self, clients: int) -> None:
        """Make a random call."""
        ways = (self.put, self.put, lambda: self.get(self.some(8)), lambda: self.get(self.some(8)), self.drop)
        others = (lambda: self.get_from_others(clients), self.lease, self.unlease)
        self.dice.choice((*ways, *others))()

    def read_all(self) -> None:
        """Compare all values with the map."""
        for number in range(self.setting.keys):
            self.get([number])


def main() -> None:
    socket, folder, keys, size, fits, client, clients, seed = sys.argv[1:]
    setting = Setting(Path(socket), Path(folder), int(keys), int(size), fits == "True")
    mapped = MappedStore(setting, int(client), int(seed))
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    mapped.read_all()
    while True:
        mapped.run_round(int(clients))


if __name__ == "__main__":
    main()
