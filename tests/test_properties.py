"""Random sequences of calls, engine against `oracle.Twin`: equal bytes, equal pools, equal refusals after each step.

Runs a short profile by default; LLM_DATADIST_THOROUGH=1 runs the long one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import Any, Callable, Optional

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import oracle
from conftest import THOROUGH, options, pool
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from memory import LE, Expected, UserTensors, at, pools, raising, same

STEPS = 120 if THOROUGH else 50
PAGE_SHIFT = 10
DEVICE_PAGES, HOST_PAGES = 56, 40
IDLE = oracle.IDLE
Draw = Callable[[Any], Any]

PLACEMENTS = st.sampled_from([Placement.DEVICE, Placement.DEVICE, Placement.HOST])
# tensors, rows, bytes of one row; few values, so that two caches often match
SHAPES = st.one_of(
    st.just((2, 4, 100)),
    st.just((1, 7, 1024)),
    st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4, 7]), st.sampled_from([100, 1024, 333])),
)
# (req_id, model_id, prefix_id)
KEYS = [(r, m, p) for r, m, p in itertools.product((1, 2, 3, IDLE), (0, 1), (IDLE, IDLE, 1))]
KEY = st.sampled_from(KEYS)
SEEDS = st.integers(0, 99)
GOOD_BLOCK = st.integers(0, 3)
ANY_BLOCK = st.one_of(st.integers(0, 6), st.integers(0, 6), st.sampled_from([-1, 7, 2**31, 2**33]))
PAIRS = st.one_of(
    *[st.lists(st.tuples(GOOD_BLOCK, GOOD_BLOCK), min_size=1, max_size=12)] * 4,
    st.lists(st.tuples(ANY_BLOCK, ANY_BLOCK), max_size=6),
)
# rows of destination and source, offset, size: first mostly valid values, then any values
WHERE = st.one_of(
    *[st.tuples(st.integers(0, 1), st.integers(0, 1), st.sampled_from([0, 1, 50]), st.sampled_from([-1, 1, 50]))] * 4,
    st.tuples(
        st.sampled_from([0, 1, 3, 7, 2**32 - 1]),
        st.sampled_from([0, 1, 3, 7, 2**32 - 1]),
        st.sampled_from([0, 99, 100, 1023, 1024, 2**63, 2**64 - 1]),
        st.sampled_from([-1, 1, 99, 100, 101, 1024, 2**63 - 1, 0, -2]),
    ),
)
MOSTLY = st.sampled_from([True] * 9 + [False])


class Meeting:
    """One engine and its model. Every method predicts the result with the model, and then makes the call."""

    def __init__(self, outcomes: Counter[tuple[str, str]], draw: Draw) -> None:
        self.outcomes = outcomes
        self.draw = draw
        self.handles: list[Cache] = []
        self.users: list[tuple[UserTensors, Cache, oracle.Entry]] = []
        self.adopted: list[UserTensors] = []
        self.dist = LLMDataDist(LLMRole.PROMPT, 1)
        self.dist.init(
            options(
                pool(DEVICE_PAGES << PAGE_SHIFT, PAGE_SHIFT),
                pool(HOST_PAGES << PAGE_SHIFT, PAGE_SHIFT),
                llm__SwapInPath=draw(st.sampled_from(["auto", "direct", "ring"])),
                llm__CopyWorkers=draw(st.sampled_from(["1", "2", "7"])),
            )
        )
        self.manager = self.dist.cache_manager

    def prepare(self) -> None:
        """Find the addresses of the pools, and allocate some caches of every kind."""
        pages = []
        for placement, count in ((Placement.DEVICE, DEVICE_PAGES), (Placement.HOST, HOST_PAGES)):
            whole = self.manager.allocate_cache(CacheDesc(1, [1, count << PAGE_SHIFT], DataType.DT_INT8, placement))
            pages.append(oracle.Pages(whole.tensor_addrs[0], 1 << PAGE_SHIFT, [False] * count))
            self.manager.deallocate_cache(whole)
        self.twin = oracle.Twin(*pages)
        self.twin.last_id = whole.cache_id
        for seed, (tensors, rows, row_bytes) in enumerate([(2, 4, 100), (1, 7, 1024), (1, 4, 100)]):
            user = UserTensors(rows, row_bytes, tensors, seed)
            entry = oracle.Entry(True, False, tensors, rows, row_bytes, user.snapshot(), user.addrs)
            self.users.append((user, user.cpu_cache(), entry))
        for placement in (Placement.DEVICE, Placement.HOST):
            self.allocate(False, placement, (2, 4, 100), [], 1)
            self.allocate(True, placement, (2, 4, 100), [], 2)
            self.allocate(True, placement, (1, 7, 1024), [], 3)

    def meet(self, name: str, predict: Callable[[], None], call: Callable[[], Any]) -> Any:
        """Predict the outcome and make the call. The outcomes must be equal."""
        try:
            predict()
        except oracle.Refusal as refusal:
            codes = tuple(LLMStatusCode[code] for code in refusal.codes)
            dual = (ValueError,) if name == "swap" and codes == LE.codes else ()
            with raising(Expected(f"LLMException{refusal.codes}", (LLMException,), codes, dual)):
                call()
            self.outcomes[name, "refused"] += 1
            return None
        result = call()
        self.outcomes[name, "done"] += 1
        return result

    def handle(self, blocks: Optional[bool] = None) -> Cache:
        """A handle: mostly of a live cache of the wanted kind, sometimes any earlier handle, also a released one."""
        living = self.twin.entries
        fit = [c for c in self.handles if c.cache_id in living and blocks in (None, c.is_blocks_cache)]
        often = self.draw(MOSTLY)
        return self.draw(st.sampled_from(fit if fit and often else self.handles))

    # -- allocation ---------------------------------------------------------------------------------------------

    def allocate_cache(self) -> None:
        keys = self.draw(st.lists(KEY, max_size=4))
        self.allocate(False, self.draw(PLACEMENTS), self.draw(SHAPES), keys, self.draw(SEEDS))

    def allocate_blocks_cache(self) -> None:
        models = self.draw(st.lists(st.integers(0, 2), max_size=1))
        self.allocate(True, self.draw(PLACEMENTS), self.draw(SHAPES), models, self.draw(SEEDS))

    def allocate(
        self, blocks: bool, placement: Placement, shape: tuple[int, int, int], keys: list[Any], seed: int
    ) -> None:
        """Allocate a cache with these keys (blocks cache: models), add it to the model, and fill it."""
        tensors, rows, row_bytes = shape
        names: list[Optional[oracle.Identity]]
        if blocks:
            names = [("blocks", 0, model) for model in keys]
            made_of = CacheDesc(tensors, (rows, row_bytes), DataType.DT_INT8, placement)
            key = BlocksCacheKey(9, keys[0]) if keys else None
            name, call = "allocate_blocks_cache", lambda: self.manager.allocate_blocks_cache(made_of, key)
        else:
            names = [oracle.identity(*key) for key in keys]
            made_of = CacheDesc(tensors, [rows, row_bytes], DataType.DT_UINT8, placement)
            made = [CacheKey(1, req_id=req_id, model_id=model, prefix_id=prefix) for req_id, model, prefix in keys]
            name, call = "allocate_cache", lambda: self.manager.allocate_cache(made_of, made)
        device = placement is Placement.DEVICE
        cache = self.meet(name, lambda: self.twin.may_allocate(device, tensors, rows, row_bytes, names), call)
        self.adopt(cache, names, seed)

    def adopt(self, cache: Optional[Cache], names: list[Optional[oracle.Identity]], seed: int) -> None:
        """Add a new cache to the model, and fill both with one pattern."""
        if cache is None:
            return
        made_of = cache.cache_desc
        (rows, row_bytes), tensors = made_of.shape, made_of.num_tensors
        generator = np.random.default_rng(seed)
        patterns = [generator.integers(0, 256, (rows, row_bytes), dtype=np.uint8) for _ in range(tensors)]
        addresses = list(cache.tensor_addrs)
        assert len(addresses) == tensors
        device = made_of.placement is Placement.DEVICE
        entry = oracle.Entry(cache.is_blocks_cache, device, tensors, rows, row_bytes, patterns, addresses)
        self.twin.allocated(cache.cache_id, entry, names)
        for address, pattern in zip(addresses, patterns):
            at(address, rows * row_bytes)[:] = pattern.reshape(-1)
        self.handles.append(cache)

    def register(self) -> None:
        tensors, rows, row_bytes = self.draw(SHAPES)
        blocks = self.draw(st.booleans())
        user = UserTensors(rows, row_bytes, tensors, self.draw(SEEDS))
        self.adopted.append(user)
        register = self.manager.register_blocks_cache if blocks else self.manager.register_cache
        cache = register(user.describe(Placement.DEVICE), user.addrs)
        entry = oracle.Entry(blocks, True, tensors, rows, row_bytes, user.snapshot(), user.addrs)
        self.twin.registered(cache.cache_id, entry)
        self.handles.append(cache)

    def unregister(self) -> None:
        registered = [number for number, entry in self.twin.entries.items() if entry.pool is None]
        number = self.draw(st.sampled_from([*registered, -1, 0, 10**6]))
        self.meet("unregister", lambda: self.twin.unregister(number), lambda: self.manager.unregister_cache(number))

    def deallocate(self) -> None:
        cache = self.handle()
        kind = cache.is_blocks_cache == self.draw(MOSTLY)
        release = self.manager.deallocate_blocks_cache if kind else self.manager.deallocate_cache
        self.meet(
            "deallocate",
            lambda: self.twin.deallocate(cache.cache_id, cache.is_blocks_cache, kind),
            lambda: release(cache),
        )

    def remove_cache_key(self) -> None:
        key = self.draw(KEY)
        self.meet(
            "remove_cache_key",
            lambda: self.twin.remove_key(oracle.identity(*key)),
            lambda: self.manager.remove_cache_key(CacheKey(self.draw(SEEDS), key[0], key[1], key[2])),
        )

    # -- moving bytes -------------------------------------------------------------------------------------------

    def copy_cache(self) -> None:
        dst = self.handle(blocks=False)
        alike = [c for c in self.handles if c.cache_desc.num_tensors == dst.cache_desc.num_tensors]
        src = self.draw(st.sampled_from([c for c in alike if not c.is_blocks_cache] or alike))
        src = src if self.draw(MOSTLY) else self.handle()
        where = self.draw(WHERE)
        self.meet(
            "copy_cache",
            lambda: self.twin.copy((dst.cache_id, dst.is_blocks_cache), (src.cache_id, src.is_blocks_cache), *where),
            lambda: self.manager.copy_cache(dst, src, *where),
        )

    def copy_blocks(self) -> None:
        cache, pairs = self.handle(blocks=True), self.draw(PAIRS)
        if not pairs and cache.cache_id not in self.twin.entries:
            return
        mapping: dict[int, list[int]] = {}
        for source, target in pairs:
            mapping.setdefault(source, []).append(target)
        pairs = [(source, target) for source, targets in mapping.items() for target in targets]
        self.meet(
            "copy_blocks",
            lambda: self.twin.copy_blocks((cache.cache_id, cache.is_blocks_cache), pairs),
            lambda: self.manager.copy_blocks(cache, mapping),
        )

    def swap(self) -> None:
        """Swap blocks between any two handles, mostly matching ones."""
        mine = self.draw(st.sampled_from([self.handle(blocks=True), *(cpu for _, cpu, _ in self.users)]))
        everyone = [*self.handles, *(cpu for _, cpu, _ in self.users)]
        fit = [cache for cache in everyone if self.fits(mine, cache)]
        often = self.draw(MOSTLY)
        other = self.draw(st.sampled_from(fit if fit and often else everyone))
        src, dst = (mine, other) if self.draw(st.booleans()) else (other, mine)
        pairs = self.draw(PAIRS)
        (source, source_gone), (target, target_gone) = self.entry_of(src), self.entry_of(dst)
        if not pairs and (source_gone or target_gone):
            return
        mapping = dict(pairs)
        pairs = list(mapping.items())
        self.meet(
            "swap",
            lambda: self.twin.swap(source, target, source_gone or target_gone, pairs),
            lambda: self.manager.swap_blocks(src, dst, mapping),
        )

    def fits(self, mine: Cache, other: Cache) -> bool:
        """Whether a swap between the two is possible."""
        left, right = mine.cache_desc, other.cache_desc
        alike = (left.num_tensors, left.shape[1]) == (right.num_tensors, right.shape[1])
        living = other.cache_id == -1 or other.cache_id in self.twin.entries
        return alike and living and other.is_blocks_cache and left.placement is not right.placement

    def entry_of(self, cache: Cache) -> tuple[oracle.Entry, bool]:
        """The cache of the model that a handle describes, and whether the engine has released it."""
        for _, cpu, entry in self.users:
            if cpu is cache:
                return entry, False
        if cache.cache_id in self.twin.entries:
            return self.twin.entries[cache.cache_id], False
        made_of = cache.cache_desc
        rows, row_bytes = made_of.shape
        device = made_of.placement is Placement.DEVICE
        return oracle.Entry(cache.is_blocks_cache, device, made_of.num_tensors, rows, row_bytes, [], []), True

    # -- after every step ---------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Check that bytes, pools and live ids of the engine and of the model are equal."""
        for number, entry in self.twin.entries.items():
            for address, expected in zip(entry.addresses, entry.data):
                assert np.array_equal(at(address, entry.size), expected.reshape(-1)), f"bytes of cache {number}"
        for user, _, entry in self.users:
            assert same(user.arrays, entry.data), "bytes of user memory"
        for name, facts in pools(self.manager).items():
            pages = self.twin.pools[name == "device"]
            assert facts["used_bytes"] == pages.used_bytes
            assert facts["free_bytes"] == (len(pages.taken) << PAGE_SHIFT) - pages.used_bytes
            assert facts["largest_free_run_bytes"] == pages.largest
            assert facts["peak_used_bytes"] >= facts["used_bytes"]
        for cache in self.handles:
            assert self.lives(cache) == (cache.cache_id in self.twin.entries), f"cache {cache.cache_id}"

    def lives(self, cache: Cache) -> bool:
        """Whether the engine has a cache with this id. Tested by a copy that changes nothing."""
        with contextlib.suppress(LLMException):
            if cache.is_blocks_cache:
                self.manager.copy_blocks(cache, {0: [0]})
            else:
                self.manager.copy_cache(cache, cache, 0, 0, 0, 1)
            return True
        return False


RULES: list[tuple[int, Callable[[Meeting], None]]] = [
    (3, Meeting.allocate_cache),
    (2, Meeting.allocate_blocks_cache),
    (5, Meeting.deallocate),
    (3, Meeting.remove_cache_key),
    (1, Meeting.register),
    (1, Meeting.unregister),
    (6, Meeting.copy_cache),
    (6, Meeting.copy_blocks),
    (8, Meeting.swap),
]
RULE = st.sampled_from([rule for weight, rule in RULES for _ in range(weight)])
MOVES = ("copy_cache", "copy_blocks", "swap")
HOLDS = ("allocate_cache", "allocate_blocks_cache", "deallocate", "remove_cache_key")


@pytest.mark.contract(
    "19.bound-key", "19.copy-blocks", "19.copy-cache", "19.copy-cache-range", "19.double-reference", "19.key-per-slot"
)
def test_engine_meets_twin() -> None:
    outcomes: Counter[tuple[str, str]] = Counter()

    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        meeting = Meeting(outcomes, data.draw)
        try:
            meeting.prepare()
            for _ in range(STEPS):
                rule = data.draw(RULE)
                note(rule.__name__)
                rule(meeting)
                meeting.compare()
        finally:
            meeting.dist.finalize()

    run()
    for call in (*MOVES, *HOLDS):
        assert outcomes[call, "done"] >= 20, dict(outcomes)
    for call in (*MOVES, "allocate_cache", "deallocate"):
        assert outcomes[call, "refused"] >= 5, dict(outcomes)
