"""Registering caller-owned memory: `register_cache`, `register_blocks_cache`, `unregister_cache`."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import options
from llm_datadist import CacheKey, Placement
from memory import GONE, LE, UserTensors, desc, raising, refused, used


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("remote", [None, True, False])
def test_registered_cache(manager: Any, placement: Placement, blocks: bool, remote: bool | None) -> None:
    user = UserTensors(4, 100, 3)
    made_of = user.describe(placement)
    register = manager.register_blocks_cache if blocks else manager.register_cache
    cache = register(made_of, user.addrs, remote_accessible=remote)
    assert cache.cache_id == 1
    assert cache.tensor_addrs == user.addrs
    assert cache.cache_desc is made_of
    assert cache.is_blocks_cache is blocks
    assert used(manager) == {"device": 0, "host": 0}
    for number in (cache.cache_id, cache.cache_id, 2**63 - 1, -(2**63)):
        assert manager.unregister_cache(number) is None
    with raising(GONE):
        _ = manager.copy_blocks(cache, {0: [1]}) if blocks else manager.copy_cache(cache, cache, 1, 0)


def test_keys_of_registered_caches_stay_until_unregistering(manager: Any) -> None:
    user = UserTensors(2)
    keys = [CacheKey(1, number) for number in range(5)]  # more than there are slots
    cache = manager.register_cache(user.describe(Placement.DEVICE), user.addrs, keys)
    for _ in range(2):
        with refused(manager, LE, users=[user]):
            manager.allocate_cache(desc(), [keys[1]])
        manager.remove_cache_key(keys[1])
    again = manager.register_cache(user.describe(Placement.DEVICE), user.addrs, tuple(keys))
    manager.copy_cache(again, again, 1, 0)
    manager.unregister_cache(again.cache_id)
    manager.unregister_cache(cache.cache_id)
    manager.allocate_cache(desc(), [keys[1]])


def test_registering_needs_no_pool_and_no_page_alignment(start: Any) -> None:
    manager = start(options(None, None)).cache_manager
    user = UserTensors(3, 101, 2)
    inner = [address + 1 for address in user.addrs]
    cache = manager.register_blocks_cache(desc(3, 99, 2), inner)
    before = user.snapshot()
    manager.copy_blocks(cache, {0: [2]})
    for tensor, was in zip(user.arrays, before):
        flat, old = tensor.reshape(-1), was.reshape(-1)
        old[1 + 2 * 99 : 1 + 3 * 99] = old[1 : 1 + 99].copy()
        assert (flat == old).all()
