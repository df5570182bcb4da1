"""Pulls and pushes between caches with different KV layouts, compared with an independent model (`kv_model`).

Not for: the plans of every pair of layouts (the core's tests `kv_layouts` compare them with a naive one).
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any, Callable

import pytest

from ids import short
from kv_model import HEADS, LAYERS, blank, latent, layout, owner, put, rank, reader, sequence
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    GroupPart,
    LayerDestination,
    LLMException,
    Placement,
    TransferWithCacheKeyConfig,
)
from llm_datadist.events import Transfer
from llm_datadist.kv_layout import KvLayout
from peers import GONE, INVALID, LIMIT, OK, End, Ends, Peer, by_blocks, by_request, equal, kv_options, linked, options
from peers.values import cache_key as key
from peers.values import code, outcome

LIMIT_MS = int(LIMIT * 1000)
TOKENS = 40
FAR = key(by_blocks(2))


def blocks_for(of: KvLayout, tokens: int = TOKENS) -> list[int]:
    """Blocks of a sequence, in no order."""
    count = -(-tokens // of.tokens_per_block)
    return [(5 * index + 3) % (count if count % 5 else count + 1) for index in range(count)]


def handle(end: End, name: str) -> Any:
    return end.held[name].handle


CONVERSIONS = {
    "order": (layout(), layout(order="HND")),
    "a third, order, blocks": (layout(8, order="HND"), layout(20, (3, 6))),
    "one layer, some heads": (layout(16), layout(24, (2, 5), layers=(2, 3), order="HND")),
    "latent, some layers": (latent(16), latent(24, layers=range(2))),
    "single, half the heads": (layout(16, rank(0, 2), kv="single"), layout(16, (2, 4), kv="single")),
    "k then v to separate, some heads": (layout(16, kv="k_then_v", order="HND"), layout(24, (0, 4))),
}


@pytest.mark.parametrize("case", CONVERSIONS)
@pytest.mark.parametrize("verify", ["off", "full"])
def test_pulls(served: tuple[End, Peer], case: str, verify: str) -> None:
    """A pull has the bytes of the model."""
    near, far = served
    src, dst = CONVERSIONS[case]
    whole = sequence(TOKENS, 1, heads=src.total_kv_heads, planes=1 if src.kv in ("latent", "single") else 2)
    from_blocks, to_blocks = blocks_for(src), blocks_for(dst)
    owner(far, "f", src, from_blocks, whole, keys=[by_blocks(0)])
    expected = reader(near, "n", dst, max(to_blocks) + 2)
    tokens = {"src_tokens": range(TOKENS), "verify": verify}
    near.manager.pull_blocks(FAR, handle(near, "n"), from_blocks, to_blocks, **tokens)
    assert equal(near.read("n"), put(expected, dst, to_blocks, whole))
    compared = near.stats()["verify"]
    assert (compared["blocks"] > 0, compared["mismatches"]) == (verify == "full", 0)


@pytest.mark.parametrize("case", CONVERSIONS)
def test_pushes(one_sided: tuple[End, Peer], case: str) -> None:
    """A push converts the layers and heads that both caches hold."""
    near, far = one_sided
    src, dst = CONVERSIONS[case]
    whole = sequence(TOKENS, 2, planes=1 if src.kv in ("latent", "single") else 2, heads=src.total_kv_heads)
    from_blocks, to_blocks = blocks_for(src), blocks_for(dst)
    owner(near, "n", src, from_blocks, whole)
    expected = reader(far, "f", dst, max(to_blocks) + 2, keys=[by_blocks(0)])
    tokens = {"src_tokens": (0, TOKENS), "verify": "full"}
    near.manager.push_blocks(FAR, handle(near, "n"), from_blocks, to_blocks, **tokens)
    assert equal(far.read("f"), put(expected, dst, to_blocks, whole))


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({}, (0, 0, 64)),
        ({"src_tokens": range(5, 38)}, (5, 0, 33)),
        ({"dst_tokens": (7, 8)}, (0, 7, 1)),
        ({"src_tokens": [3, 63], "dst_tokens": range(12, 72)}, (3, 12, 60)),
        ({"src_tokens": None, "dst_tokens": range(24, 48)}, (0, 24, 24)),
    ],
    ids=short,
)
def test_ranges_of_tokens(served: tuple[End, Peer], given: dict[str, Any], moved: tuple[int, int, int]) -> None:
    """Ranges need not start or end with a block."""
    near, far = served
    src, dst, whole = layout(16), layout(24, (2, 6), order="HND"), sequence(64, 3)
    owner(far, "f", src, [4, 0, 2, 3], whole, keys=[by_blocks(0)])
    expected = reader(near, "n", dst, 6)
    started = near.manager.pull_blocks_async(FAR, handle(near, "n"), [4, 0, 2, 3], [1, 5, 3], **given)
    assert started.result(LIMIT_MS) is None
    assert equal(near.read("n"), put(expected, dst, [1, 5, 3], whole, *moved))
    assert started.bytes == moved[2] * 4 * LAYERS * 2 * 4 * 2


def test_ranges_of_tokens_in_equal_layouts(served: tuple[End, Peer]) -> None:
    near, far = served
    same, whole = layout(16), sequence(48, 4)
    owner(far, "f", same, [2, 0, 1], whole, keys=[by_blocks(0)])
    expected = reader(near, "n", same, 4)
    near.manager.pull_blocks(FAR, handle(near, "n"), [2, 0, 1], [3, 1], src_tokens=(10, 30), dst_tokens=(11, 31))
    assert equal(near.read("n"), put(expected, same, [3, 1], whole, 10, 11, 20))


def ranks(ends: Ends, count: int, **given: Any) -> tuple[End, list[Peer]]:
    """This process, linked to `count` peers with the clusters 2, 3, …"""
    far = [ends.peer(options(**given), cluster=2 + index) for index in range(count)]
    near = ends.near(options(**given))
    linked(near, *far)
    return near, far


def test_pipeline_and_tensor_parallel_owners(ends: Ends, transport: str) -> None:
    """Owners of other layers and heads, with other blocks and orders, fill one cache."""
    near, far = ranks(ends, 3, llm__LinkTransport=transport)
    whole = sequence(48, 7)
    parts = [
        layout(16, layers=range(1)),
        layout(24, rank(0, 2), layers=range(1, 3), order="HND"),
        layout(48, rank(1, 2), layers=range(1, 3)),
    ]
    lists = [[2, 1, 0], [1, 2], [3]]
    for peer, of, blocks in zip(far, parts, lists):
        owner(peer, "f", of, blocks, whole, keys=[by_blocks(0)])
    all_of, keys = layout(12), [key(by_blocks(2 + index)) for index in range(3)]
    expected = reader(near, "n", all_of, 5)
    started = near.manager.pull_blocks_async(keys, handle(near, "n"), lists, [4, 2, 0, 1], timeout_ms=LIMIT_MS)
    assert isinstance(started, Transfer)
    assert started.result(LIMIT_MS) is None
    assert equal(near.read("n"), put(expected, all_of, [4, 2, 0, 1], whole))
    assert len(near.dist.poll()) == 0, "result() has taken the event"


def test_owners_whose_caches_were_replaced(ends: Ends, transport: str) -> None:
    """What an earlier pull learnt about a cache is not used for another one under the same key."""
    near, far = ranks(ends, 2, llm__LinkTransport=transport)
    whole, keys = sequence(TOKENS, 9), [key(by_blocks(2)), key(by_blocks(3))]
    forms = [layout(16, rank(index, 2)) for index in range(2)]
    lists = [blocks_for(of) for of in forms]
    for peer, of, blocks in zip(far, forms, lists):
        owner(peer, "f", of, blocks, whole, keys=[by_blocks(0)])
    target = layout(12)
    expected, to = reader(near, "n", target, 6), blocks_for(target)
    tokens = {"src_tokens": range(TOKENS)}
    near.manager.pull_blocks(keys, handle(near, "n"), lists, to, **tokens)
    assert equal(near.read("n"), put(expected, target, to, whole))
    # Owner 0 has more blocks now, in another order, and other heads: those of owner 1. Owner 1 has those of owner 0.
    for peer, of in zip(far, [layout(4, rank(1, 2), order="HND"), layout(16, rank(0, 2))]):
        peer.deallocate("f")
        owner(peer, "f", of, list(reversed(range(10))), sequence(TOKENS, 10), keys=[by_blocks(0)])
    lists = [list(reversed(range(10))), [9, 8, 7]]
    near.manager.pull_blocks(keys, handle(near, "n"), lists, to, **tokens)
    assert equal(near.read("n"), put(expected, target, to, sequence(TOKENS, 10)))


def test_owners_with_different_numbers_of_tokens(ends: Ends, transport: str) -> None:
    """Without a range of tokens, some heads would have fewer tokens than others."""
    near, far = ranks(ends, 2, llm__LinkTransport=transport)
    whole = sequence(32, 24)
    for index, peer in enumerate(far):
        owner(peer, "f", layout(16, rank(index, 2)), [0, 1], whole, keys=[by_blocks(0)])
    of, keys = layout(32), [key(by_blocks(2)), key(by_blocks(3))]
    before = reader(near, "n", of, 2)
    pull = near.manager.pull_blocks
    status, said = outcome(lambda: pull(keys, handle(near, "n"), [[0, 1], [0]], [1]))
    assert (status, "32 and 16" in said, "part=1" in said) == (INVALID, True, True), said
    assert equal(near.read("n"), before), "nothing has moved"
    pull(keys, handle(near, "n"), [[0, 1], [0]], [1], src_tokens=range(16))
    assert equal(near.read("n"), put(before, of, [1], whole, count=16))


@pytest.mark.parametrize("pushed", [False, True])
def test_copies_of_the_same_heads_need_lists_of_the_same_tokens(ends: Ends, transport: str, pushed: bool) -> None:
    """Whichever of the owners is read, the other list does not decide silently how many tokens move."""
    near, far = ranks(ends, 2, accessible=True, llm__LinkTransport=transport)
    for peer in far:
        owner(peer, "f", layout(16), [0, 1], sequence(32, 31), keys=[by_blocks(0)])
    of, keys = layout(16), [key(by_blocks(2)), key(by_blocks(3))]
    before, theirs = reader(near, "n", of, 2), far[0].read("f")
    for lists in ([[0, 1], [0]], [[0], [0, 1]]):
        call = near.manager.push_blocks if pushed else near.manager.pull_blocks
        given = ([0, 1], lists) if pushed else (lists, [0, 1])
        status, said = outcome(partial(call, keys, handle(near, "n"), *given))
        assert (status, "tokens" in said, "part=" in said) == (INVALID, True, True), said
        assert equal(near.read("n"), before), "nothing has moved"
        assert all(equal(peer.read("f"), theirs) for peer in far), "nothing has moved"


def test_a_push_skips_owners_without_a_common_head(ends: Ends, transport: str) -> None:
    """As a pull does. A push of which no owner gets anything is refused, as is one that does not fit an owner."""
    near, far = ranks(ends, 3, accessible=True, llm__LinkTransport=transport)
    whole = sequence(32, 32)
    src = layout(16, (0, 4), layers=range(2))
    owner(near, "n", src, [1, 0], whole)
    forms = [layout(16, (2, 6)), layout(16, (4, 8)), layout(16, layers=range(2, 3))]
    expected = [reader(peer, "f", of, 4, keys=[by_blocks(0)]) for peer, of in zip(far, forms)]
    keys, lists = [key(by_blocks(2 + index)) for index in range(3)], [[3, 1], [0, 1], [0, 1]]
    push = near.manager.push_blocks
    status, said = outcome(lambda: push(keys[1:], handle(near, "n"), [1, 0], lists[1:]))
    assert (status, "no key-value head in common" in said, "part=0" in said) == (INVALID, True, True), said
    # The last owner has fewer blocks than the push names, so no owner is written.
    status, said = outcome(lambda: push(keys, handle(near, "n"), [1, 0], [*lists[:2], [0, 4]]))
    assert (status, "dst_blocks[1]=4" in said, "part=2" in said) == (INVALID, True, True), said
    assert all(equal(peer.read("f"), before) for peer, before in zip(far, expected)), "nothing has moved"
    push(keys, handle(near, "n"), [1, 0], lists, verify="full")
    put(expected[0], forms[0], [3, 1], whole)
    for at, tensor in enumerate(expected[0]):  # heads 2 and 3 of layers 0 and 1 are in both caches
        tensor.reshape(4, 16, 4, -1)[:, :, 2 if at < 4 else 0 :] = 0x55
    assert all(equal(peer.read("f"), before) for peer, before in zip(far, expected))


def test_a_push_to_several_owners(ends: Ends, transport: str) -> None:
    near, far = ranks(ends, 3, accessible=True, llm__LinkTransport=transport)
    whole, src = sequence(TOKENS, 9), layout(16)
    owner(near, "n", src, [3, 0, 2], whole)
    layouts = [layout(8, rank(index, 3), order=order) for index, order in enumerate(("NHD", "HND", "NHD"))]
    lists = [[index + block for block in (4, 2, 0, 1, 3)] for index in range(3)]
    keys = [key(by_blocks(2 + index)) for index in range(3)]
    expected = [reader(peer, "f", of, 8, keys=[by_blocks(0)]) for peer, of in zip(far, layouts)]
    near.manager.push_blocks(keys, handle(near, "n"), [3, 0, 2], lists, verify="full")
    for peer, of, blocks, before in zip(far, layouts, lists, expected):
        assert equal(peer.read("f"), put(before, of, blocks, whole)), of
        peer.paint("f", 0x55)
    started = near.manager.push_blocks_async(keys[:2], handle(near, "n"), [3, 0, 2], lists[:2], dst_tokens=(3, 20))
    assert started.result(LIMIT_MS) is None
    for peer, of, blocks in zip(far[:2], layouts, lists):
        assert equal(peer.read("f"), put(blank(of, 8, 0x55), of, blocks, whole, 0, 3, 17)), of
    assert equal(far[2].read("f"), blank(layouts[2], 8, 0x55))


def test_groups(one_sided: tuple[End, Peer]) -> None:
    """Parts of a group convert, and may name tokens."""
    near, far = one_sided
    full, window = sequence(48, 10), sequence(32, 11)
    owner(far, "full", layout(16), [2, 0, 1], full, keys=[by_blocks(0, 0)])
    owner(far, "window", layout(32, order="HND"), [0], window, keys=[by_blocks(0, 1)])
    here = [layout(24), layout(8, rank(1, 2))]
    expected = [reader(near, name, of, 5) for name, of in zip(("full", "window"), here)]
    token = far.grant("window", [0])
    part = GroupPart(
        key(by_blocks(2, 1)),
        handle(near, "window"),
        [0],
        [4, 0],
        grant=token,
        src_tokens=range(17, 32),
        dst_tokens=(1, 16),
    )
    assert "src_tokens=range(17, 32)" in repr(part)
    assert token.hex() not in repr(part)
    assert str(token) not in repr(part)
    parts = [(key(by_blocks(2, 0)), handle(near, "full"), [2, 0, 1], [1, 3]), part]
    near.manager.pull_group(parts, verify="full", grants_done=True)
    put(expected[0], here[0], [1, 3], full)
    put(expected[1], here[1], [4, 0], window, 17, 1, 15)
    assert equal(near.read("full"), expected[0])
    assert equal(near.read("window"), expected[1])
    assert far.grant_ended(token) == "done"

    before = blank(layout(16), 4, 0x55), blank(layout(32, order="HND"), 2, 0x55)
    for name in ("full", "window"):
        far.paint(name, 0x55)
    part = GroupPart(part.key, part.cache, [4, 0], [0], src_tokens=(1, 16), dst_tokens=(17, 32))
    back = (parts[0][0], parts[0][1], [1, 3], [2, 0, 1])  # type: ignore[index]
    assert near.manager.push_group_async([back, part]).result(LIMIT_MS) is None
    assert equal(far.read("full"), put(before[0], layout(16), [2, 0, 1], full))
    put(before[1], layout(32, order="HND"), [0], window, 17, 17, 15)
    for tensor in before[1]:  # the push has no values of the other heads
        tensor.reshape(2, HEADS, -1)[:, : HEADS // 2] = 0x55
    assert equal(far.read("window"), before[1])


def test_grants_of_several_owners(ends: Ends, transport: str) -> None:
    near, far = ranks(ends, 2, llm__LinkTransport=transport)
    whole = sequence(16, 12)
    for index, peer in enumerate(far):
        owner(peer, "f", layout(16, rank(index, 2)), [0], whole, keys=[by_blocks(0)])
    of, keys = layout(16), [key(by_blocks(2)), key(by_blocks(3))]
    expected = put(reader(near, "n", of, 2), of, [1], whole)
    token = far[0].grant("f", [0])
    pull: Callable[..., None] = near.manager.pull_blocks
    pull(keys, handle(near, "n"), [[0], [0]], [1], grant=[token, None])
    assert far[0].grant_ended(token) is None
    pull(keys, handle(near, "n"), [[0], [0]], [1], grant=(token, None), grant_done=True)
    assert equal(near.read("n"), expected)
    assert far[0].grant_ended(token) == "done"
    assert code(pull, keys, handle(near, "n"), [[0], [0]], [1], grant=[token, None]) == "LLM_GRANT_ENDED"
    assert code(pull, keys, handle(near, "n"), [[0], [0]], [1], grant=[token]) == INVALID
    assert code(pull, keys, handle(near, "n"), [[0], [0]], [1], grant_done=True) == INVALID
    with pytest.raises(TypeError, match="grant"):
        pull(keys, handle(near, "n"), [[0], [0]], [1], grant=token)


def test_keys_of_slots(ends: Ends, transport: str) -> None:
    """A pull uses a key up if it moves all layers and heads of the source, and all owners only after the last part."""
    near, far = ranks(ends, 2, llm__LinkTransport=transport)
    whole = sequence(48, 13)
    for index, peer in enumerate(far):
        of = layout(48, rank(index, 2), order="HND")
        owner(peer, "f", of, [0], whole, slots=True, keys=[by_request(0, 7)])
    keys = [key(by_request(2, 7)), key(by_request(3, 7))]
    part, all_of = layout(16, (1, 5)), layout(16)
    expected = put(reader(near, "part", part, 4), part, [2, 0, 1], whole)
    pull = near.manager.pull_blocks
    for _ in range(2):
        near.paint("part", 0x55)
        pull(keys, handle(near, "part"), [[], []], [2, 0, 1])
        assert equal(near.read("part"), expected)
    expected = put(reader(near, "all", all_of, 4), all_of, [3, 1, 2], whole)
    pull(keys, handle(near, "all"), [[], []], [3, 1, 2])
    assert equal(near.read("all"), expected)
    assert code(pull, keys[0], handle(near, "all"), [], [3, 1, 2]) == GONE
    assert code(pull, keys, handle(near, "all"), [[], []], [3, 1, 2]) == GONE


def test_slots(ends: Ends, transport: str) -> None:
    """`pull_cache` and `push_cache` convert whole slots."""
    near, far = ends.pair(accessible=True, llm__LinkTransport=transport)
    src, dst, whole = layout(32, order="HND"), layout(32, rank(0, 2)), sequence(32, 14)
    cache = far.allocate_layout("f", src, 2, slots=True)
    far.write("f", put(blank(src, 2, 0xAA), src, [1], whole))
    expected = put(reader(near, "n", dst, 3, slots=True), dst, [2], whole)
    slot = key(("slot", 2, cache, 1))
    near.manager.pull_cache(slot, handle(near, "n"), 2)
    assert equal(near.read("n"), expected)
    near.manager.pull_cache_async(slot, handle(near, "n"), 2, verify="full").result(LIMIT_MS)
    assert equal(near.read("n"), expected)
    far.paint("f", 0x55)
    near.manager.push_cache(slot, handle(near, "n"), 2)
    back = put(blank(src, 2, 0x55), src, [1], whole)
    for tensor in back:
        tensor.reshape(2, HEADS, -1)[:, HEADS // 2 :] = 0x55
    assert equal(far.read("f"), back)
    for call in (near.manager.pull_cache, near.manager.pull_cache_async):
        with pytest.raises(TypeError, match="src_tokens"):
            call(slot, handle(near, "n"), 2, src_tokens=range(3))


@pytest.mark.parametrize("kv", ["k_then_v", "latent", "single"])
def test_pushes_of_caches_with_one_tensor_for_a_layer(one_sided: tuple[End, Peer], kv: str) -> None:
    """The layout says how many tensors a layer has, so that a push without `tensor_num_per_layer` sends all."""
    near, far = one_sided
    of = latent() if kv == "latent" else layout(kv=kv)
    whole = sequence(16, 15, heads=of.total_kv_heads, planes=1 if kv in ("latent", "single") else 2)
    owner(near, "n", of, [0], whole)
    expected = put(reader(far, "f", of, 3, keys=[by_blocks(0)]), of, [1], whole)
    near.manager.push_blocks(FAR, handle(near, "n"), [0], [1])
    assert equal(far.read("f"), expected)
    far.paint("f", 0x55)
    near.manager.push_group([(FAR, handle(near, "n"), [0], [1])])
    assert equal(far.read("f"), expected)


@pytest.mark.parametrize("which", ["local", "remote"])
def test_one_side_without_a_layout(one_sided: tuple[End, Peer], which: str) -> None:
    near, far = one_sided
    of, whole = layout(16), sequence(32, 16)
    shape = {"shape": [16, HEADS, 4], "tensors": 2 * LAYERS}
    at_near, at_far = (None, of) if which == "local" else (of, None)
    far.allocate_layout("f", at_far, 3, keys=[by_blocks(0)], **(shape if at_far is None else {}))
    near.allocate_layout("n", at_near, 3, **(shape if at_near is None else {}))
    with_layout = "remote" if which == "local" else "local"
    cache, manager = handle(near, "n"), near.manager
    for call in (manager.pull_blocks, manager.push_blocks):
        status, said = outcome(lambda call=call: call(FAR, cache, [0], [0]))  # type: ignore[misc]
        assert (status, f"only the {with_layout} cache has a KV layout" in said) == (INVALID, True), said
    for group in (manager.pull_group, manager.push_group):
        assert code(group, [(FAR, cache, [0], [0])]) == INVALID
        assert code(group, [(FAR, cache, [0], [0])], layout="raw") == OK
    far.write("f", put(blank(of, 3, 0xAA), of, [0, 1], whole))
    near.paint("n", 0)
    manager.pull_blocks(FAR, cache, [0, 1], [2, 0], layout="raw")
    assert equal(near.read("n"), put(blank(of, 3, 0), of, [2, 0], whole))
    far.paint("f", 0)
    manager.push_blocks(FAR, cache, [2, 0], [1, 2], layout="raw")
    assert equal(far.read("f"), put(blank(of, 3, 0), of, [1, 2], whole))
    far.paint("f", 0)
    assert manager.push_blocks_async(FAR, cache, [2, 0], [1, 2], layout="raw").result(LIMIT_MS) is None
    assert equal(far.read("f"), put(blank(of, 3, 0), of, [1, 2], whole))


def test_raw_moves_rows_between_different_layouts(served: tuple[End, Peer]) -> None:
    near, far = served
    src, dst = layout(16), layout(32, rank(0, 2), order="HND", model="other")
    owner(far, "f", src, [0, 1], sequence(32, 17), keys=[by_blocks(0)])
    near.allocate_layout("n", dst, 3, "DT_BF16")
    rows = far.read("f")
    near.manager.pull_blocks(FAR, handle(near, "n"), [0, 1], [1, 2], layout="raw")
    for ours, theirs in zip(near.read("n"), rows):
        assert (ours[1:] == theirs[:2]).all()
    pull = near.manager.pull_blocks
    assert code(pull, FAR, handle(near, "n"), [0, 1], [1], layout="raw") == INVALID
    assert code(pull, FAR, handle(near, "n"), [0], [1], layout="raw", src_tokens=range(3)) == INVALID
    assert code(pull, [FAR], handle(near, "n"), [[0]], [1], layout="raw") == INVALID


def test_parts_of_rows(one_sided: tuple[End, Peer]) -> None:
    """Parts of rows have no meaning in a layout: allowed between equal layouts or as raw bytes, refused otherwise."""
    near, far = one_sided
    of, other = layout(16), layout(16, order="HND")
    owner(far, "f", of, [0, 1], sequence(32, 19), keys=[by_blocks(0)])
    rows = far.read("f")
    before = {"same": reader(near, "same", of, 3), "other": reader(near, "other", other, 3)}
    part = {"src_offset": 8, "dst_offset": 32, "length": 40}
    for call in (near.manager.pull_blocks, near.manager.push_blocks):
        status, said = outcome(lambda call=call: call(FAR, handle(near, "other"), [0], [1], **part))  # type: ignore[misc]
        assert (status, "different KV layouts" in said) == (INVALID, True), said
        assert "order NHD, kv separate" in said
        assert "order HND, kv separate" in said
    assert equal(near.read("other"), before["other"])
    assert equal(far.read("f"), rows)
    for name, given in (("same", {}), ("other", {"layout": "raw"})):
        for ours, theirs in zip(before[name], rows):
            ours[2, 32:72] = theirs[1, 8:48]
        near.manager.pull_blocks(FAR, handle(near, name), [1], [2], **part, **given)
        assert equal(near.read(name), before[name]), name


def test_parts_of_rows_of_other_layers(one_sided: tuple[End, Peer]) -> None:
    """They would arrive in the wrong layer, unless the caller names the layers."""
    near, far = one_sided
    of, later = layout(16), layout(16, layers=range(LAYERS, 2 * LAYERS))
    owner(far, "f", of, [0, 1], sequence(32, 20), keys=[by_blocks(0)])
    rows, expected = far.read("f"), reader(near, "n", later, 3)
    cache, part = handle(near, "n"), {"src_offset": 8, "length": 40}
    for call in (near.manager.pull_blocks, near.manager.push_blocks):
        status, said = outcome(lambda call=call: call(FAR, cache, [0], [1], **part))  # type: ignore[misc]
        assert (status, "different layers need layer ranges" in said) == (INVALID, True), said
    assert equal(near.read("n"), expected)
    assert equal(far.read("f"), rows)
    for ours, theirs in zip(expected[:2], rows[2:]):
        ours[2, :40] = theirs[1, 8:48]
    near.manager.pull_blocks(FAR, cache, [1], [2], src_layer_range=range(1, 2), dst_layer_range=range(1), **part)
    assert equal(near.read("n"), expected)
    same = near.allocate_layout("h", of, 3, host=True)
    assert code(near.manager.swap_blocks, cache, handle(near, "h"), {1: 1}) == INVALID, same


def test_local_copies_and_swaps(ends: Ends) -> None:
    """They move rows as they are: refused between different layouts, allowed if a cache has none."""
    near = ends.near()
    of = layout(16)
    same, other = copy.copy(of), layout(16, order="HND")
    shape = {"shape": [16, HEADS, 4], "tensors": 2 * LAYERS}
    owner(near, "d", of, [0, 1], sequence(32, 18))
    near.allocate_layout("same", same, 3, host=True)
    near.allocate_layout("other", other, 3, host=True)
    near.allocate_layout("none", None, 3, host=True, **shape)
    for name in ("same", "none"):
        near.swap_blocks("d", name, [(0, 2), (1, 0)])
        assert all((ours[2] == theirs[0]).all() for ours, theirs in zip(near.read(name), near.read("d")))
        near.swap_blocks(name, "d", [(2, 1)])
    near.swap_blocks("none", "d", [(0, 0)])
    before = near.read("other")
    swaps = (near.manager.swap_blocks, near.manager.swap_blocks_async)
    for swap in swaps:
        with pytest.raises(ValueError, match="different KV layouts") as caught:
            swap(handle(near, "d"), handle(near, "other"), {0: 0})
        assert caught.value.status_code.name == INVALID  # type: ignore[attr-defined]
    assert equal(near.read("other"), before)
    near.allocate_layout("s", of, 2, slots=True)
    near.allocate_layout("t", other, 2, slots=True)
    near.allocate_layout("u", None, 2, slots=True, **shape)
    for call in (near.manager.copy_cache, near.manager.copy_cache_async):
        with pytest.raises(LLMException, match="different KV layouts"):
            call(handle(near, "t"), handle(near, "s"))
    near.copy_cache("u", "t")
    near.copy_cache("s", "s", 1, 0)


def test_layer_ranges(served: tuple[End, Peer]) -> None:
    """They need equal layouts. Otherwise the layers follow from the layouts."""
    near, far = served
    of, whole = layout(16), sequence(16, 19)
    owner(far, "f", of, [0], whole, keys=[by_blocks(0)])
    expected = reader(near, "n", of, 2)
    ranges = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}
    near.manager.pull_blocks(FAR, handle(near, "n"), [0], [0], **ranges)
    one = put(blank(of, 2, 0x55), of, [0], whole)
    assert equal(near.read("n"), [*expected[:2], *one[2:4], *expected[4:]])
    near.allocate_layout("h", layout(16, order="HND"), 2)
    for cache, keys, src in [("h", FAR, [0]), ("n", [FAR], [[0]])]:
        status, said = outcome(
            lambda c=cache, k=keys, s=src: near.manager.pull_blocks(k, handle(near, c), s, [0], **ranges)
        )  # type: ignore[misc]
        assert (status, "layer ranges" in said) == (INVALID, True), said


def test_bad_arguments_of_calls(served: tuple[End, Peer]) -> None:
    near, far = served
    owner(far, "f", layout(16), [0, 1], sequence(32, 20), keys=[by_blocks(0)])
    near.allocate_layout("n", layout(16, order="HND"), 3)
    cache, manager = handle(near, "n"), near.manager
    pull, push = manager.pull_blocks, manager.push_blocks

    def refused(status: str, text: str, call: Callable[..., Any], *args: Any, **given: Any) -> None:
        found, said = outcome(lambda: call(*args, **given))
        assert found == status, (found, said)
        assert text in said, said

    for call in (pull, manager.pull_blocks_async):
        for name in ("src_tokens", "dst_tokens"):
            for wrong in (3, "ab", (1, 2, 3), (1,), (1.0, 2), (True, 2), {1, 2}):
                refused("TypeError", name, call, FAR, cache, [0], [0], **{name: wrong})
            for wrong in ((-1, 2), range(-1, 2), (0, 2**64)):
                refused("ValueError", name, call, FAR, cache, [0], [0], **{name: wrong})
            for wrong in (range(0, 4, 2), range(2, 2), (3, 2)):
                refused(INVALID, name, call, FAR, cache, [0], [0], **{name: wrong})
        refused("TypeError", "layout", call, FAR, cache, [0], [0], layout=1)
        refused(INVALID, 'layout="RAW"', call, FAR, cache, [0], [0], layout="RAW")
        refused(INVALID, "len(src_cache_key)=0", call, [], cache, [], [0])
        refused(INVALID, "len(src_blocks)=1", call, [FAR, FAR], cache, [[0]], [0])
        refused("TypeError", "src_cache_key", call, [FAR, 1], cache, [[0], [0]], [0])
        refused("TypeError", "src_blocks", call, [FAR], cache, 3, [0])
        refused("TypeError", "src_blocks", call, [FAR], cache, [3], [0])
        refused("TypeError", "dst_cache", call, [FAR], "n", [[0]], [0])
        refused(INVALID, "dst_blocks", call, [FAR], cache, [[0]], [])
    refused(INVALID, "src_tokens", pull, FAR, cache, [0], [0], src_tokens=(0, 4), dst_tokens=(0, 5))
    refused(INVALID, "17", pull, FAR, cache, [0], [0], src_tokens=(0, 17))
    refused(INVALID, "llm.EnableRemoteCacheAccessible", push, FAR, cache, [0], [0], src_tokens=(0, 17))
    refused(INVALID, "llm.EnableRemoteCacheAccessible", push, [FAR], cache, [0], [[0]])
    refused("TypeError", "layout", manager.pull_group, [(FAR, cache, [0], [0])], layout=1)
    refused("TypeError", "src_tokens", manager.pull_group, [GroupPart(FAR, cache, [0], [0], src_tokens=3)])  # type: ignore[arg-type]
    assert near.dist.poll() == []


def test_bad_arguments_of_pushes(one_sided: tuple[End, Peer]) -> None:
    near, far = one_sided
    far.allocate_layout("f", layout(16), 3, keys=[by_blocks(0)])
    far.allocate_layout("g", layout(16), 3, keys=[by_blocks(0, 1)])
    near.allocate_layout("n", layout(16, order="HND"), 3)
    cache, both = handle(near, "n"), [FAR, key(by_blocks(2, 1))]
    for call in (near.manager.push_blocks, near.manager.push_blocks_async):
        for wrong, text in [((1, 2, 3), TypeError), ((-1, 2), ValueError), (range(3, 3), LLMException)]:
            with pytest.raises(text, match="dst_tokens"):
                call(FAR, cache, [0], [0], dst_tokens=wrong)
        assert code(call, both, cache, [0], [[0]]) == INVALID
        assert code(call, [], cache, [0], []) == INVALID
        assert code(call, both, cache, [0], [[0], [0]], range(1), range(1)) == INVALID
        assert code(call, both, cache, [0], [[0], 0]) == "TypeError"
    with pytest.raises(LLMException, match="grant"):
        near.manager.push_group([GroupPart(FAR, cache, [0], [0], grant=b"x" * 48)])
    near.manager.push_blocks(both, cache, [0], [[0], [1]], notify=b"one cluster")
    assert far.polled() == [(1, b"one cluster")]


GOOD: dict[str, Any] = {"head_dim": 8, "layers": range(4), "total_kv_heads": 8}


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"order": "nhd"}, LLMException, 'order="nhd" must be "NHD" or "HND"'),
        ({"kv": "apart"}, LLMException, 'kv="apart" must be "separate", "k_then_v", "latent" or "single"'),
        ({"kv_heads": range(3, 9)}, LLMException, "kv_heads=3..9 must be"),
        ({"kv_heads": (5, 5)}, LLMException, "kv_heads=5..5 must be"),
        ({"layers": range(0)}, LLMException, "layers=0..0 must be"),
        ({"layers": range(0, 4, 2)}, LLMException, "layers="),
        ({"head_dim": 0}, LLMException, "head_dim=0 must be above 0"),
        ({"total_kv_heads": 0, "kv_heads": range(1)}, LLMException, "total_kv_heads=0 must be above 0"),
        ({"kv": "latent"}, LLMException, "latent layout"),
        ({"model": "é" * 129}, LLMException, "258"),
        ({"head_dim": -1}, ValueError, "head_dim"),
        ({"layers": range(2**33)}, ValueError, "layers"),
        ({"total_kv_heads": None}, TypeError, "total_kv_heads"),
        ({"total_kv_heads": 8.0}, TypeError, "total_kv_heads"),
        ({"head_dim": True}, TypeError, "head_dim"),
        ({"layers": 4}, TypeError, "layers"),
        ({"kv_heads": (1, 2, 3)}, TypeError, "kv_heads"),
        ({"order": 1}, TypeError, "order"),
        ({"model": b"a"}, TypeError, "model"),
    ],
    ids=short,
)
def test_values_that_a_layout_refuses(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        KvLayout(16, **{**GOOD, **given})
    assert text in str(caught.value)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code.name == INVALID


def test_a_layout_is_a_value() -> None:
    one, same = KvLayout(16, **GOOD), KvLayout(16, **{**GOOD, "layers": (0, 4), "kv_heads": [0, 8]})
    assert one == same
    assert hash(one) == hash(same)
    assert len({one, same, KvLayout(16, **GOOD, model="b")}) == 2
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one  # noqa: S301
    assert eval(repr(one), {"KvLayout": KvLayout}) == one  # noqa: S307
    assert (same.layers, same.kv_heads, one.model) == (range(4), range(8), "")
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'order'"):
        one.order = "HND"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'order'"):
        del one.order
    assert one == same
    assert one != "a layout"
    assert list(KvLayout.__match_args__) == list(vars(one))
    assert one.__replace__(model="b") == KvLayout(16, **GOOD, model="b")  # what `copy.replace` of Python 3.13 calls
    assert KvLayout(16, head_dim=8, layers=range(1), kv="latent").kv_heads == range(1)


@pytest.mark.parametrize(
    ("given", "tensors", "shape"),
    [
        ({}, 8, [5, 16, 8, 8]),
        ({"order": "HND", "kv_heads": range(2, 5)}, 8, [5, 3, 16, 8]),
        ({"kv": "k_then_v"}, 4, [5, 2, 16, 8, 8]),
        ({"kv": "k_then_v", "order": "HND", "layers": (2, 3)}, 1, [5, 2, 8, 16, 8]),
        ({"kv": "latent", "total_kv_heads": None}, 4, [5, 16, 8]),
    ],
    ids=short,
)
def test_the_descriptor_of_a_layout(manager: Any, given: dict[str, Any], tensors: int, shape: list[int]) -> None:
    of = KvLayout(16, **{**GOOD, **given})
    desc = CacheDesc.of_layout(of, 5, DataType.DT_FLOAT16, Placement.HOST)
    assert (desc.num_tensors, desc.shape, desc.layout, desc.placement) == (tensors, shape, of, Placement.HOST)
    assert repr(of) in repr(desc)
    assert desc.size == manager.allocate_blocks_cache(desc).cache_desc.size
    assert pickle.loads(pickle.dumps(desc)).layout == of  # noqa: S301
    for wrong in (CacheDesc(tensors + 1, shape, DataType.DT_FLOAT16, layout=of),
                  CacheDesc(tensors, [*shape[:-1], 9], DataType.DT_FLOAT16, layout=of)):  # fmt: skip
        assert code(manager.allocate_blocks_cache, wrong) == INVALID
    assert CacheDesc(1, [1], DataType.DT_FLOAT16).layout is None


def test_descriptors_refuse_other_types() -> None:
    for wrong in ("NHD", 1, {}):
        with pytest.raises(TypeError, match="layout"):
            CacheDesc(1, [1], DataType.DT_FLOAT16, layout=wrong)  # type: ignore[arg-type]
    for layout_, blocks in [(None, 3), (KvLayout(16, **GOOD), 3.0), (KvLayout(16, **GOOD), True)]:
        with pytest.raises(TypeError):
            CacheDesc.of_layout(layout_, blocks, DataType.DT_FLOAT16)  # type: ignore[arg-type]


def test_a_cache_key_in_a_list_of_one(served: tuple[End, Peer]) -> None:
    """A list of one key is a call with several owners, of which there is one."""
    near, far = served
    of, whole = layout(16), sequence(16, 21)
    owner(far, "f", of, [0], whole, keys=[by_blocks(0)])
    expected = put(reader(near, "n", layout(8), 3), layout(8), [2, 0], whole)
    near.manager.pull_blocks([BlocksCacheKey(2)], handle(near, "n"), [[0]], [2, 0])
    assert equal(near.read("n"), expected)


def test_the_older_manager_converts_too(ends: Ends, transport: str) -> None:
    """Without ranges, several owners and `layout="raw"`."""
    far = ends.peer(kv_options(llm__LinkTransport=transport))
    near = ends.near(kv_options(llm__LinkTransport=transport))
    linked(near, far)
    whole = sequence(32, 22)
    src, dst = layout(32, order="HND"), layout(32, rank(1, 2))
    owner(far, "f", src, [0], whole, slots=True, keys=[by_request(0, 7)])
    expected = put(reader(near, "n", dst, 2, slots=True), dst, [1], whole)
    near.pull_cache(by_request(2, 7), "n", 1)
    assert equal(near.read("n"), expected)


def test_layerwise_transfers_do_not_convert(one_sided: tuple[End, Peer]) -> None:
    near, far = one_sided
    of, whole = layout(16), sequence(16, 23)
    far.allocate_layout("f", layout(16, order="HND"), 2, keys=[by_blocks(0)])
    far.allocate_layout("g", of, 2, keys=[by_blocks(0, 1)])
    far.paint("g", 0x55)
    owner(near, "n", of, [0], whole)
    outcomes = []
    for model in (0, 1):
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2, model), range(LAYERS), range(LAYERS))
        task = near.manager.begin_layers(handle(near, "n"), [LayerDestination(config, [0], [1])])
        for layer in range(LAYERS):
            task.ready(layer)
        outcomes.append(task.transfers[0].exception(LIMIT_MS))
    assert isinstance(outcomes[0], LLMException)
    assert (outcomes[0].status_code.name, "different KV layouts" in str(outcomes[0])) == (INVALID, True)
    assert outcomes[1] is None
    assert equal(far.read("g"), put(blank(of, 2, 0x55), of, [1], whole))
