"""When a load counts as over, with pulls that the tests end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from llm_datadist import Busy, GrantEnded, InvalidArgument
from llm_datadist.integrations.vllm.p2p_messages import Offer
from llm_datadist.integrations.vllm.p2p_reads import Reads

JOB, OTHER = 1, 2
TOKEN = b"t" * 48


class Pull:
    def __init__(self, *given: Any) -> None:
        self.given = given
        self.cancelled = 0

    def cancel(self) -> bool:
        self.cancelled += 1
        return True


class Rows(dict[str, Any]):
    """A cache: the rows that were asked for."""

    name = "rows"

    def __getitem__(self, rows: Any) -> Any:
        return (self.name, rows)


class Peer:
    def __getitem__(self, name: str) -> Rows:
        assert name == Rows.name
        return Rows()


class Reader:
    """The loads of a tier, the pulls that they have started, and what was refused."""

    def __init__(self, limit_s: float = 10.0) -> None:
        self.pulls: list[Pull] = []
        self.refused: list[tuple[int, str]] = []
        self.errors: list[Exception] = []  # of the next pulls
        self.reads = Reads(self, Rows(), limit_s, lambda _peer, number, reason: self.refused.append((number, reason)))  # type: ignore[arg-type]

    def pull(self, dst: Any, src: Any, *, grant: bytes, timeout: float) -> Pull:
        if self.errors:
            raise self.errors.pop(0)
        self.pulls.append(Pull(dst[1], src[1], grant, timeout))
        return self.pulls[-1]

    def offer(self, number: int, *rows: int, peer: str = "peer") -> None:
        self.reads.offered(peer, Peer(), Offer.of(number, [row + 100 for row in rows], list(rows), TOKEN))  # type: ignore[arg-type]

    def end(self, pull: Pull, error: Any = None) -> None:
        self.reads.completed(pull, error)  # type: ignore[arg-type]


@pytest.fixture
def reader() -> Reader:
    made = Reader()
    made.reads.expect(JOB, "peer", [4, 5, 6])
    return made


def test_a_load_ends_with_its_last_pull(reader: Reader) -> None:
    reader.offer(1, 6, 4)
    reader.offer(2, 5)
    assert [pull.given for pull in reader.pulls] == [
        ([6, 4], [106, 104], TOKEN, 10.0),
        ([5], [105], TOKEN, 10.0),
    ]
    reader.end(reader.pulls[0])
    assert reader.reads.finish(JOB, success=True) is None
    assert reader.pulls[1].cancelled == 0
    reader.end(reader.pulls[1])
    assert reader.reads.finish(JOB, success=True) is True


def test_a_failed_load_cancels_its_pulls_and_waits_for_them(reader: Reader) -> None:
    reader.reads.expect(OTHER, "peer", [7])
    reader.offer(1, 4)
    reader.offer(2, 7)
    for _ in range(2):
        assert reader.reads.finish(JOB, success=False) is None
    assert [pull.cancelled > 0 for pull in reader.pulls] == [True, False]
    reader.end(reader.pulls[0])  # the last byte was faster
    assert reader.reads.finish(JOB, success=False) is False
    reader.end(reader.pulls[1])
    assert reader.reads.finish(OTHER, success=True) is True


def test_a_failed_pull_is_reported_to_the_owner_and_fails_the_load(reader: Reader) -> None:
    reader.offer(9, 4, 5, 6)
    reader.end(reader.pulls[0], GrantEnded("it has expired"))
    assert reader.refused == [(9, "it has expired")]
    assert reader.reads.finish(JOB, success=True) is False


def test_rows_that_nobody_offered_fail_the_load(reader: Reader) -> None:
    reader.offer(1, 4, 5)
    reader.end(reader.pulls[0])
    assert reader.reads.finish(JOB, success=True) is False


def test_a_job_that_is_no_load_keeps_its_outcome(reader: Reader) -> None:
    assert reader.reads.finish(77, success=True) is True
    assert reader.reads.finish(77, success=False) is False


def test_nothing_begins_after_the_end(reader: Reader) -> None:
    reader.errors = [Busy("full")]
    reader.offer(1, 4)
    assert reader.reads.finish(JOB, success=False) is False
    reader.reads.resume()
    reader.offer(2, 5)
    assert reader.pulls == []
    assert reader.refused == [(1, "the load has ended"), (2, "no load from this peer waits for these rows")]


def test_a_row_of_the_next_load_is_not_that_of_the_last_one(reader: Reader) -> None:
    """vLLM gives the rows of an ended load to another one. Its old offers must not write there."""
    reader.errors = [Busy("full")]
    reader.offer(1, 4)
    reader.reads.finish(JOB, success=False)
    reader.reads.expect(OTHER, "another peer", [4])
    reader.reads.resume()
    reader.offer(2, 4)
    assert reader.pulls == []
    reader.offer(3, 4, peer="another peer")
    assert len(reader.pulls) == 1


def test_offers_wait_until_there_is_room(reader: Reader) -> None:
    reader.errors = [Busy("full")] * 4
    reader.offer(1, 4)
    reader.offer(2, 5)
    reader.reads.resume()
    assert (reader.pulls, reader.refused) == ([], [])
    reader.reads.resume()
    assert [pull.given[0] for pull in reader.pulls] == [[4], [5]]
    reader.reads.resume()
    assert len(reader.pulls) == 2


def test_offers_do_not_wait_without_end() -> None:
    reader = Reader(limit_s=0.01)
    reader.reads.expect(JOB, "peer", [4])
    reader.errors = [Busy("full")]
    reader.offer(1, 4)
    time.sleep(0.02)
    reader.reads.resume()
    assert reader.refused == [(1, "max_transfers of the reader left no room within 0.01 s")]
    assert reader.reads.finish(JOB, success=True) is False


@pytest.mark.parametrize(
    ("error", "text"), [(InvalidArgument("no token"), "no token"), (MemoryError(), "MemoryError()")]
)
def test_a_pull_that_does_not_start_is_refused(reader: Reader, error: Exception, text: str) -> None:
    reader.errors = [error]
    reader.offer(1, 4, 5, 6)
    assert reader.refused == [(1, text)]
    assert reader.reads.finish(JOB, success=True) is False


def test_a_waiting_offer_that_fails_leaves_the_others(reader: Reader) -> None:
    reader.errors = [Busy("full")] * 3 + [MemoryError("no memory")]
    for number, row in ((1, 4), (2, 5), (3, 6)):
        reader.offer(number, row)
    reader.reads.resume()
    assert reader.refused == [(1, "no memory")]
    assert [pull.given[0] for pull in reader.pulls] == [[5], [6]]


def test_a_refusal_that_fails_leaves_the_other_offers(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.errors = [Busy("full")] * 2 + [InvalidArgument("no token")]
    reader.offer(1, 4)
    reader.offer(2, 5)

    def refuse(*_given: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(reader.reads, "_refuse", refuse)
    with pytest.raises(MemoryError):
        reader.reads.resume()
    reader.reads.resume()
    assert [pull.given[0] for pull in reader.pulls] == [[5]]


def test_other_transfers_are_ignored(reader: Reader) -> None:
    reader.end(Pull(), GrantEnded("of something else"))
    assert reader.refused == []
