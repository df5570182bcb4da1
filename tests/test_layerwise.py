"""Layer-wise transfers to another process: which bytes arrive, and when a layer is asked for and sent.

Bytes are compared with numpy arrays, and the order is checked with events. Not for: the task (`test_cache_task.py`).
"""

from __future__ import annotations

import itertools
import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from layers import Remote, Steps, Transfer, launch, names, results
from llm_datadist import BlocksCacheKey, LLMStatusCode, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.original.layerwise import LayerProgress
from peers import GONE, INVALID, OK, UNLINKED, Ends, equal, eventually, pattern

if TYPE_CHECKING:
    from peers import End, Peer

PLACEMENTS = list(itertools.product([False, True], repeat=3))  # source registered, destination on the host, registered


@pytest.mark.parametrize("layout", ["slots", "blocks", "pieces"])
def test_bytes_arrive_between_all_placements_and_origins(ends: Ends, way: dict[str, Any], layout: str) -> None:
    """Rows have 1 byte to 100 kB. A slot that is split into blocks has a short last piece, or is one piece."""
    local, remote = ends.pair(pool=32 << 20, **way)
    chance = random.Random(11)  # noqa: S311
    for number, (mine, host, registered) in enumerate(PLACEMENTS * 3):
        layers, rows = chance.randint(1, 4), chance.randint(1, 6)
        row_bytes = chance.choice([chance.randint(2, 9000), chance.randint(60_000, 100_000)])
        local.make("n", rows, row_bytes, 2 * layers, blocks=layout == "blocks", registered=mine, seed=5000 + number)
        source = pattern(5000 + number, 2 * layers, rows, row_bytes)
        first, dst, row = chance.randrange(layers), chance.randint(0, 2), chance.randrange(rows)
        src = range(first, chance.randint(first + 1, layers))
        how = {"blocks": layout != "slots", "model": number, "host": host, "registered": registered, "seed": number}

        def into(rows: int, row_bytes: int, there: int = dst + len(src), how: Any = how) -> Remote:
            return Remote(remote, way["accessible"], "f", rows, row_bytes, there, **how)

        if layout == "slots":
            to, slot = into(rows, row_bytes + chance.randint(0, 3)), chance.randrange(rows)
            to.slot(source, src, dst, row=row, slot=slot)
            config, lists = to.to(src, dst, row=row, slot=slot), {}
        elif layout == "blocks":
            to, right = into(rows + 2, row_bytes), chance.sample(range(rows + 2), chance.randint(1, rows))
            left = tuple(chance.randrange(rows) for _ in right)
            to.blocks(source, src, dst, list(zip(left, right)))
            config = to.to(src, dst, by_id=chance.random() < 0.5)
            lists = {"src": left, "dst": right, "size": chance.choice([None, 0, row_bytes])}
        else:
            size = chance.randint(max(1, row_bytes // 20), rows * row_bytes - 1)
            pieces = -(-row_bytes // size)
            to, right = into(pieces + 1, size), chance.sample(range(pieces + 1), chance.randint(1, pieces))
            to.pieces(source, src, dst, row, right)
            config = to.to(src, dst, row=row, by_id=row > 0 or chance.random() < 0.5)
            lists = {"dst": right, "size": size}
        assert results(launch(local, "n", [config], **lists)) == [OK], number
        to.check(number)
        assert equal(local.read("n"), source), "a transfer changed its source"
        local.release("n")
        remote.release("f")


def test_addresses_in_gaps_are_refused(served: tuple[End, Peer]) -> None:
    """In each row, 240 bytes that belong to no tensor follow the rows of the four tensors."""
    local, remote = served
    first, *others = remote.native_register("f", 8, 100, 640, 4, seed=1)
    local.allocate("n", 8, 100, 4, blocks=True, seed=2)
    assert first + 300 == others[-1]
    for offset, block, text in (
        (400, 0, "lies in no cache"),  # the first byte of a gap
        (639, 0, "lies in no cache"),
        (1, 0, "exceeds the row"),
        (640, 7, r"dst_block_indices\[0\]=7"),  # one row after the last one
    ):
        for addresses in ([first + offset, *others], [first + offset] * 4):
            task = launch(local, "n", [TransferConfig(2, addresses, range(2), 0)], src=[3], dst=[block])
            assert results(task) == [INVALID], offset
            assert re.search(text, str(task.errors()[0])), task.errors()
    assert equal(remote.read("f"), pattern(1, 4, 8, 100))
    remote.check_gaps("f")


def test_a_blocks_cache_without_lists_sends_its_first_block(ends: Ends, way: dict[str, Any]) -> None:
    """Block 0 goes to block 0, or to slot 0, of each tensor, and nothing else moves."""
    transfer = Transfer(ends, way, 6, 32, blocks=True)
    slots = transfer.remote("slots", shape=(3, 40, 4))
    for to, src, dst, lists in (
        (transfer.to, range(4), 0, {}),
        (transfer.to, range(1, 3), 2, {"src": None, "dst": None}),
        (slots, range(4), 0, {"src": [], "dst": []}),
    ):
        to.slot(transfer.source, src, dst)
        assert transfer.send(to=[to.to(src, dst)], **lists) == [OK]
        to.check((src, dst))


def test_blocks_of_another_size_and_missing_keys_are_refused_with_nothing_moved(ends: Ends) -> None:
    """`layer_destination.rs` has slots, blocks and layers that the remote cache lacks."""
    transfer = Transfer(ends, {"accessible": True}, 6, 32, 2, blocks=True)
    wide, both = transfer.remote("wide", shape=(4, 33, 2), blocks=True, model=1), range(2)
    no_key = TransferWithCacheKeyConfig(BlocksCacheKey(2, 77), both, both)
    transfer.local.allocate("slots", 3, 100, 4)
    for name, config, lists, code in (
        ("slots", wide.to(both), {"dst": [0, 1], "size": 16}, INVALID),
        ("n", wide.to(both), {}, INVALID),
        ("n", no_key, {"src": [0], "dst": [0]}, GONE),
    ):
        assert results(launch(transfer.local, name, [config], **lists)) == [code]
    for remote in (transfer.to, wide):
        remote.check()


def test_an_address_named_twice_gets_the_last_layer(ends: Ends) -> None:
    transfer = Transfer(ends, None, 1, 6400, 10)
    assert transfer.send(to=[TransferConfig(2, transfer.to.bases[:2] * 10)]) == [OK]
    transfer.to.slot(transfer.source, range(9, 10))
    transfer.to.check()


def test_layers_of_three_tensors(ends: Ends, way: dict[str, Any]) -> None:
    local, remote = ends.pair(**way)
    local.allocate("n", 2, 50, 12, seed=1)
    to = Remote(remote, way["accessible"], "f", 2, 50, 4, per=3, seed=2)
    to.slot(pattern(1, 12, 2, 50), range(1, 4), row=1, slot=1)

    class Mine(Steps):
        tensor_num_per_layer = 3

    for steps in (Steps(tensor_num_per_layer=3), Mine()):
        remote.fill("f", 2)
        assert results(launch(local, "n", [to.to(range(1, 4), row=1, slot=1)], steps)) == [OK]
        assert steps.layers == [1, 2, 3]
        to.check()


def test_configs_of_one_transfer_have_results_of_their_own(ends: Ends, way: dict[str, Any]) -> None:
    transfer = Transfer(ends, way, 3, 80)
    to, two, short = transfer.to, transfer.remote("two"), transfer.remote("short", shape=(1, 79, 4))
    same = to.to(range(1, 3), row=2, slot=2)
    configs = [to.to(range(4)), short.to(range(2)), two.to(range(2, 4), row=1, slot=2), same, same]
    for transfer.peer.cluster in (7, 1, 2):  # no engine, this engine, the peer
        configs.append(to.to(range(4)))
    steps = Steps()
    task = transfer.start(steps, configs)
    assert results(task) == [OK, INVALID, OK, OK, OK, UNLINKED, INVALID, OK]
    assert task.synchronize() == LLMStatusCode.LLM_PARAM_INVALID
    two.slot(transfer.source, range(2, 4), row=1, slot=2)
    to.slot(transfer.source, range(4))
    to.slot(transfer.source, range(1, 3), 0, row=2, slot=2)
    for remote in (to, two, short):
        remote.check()
    errors = task.errors()
    assert [at for at, error in enumerate(errors) if error] == [1, 5, 6]
    assert names(errors[1], cluster=2, layer=0), errors[1]
    assert names(errors[5], cluster=7), errors[5]
    assert errors[5].status_code == LLMStatusCode.LLM_NOT_YET_LINK
    assert steps.layers == [0, 1, 2, 3], "a layer that several need is asked for once"


def test_layers_are_asked_for_once_in_order_and_only_if_needed(ends: Ends) -> None:
    transfer = Transfer(ends, None, 2, 64, 10)
    to, steps = transfer.to, Steps()
    configs = [to.to(range(7, 9)), to.to(range(2, 4), 2), to.to(range(3, 5), 5, slot=1), to.to(range(7, 8), 9)]
    assert transfer.send(steps, configs) == [OK] * 4
    assert steps.asked == [(2, None), (3, None), (4, None), (7, None), (8, None)]
    assert [(thread.name, thread.daemon) for thread in steps.threads] == [("llm-layers", True)]


def test_a_layer_goes_as_soon_as_it_is_ready_and_not_before(ends: Ends, way: dict[str, Any]) -> None:
    transfer = Transfer(ends, way, 1, 700)
    local, source, steps = transfer.local, transfer.source, Steps(allowed=0)
    local.paint("n", 0xEE)
    task = transfer.start(steps)
    for layer in range(4):
        steps.reached(layer)
        there = [LayerProgress(layer, 4, 1400 * layer)]
        eventually(lambda there=there: task.progress() == there, what=f"{layer} layers")
        assert task.get_results(0) == [LLMStatusCode.LLM_TIMEOUT]
        assert not task.done()
        transfer.to.check(f"before layer {layer}")
        for tensor in (2 * layer, 2 * layer + 1):
            local.held["n"].arrays[tensor][:] = source[tensor]
        transfer.to.slot(source, range(layer, layer + 1), layer)
        steps.allow(layer + 1)
    assert results(task) == [OK]
    local.paint("n", 0xEE)
    transfer.to.check("the source was read after the end")
    (progress,) = task.progress()
    assert (progress.layers_done, progress.num_layers, progress.bytes_done) == (4, 4, 5600)


def test_sync_kv_timeout_is_for_layers_and_not_for_the_model(ends: Ends, way: dict[str, Any]) -> None:
    transfer = Transfer(ends, way, llm__SyncKvCacheWaitTime=1000)
    steps = Steps(allowed=0)
    task = transfer.start(steps)
    for layer in range(2):
        steps.reached(layer)
        assert task.synchronize(1200) == LLMStatusCode.LLM_TIMEOUT
        steps.allow(layer + 1)
    steps.allow()
    assert results(task) == [OK]
    transfer.arrived()
