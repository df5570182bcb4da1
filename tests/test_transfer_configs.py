"""`TransferConfig` and `TransferWithCacheKeyConfig`: constructors, setters and texts (contract §4.11, §4.12)."""

from __future__ import annotations

from typing import Any

import pytest

import llm_datadist
from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from memory import LE, TE, UINT32_MAX, UINT64_MAX, VE, Expected, raising
from mistakes import Row, check
from two_modes import config

TRANSFER_FIELDS: dict[str, tuple[list[Any], list[tuple[Any, Expected]]]] = {
    "dst_cluster_id": (
        [0, 2, UINT64_MAX],
        [*[(bad, TE) for bad in (None, "1", 1.0, True, [1])], *[(bad, VE) for bad in (-1, UINT64_MAX + 1, 2**100)]],
    ),
    "dst_addrs": (
        [[1, 2], (3, 4), [UINT64_MAX], [0], ()],
        [
            *[(bad, TE) for bad in (None, 5, "12", {1, 2}, range(2), [1, "2"], (1, 2.0), [True], [-1, "2"])],
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


def test_order_of_checks_of_a_transfer_config() -> None:
    check(
        config,
        GOOD_TRANSFER,
        [Row({field: value}, expected) for field, (_, bad) in TRANSFER_FIELDS.items() for value, expected in bad],
    )


@pytest.mark.contract("20.5", "19.transfer-config")
@pytest.mark.parametrize("field", TRANSFER_FIELDS)
def test_fields_of_a_transfer_config(field: str) -> None:
    good, bad = TRANSFER_FIELDS[field]
    made = config(*GOOD_TRANSFER.values())
    for value, expected in bad:
        with raising(expected):
            setattr(made, field, value)
        assert getattr(made, field) == GOOD_TRANSFER[field], "a refused value was kept"
    for value in good:
        assert getattr(config(**{**GOOD_TRANSFER, field: value}), field) == value
        setattr(made, field, value)
        assert getattr(made, field) == value


def test_defaults_and_text_of_a_transfer_config() -> None:
    made = config(1, [1, 2])
    assert (made.src_layer_range, made.src_batch_index, made.dst_layer_range) == (None, 0, None)
    made.dst_layer_range = "anything"  # a plain attribute
    full = config(1, [1, 2], range(1), 0)
    text = "TransferConfig(dst_cluster_id=1, dst_addrs=[1, 2], src_layer_range=range(0, 1), src_batch_index=0)"
    assert (repr(full), str(full)) == (text, text)


@pytest.mark.contract("20.5")
def test_transfer_config_with_a_cache_key() -> None:
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
