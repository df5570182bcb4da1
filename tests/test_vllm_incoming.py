"""Which parts decode pulls, and when it has everything, against a model of both memories."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from counted_lines import lines
from llm_datadist.integrations.vllm import incoming as incoming_module
from llm_datadist.integrations.vllm.group_caches import HEADS, PAGES, VIEWS
from llm_datadist.integrations.vllm.incoming import MAX_AGAIN, MAX_PARTS, Incoming, Pull
from llm_datadist.integrations.vllm.messages import Lent, Ready

RIGHT, WRONG = "right", "wrong"


def lent(number: int, first: int, blocks: list[list[int]], *, layers: int = 0, last: bool = False) -> Lent:
    return Lent("t", 0, number, first, blocks, [["aa"] if any(group) else [] for group in blocks], layers, last)


def incoming(
    missing: Any,
    ranks: Any = (1,),
    layers: int = 4,
    *,
    by_layers: bool = True,
    layers_per_pull: int = 0,
    blocks: int | None = None,
    view: str = PAGES,
) -> Incoming:
    needed = [set(group) for group in missing]
    count = 1 + max(index for group in needed for index in group) if blocks is None else blocks
    return Incoming(needed, count, set(ranks), view, layers, by_layers=by_layers, layers_per_pull=layers_per_pull)


class Sides:
    """Prefill computes, preempts and lends. Decode hears it from each rank in order, and pulls."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.count, self.layers, ranks = rng.randint(1, 12), rng.randint(1, 4), rng.randint(1, 3)
        self.view = rng.choice([PAGES, HEADS])
        self.missing = {index for index in range(self.count) if rng.random() < 0.8} or {0}
        if self.view == HEADS:
            self.missing = set(range(min(self.missing), self.count))
        self.memory = {(index, layer): "" for index in range(self.count) for layer in range(self.layers)}
        self.news: dict[int, deque[Any]] = {rank: deque() for rank in range(ranks)}
        by_layers = self.view == PAGES and ranks == 1 and rng.random() < 0.8
        options: Any = {"by_layers": by_layers, "blocks": self.count, "view": self.view}
        options["layers_per_pull"] = rng.randint(0, 2)
        self.decode = incoming([self.missing], self.news, self.layers, **options)
        self.number = 0
        self.withdrawn: set[int] = set()
        self.running: list[Pull] = []
        # Those that had read their last byte before their part was withdrawn.
        self.in_time: list[Pull] = []

    def say(self, message: Any) -> None:
        for news in self.news.values():
            news.append(message)

    def compute(self, begin: int, end: int, *, interrupted: bool) -> int:
        """Compute the blocks from `begin` to `end` in steps. Return where a preemption has interrupted it."""
        parts = []
        while begin < end:
            size = self.rng.randint(1, end - begin)
            if interrupted and self.rng.random() < 0.3:
                break
            blocks = [[100 + index for index in range(begin, begin + size)]]
            parts.append(self.number)
            grants = [["aa"] * VIEWS[self.view]]
            self.say(Lent("t", 0, self.number, begin, blocks, grants, 0, begin + size == end))
            for layer in range(self.layers):
                if self.rng.random() < 0.7 or layer == self.layers - 1:
                    self.say(Ready([["t", self.number]], layer + 1))
                self.decode_acts()
            self.number, begin = self.number + 1, begin + size
        if interrupted:
            self.in_time += [pull for pull in self.running if self.rng.random() < 0.5]
            self.withdrawn.update(parts)
        return begin

    def decode_acts(self) -> None:
        for _ in range(self.rng.randint(0, 4)):
            rank = self.rng.choice(list(self.news))
            if self.running and self.rng.random() < 0.5:
                self.end_pull(self.running.pop(self.rng.randrange(len(self.running))))
            elif self.news[rank]:
                self.hear(rank, self.news[rank].popleft())
            self.running += self.decode.start()
            self.check()

    def hear(self, rank: int, message: Any) -> None:
        if isinstance(message, Lent):
            self.decode.lent(rank, message)
        else:
            for _, number in message.parts:
                self.decode.ready(rank, number, message.layers)

    def end_pull(self, pull: Pull) -> None:
        """A pull of a part that was withdrawn meanwhile has read other bytes, and fails."""
        lost = pull.part.number in self.withdrawn and not any(pull is other for other in self.in_time)
        for index in self.written(pull):
            for layer in pull.layers:
                self.memory[index, layer] = WRONG if lost else RIGHT
        if lost:
            self.decode.lost(pull)
        else:
            self.decode.done(pull)

    def written(self, pull: Pull) -> list[int]:
        """The blocks that a pull writes. Between other block sizes, it covers the whole part."""
        part = pull.part
        return part.wanted[0] if self.view == PAGES else sorted(self.missing.intersection(range(part.first, part.end)))

    def check(self) -> None:
        """No two pulls write to one place, and only what is missing is written."""
        targets = [(index, layer) for pull in self.running for index in self.written(pull) for layer in pull.layers]
        assert len(targets) == len(set(targets))
        assert {index for index, _ in targets} <= self.missing
        if self.decode.complete:
            assert all(self.memory[index, layer] == RIGHT for index in self.missing for layer in range(self.layers))
            assert not self.running

    def run(self) -> None:
        for _ in range(self.rng.randint(0, 3)):
            self.compute(0, self.count, interrupted=True)
        self.compute(0, self.count, interrupted=False)
        while self.running or any(self.news.values()):
            self.decode_acts()
        assert self.decode.complete
        assert all(not self.memory[index, 0] for index in range(self.count) if index not in self.missing)


@pytest.mark.parametrize("seed", range(300))
def test_random_schedules_deliver_every_missing_block(seed: int) -> None:
    Sides(random.Random(seed)).run()  # noqa: S311 - not a secret


def test_layers_are_pulled_as_they_become_ready() -> None:
    """While a pull runs, further layers gather for the next one."""
    state = incoming([[0, 1]])
    state.lent(1, lent(0, 0, [[7, 8]], last=True))
    assert state.start() == []
    state.ready(1, 0, 1)
    (first,) = state.start()
    assert first.layers == range(1)
    state.ready(1, 0, 3)
    assert state.start() == []
    assert state.waits
    assert state.done(first) == 0
    (second,) = state.start()
    assert second.layers == range(1, 3)
    state.done(second)
    state.ready(1, 0, 4)
    state.ready(1, 0, 2)  # an older message changes nothing
    (third,) = state.start()
    assert not state.waits
    assert state.done(third) == 2
    assert state.complete


@pytest.mark.parametrize(("by_layers", "expected"), [(True, [range(3), range(3, 4)]), (False, [range(4)])])
def test_a_pull_has_a_largest_number_of_layers(by_layers: bool, expected: list[range]) -> None:
    """So that host buffers load some layers while the next ones are pulled. Heads are converted in one pull."""
    state = incoming([[0]], by_layers=by_layers, layers_per_pull=3)
    state.lent(1, lent(0, 0, [[7]], layers=4, last=True))
    found = []
    while pulls := state.start():
        found += [pull.layers for pull in pulls]
        for pull in pulls:
            state.done(pull)
    assert found == expected
    assert state.complete


def test_groups_without_content_have_no_grants() -> None:
    state = incoming([[0, 1], [1]])
    state.lent(1, lent(0, 0, [[7, 8], [0, 9]], layers=4, last=True))
    (pull,) = state.start()
    assert (pull.part.wanted, pull.layers) == ([[0, 1], [1]], range(4))
    assert state.done(pull) == 3
    assert state.complete


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([lent(0, 0, [[7, 0]])], "prefill does not lend block 1 of KV cache group 0"),
        ([lent(0, 0, [[7]], last=True)], "prefill does not lend block 1 of KV cache group 0"),
        ([lent(0, 1, [[7]]), lent(1, 2, [[8]], last=True)], "prefill does not lend block 0 of KV cache group 0"),
        ([lent(0, 2, [[7, 8]])], "prefill lends blocks up to 4 of a prompt of 3 blocks"),
        ([lent(0, 2**31 - 1, [[7]])], "prefill lends blocks up to 2147483648 of a prompt of 3 blocks"),
        (
            [lent(0, 0, [[7], [8]])],
            r"part 0 has 2 lists of blocks and 2 of grants \(expected 1, one for each KV cache group\)",
        ),
        ([lent(0, 0, [])], "part 0 has 0 lists of blocks and 0 of grants"),
        ([Lent("t", 0, 0, 0, [[7]], [[]], 0, False)], r"part 0 has \[0\] grants per KV cache group \(expected \[1\]\)"),
        ([Lent("t", 0, 0, 0, [[7]], [["aa"] * 2], 0, False)], r"\[2\] grants per KV cache group \(expected \[1\]\)"),
        ([lent(0, 0, [[7]]), lent(0, 0, [[8]])], "part 0 from rank 1 is lent again, or has other blocks than before"),
        ([lent(0, 0, [[7]]), lent(0, 0, [[7]])], "part 0 from rank 1 is lent again"),
    ],
)
def test_invalid_part_is_refused(parts: list[Lent], text: str) -> None:
    state = incoming([[0, 1]], blocks=3)
    *before, last = parts
    for message in before:
        state.lent(1, message)
    with pytest.raises(ValueError, match=text):
        state.lent(1, last)


def test_ranks_that_do_not_agree_are_refused() -> None:
    state = incoming([[0, 1]], ranks=(1, 2))
    state.lent(1, lent(0, 0, [[7, 8]], layers=4))
    state.lent(3, lent(5, 0, [[1, 2]], layers=4))  # nobody has asked this one
    assert state.start() == []
    with pytest.raises(ValueError, match="part 0 from rank 2 is lent again, or has other blocks than before"):
        state.lent(2, lent(0, 0, [[7, 9]], layers=4))


def test_the_parts_of_a_request_are_bounded() -> None:
    state = incoming([range(MAX_PARTS + 1)])
    for number in range(MAX_PARTS):
        assert state.lent(1, lent(number, number, [[7]]))
    with pytest.raises(ValueError, match="more than 4096 parts"):
        state.lent(1, lent(MAX_PARTS, MAX_PARTS, [[7]]))


def test_repeated_lending_is_bounded() -> None:
    """Each part replaces the one before, and is a sign of progress."""
    state = incoming([[0, 1]])
    for number in range(MAX_AGAIN + 1):
        assert state.lent(1, lent(number, 0, [[7, 8]]))
        assert state.start() == []
    with pytest.raises(ValueError, match="lent the prompt again more than 64 times"):
        state.lent(1, lent(MAX_AGAIN + 1, 0, [[7, 8]]))


def test_parts_that_are_not_needed_are_not_kept() -> None:
    state = incoming([[0]], blocks=1000)
    for number in range(2 * MAX_PARTS):
        assert not state.lent(1, lent(number, 1 + number % 999, [[7]]))
    assert state.lent(1, lent(9999, 0, [[7]], layers=4))
    assert len(state.start()) == 1


def test_only_more_layers_are_progress() -> None:
    state = incoming([[0]])
    assert not state.ready(1, 0, 1)
    state.lent(1, lent(0, 0, [[7]]))
    assert [state.ready(1, 0, layers) for layers in (1, 1, 0, 2**31 - 1)] == [True, False, False, True]
    assert not state.ready(1, 0, 2**31 - 1)


def test_blocks_that_a_lost_pull_has_overwritten_are_missing_again() -> None:
    """A part is lent again while its first pull has already succeeded, and is withdrawn during the second one."""
    state = incoming([[0, 1]], blocks=2)
    state.lent(1, lent(0, 0, [[7]], layers=4))
    (first,) = state.start()
    state.lent(1, lent(1, 0, [[8, 9]], layers=4))
    state.done(first)
    (second,) = state.start()
    assert second.part.wanted == [[0, 1]]
    state.lost(second)
    assert not state.complete
    state.lent(1, lent(2, 0, [[5, 6]], layers=4))
    (third,) = state.start()
    assert state.done(third) == 2
    assert state.complete


def test_a_part_whose_blocks_have_arrived_is_not_pulled() -> None:
    state = incoming([[0]])
    state.lent(1, lent(0, 0, [[7]], layers=4))
    (first,) = state.start()
    state.lent(1, lent(1, 0, [[8]], layers=4))
    state.done(first)
    assert state.start() == []
    assert state.complete


def test_the_work_for_a_part_does_not_grow_with_their_number() -> None:
    """Counts the lines that run while a prompt of many parts is lent, computed and pulled layer by layer."""

    def cost(parts: int) -> int:
        state = incoming([set(range(parts))])
        pulls: deque[Pull] = deque()

        def drive() -> None:
            for number in range(parts):
                state.lent(1, lent(number, number, [[1]], last=number == parts - 1))
            for layers in (2, 4):
                for number in range(parts):
                    state.ready(1, number, layers)
                    pulls.extend(state.start())
                    while len(pulls) > 8:
                        state.done(pulls.popleft())
                while pulls:
                    state.done(pulls.popleft())
                    pulls.extend(state.start())

        count = lines(drive, incoming_module.__file__)
        assert state.complete
        return count

    few, many = cost(256), cost(1024)
    assert few > 256
    assert many < 5 * few
