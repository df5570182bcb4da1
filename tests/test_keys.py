"""`CacheKey` and `BlocksCacheKey`: positions, keywords, aliases, and what a key lacks."""

from __future__ import annotations

from typing import Any, Callable

import pytest

from llm_datadist import BlocksCacheKey, CacheKey
from memory import LE, UINT64_MAX
from mistakes import fails


@pytest.mark.contract("20.3", "19.cache-key", "19.blocks-cache-key")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (CacheKey, "cluster_id is required"),
        (BlocksCacheKey, "cluster_id is required"),
        (lambda: CacheKey(1), "req_id is required"),
        (
            lambda: CacheKey(1, request_id=5),
            "req_id is required (got ['request_id']; the keywords are cluster_id, req_id, model_id, prefix_id)",
        ),
        (
            lambda: BlocksCacheKey(cluster=1),
            "cluster_id is required (got ['cluster']; the keywords are cluster_id, model_id)",
        ),
        (
            lambda: CacheKey(1, 2, modell_id=5),
            "Unsupported arguments: ['modell_id']; the keywords are cluster_id, req_id, model_id, prefix_id",
        ),
        (lambda: CacheKey(prompt_cluster_id=1, model_id=2), "req_id is required"),
        (lambda: CacheKey(cluster_id=1, req_id=2, wrong=None), "Unsupported"),
        (lambda: BlocksCacheKey(cluster_id=1, req_id=3), "Unsupported"),
        (lambda: CacheKey(1, 2, 3, 4, model_id=5), ""),
        (lambda: BlocksCacheKey(1, 2, 3), ""),
        # Order: arguments in all, cluster id, request, unknown names, types.
        (lambda: CacheKey(a=1, b=2, c=3, d=4, e=5), ""),
        (lambda: CacheKey(wrong=1), "cluster_id is required"),
        (lambda: CacheKey("x", wrong=1), "req_id is required"),
        (lambda: CacheKey("x", "y", wrong=1), "Unsupported"),
        (lambda: BlocksCacheKey(wrong=1), "cluster_id is required"),
        (lambda: BlocksCacheKey("x", wrong=1), "Unsupported"),
    ],
)
def test_a_key_says_what_it_lacks(make: Callable[[], Any], text: str) -> None:
    fails(make, LE, text)


@pytest.mark.contract("20.3", "19.cache-key", "19.blocks-cache-key")
def test_keys_by_position_keyword_and_alias() -> None:
    for key in (
        CacheKey(1, 2, 3, 4),
        CacheKey(cluster_id=1, req_id=2, model_id=3, prefix_id=4),
        CacheKey(prompt_cluster_id=1, req_id=2, model_id=3, prefix_id=4),
        CacheKey(1, 2, prefix_id=4, model_id=3),
    ):
        assert (key.cluster_id, key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 1, 2, 3, 4)
        assert repr(key) == "CacheKey(cluster_id=1, req_id=2, prefix_id=4, model_id=3)"
    short = CacheKey(1, req_id=UINT64_MAX)
    assert (short.model_id, short.prefix_id) == (0, UINT64_MAX)
    for blocks in (BlocksCacheKey(1, 2), BlocksCacheKey(cluster_id=1, model_id=2), BlocksCacheKey(1, model_id=2)):
        assert (blocks.cluster_id, blocks.prompt_cluster_id, blocks.model_id) == (1, 1, 2)
        assert repr(blocks) == "BlocksCacheKey(cluster_id=1, model_id=2)"
    other = BlocksCacheKey(prompt_cluster_id=3, model_id=1)
    assert (other.cluster_id, other.prompt_cluster_id) == (3, 3)
    assert repr(other) == "BlocksCacheKey(prompt_cluster_id=3, model_id=1)"
    assert BlocksCacheKey(UINT64_MAX).model_id == 0
    assert BlocksCacheKey(5, cluster_id=6).cluster_id == 5
    assert BlocksCacheKey(cluster_id=7, prompt_cluster_id=8).cluster_id == 7
