"""Copies inside an engine, compared with plain bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.native import Cache, Completed, Engine, InvalidArgument, Transfer

from .helpers import BLOCKS, LIMIT, Model, allocate, check_times, fails, fill, layout, of, refused

if TYPE_CHECKING:
    from .conftest import Open, Pair


def make(engine: Engine, kind: str, name: str, seed: int) -> Cache:
    """Make a cache of one kind of memory, filled by `seed`."""
    if kind != "registered":
        return allocate(engine, name, seed, pool=kind)
    cache = engine.register(name, [np.zeros((BLOCKS, 96), np.uint8) for _ in range(4)])
    fill(cache, seed)
    return cache


KINDS = ["device", "host", "registered"]


@pytest.mark.parametrize("verify", ["off", "sample", "full"])
@pytest.mark.parametrize("source", KINDS)
@pytest.mark.parametrize("target", KINDS)
def test_directions(engine: Engine, target: str, source: str, verify: Any) -> None:
    dst, src = make(engine, target, "a", 1), make(engine, source, "b", 2)
    model = Model(dst)
    transfer = engine.copy(dst[[3, 9, 4]], src[[0, 0, 15]], verify=verify)
    assert isinstance(transfer, Transfer)
    assert transfer.result(LIMIT) is None
    model.write([3, 9, 4], Model(src), [0, 0, 15]).check(dst)
    assert (transfer.done(), transfer.bytes, transfer.total) == (True, 3 * 4 * 96, 3 * 4 * 96)
    compared = engine.stats()["verify"]
    assert (compared["blocks"] > 0, compared["mismatches"]) == (verify != "off", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_within_a_cache(engine: Engine, kind: str) -> None:
    kv = make(engine, kind, "kv", 1)
    model = Model(kv)
    engine.copy(kv[[1, 2, 3]], kv[[4, 4, 5]]).result(LIMIT)
    model.write([1, 2, 3], model, [4, 4, 5]).check(kv)
    engine.copy(kv[[7]], kv[[7]]).result(LIMIT)
    model.check(kv)


def test_pairs(engine: Engine) -> None:
    kv, host = allocate(engine, seed=1), allocate(engine, "host", 2, pool="host")
    models = Model(kv), Model(host)
    engine.copy([(kv[[1]], host[[2]]), (host[[3, 4, 3]], kv[[5, 6, 8]]), (kv[[7]], kv[[8]])]).result(LIMIT)
    models[0].write([1], models[1], [2]).write([7], models[0], [8]).check(kv)
    models[1].write([3, 4, 3], models[0], [5, 6, 8]).check(host)


def test_pairs_are_checked_before_anything_moves(engine: Engine) -> None:
    kv, host = allocate(engine, seed=1), allocate(engine, "host", 2, pool="host")
    model = Model(kv)
    error = fails(InvalidArgument, lambda: engine.copy([(kv[[1]], host[[2]]), (kv[[2]], host[[BLOCKS]])]))
    assert error.facts["part"] == "1"
    model.check(kv)


def test_caches_with_equal_layouts(engine: Engine) -> None:
    kv = engine.allocate("kv", layout(), blocks=8)
    host = engine.allocate("host", layout(), blocks=8, pool="host")
    for number, tensor in enumerate(kv.tensors):
        tensor.numpy()[:] = number
    engine.copy(host[[1]], kv[[2]]).result(LIMIT)
    assert [int(tensor.numpy()[1].max()) for tensor in host.tensors] == [0, 1, 2, 3]


def test_caches_that_do_not_fit(engine: Engine) -> None:
    kv = allocate(engine, seed=1)
    model = Model(kv)
    rows, tensors = allocate(engine, "rows", shape=(95,)), allocate(engine, "tensors", tensors=3)
    one, two = (engine.allocate(order, layout(order=order), blocks=4) for order in ("NHD", "HND"))
    for dst, src in ((kv, rows), (rows, kv), (kv, tensors), (tensors, kv), (one, two)):
        fails(InvalidArgument, lambda dst=dst, src=src: engine.copy(dst[[1]], src[[1]]))  # type: ignore[misc]
    model.check(kv)


def test_different_numbers_of_blocks(engine: Engine) -> None:
    kv = allocate(engine)
    for dst, src in (([1, 2], [3]), ([1], [2, 3]), ([], [1]), ([1], [])):
        error = fails(InvalidArgument, lambda dst=dst, src=src: engine.copy(kv[dst], kv[src]))  # type: ignore[misc]
        assert str(len(dst)) in str(error)
        assert str(len(src)) in str(error)


def test_wrong_arguments(pair: Pair, start: Open) -> None:
    engine, remote_kv = pair.local, pair.peer["kv"][[1]]
    kv, _ = pair.caches()
    model, rows, other = Model(kv), kv[[1]], allocate(start(name="other"))[[1]]
    wrong: list[tuple[Any, ...]] = [
        (), (rows,), (None, rows), (rows, None), (1, rows), (rows, 1), (rows, kv), (kv, rows), ([rows], rows),
        ([(rows,)],), ([(rows, rows, rows)],), ([rows, rows],), ((rows, rows), rows), ([(rows, rows)], rows),
        ({rows: rows},), ("ab",), ([(rows, None)],), (rows, [rows]),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(TypeError):
            engine.copy(*arguments)
    refused("dst", lambda: engine.copy([]))
    refused("dst", lambda: engine.copy(remote_kv, rows))
    refused("src", lambda: engine.copy(rows, remote_kv))
    refused("dst", lambda: engine.copy(other, rows), "other")
    refused("src", lambda: engine.copy(rows, other), "other")
    refused("verify", lambda: engine.copy(rows, rows, verify="most"))  # type: ignore[arg-type]
    check_times(lambda time: engine.copy(rows, rows, timeout=time))
    for keyword in ("notify", "grant", "verfy", "layers"):
        with pytest.raises(TypeError, match=keyword):
            engine.copy(rows, rows, **{keyword: None})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        engine.copy(dst=rows, src=rows)  # type: ignore[call-arg]
    model.check(kv)
    assert of(Completed, engine.events()) == [], "a refused call has no event"
