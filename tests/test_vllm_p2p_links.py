"""Chunks that schedulers pull from each other, with two engines in one process.

Not for: vLLM's side (`test_vllm_p2p_tier.py`, and `integration-tests/vllm/test_p2p_tier.py` with the real one), and
loads that end while a pull writes (`test_vllm_p2p_reads.py`).
"""

from __future__ import annotations

import mmap
import time
import uuid
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import Closed, Engine, Error, PeerLost
from llm_datadist.integrations.vllm.allowed_peers import LOOPBACK, AllowedPeers
from llm_datadist.integrations.vllm.messages import MAX_REASON
from llm_datadist.integrations.vllm.p2p_links import CACHE, Links
from llm_datadist.integrations.vllm.p2p_messages import (
    MAX_ROWS,
    VERSION,
    Contact,
    Offer,
    Refused,
    decode,
    decode_contact,
    encode,
)
from peers import LIMIT, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS, ROW = 16, 4096
JOB = 7


class Scheduler:
    """A primary tier of random bytes, and its links. `name` is what vLLM calls it."""

    def __init__(
        self, name: str, rows: int = ROWS, row: int = ROW, limit_s: float = LIMIT, allowed: Any = None, **options: Any
    ) -> None:
        self.name = name
        self.memory = mmap.mmap(-1, rows * row)
        self.view = memoryview(self.memory).cast("b", shape=[rows, row])
        self.bytes = np.frombuffer(self.memory, np.int8).reshape(rows, row)
        self.bytes[:] = np.random.default_rng(len(name)).integers(-128, 128, (rows, row), np.int8)
        peers = AllowedPeers(LOOPBACK if allowed is None else allowed)
        self.links = Links(str(uuid.uuid4()), self.view, "127.0.0.1:0", peers, limit_s, options)

    def add(self, other: Scheduler) -> None:
        self.links.add(other.name, other.links.contact(other.links.address), other.bytes.shape[1])

    def expect(self, other: Scheduler, *rows: int, job: int = JOB) -> None:
        self.links.reads.expect(job, other.name, rows)

    def ended(self, other: Scheduler) -> tuple[list[int], list[int]]:
        self.links.advance()
        return self.links.writes.take(other.name)


class Pair:
    """The owner writes to the reader, as vLLM calls it."""

    def __init__(self, **options: Any) -> None:
        self.owner, self.reader = Scheduler("owner", **options), Scheduler("the reader", **options)
        self.owner.add(self.reader)
        self.reader.add(self.owner)

    def write(self, local: list[int], remote: list[int]) -> int:
        return self.owner.links.write(self.reader.name, local, remote)

    def ended(self, count: int = 1) -> tuple[list[int], list[int]]:
        """Let both go on until as many writes have ended."""
        done: list[int] = []
        failed: list[int] = []

        def enough() -> bool:
            self.reader.links.advance()
            more = self.owner.ended(self.reader)
            done.extend(more[0])
            failed.extend(more[1])
            return len(done) + len(failed) >= count

        eventually(enough)
        return done, failed

    def delivers(self, local: list[int], remote: list[int]) -> bool:
        """Write rows, and return whether they have arrived."""
        number = self.write(local, remote)
        done, failed = self.ended()
        assert done + failed == [number]
        return bool(done)

    def close(self) -> None:
        self.owner.links.close()
        self.reader.links.close()

    def failed(self) -> list[int]:
        """Let the owner go on, without the reader, until a write has failed."""
        failed: list[int] = []

        def enough() -> bool:
            failed.extend(self.owner.ended(self.reader)[1])
            return bool(failed)

        eventually(enough)
        return failed

    def finished(self, success: bool = True, job: int = JOB, scheduler: Scheduler | None = None) -> bool:
        found: list[bool | None] = []
        links = (scheduler or self.reader).links

        def ended() -> bool:
            links.advance()
            found.append(links.reads.finish(job, success))
            return found[-1] is not None

        eventually(ended)
        return bool(found[-1])


def advance_until(condition: Callable[[], bool], *schedulers: Scheduler) -> None:
    def met() -> bool:
        for one in schedulers:
            one.links.advance()
        return condition()

    eventually(met)


def linked(scheduler: Scheduler) -> list[Any]:
    """The peers of a scheduler, as soon as it has one, and none that it has added is still being linked."""

    def is_linked() -> bool:
        links = scheduler.links
        return links._engine.peers != [] and all(remote.peer is not None for remote in links._remotes.values())

    advance_until(is_linked, scheduler)
    return scheduler.links._engine.peers


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair()) as made:
        yield made


def test_only_the_named_rows_arrive(pair: Pair) -> None:
    before = pair.reader.bytes.copy()
    pair.reader.expect(pair.owner, 3, 1, 8)
    assert pair.delivers([5, 0, 15], [1, 8, 3])
    assert pair.finished()
    before[[1, 8, 3]] = pair.owner.bytes[[5, 0, 15]]
    assert (pair.reader.bytes == before).all()


def test_rows_arrive_in_several_writes(pair: Pair) -> None:
    pair.reader.expect(pair.owner, *range(6))
    numbers = [pair.write([row + 9], [row]) for row in range(6)]
    done, failed = pair.ended(6)
    assert (sorted(done), failed) == (numbers, [])
    assert pair.finished()
    assert (pair.reader.bytes[:6] == pair.owner.bytes[9:15]).all()


def test_both_directions_at_once(pair: Pair) -> None:
    pair.reader.expect(pair.owner, *range(4))
    pair.owner.expect(pair.reader, *range(12, 16), job=1)
    there, back = pair.owner.bytes[4:8].copy(), pair.reader.bytes[8:12].copy()
    pair.write([4, 5, 6, 7], [0, 1, 2, 3])
    pair.reader.links.write(pair.owner.name, [8, 9, 10, 11], [12, 13, 14, 15])
    ended: list[int] = []

    def both() -> bool:
        ended.extend(pair.owner.ended(pair.reader)[0] + pair.reader.ended(pair.owner)[0])
        return len(ended) == 2

    eventually(both)
    assert pair.finished()
    assert pair.finished(scheduler=pair.owner, job=1)
    assert (pair.reader.bytes[:4] == there).all()
    assert (pair.owner.bytes[12:] == back).all()


@pytest.mark.parametrize(
    ("wanted", "offered"),
    [
        ([], [3]),  # no load
        ([3], [3, 4]),  # a row of no load
        ([3, 4], [3, 3]),  # a row twice
        ([3], [99]),  # no row of the reader
    ],
)
def test_rows_that_no_load_waits_for_are_refused(pair: Pair, wanted: list[int], offered: list[int]) -> None:
    before = pair.reader.bytes.copy()
    pair.reader.expect(pair.owner, *wanted)
    assert not pair.delivers([1, 2][: len(offered)], offered)
    assert (pair.reader.bytes == before).all()


def test_rows_are_offered_once(pair: Pair) -> None:
    pair.reader.expect(pair.owner, 3)
    assert pair.delivers([1], [3])
    assert not pair.delivers([2], [3])
    assert pair.finished()
    assert (pair.reader.bytes[3] == pair.owner.bytes[1]).all()


def test_a_write_is_refused_by_its_peer_only(pair: Pair) -> None:
    other = Scheduler("another one")
    pair.owner.add(other)
    other.add(pair.owner)
    pair.reader.expect(pair.owner, 3)
    number = pair.write([1], [3])
    (peer,) = linked(other)
    peer.send(encode(Refused(number, "not mine")))
    for _ in range(20):
        assert pair.owner.ended(pair.reader) == ([], [])
        time.sleep(0.005)
    assert pair.ended() == ([number], [])
    other.links.close()


def test_the_reason_of_a_peer_is_fit_for_the_log(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    (peer,) = linked(pair.reader)
    for reason in "x\nERROR forged\x1b[2J" + "y" * (MAX_REASON - 20), "z" * (MAX_REASON + 1):
        number = pair.write([1], [3])
        peer.send(encode(Refused(number, reason)))
    assert pair.failed() == [number - 1]
    (line,) = [record.message for record in caplog.records if "rows were not read" in record.message]
    assert line.endswith("x?ERROR forged?[2J" + "y" * (MAX_REASON - 20))
    advance_until(lambda: "is ignored: it is invalid" in caplog.text, pair.owner)


def test_a_long_reason_of_ours_is_cut(pair: Pair) -> None:
    (peer,) = linked(pair.reader)
    number = pair.write([1], [3])
    pair.reader.links._refuse(peer, number, "é" * 2 * MAX_REASON)
    assert pair.failed() == [number]


def test_a_write_that_cannot_be_sent_is_forgotten(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    linked(pair.owner)

    def fail(*_given: Any) -> None:
        raise PeerLost("the link has ended")

    with monkeypatch.context() as patch:
        patch.setattr(pair.owner.links._outbox, "send", fail)
        with pytest.raises(PeerLost):
            pair.write([1], [3])
    pair.owner.links.writes.lost(pair.reader.name, "nothing is left to fail")
    assert pair.owner.ended(pair.reader) == ([], [])


def test_rows_that_the_owner_does_not_have_do_not_begin(pair: Pair) -> None:
    with pytest.raises(Error, match="16"):
        pair.write([ROWS], [0])
    for local, remote in ([], []), ([1], [1, 2]):
        with pytest.raises(ValueError, match="rows of the peer"):
            pair.write(local, remote)
    with pytest.raises(ValueError, match="nobody is not a peer"):
        pair.owner.links.write("nobody", [1], [1])


def test_a_load_may_exceed_one_message() -> None:
    count = 2 * MAX_ROWS + 5
    with closing(Pair(rows=count, row=16)) as pair:
        pair.reader.expect(pair.owner, *range(count))
        order = np.random.default_rng(1).permutation(count)
        number = pair.write(order.tolist(), list(range(count)))
        assert pair.ended() == ([number], [])
        assert pair.finished()
        assert (pair.reader.bytes == pair.owner.bytes[order]).all()


def test_more_writes_than_transfers() -> None:
    """The reader may have two transfers at a time. The other offers wait."""
    with closing(Pair(max_transfers=2)) as pair:
        pair.reader.expect(pair.owner, *range(ROWS))
        numbers = [pair.write([row], [ROWS - 1 - row]) for row in range(ROWS)]
        done, failed = pair.ended(ROWS)
        assert (sorted(done), failed) == (numbers, [])
        assert pair.finished()
        assert (pair.reader.bytes == pair.owner.bytes[::-1]).all()


def test_a_reader_that_does_not_answer_in_time_has_failed() -> None:
    with closing(Pair(limit_s=0.5)) as pair:
        before = pair.reader.bytes.copy()
        pair.reader.expect(pair.owner, 3)
        number = pair.write([1], [3])
        assert pair.failed() == [number]
        # It goes on, finds the offer, and must not take what the row may hold by now for the chunk.
        pair.owner.bytes[1] = 0
        for _ in range(20):
            pair.reader.links.advance()
            time.sleep(0.01)
        assert not pair.finished(success=True)
        assert (np.delete(pair.reader.bytes, 3, 0) == np.delete(before, 3, 0)).all()


def test_a_cancelled_write_is_not_reported_and_not_read(pair: Pair) -> None:
    pair.reader.expect(pair.owner, 3)
    pair.owner.links.writes.cancel([pair.write([1], [3]), 12345])
    for _ in range(50):
        pair.reader.links.advance()
        assert pair.owner.ended(pair.reader) == ([], [])
        time.sleep(0.002)
    assert not pair.finished(success=True)


def test_the_end_of_the_owner_fails_the_load(pair: Pair) -> None:
    pair.reader.expect(pair.owner, 3)
    pair.write([1], [3])
    pair.owner.links.close()
    assert not pair.finished(success=True)


def test_the_end_of_the_reader_fails_the_write(pair: Pair) -> None:
    pair.reader.expect(pair.owner, 3)
    linked(pair.owner)
    number = pair.write([1], [3])
    pair.reader.links.close()
    assert pair.failed() == [number]


def test_a_peer_that_is_gone_fails_the_write() -> None:
    with closing(Pair(limit_s=0.5)) as pair:
        pair.reader.links.close()
        number = pair.write([1], [3])
        assert pair.failed() == [number]


def test_a_link_that_has_broken_is_made_again(pair: Pair) -> None:
    pair.reader.expect(pair.owner, 3, 4)
    assert pair.delivers([1], [3])
    # The owner may know before the reader that the rows are read.
    advance_until(lambda: not pair.reader.links.reads._running, pair.reader)
    for peer in pair.owner.links._engine.peers:
        peer.close().result()
    assert pair.delivers([2], [4])
    assert pair.finished()


def test_a_peer_that_was_removed_may_come_back(pair: Pair) -> None:
    pair.owner.links.remove(pair.reader.name)
    pair.owner.links.remove(pair.reader.name)
    with pytest.raises(ValueError, match="not a peer"):
        pair.write([1], [3])
    pair.owner.add(pair.reader)
    pair.owner.add(pair.reader)  # again: nothing changes
    pair.reader.expect(pair.owner, 3)
    assert pair.delivers([1], [3])


def test_a_restarted_peer_replaces_the_old_one(pair: Pair) -> None:
    new = Scheduler("the reader")
    pair.reader.links.close()
    pair.owner.add(new)
    new.add(pair.owner)
    pair.reader = new
    new.expect(pair.owner, 3)
    assert pair.delivers([1], [3])


def test_peers_that_do_not_fit_are_refused(pair: Pair) -> None:
    links, name, contact = (
        pair.owner.links,
        pair.reader.links._engine.name,
        pair.reader.links.contact(pair.reader.links.address),
    )
    with pytest.raises(ValueError, match="rows of new have 8192 bytes, and rows of this engine 4096"):
        links.add("new", contact, 2 * ROW)
    with pytest.raises(ValueError, match="known as the reader"):
        links.add("new", contact, ROW)
    with pytest.raises(ValueError, match=r"10\.0\.0\.1:26000 is not one of allowed_peers"):
        links.add("new", encode(Contact(VERSION, name + "x", "10.0.0.1:26000")), ROW)
    with pytest.raises(ValueError, match=r"version 2 of the messages, and this engine version 1"):
        links.add("new", encode(Contact(2, name + "x", "127.0.0.1:1")), ROW)
    for garbage in b"", b"\xc1", encode(Refused(1, "")), contact[:-1]:
        with pytest.raises(ValueError, match="not a message"):
            links.add("new", garbage, ROW)
    with pytest.raises(ValueError, match="not one of allowed_peers"):
        Scheduler("strict", allowed=["127.0.0.1:1"]).add(pair.reader)


def test_unreadable_messages_and_strangers_change_nothing(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.reader.expect(pair.owner, 3)
    stranger = Scheduler("stranger")
    stranger.add(pair.reader)
    for sender in pair.owner, stranger:
        (peer,) = linked(sender)
        for data in b"", b"\xc1", encode(Offer.of(1, [1], [3], b"short")), encode(Offer(1, b"", b"", b"")):
            peer.send(data)
        peer.send(encode(Refused(5, "unknown")))
    advance_until(lambda: "1 rows of owner did not arrive" in caplog.text, pair.reader)
    advance_until(lambda: "is not a peer of this tier" in caplog.text, pair.reader)
    for _ in range(20):
        pair.reader.links.advance()
        time.sleep(0.005)
    assert "a message of 0 bytes" in caplog.text
    assert caplog.text.count("is ignored") == 2, "one line for each link"
    stranger.links.close()
    advance_until(lambda: len(pair.reader.links._reported) == 1, pair.reader)
    assert not pair.finished(success=True)  # `b"short"` is no token


def test_the_log_shows_no_token(pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(pair.reader.links.reads, "offered", fail)
    sent: list[bytes] = []

    def send(peer: Any, offer: Offer) -> None:
        sent.append(offer.token)
        peer.send(encode(offer))

    monkeypatch.setattr(pair.owner.links._outbox, "send", send)
    pair.write([1], [3])
    advance_until(lambda: "a fault" in caplog.text, pair.owner, pair.reader)
    assert repr(sent[0])[2:-1] not in caplog.text
    assert repr(sent[0]) not in repr(Offer.of(1, [1], [3], sent[0]))


def test_a_fault_of_one_event_leaves_the_others(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.reader.expect(pair.owner, 3, 4)
    real, faults = pair.reader.links.reads.offered, [RuntimeError("a fault")]

    def offered(*given: Any) -> None:
        if faults:
            raise faults.pop()
        real(*given)

    monkeypatch.setattr(pair.reader.links.reads, "offered", offered)
    pair.write([1], [3])
    assert pair.delivers([2], [4])


def test_close_drops_the_view() -> None:
    pair = Pair()
    pair.reader.expect(pair.owner, 3)
    pair.write([1], [3])
    for one in (pair.owner, pair.reader):
        del one.bytes
        one.links.advance()
        with pytest.raises(BufferError):
            one.memory.close()
        one.links.close()
        one.links.close()
        one.links.advance()
        one.view.release()
        one.memory.close()
    with pytest.raises(Closed):
        pair.write([1], [3])


def test_an_engine_that_cannot_register_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []

    def engine(**options: Any) -> Engine:
        engines.append(Engine(**options))
        return engines[-1]

    monkeypatch.setattr("llm_datadist.integrations.vllm.p2p_links.Engine", engine)
    read_only = memoryview(bytes(64)).cast("b", shape=[4, 16])
    with pytest.raises(Error, match="read-only"):
        Links("name", read_only, "127.0.0.1:0", AllowedPeers(LOOPBACK), 1.0, {})
    with pytest.raises(TypeError, match="no_such_option"):
        Links("name", read_only, "127.0.0.1:0", AllowedPeers(LOOPBACK), 1.0, {"no_such_option": 1})
    assert [one.closed for one in engines] == [True]


def test_messages_survive_a_round_trip() -> None:
    offer = Offer.of(2**61, [0, 2**32 - 1], [5, 6], b"t" * 48)
    assert decode(encode(offer)) == offer
    assert offer.rows() == ([0, 2**32 - 1], [5, 6])
    largest = Offer.of(2**61, list(range(MAX_ROWS)), list(range(MAX_ROWS)), b"t" * 48)
    assert len(encode(largest)) <= 64 << 10
    contact = Contact(VERSION, "engine", "127.0.0.1:1")
    assert decode_contact(encode(contact)) == contact
    with pytest.raises(ValueError, match="2 rows for 1 rows"):
        Offer(1, bytes(8), bytes(4), b"").rows()


def test_the_cache_has_the_name_that_peers_use(pair: Pair) -> None:
    assert pair.owner.links.reads._cache.name == CACHE
