"""A naive model of the engine for the property tests: it computes the result of every call in the simplest way.

Bytes are numpy copies, tables are dictionaries, and free runs of a pool are found by scanning its pages. It shares no
code with the package and does not call it; a test passes it the place of an allocation. A call that must be refused
raises `Refusal` before anything here changes. Not for: wrong Python types (see `test_bad_input.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    import numpy as np

IDLE = 2**64 - 1
INVALID = "LLM_PARAM_INVALID"
GONE = "LLM_KV_CACHE_NOT_EXIST"
FULL = "LLM_OUT_OF_MEMORY"

Identity = tuple[str, int, int]
Pairs = Sequence[tuple[int, int]]


class Refusal(Exception):  # noqa: N818
    """The call must fail with one of these status names."""

    def __init__(self, *codes: str) -> None:
        super().__init__(*codes)
        self.codes = codes


def need(holds: bool, *codes: str) -> None:
    if not holds:
        raise Refusal(*codes)


def identity(req_id: int, model_id: int = 0, prefix_id: int = IDLE) -> Optional[Identity]:
    """Return the identity under which a key is kept; None for a placeholder."""
    if prefix_id != IDLE:
        return ("prefix", prefix_id, model_id)
    return None if req_id == IDLE else ("request", req_id, model_id)


@dataclass
class Pages:
    """The pages of one pool that are in use."""

    base: int
    page: int
    taken: list[bool]

    def runs(self) -> list[int]:
        """Lengths of all free runs, in pages."""
        return [len(list(run)) for taken, run in groupby(self.taken) if not taken]

    def count(self, size: int) -> int:
        """Pages that one tensor of `size` bytes takes."""
        return -(-size // self.page)

    def fits(self, tensors: int, size: int) -> bool:
        """Whether that many equal tensors fit into the free runs."""
        return sum(run // self.count(size) for run in self.runs()) >= tensors

    def mark(self, entry: Entry, taken: bool) -> None:
        """Mark the pages of a cache as used or free. Each page must have been in the other state."""
        count = self.count(entry.size)
        for address in entry.addresses:
            first, rest = divmod(address - self.base, self.page)
            assert rest == 0, "a tensor does not start on a page of its pool"
            assert 0 <= first <= first + count <= len(self.taken), "a tensor lies outside its pool"
            assert set(self.taken[first : first + count]) == {not taken}, "two tensors share a page"
            self.taken[first : first + count] = [taken] * count

    @property
    def used_bytes(self) -> int:
        return sum(self.taken) * self.page

    @property
    def largest(self) -> int:
        """Bytes of the longest free run."""
        return max(self.runs(), default=0) * self.page


@dataclass
class Entry:
    """One cache: its geometry, its bytes, and what still holds it."""

    blocks: bool
    device: bool
    tensors: int
    rows: int
    row_bytes: int
    data: list[np.ndarray]
    addresses: list[int]
    pool: Optional[Pages] = None
    by_id: bool = True
    keys: set[Identity] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Bytes of one tensor."""
        return self.rows * self.row_bytes


class Twin:
    """A model of the engine's state, and of what each call changes."""

    def __init__(self, device: Pages, host: Pages) -> None:
        self.pools = {True: device, False: host}
        self.entries: dict[int, Entry] = {}
        self.bound: dict[Identity, int] = {}
        self.last_id = 0

    def may_allocate(
        self, device: bool, tensors: int, rows: int, row_bytes: int, keys: Sequence[Optional[Identity]]
    ) -> None:
        """Refuse what `allocate` must refuse. Memory comes before keys, as the contract orders it."""
        too_full = not self.pools[device].fits(tensors, rows * row_bytes)
        bad_keys = len(keys) > rows or any(key in self.bound for key in keys if key is not None)
        need(not (too_full and bad_keys), FULL, INVALID)
        need(not too_full, FULL)
        need(not bad_keys, INVALID)

    def allocated(self, number: int, entry: Entry, keys: Sequence[Optional[Identity]]) -> None:
        """Record the addresses of a new cache."""
        self.registered(number, entry)
        entry.pool = self.pools[entry.device]
        entry.pool.mark(entry, taken=True)
        entry.keys = {key for key in keys if key is not None}
        self.bound.update(dict.fromkeys(entry.keys, number))

    def registered(self, number: int, entry: Entry) -> None:
        """Record a registration of memory of the caller."""
        assert number > self.last_id, "a cache id was used twice"
        self.last_id = number
        self.entries[number] = entry

    def deallocate(self, number: int, handle_blocks: bool, as_blocks: bool) -> None:
        """Drop the reference by id. A blocks cache is released at once, a batch cache with its last key."""
        need(handle_blocks == as_blocks, INVALID)
        entry = self.entries.get(number)
        if entry is None or entry.pool is None:
            return
        entry.by_id = False
        if entry.blocks:
            for key in entry.keys:
                del self.bound[key]
            entry.keys.clear()
        self._release_if_unheld(number)

    def remove_key(self, key: Optional[Identity]) -> None:
        """Unbind a key; the last reference frees the cache."""
        if key in self.bound and key[0] != "blocks":
            number = self.bound.pop(key)
            self.entries[number].keys.discard(key)
            self._release_if_unheld(number)

    def unregister(self, number: int) -> None:
        if number in self.entries and self.entries[number].pool is None:
            del self.entries[number]

    def _release_if_unheld(self, number: int) -> None:
        entry = self.entries[number]
        if entry.pool is not None and not entry.by_id and not entry.keys:
            entry.pool.mark(entry, taken=False)
            del self.entries[number]

    def copy(
        self, dst: tuple[int, bool], src: tuple[int, bool], dst_row: int, src_row: int, offset: int, size: int
    ) -> None:
        """`copy_cache`; each handle is (id, whether it says it is a blocks cache)."""
        need(not src[1] and not dst[1] and (size == -1 or size > 0), INVALID)
        need(src[0] in self.entries and dst[0] in self.entries, GONE)
        source, target = self.entries[src[0]], self.entries[dst[0]]
        need(source.tensors == target.tensors, INVALID)
        need(src_row < source.rows and dst_row < target.rows, INVALID)
        need(offset == 0 or (offset < source.row_bytes and offset < target.row_bytes), INVALID)
        length = source.row_bytes - offset if size == -1 else size
        need(offset + length <= source.row_bytes and offset + length <= target.row_bytes, INVALID)
        for left, right in zip(target.data, source.data):
            left[dst_row, offset : offset + length] = right[src_row, offset : offset + length].copy()

    def copy_blocks(self, handle: tuple[int, bool], pairs: Pairs) -> None:
        """`copy_blocks`, pair after pair."""
        need(handle[1], INVALID)
        entry = self.entries.get(handle[0])
        rows = entry.rows if entry else 2**63
        bad = any(not 0 <= number < rows for pair in pairs for number in pair)
        need(entry is not None, GONE, *[INVALID] * bad)
        need(not bad, INVALID)
        for tensor in entry.data:
            for source, target in pairs:
                tensor[target] = tensor[source].copy()

    def swap(self, src: Entry, dst: Entry, gone: bool, pairs: Pairs) -> None:
        """`swap_blocks` between two caches as their handles describe them, pair after pair."""
        fit = src.blocks and dst.blocks and src.row_bytes == dst.row_bytes and src.tensors == dst.tensors
        inside = all(0 <= source < src.rows and 0 <= target < dst.rows for source, target in pairs)
        bad = not (fit and inside and src.device != dst.device)
        need(not (bad and gone), INVALID, GONE)
        need(not bad, INVALID)
        need(not gone, GONE)
        for left, right in zip(dst.data, src.data):
            for source, target in pairs:
                left[target] = right[source].copy()
