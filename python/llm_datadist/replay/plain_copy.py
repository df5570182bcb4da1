"""The rate of a plain copy between the pools, which the rate of pulls is compared with."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.replay.content import Words

_ROUNDS = 60
_ROUND_S, _PAUSE_S = 0.01, 0.005  # other processes interrupt most longer rounds, even with pauses between them
_WORD = 8


class PlainCopy(NamedTuple):
    """The rate of `threads` threads that copied `bytes_at_a_time` at a time: the fastest of many rounds."""

    threads: int
    bytes_at_a_time: int
    bytes_per_s: float


def measure(sources: Sequence[Words], targets: Sequence[Words], threads: int, amount: int) -> PlainCopy:
    """Copy from the tensors `sources` to `targets` for about a second. This overwrites the targets.

    Args:
        sources: a (rows, words) view of each tensor.
        targets: as many tensors.
        threads: number of threads, each of which copies its share without waiting for the others.
        amount: bytes that all threads together copy at a time, as one pull would.
    """
    pairs = [(source.reshape(-1), target.reshape(-1)) for source, target in zip(sources, targets)]
    share = max(amount // threads // _WORD, 1)

    def copy(thread: int) -> int:
        until, copied, step = time.perf_counter() + _ROUND_S, 0, thread
        while not copied or time.perf_counter() < until:
            source, target = pairs[step % len(pairs)]
            words = min(share, len(source), len(target))
            start, place = (step * share % (len(side) - words + 1) for side in (source, target))
            np.copyto(target[place : place + words], source[start : start + words])
            copied += words * _WORD
            step += threads
        return copied

    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            copied = sum(pool.map(copy, range(threads)))
            best = max(best, copied / (time.perf_counter() - start))
            time.sleep(_PAUSE_S)
    return PlainCopy(threads, share * threads * _WORD, best)
