"""Layer-wise transfers that are awaited, and what many of them leave behind."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

from layers import Far, Steps, launch, results, send
from llm_datadist import (
    LLMStatusCode,
)
from peers import (
    LIMIT,
    OK,
    End,
    Ends,
    Peer,
    eventually,
    pattern,
)

KEPT = 8  # threads that the engine may keep for the next tasks, few beside the tasks there were


@pytest.fixture
def pair(ends: Ends, way: dict[str, Any]) -> tuple[End, Peer, bool]:
    """Two linked ends, and whether caches are named by key."""
    return (*ends.pair(pool=16 << 20, **way), way["accessible"])


# -- asyncio ---------------------------------------------------------------------------------------------------------


def test_await_one_and_many(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 16, 64, 4, seed=1)
    source = pattern(1, 4, 16, 64)
    to = Far(far, accessible, "f", 20, 64, 2, seed=2)

    async def main() -> Any:
        task = launch(near, "n", [to.to(range(2), row=0, slot=3)])
        first = await task
        assert await task == first, "again, when it is over"
        many = [launch(near, "n", [to.to(range(2), row=row, slot=row + 4)]) for row in range(16)]
        return [first, *await asyncio.gather(*many)]

    assert asyncio.run(main()) == [LLMStatusCode.LLM_SUCCESS] * 17
    to.slot(source, range(2), row=0, slot=3)
    for row in range(16):
        to.slot(source, range(2), row=row, slot=row + 4)
    to.check()


def test_the_loop_runs_while_a_task_is_awaited(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)
    steps = Steps(allowed=0)

    async def model() -> None:
        for layer in range(2):
            while layer not in steps.layers:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            steps.allow(layer + 1)

    async def main() -> Any:
        task = launch(near, "n", [to.to(range(2))], steps)
        return await asyncio.wait_for(asyncio.gather(task, task, model()), LIMIT)

    assert asyncio.run(main()) == [LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_SUCCESS, None]


def test_awaiting_a_failure_gives_its_code(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)

    async def main() -> Any:
        return await launch(near, "n", [to.to(range(2))], Steps(answers={1: False}))

    assert asyncio.run(main()) == LLMStatusCode.LLM_PARAM_INVALID


def test_cancelling_coroutines_and_wait_for_leave_the_transfer_alone(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)
    steps = Steps(allowed=0)
    task = launch(near, "n", [to.to(range(2))], steps)

    async def wait() -> Any:
        return await task

    async def main() -> Any:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.05)
        stays, goes = asyncio.ensure_future(wait()), asyncio.ensure_future(wait())
        await asyncio.sleep(0.01)
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        assert not task.done()
        assert not stays.done(), "one who stopped waiting took the other with it"
        steps.allow()
        return await asyncio.wait_for(stays, LIMIT)

    assert asyncio.run(main()) == LLMStatusCode.LLM_SUCCESS
    to.slot(pattern(1, 4, 1, 64), range(2))
    to.check()


def test_cancelling_the_task_wakes_who_awaits_it(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)

    async def main() -> Any:
        steps = Steps(allowed=0)
        task = launch(near, "n", [to.to(range(2))], steps)

        async def wait() -> Any:
            return await task

        waiting = [asyncio.ensure_future(wait()) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert task.cancel()
        told = await asyncio.wait_for(asyncio.gather(*waiting), LIMIT)
        steps.allow()
        return told

    assert asyncio.run(main()) == [LLMStatusCode.LLM_FAILED] * 3


def test_two_loops_in_two_threads(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)
    steps = Steps(allowed=0)
    task = launch(near, "n", [to.to(range(2))], steps)
    told: list[Any] = []

    async def wait() -> Any:
        return await asyncio.wait_for(asyncio.gather(task, task), LIMIT)

    crew = [threading.Thread(target=lambda: told.append(asyncio.run(wait()))) for _ in range(3)]
    for thread in crew:
        thread.start()
    assert task.synchronize(50) == LLMStatusCode.LLM_TIMEOUT
    steps.allow()
    for thread in crew:
        thread.join(LIMIT)
    assert told == [[LLMStatusCode.LLM_SUCCESS] * 2] * 3


def test_a_loop_that_is_closed_while_a_task_is_awaited(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 2, seed=1)
    to = Far(far, False, "f", 1, 64, 1, seed=2)
    steps = Steps(allowed=0)
    task = launch(near, "n", [to.to(range(1))], steps)

    async def abandon() -> None:
        async def wait() -> Any:
            return await task

        asyncio.ensure_future(wait())  # noqa: RUF006
        await asyncio.sleep(0.01)

    before = near.resources()["descriptors"]
    for _ in range(5):
        asyncio.run(abandon())
    assert near.resources()["descriptors"] <= before + 1
    steps.allow()
    assert results(task) == [OK]


# -- what is left behind ---------------------------------------------------------------------------------------------


def test_two_hundred_tasks_leave_nothing_behind(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 2, 640, 6, seed=1)
    to = Far(far, False, "f", 2, 640, 3, seed=2)

    async def wait(task: Any) -> Any:
        return await task

    def some(count: int) -> None:
        for number in range(count):
            answers = {1: False} if number % 4 == 1 else {1: ValueError("x")} if number % 40 == 2 else {}
            task = launch(near, "n", [to.to(range(3), row=number % 2)], Steps(answers=answers))
            if number % 4 == 3:
                task.cancel()
            if number % 5 == 0:
                asyncio.run(wait(task))
            task.get_results(int(LIMIT * 1000))
            task.progress()
            task.errors()

    some(10)
    used = near.used()
    there = far.used()
    before, far_before = near.resources(), far.resources()
    some(200)
    task = launch(near, "n", [to.to(range(3))])
    assert results(task) == [OK]

    def settled() -> bool:
        pairs = ((near.resources(), before), (far.resources(), far_before))
        grown = [now[what] - then[what] for now, then in pairs for what in ("threads", "descriptors")]
        return max(grown) <= KEPT

    eventually(settled, what="threads and descriptors as before")
    assert near.used() == used
    assert far.used() == there
    assert near.resources()["resident"] < before["resident"] + (16 << 20)
    near.deallocate("n")
    eventually(lambda: near.used() == 0, what="the memory of the source")
    far.deallocate("f")
    eventually(lambda: far.used() == 0, what="the memory of the destination")


def test_a_hundred_random_transfers(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    chance = random.Random(11)  # noqa: S311
    for number in range(100):
        layers, rows, row_bytes = chance.randint(1, 8), chance.randint(1, 6), chance.randint(1, 9000)
        mine, host, registered = (chance.random() < 0.5 for _ in range(3))
        how = {"host": host, "registered": registered, "seed": number}
        layout = chance.choice(["slots", "blocks", "pieces"])
        near.make("n", rows, row_bytes, 2 * layers, blocks=layout == "blocks", registered=mine, seed=5000 + number)
        source = pattern(5000 + number, 2 * layers, rows, row_bytes)
        first = chance.randrange(layers)
        src = range(first, chance.randint(first + 1, layers))
        dst = chance.randint(0, 2)
        there = dst + len(src)
        if layout == "slots":
            to = Far(far, accessible, "f", rows, row_bytes + chance.randint(0, 3), there, **how)
            row, slot = chance.randrange(rows), chance.randrange(rows)
            to.slot(source, src, dst, row=row, slot=slot)
            told = send(near, "n", [to.to(src, dst, row=row, slot=slot)])
        elif layout == "blocks":
            to = Far(far, accessible, "f", rows + 2, row_bytes, there, blocks=True, model=number, **how)
            right = chance.sample(range(rows + 2), chance.randint(1, rows))
            left = [chance.randrange(rows) for _ in right]
            to.blocks(source, src, dst, list(zip(left, right)))
            told = send(near, "n", [to.to(src, dst)], src=left, dst=right)
        else:
            size = chance.randint(max(1, row_bytes // 20), max(1, row_bytes - 1))
            pieces = -(-row_bytes // size)
            to = Far(far, accessible, "f", pieces + 1, size, there, blocks=True, model=number, **how)
            right = chance.sample(range(pieces + 1), chance.randint(1, pieces))
            row = chance.randrange(rows)
            if size >= rows * row_bytes:
                continue
            to.pieces(source, src, dst, row, right)
            told = send(near, "n", [to.to(src, dst, row=row, by_id=True)], dst=right, size=size)
        assert told == [OK], (number, layout)
        to.check((number, layout))
        (near.unregister if mine else near.deallocate)("n")
        (far.unregister if registered else far.deallocate)("f")
