"""Pulls and pushes between caches with different layouts, compared with an independent model (`kv_model`).

Not for: the plans of every pair of layouts (the core's tests `kv_layouts` compare them with a naive one).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ids import short
from llm_datadist.native import Engine, GrantEnded, InvalidArgument, KvLayout, RemoteCache

from .helpers import LIMIT, fails, refused
from .kv_model import HEADS, LAYERS, blank, holds, latent, layout, owner, put, rank, reader, sequence, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .conftest import Open, Pair

TRANSPORTS = ["auto", "tcp"]
TOKENS = 40


def blocks_for(of: KvLayout, tokens: int = TOKENS) -> list[int]:
    """Blocks of a sequence, in no order."""
    count = -(-tokens // of.block_tokens)
    return [(5 * index + 3) % (count if count % 5 else count + 1) for index in range(count)]


CONVERSIONS = {
    "order": (layout(), layout(order="HND")),
    "equal": (layout(16), layout(16)),
    "a third, order, blocks": (layout(8, order="HND"), layout(20, (3, 6))),
    "one layer, some heads": (layout(16), layout(24, (2, 5), layers=range(2, 3), order="HND")),
    "latent, some layers": (latent(16), latent(24, layers=range(2))),
    "single, half the heads": (layout(16, rank(0, 2), kv="single"), layout(16, (2, 4), kv="single")),
    "k then v to separate, some heads": (layout(16, kv="k_then_v", order="HND"), layout(24, (0, 4))),
    "separate to k then v": (layout(16), layout(24, kv="k_then_v", order="HND")),
}


@pytest.mark.parametrize("case", CONVERSIONS)
@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("verb", ["pull", "push"])
def test_conversions(pair: Pair, case: str, verify: Any, verb: str) -> None:
    """A pull has the bytes of the model. A push converts the layers and heads that both caches hold."""
    src, dst = CONVERSIONS[case]
    whole = sequence(TOKENS, 1, heads=src.total_heads, planes=1 if src.kv in ("latent", "single") else 2)
    read, written = blocks_for(src), blocks_for(dst)
    source, target = (pair.remote, pair.local) if verb == "pull" else (pair.local, pair.remote)
    theirs = owner(source, "kv", src, read, whole)
    ours, expected = reader(target, "kv", dst, max(written) + 2)
    if verb == "pull":
        transfer = pair.local.pull(ours[written], pair.peer["kv"][read].part(tokens=range(TOKENS)), verify=verify)
    else:
        transfer = pair.local.push(pair.peer["kv"][written], theirs[read].part(tokens=range(TOKENS)), verify=verify)
    transfer.result(LIMIT)
    assert holds(ours, put(expected, dst, written, whole))
    compared = pair.local.stats()["verify"]
    assert (compared["blocks"] > 0, compared["mismatches"]) == (verify == "full", 0)


@pytest.mark.parametrize(
    ("src_tokens", "dst_tokens", "moved"),
    [
        (range(64), None, (0, 0, 64)),
        (range(5, 38), None, (5, 0, 33)),
        (None, (7, 8), (0, 7, 1)),
        (slice(3, 63), range(12, 72), (3, 12, 60)),
        (None, range(24, 48), (0, 24, 24)),
    ],
    ids=short,
)
def test_ranges_of_tokens(pair: Pair, src_tokens: Any, dst_tokens: Any, moved: tuple[int, int, int]) -> None:
    """Ranges need not start or end with a block."""
    src, dst, whole = layout(16), layout(24, (2, 6), order="HND"), sequence(64, 3)
    owner(pair.remote, "kv", src, [4, 0, 2, 3], whole)
    cache, expected = reader(pair.local, "kv", dst, 6)
    to, from_ = cache[[1, 5, 3]], pair.peer["kv"][[4, 0, 2, 3]]
    to = to if dst_tokens is None else to.part(tokens=dst_tokens)
    pull = pair.local.pull(to, from_ if src_tokens is None else from_.part(tokens=src_tokens))
    pull.result(LIMIT)
    assert holds(cache, put(expected, dst, [1, 5, 3], whole, *moved))
    assert pull.bytes == moved[2] * 4 * LAYERS * 2 * 4 * 2


def ranks(start: Open, carried_by: str, count: int) -> tuple[Engine, list[Engine], list[RemoteCache]]:
    """An engine that is linked to `count` others, these, and their caches `kv`."""
    local = start(transport=carried_by)
    remote = [start(transport=carried_by, listen="127.0.0.1:0") for _ in range(count)]
    return local, remote, [local.link(str(one.address)).result(LIMIT)["kv"] for one in remote]


def pairs(local: Any, remote_kv: Sequence[RemoteCache], lists: Sequence[list[int]]) -> list[Any]:
    return [(local, cache[blocks]) for cache, blocks in zip(remote_kv, lists)]


def swapped(given: Sequence[Any]) -> list[Any]:
    return [(src, dst) for dst, src in given]


def test_owners_whose_caches_were_replaced(start: Open, carried_by: str) -> None:
    """What an earlier pull learnt about a cache is not used for another one of the same name."""
    local, remote, remote_kv = ranks(start, carried_by, 2)
    whole, forms, target = sequence(TOKENS, 9), [layout(16, rank(index, 2)) for index in range(2)], layout(12)
    lists, to = [blocks_for(of) for of in forms], blocks_for(target)
    held = [owner(engine, "kv", of, blocks, whole) for engine, of, blocks in zip(remote, forms, lists)]
    cache, expected = reader(local, "n", target, 6)
    rows = cache[to].part(tokens=range(TOKENS))
    local.pull(pairs(rows, remote_kv, lists)).result(LIMIT)
    assert holds(cache, put(expected, target, to, whole))
    # Owner 0 has more blocks now, in another order, and other heads: those of owner 1. Owner 1 has those of owner 0.
    for old in held:
        old.free().result(LIMIT)
    again, lists = sequence(TOKENS, 10), [list(reversed(range(10))), [9, 8, 7]]
    owner(remote[0], "kv", layout(4, rank(1, 2), order="HND"), list(reversed(range(10))), again)
    owner(remote[1], "kv", layout(16, rank(0, 2)), [9, 8, 7], again)
    local.pull(pairs(rows, remote_kv, lists)).result(LIMIT)
    assert holds(cache, put(expected, target, to, again))


@pytest.mark.parametrize("verb", ["pull", "push"])
def test_copies_of_the_same_heads_need_lists_of_the_same_tokens(start: Open, carried_by: str, verb: str) -> None:
    """Whichever of the owners is read, the other list does not decide silently how many tokens move."""
    local, remote, remote_kv = ranks(start, carried_by, 2)
    theirs = [owner(engine, "kv", layout(16), [0, 1], sequence(32, 31)) for engine in remote]
    before = put(blank(layout(16), 3, 0xAA), layout(16), [0, 1], sequence(32, 31))
    cache, ours = reader(local, "n", layout(16), 2)
    for lists in ([[0, 1], [0]], [[0], [0, 1]]):
        given = pairs(cache[[0, 1]], remote_kv, lists)
        call = local.pull if verb == "pull" else local.push
        error = fails(InvalidArgument, lambda: call(given if verb == "pull" else swapped(given)))  # noqa: B023
        assert "part" in error.facts
        assert holds(cache, ours), "nothing has moved"
        assert all(holds(one, before) for one in theirs), "nothing has moved"


def test_push_skips_owners_without_a_common_head(start: Open, carried_by: str) -> None:
    """As a pull does. A push of which no owner gets anything is refused, as is one that does not fit an owner."""
    local, remote, remote_kv = ranks(start, carried_by, 3)
    whole, src = sequence(32, 32), layout(16, (0, 4), layers=range(2))
    mine = owner(local, "n", src, [1, 0], whole)
    forms = [layout(16, (2, 6)), layout(16, (4, 8)), layout(16, layers=range(2, 3))]
    made = [reader(engine, "kv", of, 4) for engine, of in zip(remote, forms)]
    given = swapped(pairs(mine[[1, 0]], remote_kv, [[3, 1], [0, 1], [0, 1]]))
    error = fails(InvalidArgument, lambda: local.push(given[1:]))
    assert error.facts["part"] == "0"
    # The last owner has fewer blocks than the push names, so no owner is written.
    wrong = [*given[:2], (remote_kv[2][[0, 4]], mine[[1, 0]])]
    error = fails(InvalidArgument, lambda: local.push(wrong))
    assert error.facts["part"] == "2"
    assert all(holds(cache, before) for cache, before in made), "nothing has moved"
    local.push(given, verify="full").result(LIMIT)
    put(made[0][1], forms[0], [3, 1], whole)
    for at, tensor in enumerate(made[0][1]):  # heads 2 and 3 of layers 0 and 1 are in both caches
        tensor.reshape(4, 16, 4, -1)[:, :, 2 if at < 4 else 0 :] = 0x55
    assert all(holds(cache, before) for cache, before in made)


def test_push_to_several_owners(start: Open, carried_by: str) -> None:
    local, remote, remote_kv = ranks(start, carried_by, 3)
    whole, src = sequence(TOKENS, 9), layout(16)
    mine = owner(local, "n", src, [3, 0, 2], whole)
    layouts = [layout(8, rank(index, 3), order=order) for index, order in enumerate(("NHD", "HND", "NHD"))]
    lists = [[index + block for block in (4, 2, 0, 1, 3)] for index in range(3)]
    made = [reader(engine, "kv", of, 8) for engine, of in zip(remote, layouts)]
    rows = mine[[3, 0, 2]].part(tokens=range(TOKENS))
    local.push(swapped(pairs(rows, remote_kv, lists)), verify="full").result(LIMIT)
    for (cache, before), of, blocks in zip(made, layouts, lists):
        assert holds(cache, put(before, of, blocks, whole)), of
        write(cache, blank(of, 8, 0x55))
    given = [(dst.part(tokens=(3, 20)), mine[[3, 0, 2]]) for dst, _ in swapped(pairs(rows, remote_kv[:2], lists))]
    local.push(given).result(LIMIT)
    for (cache, _), of, blocks in zip(made[:2], layouts, lists):
        assert holds(cache, put(blank(of, 8, 0x55), of, blocks, whole, 0, 3, 17)), of
    assert holds(made[2][0], blank(layouts[2], 8, 0x55))


def test_pairs_convert(pair: Pair) -> None:
    """Each pair of a list converts, and may name tokens and a grant."""
    full, window = sequence(48, 10), sequence(32, 11)
    theirs = [
        owner(pair.remote, "full", layout(16), [2, 0, 1], full),
        owner(pair.remote, "window", layout(32, order="HND"), [0], window),
    ]
    here = [layout(24), layout(8, rank(1, 2))]
    (first, before), (second, other) = (reader(pair.local, n, of, 5) for n, of in zip(("full", "window"), here))
    grant = pair.remote.lend(theirs[1][[0]], ttl=LIMIT)
    to = second[[4, 0]].part(tokens=(1, 16))
    given = [
        (first[[1, 3]].part(tokens=range(48)), pair.peer["full"][[2, 0, 1]]),
        (to, pair.peer["window"][[0]].part(tokens=range(17, 32))),
    ]
    pair.local.pull(given, verify="full", grant=[None, grant.token]).result(LIMIT)
    assert holds(first, put(before, here[0], [1, 3], full))
    assert holds(second, put(other, here[1], [4, 0], window, 17, 1, 15))
    assert grant.ended == "done"
    blanks = [blank(layout(16), 4, 0x55), blank(layout(32, order="HND"), 2, 0x55)]
    for cache, bytes_ in zip(theirs, blanks):
        write(cache, bytes_)
    pair.local.push(swapped(given)).result(LIMIT)
    assert holds(theirs[0], put(blanks[0], layout(16), [2, 0, 1], full))
    put(blanks[1], layout(32, order="HND"), [0], window, 17, 17, 15)
    for tensor in blanks[1]:  # the push has no values of the other heads
        tensor.reshape(2, HEADS, -1)[:, : HEADS // 2] = 0x55
    assert holds(theirs[1], blanks[1])


def test_grants_of_several_owners(start: Open, carried_by: str) -> None:
    local, remote, remote_kv = ranks(start, carried_by, 2)
    whole, of = sequence(16, 12), layout(16)
    held = [owner(engine, "kv", layout(16, rank(index, 2)), [0], whole) for index, engine in enumerate(remote)]
    cache, expected = reader(local, "n", of, 2)
    grant = remote[0].lend(held[0][[0]], ttl=LIMIT)
    given, tokens = pairs(cache[[1]], remote_kv, [[0], [0]]), [grant.token, None]
    local.pull(given, grant=tokens, last=False).result(LIMIT)
    assert grant.ended is None
    local.pull(given, grant=tuple(tokens)).result(LIMIT)
    assert holds(cache, put(expected, of, [1], whole))
    assert grant.ended == "done"
    fails(GrantEnded, lambda: local.pull(given, grant=tokens))


def test_parts_of_blocks_with_layouts(pair: Pair) -> None:
    """Bytes of blocks move as they are, so both layouts are equal then, but for their layers."""
    of = layout(16, order="HND")
    theirs, whole = owner(pair.remote, "kv", of, [0, 1], sequence(32, 5)), sequence(32, 5)
    cache, expected = reader(pair.local, "kv", of, 3)
    half = slice(0, HEADS // 2 * 16 * 4 * 2)  # the first heads of a block
    pair.local.pull(cache[[2, 0]].part(bytes=half), pair.peer["kv"][[0, 1]].part(bytes=half)).result(LIMIT)
    put(expected, of, [2, 0], whole)
    for tensor in expected:
        tensor[[2, 0], half.stop :] = 0x55
    assert holds(cache, expected)
    other = owner(pair.local, "other", layout(16), [0], sequence(16, 6))
    error = fails(InvalidArgument, lambda: pair.local.pull(other[[0]].part(bytes=half), pair.peer["kv"][[0]]))
    assert error.argument in {"dst", "src", "bytes"}, error
    assert holds(theirs, put(blank(of, 3, 0xAA), of, [0, 1], whole))


def test_blocks_without_tokens_of_the_other_end(pair: Pair) -> None:
    """Rows without a range of tokens move whole blocks, so no block of either end may be left over."""
    whole, remote_kv = sequence(32, 5), pair.peer["kv"]
    theirs = owner(pair.remote, "kv", layout(16), [0, 1], whole)
    (mine, ours), (longer, before) = (
        reader(pair.local, name, layout(n), 3) for name, n in (("kv", 16), ("longer", 32))
    )
    refused("dst", lambda: pair.local.pull(mine[[0, 1]], remote_kv[[0]]))
    refused("dst", lambda: pair.local.pull(mine[[0]], remote_kv[[0, 1]]))
    refused("dst", lambda: pair.local.push(remote_kv[[0]], mine[[0, 1]]))
    fails(InvalidArgument, lambda: pair.local.pull(longer[[0, 1]], remote_kv[[0, 1]]), "dst")
    fails(InvalidArgument, lambda: pair.local.push(remote_kv[[0, 1]], longer[[0, 1]]), "src")
    assert holds(mine, ours)
    assert holds(longer, before)
    assert holds(theirs, put(blank(layout(16), 3, 0xAA), layout(16), [0, 1], whole))


@pytest.mark.parametrize(
    "change", [{"model": "x"}, {"head_dim": 8}, {"heads": (0, 4)}, {"dtype": "int16"}, {"kv": "single"}], ids=short
)
def test_layouts_that_do_not_fit(pair: Pair, change: dict[str, Any]) -> None:
    """Of another model, or without a head that the cache needs."""
    mine, before = reader(pair.local, "kv", layout(), 2)
    pair.remote.allocate("kv", layout(**change), blocks=2)
    fails(InvalidArgument, lambda: pair.local.pull(mine[[1]], pair.peer["kv"][[1]]))
    assert holds(mine, before)
