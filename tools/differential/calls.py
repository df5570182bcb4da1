"""Draws random calls for two engines. The same numbers make the same calls, as long as the results are the same.

Most calls are valid. Some have one wrong argument, name a cache that was released, or a key that nobody has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from peers import by_blocks, by_request, by_slot

if TYPE_CHECKING:
    import random

LOCAL, REMOTE = 1, 2  # the clusters of the two engines
SHAPES = [(4, 256, 2), (8, 1000, 4), (3, 4096, 1), (16, 64, 6), (6, 16 << 10, 2)]
MAX_CACHES = 8  # of one engine
WRONG_NUMBERS = [-1, 2**31, 2**33, 1 << 62]


@dataclass
class Cache:
    """What is known of a cache."""

    name: str
    owner: int
    rows: int
    row_bytes: int
    tensors: int
    blocks: bool
    host: bool
    registered: bool
    key: Any  # by which the peer names it, or None
    number: int = 0  # the cache id
    released: bool = False


class Call(NamedTuple):
    """A call of one engine: the method of `End`, and its arguments."""

    engine: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: Optional[Cache] = None  # that it makes or releases


class Calls:
    """The caches of two engines, and the next call."""

    def __init__(self, chance: random.Random, *, accessible: bool) -> None:
        self.chance = chance
        self.accessible = accessible  # whether a slot is named by cache id and index, or by a request
        # Few, so that two caches often match.
        self.shapes = chance.sample(SHAPES, 2)
        self.caches: list[Cache] = []
        self.made = 0

    def next(self) -> Call:
        """Draw a call."""
        chance = self.chance
        live = [cache for cache in self.caches if not cache.released]
        if len(live) < 4 or (chance.random() < 0.06 and len(live) < 2 * MAX_CACHES):
            return self._make()
        kinds = [self._release, self._fill, self._remove_key, self._copy_cache, self._copy_blocks, self._swap]
        kinds += [self._pull_cache, self._pull_blocks, self._push_cache, self._push_blocks]
        pushes = [8, 26] if self.accessible else [1, 1]  # pushes need caches that are accessible
        (kind,) = chance.choices(kinds, [1, 8, 1, 4, 6, 6, 10, 30, *pushes])
        return kind()

    def note(self, call: Call, result: Any) -> None:
        """Note that a call which makes or releases a cache has succeeded."""
        cache = call.cache
        if cache is None:
            return
        if call.method in ("release", "unregister", "deallocate"):
            cache.released = True
            # A few of the released ones stay, for calls that must be refused.
            gone = [known for known in self.caches if known.released]
            if len(gone) > 3:
                self.caches.remove(gone[0])
        else:
            cache.number = result
            self.caches.append(cache)

    # caches

    def _make(self) -> Call:
        chance = self.chance
        self.made += 1
        owner, blocks = chance.choice([LOCAL, REMOTE]), chance.random() < 0.6
        name, host = f"c{self.made}", chance.random() < 0.3
        key: Any = None
        if chance.random() < 0.9:
            model = chance.randrange(6)
            key = by_blocks(owner, model) if blocks else by_request(owner, chance.randrange(4), model)
        rows, row_bytes, tensors = chance.choice(self.shapes)
        registered = chance.random() < 0.3
        cache = Cache(name, owner, rows, row_bytes, tensors, blocks, host, registered, key)
        keys = [key] * (1 if blocks else chance.randrange(1, rows + 1)) if key else []
        if not blocks and keys:
            keys = [by_request(owner, 10 * chance.randrange(4) + slot, key[3]) for slot in range(len(keys))]
            cache.key = keys[0]
        given = {"host": host, "blocks": blocks, "keys": keys, "seed": self.made}
        if registered:
            given["accessible"] = chance.choice([True, True, None])
        return Call(owner, "register" if registered else "allocate", (name, rows, row_bytes, tensors), given, cache)

    def _release(self) -> Call:
        cache = self._any()
        method = "unregister" if cache.registered else "deallocate"
        return Call(cache.owner, method, (cache.name,), {}, cache)

    def _fill(self) -> Call:
        live = [cache for cache in self.caches if not cache.released]
        cache = self.chance.choice(live)
        return Call(cache.owner, "paint", (cache.name, self.chance.randrange(256)), {})

    def _remove_key(self) -> Call:
        cache = self._any()
        key = cache.key or by_request(cache.owner, 7)
        return Call(cache.owner, "recorded", ("remove_cache_key", key), {})

    # copies

    def _copy_cache(self) -> Call:
        src = self._any(blocks=False)
        dst = self._like(src, src.owner)
        args = [f"${dst.name}", f"${src.name}", self._row(dst), self._row(src)]
        args += [self._size(dst, zero=True) if self.chance.random() < 0.4 else 0, self._size(dst)]
        return self._recorded(dst.owner, "copy_cache", args)

    def _copy_blocks(self) -> Call:
        cache = self._any(blocks=True)
        pairs: dict[int, list[int]] = {}
        for _ in range(self.chance.randrange(1, 6)):
            pairs.setdefault(self._row(cache), []).append(self._row(cache))
        return self._recorded(cache.owner, "copy_blocks", [f"${cache.name}", pairs])

    def _swap(self) -> Call:
        src = self._any(blocks=True)
        dst = self._like(src, src.owner, host=not src.host)
        pairs = {self._row(src): self._row(dst) for _ in range(self.chance.randrange(1, 6))}
        return self._recorded(src.owner, "swap_blocks", [f"${src.name}", f"${dst.name}", pairs])

    # transfers

    def _pull_cache(self) -> Call:
        remote = self._any(blocks=False)
        local = self._like(remote, LOCAL + REMOTE - remote.owner)
        by_number = self.accessible != (self.chance.random() < 0.05)
        key = by_slot(remote.owner, remote.number, self._row(remote)) if by_number else self._key(remote)
        args = [key, f"${local.name}", self._row(local), self._size(local)]
        return self._recorded(local.owner, "pull_cache", args, self._layers(local))

    def _pull_blocks(self) -> Call:
        chance = self.chance
        of_slot = chance.random() < 0.15
        remote = self._any(blocks=not of_slot)
        local = self._like(remote, LOCAL + REMOTE - remote.owner, blocks=True)
        if of_slot:
            rows = self._rows(local)
            return self._recorded(local.owner, "pull_blocks", [self._key(remote), f"${local.name}", [], rows])
        src = self._rows(remote)
        dst = self._rows(local, len(src))
        more = self._layers(local)
        return self._recorded(local.owner, "pull_blocks", [self._key(remote), f"${local.name}", src, dst], more)

    def _push_cache(self) -> Call:
        remote = self._any(blocks=False)
        local = self._like(remote, LOCAL + REMOTE - remote.owner)
        key = by_slot(remote.owner, remote.number, self._row(remote))
        return self._recorded(local.owner, "push_cache", [key, f"${local.name}", self._row(local)], self._layers(local))

    def _push_blocks(self) -> Call:
        remote = self._any(blocks=True)
        local = self._like(remote, LOCAL + REMOTE - remote.owner)
        dst = self._rows(remote)
        src = self._rows(local, len(dst))
        more = self._layers(local)
        return self._recorded(local.owner, "push_blocks", [self._key(remote), f"${local.name}", src, dst], more)

    def _recorded(self, engine: int, method: str, args: list[Any], kwargs: Optional[dict[str, Any]] = None) -> Call:
        return Call(engine, "recorded", (method, *args), kwargs or {})

    # arguments

    def _any(self, blocks: Optional[bool] = None, owner: Optional[int] = None) -> Cache:
        """Choose a cache, usually one that fits."""
        fits = [c for c in self.caches if (blocks is None or c.blocks == blocks) and owner in (None, c.owner)]
        live = [cache for cache in fits if not cache.released]
        if live and self.chance.random() < 0.95:
            return self.chance.choice(live)
        of_owner = [cache for cache in self.caches if owner in (None, cache.owner)]
        return self.chance.choice(fits or of_owner or self.caches)

    def _like(self, other: Cache, owner: int, *, blocks: Optional[bool] = None, host: Optional[bool] = None) -> Cache:
        """Choose a cache of an engine that usually has the shape of another one."""
        blocks = other.blocks if blocks is None else blocks
        alike = [
            cache
            for cache in self.caches
            if (cache.owner, cache.blocks, cache.released) == (owner, blocks, False)
            and host in (None, cache.host)
            and (cache.row_bytes, cache.tensors) == (other.row_bytes, other.tensors)
        ]
        if alike and self.chance.random() < 0.92:
            return self.chance.choice(alike)
        return self._any(blocks, owner)

    def _key(self, cache: Cache) -> Any:
        if cache.key is None or self.chance.random() < 0.03:
            return by_blocks(cache.owner, 9) if cache.blocks else by_request(cache.owner, 99, 9)
        return cache.key

    def _row(self, cache: Cache) -> int:
        if self.chance.random() < 0.02:
            return self.chance.choice([cache.rows, *WRONG_NUMBERS])
        return self.chance.randrange(cache.rows)

    def _rows(self, cache: Cache, count: Optional[int] = None) -> list[int]:
        wanted = self.chance.randrange(1, cache.rows + 1) if count is None else count
        if self.chance.random() < 0.03:
            wanted += self.chance.choice([-1, 1])
        if self.chance.random() < 0.8 and wanted <= cache.rows:
            rows = self.chance.sample(range(cache.rows), max(wanted, 0))
        else:
            rows = [self.chance.randrange(cache.rows) for _ in range(wanted)]
        if rows and self.chance.random() < 0.03:
            rows[self.chance.randrange(len(rows))] = self._row(cache) if self.chance.random() < 0.5 else cache.rows
        return rows

    def _size(self, cache: Cache, *, zero: bool = False) -> int:
        row_bytes = cache.row_bytes
        if self.chance.random() < 0.04:
            return self.chance.choice([0, -2, row_bytes + 1, *WRONG_NUMBERS])
        if zero:
            return self.chance.choice([0, 1, row_bytes // 2, row_bytes - 1])
        return self.chance.choice([-1, -1, 1, row_bytes // 2, row_bytes])

    def _layers(self, cache: Cache) -> dict[str, Any]:
        if self.chance.random() < 0.8:
            return {}
        each = self.chance.choice([1, 2])
        layers = max(cache.tensors // each, 1)
        given: dict[str, Any] = {"tensor_num_per_layer": each}
        for name in self.chance.choice([["src"], ["dst"], ["src", "dst"]]):
            first = self.chance.randrange(layers)
            given[f"{name}_layer_range"] = (first, self.chance.randrange(first + 1, layers + 2))
        return given
