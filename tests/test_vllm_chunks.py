"""Which host rows hold the blocks of a job of vLLM's offloading, compared with a count block by block."""

from __future__ import annotations

import random

import pytest

from llm_datadist.integrations.vllm.chunks import host_rows


def naive(chunks: list[int], sizes: list[int], firsts: list[int], per_chunk: int) -> list[int]:
    rows, left = [], list(chunks)
    for size, first in zip(sizes, firsts):
        held: dict[int, int] = {}
        for block in range(first, first + size):
            if block // per_chunk not in held:
                held[block // per_chunk] = left.pop(0)
            rows.append(held[block // per_chunk] * per_chunk + block % per_chunk)
    assert not left
    return rows


def test_rows_follow_the_count() -> None:
    rng = random.Random(5)  # noqa: S311
    for _ in range(500):
        per_chunk = rng.randint(1, 4)
        groups = [(rng.randint(0, 9), rng.randint(0, 20)) for _ in range(rng.randint(1, 3))]
        sizes, firsts = [size for size, _ in groups], [first for _, first in groups]
        needed = sum(len({(first + step) // per_chunk for step in range(size)}) for size, first in groups)
        chunks = rng.sample(range(100), needed)
        assert host_rows(chunks, sizes, firsts, per_chunk).tolist() == naive(chunks, sizes, firsts, per_chunk)


def test_too_few_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1 chunks do not hold groups of \[3\] blocks"):
        host_rows([4], [3], [0], 2)
