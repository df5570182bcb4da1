"""The class with the calls of Mooncake's transfer engine, between two processes.

The real package is not installed here. Its names and the order of its arguments (0.3.13) are listed below. That the
calls do what they say is compared with the bytes that numpy moves.
"""

from __future__ import annotations

import inspect
import multiprocessing
import random
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.integrations.transfer_engine import TransferEngine, TransferNotify, TransferOpcode
from llm_datadist.integrations.transfer_engine.regions import Region, Regions, pieces
from peers import LIMIT, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

SIZE = 1 << 20
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["llm_datadist", "numpy"])

MOONCAKE = {
    "initialize": ["local_hostname", "metadata_server", "protocol", "device_name"],
    "get_rpc_port": [],
    "register_memory": ["buffer_addr", "capacity", "location"],
    "unregister_memory": ["buffer_addr"],
    "batch_register_memory": ["buffer_addresses", "capacities", "location"],
    "batch_unregister_memory": ["buffer_addresses"],
    "transfer_sync_read": ["target_hostname", "buffer", "peer_buffer_address", "length"],
    "transfer_sync_write": ["target_hostname", "buffer", "peer_buffer_address", "length"],
    "batch_transfer_sync": ["target_hostname", "buffers", "peer_buffer_addresses", "lengths", "opcode", "notify"],
    "batch_transfer_sync_read": ["target_hostname", "buffers", "peer_buffer_addresses", "lengths"],
    "batch_transfer_sync_write": ["target_hostname", "buffers", "peer_buffer_addresses", "lengths"],
    "batch_transfer_async": ["target_hostname", "buffers", "peer_buffer_addresses", "lengths", "opcode"],
    "batch_transfer_async_read": ["target_hostname", "buffers", "peer_buffer_addresses", "lengths"],
    "batch_transfer_async_write": ["target_hostname", "buffers", "peer_buffer_addresses", "lengths"],
    "transfer_check_status": ["batch_id"],
    "get_batch_transfer_status": ["batch_ids"],
    "send_probe": ["peer_server_name"],
    "get_notifies": [],
}


def test_the_calls_are_those_of_mooncake() -> None:
    found = {name: list(inspect.signature(getattr(TransferEngine, name)).parameters)[1:] for name in MOONCAKE}
    assert found == MOONCAKE
    assert [code.name for code in TransferOpcode] == ["Read", "Write"]


def _run(pipe: Connection, protocol: str) -> None:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, "") == 0
    memory = np.zeros(SIZE, np.uint8)
    pipe.send((engine.get_session_id(), memory.ctypes.data))
    name = ""
    while name != "close":
        name, args = pipe.recv()
        if name == "bytes":
            pipe.send(memory.copy())
        elif name == "fill":
            memory[:] = args[0]
            pipe.send(None)
        else:
            pipe.send(getattr(engine, name)(*args))


class Far:
    """A transfer engine in another process, with memory of `SIZE` bytes."""

    def __init__(self, protocol: str) -> None:
        self._pipe, there = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_run, args=(there, protocol), daemon=True)
        self.process.start()
        there.close()
        self.session, self.address = self._heard()

    def __call__(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        return self._heard()

    def _heard(self) -> Any:
        assert self._pipe.poll(LIMIT), "the other process does not answer"
        return self._pipe.recv()


class Near:
    """The transfer engine of this process, with memory of `SIZE` bytes."""

    def __init__(self, protocol: str, **engine_options: Any) -> None:
        self.engine = TransferEngine(engine_options)
        assert self.engine.initialize("127.0.0.1:0", "P2PHANDSHAKE", protocol, "") == 0
        self.memory = np.random.default_rng(1).integers(1, 256, SIZE, np.uint8)
        self.address = self.memory.ctypes.data


@pytest.fixture(params=["", "tcp"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Near, Far]]:
    near, far = Near(request.param), Far(request.param)
    yield near, far
    near.engine.close()
    if far.process.is_alive():
        far("close")
    far.process.join(LIMIT)


def registered(ends: tuple[Near, Far], parts: int = 4) -> tuple[Near, Far]:
    """Register the memory of both sides in parts of equal length."""
    near, far = ends
    step = SIZE // parts
    starts = range(0, SIZE, step)
    assert near.engine.batch_register_memory([near.address + start for start in starts], [step] * parts) == 0
    assert far("batch_register_memory", [far.address + start for start in starts], [step] * parts) == 0
    return near, far


def drawn(seed: int, parts: int = 4) -> tuple[list[int], list[int], list[int]]:
    """Offsets on both sides and lengths of pieces. No two destination ranges meet, and none leaves its part."""
    rng = random.Random(seed)  # noqa: S311
    step = SIZE // parts
    mine, theirs = rng.sample(range(0, SIZE, 4096), 60), rng.sample(range(0, SIZE, 4096), 60)
    lengths = [rng.randint(1, min(4096, step)) for _ in mine]
    return mine, theirs, lengths


def moved(to: np.ndarray, at: list[int], source: np.ndarray, of: list[int], lengths: list[int]) -> np.ndarray:
    for target, start, length in zip(at, of, lengths):
        to[target : target + length] = source[start : start + length]
    return to


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranges_are_written_and_read(ends: tuple[Near, Far], asynchronous: bool) -> None:
    near, far = registered(ends)
    mine, theirs, lengths = drawn(1)
    here, there = [near.address + at for at in mine], [far.address + at for at in theirs]
    ranges = (far.session, here, there, lengths)
    engine = near.engine
    if asynchronous:
        batch = engine.batch_transfer_async_write(*ranges)
        assert batch > 0
        assert engine.get_batch_transfer_status([batch]) == 0
    else:
        assert engine.batch_transfer_sync_write(*ranges) == 0
    expected = moved(np.zeros(SIZE, np.uint8), theirs, near.memory, mine, lengths)
    assert np.array_equal(far("bytes"), expected)

    far("fill", 7)
    before = near.memory.copy()
    if asynchronous:
        batch = engine.batch_transfer_async_read(*ranges)
        eventually(lambda: engine.transfer_check_status(batch) == 1)
        assert engine.transfer_check_status(batch) == -1
    else:
        assert engine.batch_transfer_sync_read(*ranges) == 0
    assert np.array_equal(near.memory, moved(before, mine, np.full(SIZE, 7, np.uint8), theirs, lengths))


def test_one_range_and_a_notification(ends: tuple[Near, Far]) -> None:
    near, far = registered(ends)
    engine = near.engine
    assert engine.transfer_sync_write(far.session, near.address + 5, far.address + 9, 100) == 0
    assert engine.transfer_sync_read(far.session, near.address + 200, far.address + 9, 100) == 0
    assert np.array_equal(near.memory[200:300], near.memory[5:105])
    ranges = ([near.address], [far.address], [8])
    message = TransferNotify("request 7", "done")
    assert engine.batch_transfer_sync(far.session, *ranges, TransferOpcode.Write, message) == 0
    got: list[TransferNotify] = []
    eventually(lambda: got.extend(far("get_notifies")) or got)
    assert got == [message]
    assert engine.get_notifies() == []


def test_memory_that_a_peer_registers_later_is_found(ends: tuple[Near, Far]) -> None:
    near, far = ends
    engine = near.engine
    assert engine.register_memory(near.address, SIZE) == 0
    assert far("register_memory", far.address, 4096) == 0
    assert engine.transfer_sync_write(far.session, near.address, far.address, 4096) == 0
    assert engine.transfer_sync_write(far.session, near.address, far.address + 4096, 1) == -1
    assert far("register_memory", far.address + 4096, 4096) == 0
    assert engine.transfer_sync_write(far.session, near.address, far.address + 4096, 4096) == 0
    assert far("unregister_memory", far.address) == 0
    assert engine.transfer_sync_write(far.session, near.address, far.address, 4096) == -1
    assert far("register_memory", far.address, 4096) == 0
    assert engine.transfer_sync_write(far.session, near.address, far.address, 4096) == 0


def test_more_regions_than_a_message_holds(ends: tuple[Near, Far]) -> None:
    near, far = ends
    parts = 2500
    starts = range(0, parts * 64, 64)
    assert near.engine.register_memory(near.address, SIZE) == 0
    assert far("batch_register_memory", [far.address + start for start in starts], [64] * parts) == 0
    assert near.engine.transfer_sync_write(far.session, near.address, far.address + 64 * 2400, 64) == 0
    assert np.array_equal(far("bytes")[64 * 2400 :][:64], near.memory[:64])


def test_mistakes_are_minus_one_and_move_nothing(ends: tuple[Near, Far], caplog: pytest.LogCaptureFixture) -> None:
    near, far = registered(ends)
    engine, mine, theirs = near.engine, near.address, far.address
    step = SIZE // 4
    for args, reason in [
        ((far.session, [mine], [theirs], [0]), "lengths[0]=0 must be above 0"),
        ((far.session, [mine], [theirs], [-1]), "lengths[0]=-1 must be above 0"),
        ((far.session, [mine], [theirs], [step + 1]), "are not registered here"),
        ((far.session, [mine - 1], [theirs], [8]), "are not registered here"),
        ((far.session, [mine], [theirs + SIZE - 4], [8]), "are not registered at the peer"),
        ((far.session, [mine], [theirs], [8, 8]), "must be equally long"),
        ((far.session, [], [], []), "no ranges"),
        (("nonsense", [mine], [theirs], [8]), "nonsense"),
    ]:
        caplog.clear()
        assert engine.batch_transfer_sync_write(*args) == -1
        assert engine.batch_transfer_async_read(*args) == -1
        assert reason in caplog.text
    assert not far("bytes").any()
    for address, length in [(mine, 8), (mine - 4, 8), (mine + SIZE - 1, 1), (mine + SIZE, 0), (0, 8)]:
        assert engine.register_memory(address, length) == -1
    # All or none.
    other = np.zeros(64, np.uint8)
    assert engine.batch_register_memory([other.ctypes.data, mine], [64, 8]) == -1
    assert engine.register_memory(other.ctypes.data, 64) == 0
    assert engine.unregister_memory(mine + 1) == -1
    assert engine.batch_unregister_memory([mine, mine]) == -1
    assert engine.transfer_check_status(99) == -1
    assert engine.get_batch_transfer_status([99]) == -1


def test_bad_numbers_are_named_as_the_caller_named_them(
    ends: tuple[Near, Far], caplog: pytest.LogCaptureFixture
) -> None:
    near, far = ends
    engine, mine, wide = near.engine, near.address, np.int64(near.address)
    convert = "is numpy.int64, not int; convert it with int()"

    def said(call: Any, *args: Any) -> str:
        caplog.clear()
        assert call(*args) == -1
        return caplog.text

    for addresses, capacities, text in [
        ([mine, mine + 8, wide], [8, 8, 8], f"buffer_addresses[2] {convert}"),
        ([mine], [np.int64(8)], f"capacities[0] {convert}"),
        ([mine], [0], "capacities[0]=0 must be above 0"),
        ([mine], [2**63], f"capacities[0]={2**63} must be below 2^63"),
        ([0], [8], "buffer_addresses[0]=0 must be above 0"),
        ([2**64], [8], f"buffer_addresses[0]={2**64} must be below 2^64"),
        ([2**64 - 4], [8], f"buffer_addresses[0]={2**64 - 4} and capacities[0]=8 end above 2^64"),
        ([None], [8], "buffer_addresses[0] is NoneType, not int\n"),
        ([mine], [True], "capacities[0] is bool, not int\n"),
    ]:
        assert text in said(engine.batch_register_memory, addresses, capacities)
    assert f"buffer_addresses[0] {convert}" in said(engine.register_memory, wide, 8)
    for ranges, text in [
        (([wide], [mine], [8]), f"buffers[0] {convert}"),
        (([-1], [mine], [8]), "buffers[0]=-1 must be 0 or above"),
        (([mine], [mine, wide], [8, 8]), f"peer_buffer_addresses[1] {convert}"),
        (([mine], [mine], [1.5]), "lengths[0] is float, not int\n"),
    ]:
        assert text in said(engine.batch_transfer_sync_read, far.session, *ranges)
        assert text in said(engine.batch_transfer_async_write, far.session, *ranges)


def test_a_peer_that_is_gone_is_minus_one(ends: tuple[Near, Far]) -> None:
    near, far = registered(ends)
    assert near.engine.send_probe(far.session) == 0
    assert near.engine.transfer_sync_write(far.session, near.address, far.address, 8) == 0
    far.process.kill()
    far.process.join(LIMIT)
    assert near.engine.transfer_sync_write(far.session, near.address, far.address, 8) == -1


def test_calls_before_initialize() -> None:
    engine = TransferEngine()
    assert engine.get_rpc_port() == -1
    assert engine.register_memory(4096, 8) == -1
    assert engine.transfer_sync_write("127.0.0.1:1", 1, 2, 3) == -1
    assert engine.get_notifies() == []
    engine.close()
    assert TransferEngine({"no_such": 1}).initialize("127.0.0.1", "", "", "") == -1


Ranges = list[tuple[int, int, int]]


def owner(side: list[Region], start: int, length: int) -> int | None:
    """Return the number of the region that owns all bytes of a range, found byte by byte."""
    owners = {region.number: set(range(region.address, region.end)) for region in side}
    return next((number for number, owned in owners.items() if owned.issuperset(range(start, start + length))), None)


def expected_pieces(sides: tuple[list[Region], list[Region]], ranges: Ranges) -> list[list[tuple[int, int]]] | None:
    """Return the pairs of addresses of each piece, or `None` if a range is not inside one region."""
    found: list[tuple[tuple[int, int], list[tuple[int, int]]]] = []
    for mine, theirs, length in ranges:
        here, there = owner(sides[0], mine, length), owner(sides[1], theirs, length)
        if here is None or there is None:
            return None
        pairs = [(mine + at, theirs + at) for at in range(length)]
        if found and found[-1][0] == (here, there) and found[-1][1][-1] == (mine - 1, theirs - 1):
            found[-1][1].extend(pairs)
        else:
            found.append(((here, there), pairs))
    return [pairs for _, pairs in found]


def drawn_regions(rng: random.Random) -> list[Region]:
    """Return regions of 1 to 9 bytes. Half of them touch the one before them."""
    made, start = [], rng.randrange(4)
    for number in range(6):
        length = rng.randint(1, 9)
        made.append(Region(start, length, number))
        start += length + rng.choice([0, rng.randint(1, 4)])
    return made


def drawn_ranges(rng: random.Random) -> Ranges:
    """Return ranges of which most follow the one before them on both sides."""
    ranges: Ranges = []
    for _ in range(rng.randint(1, 8)):
        mine, theirs = rng.randrange(40), rng.randrange(40)
        if ranges and rng.random() < 0.8:
            mine, theirs = (start + ranges[-1][2] for start in ranges[-1][:2])
        ranges.append((mine, theirs, rng.randint(1, 4)))
    return ranges


def test_pieces_follow_a_search_byte_by_byte() -> None:
    rng = random.Random(2)  # noqa: S311
    refused = moved_pieces = kept_apart = 0
    for _ in range(10_000):
        sides, ranges = (drawn_regions(rng), drawn_regions(rng)), drawn_ranges(rng)
        columns = [list(column) for column in zip(*ranges)]
        expected = expected_pieces(sides, ranges)
        if expected is None:
            refused += 1
            with pytest.raises(LookupError, match="not registered"):
                pieces(Regions(sides[0]), Regions(sides[1]), *columns)
            continue
        found = pieces(Regions(sides[0]), Regions(sides[1]), *columns)
        assert [
            [
                (piece.local.address + piece.local_offset + at, piece.remote.address + piece.remote_offset + at)
                for at in range(piece.length)
            ]
            for piece in found
        ] == expected
        moved_pieces += len(found)
        pairs = zip(expected, expected[1:])
        kept_apart += sum(a[-1][0] + 1 == b[0][0] and a[-1][1] + 1 == b[0][1] for a, b in pairs)
    # The draw has all three outcomes: a refusal, pieces, and ranges that touch at the border of a region.
    assert min(refused, moved_pieces, kept_apart) > 50


@pytest.mark.parametrize("parts_here", [1, 4])
@pytest.mark.parametrize("parts_there", [1, 4])
def test_ranges_that_touch_at_the_border_of_a_region_move(
    ends: tuple[Near, Far], parts_here: int, parts_there: int
) -> None:
    near, far = ends
    for parts, register, address in (
        (parts_here, near.engine.batch_register_memory, near.address),
        (parts_there, partial(far, "batch_register_memory"), far.address),
    ):
        step = SIZE // parts
        assert register([address + start for start in range(0, SIZE, step)], [step] * parts) == 0
    length = SIZE // 8
    starts = range(0, SIZE, length)
    ranges = ([near.address + at for at in starts], [far.address + at for at in starts], [length] * 8)
    assert near.engine.batch_transfer_sync_write(far.session, *ranges) == 0
    assert np.array_equal(far("bytes"), near.memory)
    far("fill", 3)
    assert near.engine.batch_transfer_sync_read(far.session, *ranges) == 0
    assert np.array_equal(near.memory, np.full(SIZE, 3, np.uint8))


@pytest.mark.parametrize(
    "given", [1, [1], [[1, 2]], [[1, 2, "3"]], [[-1, 2, 3]], [[1, 0, 3]], [[2**64, 1, 1]], [[1, 2**64, 1]]]
)
def test_lists_of_peers_that_lie_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="region"):
        Regions.list_from(given)
