"""The acceptance checklist (python-api.md §20), line by line: `test_20_04_…` proves (part of) line 4.

Lines 1, 3 and 5 (kinds of classes, keys, configs of transfers) are here, others in `test_acceptance_*.py`; what the
tests of a subject prove anyway is only marked there. Written from the
specification alone. Not for: the rows of §19 (`test_seed_contract.py`).
"""

from __future__ import annotations

import enum
from typing import Any, Callable

import pytest

import llm_datadist
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMException,
)
from memory import (
    LE,
    TE,
    UINT32_MAX,
    UINT64_MAX,
    VE,
    Expected,
    raising,
)
from mistakes import Row, check
from two_modes import (
    config,
)

# -- 1 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.1", "19.layer-synchronizer", "19.llm-exception")
def test_20_01_kinds() -> None:
    for name in ("LLMStatusCode", "LLMRole", "Placement"):
        assert issubclass(getattr(llm_datadist, name), enum.IntEnum)
    for name in ("DataType", "RegisterMemStatus", "Memtype"):
        kind = getattr(llm_datadist, name)
        assert issubclass(kind, enum.Enum)
        assert not issubclass(kind, int)
    assert issubclass(LLMException, RuntimeError)
    kind = llm_datadist.LayerSynchronizer
    assert (kind.tensor_num_per_layer, kind.timeout_in_millis) == (2, None)
    with pytest.raises(TypeError, match="abstract"):
        llm_datadist.LayerSynchronizer()

    class Incomplete(llm_datadist.LayerSynchronizer):  # type: ignore[misc, name-defined]
        """Lacks its method."""

    with pytest.raises(TypeError, match="abstract"):
        Incomplete()


# -- 3 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.3", "19.cache-key", "19.blocks-cache-key")
@pytest.mark.parametrize(
    ("make", "expected", "text"),
    [
        (CacheKey, LE, "cluster_id is required"),
        (lambda: CacheKey(req_id=1), LE, "cluster_id is required"),
        (BlocksCacheKey, LE, "cluster_id is required"),
        (lambda: BlocksCacheKey(model_id=1), LE, "cluster_id is required"),
        (lambda: CacheKey(1), LE, "req_id is required"),
        (lambda: CacheKey(cluster_id=1), LE, "req_id is required"),
        (lambda: CacheKey(prompt_cluster_id=1, model_id=2), LE, "req_id is required"),
        (lambda: CacheKey(1, 2, wrong=3), LE, "Unsupported"),
        (lambda: CacheKey(cluster_id=1, req_id=2, wrong=None), LE, "Unsupported"),
        (lambda: BlocksCacheKey(1, wrong=3), LE, "Unsupported"),
        (lambda: BlocksCacheKey(cluster_id=1, req_id=3), LE, "Unsupported"),
        (lambda: BlocksCacheKey("1"), TE, "only support"),
        (lambda: BlocksCacheKey(cluster_id="1"), TE, "only support"),
        (lambda: BlocksCacheKey(1, "0"), TE, "only support"),
        (lambda: BlocksCacheKey(prompt_cluster_id=1, model_id=1.0), TE, "only support"),
        (lambda: CacheKey(1, 2, 3, 4, 5), LE, ""),
        (lambda: CacheKey(1, 2, 3, 4, model_id=5), LE, ""),
        (lambda: BlocksCacheKey(1, 2, 3), LE, ""),
        (lambda: CacheKey("1", 2), TE, ""),
        (lambda: CacheKey(1, None), TE, ""),
        (lambda: CacheKey(-1, 2), VE, ""),
        (lambda: CacheKey(cluster_id=-1, req_id=2), VE, ""),
        (lambda: CacheKey(1, -1), VE, ""),
        (lambda: CacheKey(1, 2, -1), VE, ""),
        (lambda: CacheKey(1, 2, 3, -1), VE, ""),
        (lambda: CacheKey(1, 2, prefix_id=UINT64_MAX + 1), VE, ""),
        (lambda: BlocksCacheKey(-1), VE, ""),
        (lambda: BlocksCacheKey(1, -1), VE, ""),
        (lambda: CacheKeyByIdAndIndex(-1, 1), VE, ""),
        (lambda: CacheKeyByIdAndIndex(1, 1, -1), VE, ""),
        (lambda: CacheKeyByIdAndIndex(1, None), TE, ""),
        # Order: arguments in all, cluster id, request, unknown names, types.
        (lambda: CacheKey(a=1, b=2, c=3, d=4, e=5), LE, ""),
        (lambda: CacheKey(wrong=1), LE, "cluster_id is required"),
        (lambda: CacheKey("x", wrong=1), LE, "req_id is required"),
        (lambda: CacheKey("x", "y", wrong=1), LE, "Unsupported"),
        (lambda: BlocksCacheKey(wrong=1), LE, "cluster_id is required"),
        (lambda: BlocksCacheKey("x", wrong=1), LE, "Unsupported"),
    ],
)
def test_20_03_keys_refused(make: Callable[[], Any], expected: Expected, text: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (judged below)
        make()
    expected.judge(caught.value)
    assert text in str(caught.value)


@pytest.mark.contract("20.3", "19.cache-key", "19.blocks-cache-key")
def test_20_03_keys_by_position_keyword_and_alias() -> None:
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
    slot = CacheKeyByIdAndIndex(1, -2)
    assert (slot.cluster_id, slot.cache_id, slot.batch_index) == (1, -2, 0)
    assert CacheKey(1, 2) != CacheKey(1, 2)


# -- 5 ---------------------------------------------------------------------------------------------------------------

TRANSFER_FIELDS: dict[str, tuple[list[Any], list[tuple[Any, Expected]]]] = {
    "dst_cluster_id": (
        [0, 2, UINT64_MAX],
        [*[(bad, TE) for bad in (None, "1", 1.0, True, [1])], *[(bad, VE) for bad in (-1, UINT64_MAX + 1, 2**100)]],
    ),
    "dst_addrs": (
        [[1, 2], (3, 4), [UINT64_MAX], [0], ()],
        [
            *[
                (bad, TE)
                for bad in (None, 5, "12", {1, 2}, range(2), {1: 2}, [1, "2"], [None], (1, 2.0), [True], [-1, "2"])
            ],
            *[(bad, VE) for bad in ([-1], [1, UINT64_MAX + 1], (1, 2**100))],
        ],
    ),
    "src_layer_range": (
        [None, range(1), range(3, 40)],
        [
            *[(bad, TE) for bad in ([0, 1], 1, "range", (0, 1), slice(0, 1))],
            *[(bad, LE) for bad in (range(0), range(4, 1), range(0, 5, 2), range(0, 1, -1), range(-1, 2), range(3, 3))],
        ],
    ),
    "src_batch_index": (
        [0, 7, UINT32_MAX],
        [*[(bad, TE) for bad in (None, "0", 0.0, True)], *[(bad, VE) for bad in (-1, 2**32, 2**100)]],
    ),
}
GOOD_TRANSFER = {"dst_cluster_id": 1, "dst_addrs": [1, 2], "src_layer_range": range(1), "src_batch_index": 0}


@pytest.mark.contract("20.5", "19.transfer-config")
@pytest.mark.parametrize("field", TRANSFER_FIELDS)
def test_20_05_transfer_config_fields(field: str) -> None:
    good, bad = TRANSFER_FIELDS[field]
    for value in good:
        made = config(**{**GOOD_TRANSFER, field: value})
        assert getattr(made, field) == value
        other = config(*GOOD_TRANSFER.values())
        setattr(other, field, value)
        assert getattr(other, field) == value
    for value, expected in bad:
        with raising(expected):
            config(**{**GOOD_TRANSFER, field: value})
        made = config(**GOOD_TRANSFER)
        with raising(expected):
            setattr(made, field, value)
        assert getattr(made, field) == GOOD_TRANSFER[field], "a refused value was kept"


@pytest.mark.contract("20.5", "19.transfer-config")
def test_20_05_transfer_config_order_defaults_and_text() -> None:
    check(
        config,
        GOOD_TRANSFER,
        [Row({field: value}, expected) for field, (_, bad) in TRANSFER_FIELDS.items() for value, expected in bad],
    )
    made = config(1, [1, 2])
    assert (made.src_layer_range, made.src_batch_index, made.dst_layer_range) == (None, 0, None)
    made.dst_layer_range = "anything"  # a plain attribute
    full = config(1, [1, 2], range(1), 0)
    text = "TransferConfig(dst_cluster_id=1, dst_addrs=[1, 2], src_layer_range=range(0, 1), src_batch_index=0)"
    assert (repr(full), str(full)) == (text, text)


@pytest.mark.contract("20.5")
def test_20_05_transfer_config_with_a_cache_key() -> None:
    make = llm_datadist.TransferWithCacheKeyConfig
    blocks, slot = BlocksCacheKey(3), CacheKeyByIdAndIndex(2, 1)
    good = {"cache_key": slot, "src_layer_range": range(2), "dst_layer_range": range(3, 5), "src_batch_index": 1}
    ranges = TRANSFER_FIELDS["src_layer_range"][1]
    rows = [
        *[Row({"cache_key": bad}, TE) for bad in (None, 5, "key", CacheKey(1, 1))],
        *[Row({"src_layer_range": bad}, expected) for bad, expected in [(None, TE), *ranges]],
        *[Row({"dst_layer_range": bad}, expected) for bad, expected in [(None, TE), *ranges]],
        Row({"dst_layer_range": range(3), "src_layer_range": range(2)}, LE),
        *[Row({"src_batch_index": bad}, expected) for bad, expected in TRANSFER_FIELDS["src_batch_index"][1]],
        Row({"cache_key": blocks, "src_batch_index": 1}, LE),
    ]
    check(make, good, rows)
    made = make(**good)
    assert (made.cache_key, made.dst_cluster_id) == (slot, 2)
    text = "src_layer_range=range(0, 2), dst_layer_range=range(3, 5), src_batch_index=1)"
    assert repr(made) == str(made) == f"TransferWithCacheKeyConfig(cache_key={slot!r}, {text}"
    for row in rows:
        ((field, bad), *others) = row.wrong.items()
        if not others and (bad is not None or field == "cache_key"):
            with raising(row.expected):
                setattr(made, field, bad)
            assert getattr(made, field) == good[field], "a refused value was kept"
    made.dst_layer_range = range(9)  # a setter knows nothing of the other
    made.src_layer_range = made.dst_layer_range = None
    assert (made.src_layer_range, made.dst_layer_range) == (None, None)
    with raising(LE):
        made.cache_key, made.src_batch_index = blocks, 1
    assert made.dst_cluster_id == 2
    made = make(blocks, range(1), range(1))
    assert made.src_batch_index == 0
    with raising(LE):
        made.src_batch_index = 2**32 - 1
    with raising(TE):
        make(blocks)
