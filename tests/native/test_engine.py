"""Opening and closing engines, their parameters, and what is left of them in a forked child."""

from __future__ import annotations

import gc
import json
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from ids import short
from llm_datadist.native import Closed, Engine, Error, InvalidArgument, OutOfMemory, PeerUp, TensorView
from peers import eventually, together

from .helpers import LIMIT, address, allocate, check_times, closed, contents, fails, layout, of, refused, run_alone

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Open, Pair

TOKEN = "a token of some length"  # noqa: S105


def test_engine_without_arguments() -> None:
    with Engine() as engine:
        assert engine.name == f"{socket.gethostname()}/{os.getpid()}/{engine.name.rsplit('/', 1)[1]}"
        assert (engine.address, engine.timeout, engine.closed, engine.peers) == (None, 10.0, False, [])
        assert engine.stats()["pools"] == {}
        assert engine.events() == []
        refused("pool", lambda: engine.allocate("kv", blocks=1, tensors=1, shape=(1,), dtype="int8"))
        with Engine() as other:
            assert other.name != engine.name
    assert engine.closed


@pytest.mark.parametrize(
    ("size", "number"),
    [(65536, 65536), ("64KiB", 65536), ("1MiB", 1 << 20), (70000, 65536), ("100KiB", 98304), (1 << 20, 1 << 20)],
)
def test_sizes(start: Open, size: int | str, number: int) -> None:
    engine = start(pool=size, host_pool=None, page="32KiB")
    assert engine.stats()["pools"]["device"]["capacity_bytes"] == number
    assert engine.stats()["pools"]["device"]["page_bytes"] == 32768
    assert set(engine.stats()["pools"]) == {"device"}


BAD_SIZES: list[Any] = [
    "4 GiB",
    "4gb",
    "4G",
    "1.5MiB",
    "MiB",
    "",
    "-1KiB",
    "+1KiB",
    "0KiB",
    0,
    -1,
    2**64,
    "99999999TiB",
]
BAD: list[tuple[str, Any]] = [
    *[("pool", size) for size in BAD_SIZES],
    *[("host_pool", size) for size in BAD_SIZES],
    *[("page", size) for size in [*BAD_SIZES, 512, "512", 1000, "3KiB", "2GiB"]],
    *[("listen", text) for text in ["", "26000", "localhost:1", "1.2.3.4", "1.2.3.4:70000", "[::1]", "::1:5", ":5"]],
    *[("name", text) for text in ["", "x" * 129, "é" * 65, "a\nb", "a\0b", "\x7f"]],
    ("metadata", bytes(16 * 1024 + 1)),
    *[("token", text) for text in ["", "short", "x" * 15]],
    *[("token_file", text) for text in ["relative", "/does/not/exist", "/"]],
    *[("verify", text) for text in ["", "on", "FULL", "Sample"]],
    *[("timeout", number) for number in [0, -1, 0.0, float("nan"), float("inf")]],
    *[("copy_workers", number) for number in [0, -1, 257, 2**64]],
    *[("max_transfers", number) for number in [0, 2**20 + 1]],
    ("transport", "carrier pigeon"),
    ("huge_pages", "sometimes"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=short)
def test_wrong_values(name: str, value: Any) -> None:
    refused(name, lambda: Engine(**{name: value}))


NO_TEXT: list[Any] = [1, b"x", True, ["x"], 1.0]
NO_NUMBER: list[Any] = [True, b"1", [1], object(), 1j]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("listen", "name", "token", "verify", "transport") for value in NO_TEXT],
        *[(name, value) for name in ("pool", "host_pool", "page") for value in [*NO_NUMBER, 1.0, float("nan")]],
        *[("timeout", value) for value in [*NO_NUMBER, "1", None]],
        *[("copy_workers", value) for value in [*NO_NUMBER, 1.5, None]],
        *[("metadata", value) for value in ["text", 1, None, [1]]],
        *[("accept_remote", value) for value in [0, 1, "yes", None]],
        ("token_file", 3),
        ("token_file", True),
    ],
    ids=short,
)
def test_wrong_types(name: str, value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        Engine(**{name: value})
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "right"), [("copy_worker", "copy_workers"), ("hostpool", "host_pool"), ("lisen", "listen")]
)
def test_misspelt_options_name_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=right):
        Engine(**{wrong: 1})  # type: ignore[arg-type]


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        Engine("64MiB")  # type: ignore[misc]


def test_options_of_a_file(start: Open) -> None:
    text = '{"pool": "1MiB", "timeout": 2.5, "copy_workers": 2, "verify": "full", "heartbeat": 0.5, "name": "of JSON"}'
    engine = start(**json.loads(text))
    assert (engine.timeout, engine.name, engine.stats()["copy_workers"]) == (2.5, "of JSON", 2)
    cache = allocate(engine)
    engine.copy(cache[[1]], cache[[2]]).result(LIMIT)
    assert engine.stats()["verify"]["blocks"] == 1


def test_token_files(tmp_path: Path, start: Open) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    left, right = start(token_file=file, listen="127.0.0.1:0"), start(token=TOKEN)
    assert right.link(left.address).result(LIMIT).name == left.name
    refused("token_file", lambda: Engine(token=TOKEN, token_file=str(file)))
    file.chmod(0o644)
    error = refused("token_file", lambda: Engine(token_file=str(file)))
    assert TOKEN not in str(error)


def test_addresses(start: Open) -> None:
    first = start(listen="127.0.0.1:0")
    assert 0 < int(first.address.removeprefix("127.0.0.1:")) < 65536
    error = fails(Error, lambda: start(listen=first.address))
    assert first.address in str(error)
    address = first.address
    first.close()
    assert first.address == address, "the address can still be read"
    assert start(listen=address).address == address


def test_pool_without_memory_for_it() -> None:
    fails(OutOfMemory, lambda: Engine(pool="200TiB"))


def test_closed_engine_refuses_every_call(pair: Pair) -> None:
    local, peer = pair.local, pair.peer
    cache, _ = pair.caches()
    rows, remote_kv = cache[[1]], peer["kv"][[1]]
    grant = local.lend(cache[[2]], ttl=LIMIT)
    token = grant.token
    done, running = local.copy(cache[[3]], cache[[4]]), local.push(remote_kv, rows, layerwise=True)
    done.result(LIMIT)
    before, views = contents(cache), cache.tensors
    local.close()
    local.close()
    assert (local.closed, local.name, local.timeout) == (True, "local", LIMIT)
    for call in (
        lambda: local.peers, local.stats, local.events, local.fileno, local.__enter__,
        lambda: local.allocate("b", blocks=1, tensors=1, shape=(1,), dtype="int8"),
        lambda: local.register("c", [bytearray(8)]),
        lambda: local.copy(rows, rows), lambda: local.pull(rows, remote_kv), lambda: local.push(remote_kv, rows),
        lambda: local.link("127.0.0.1:1"), lambda: local.lend(rows, ttl=1.0),
        lambda: peer.send(b"x"), peer.close, lambda: grant.renew(1.0), grant.revoke,
    ):  # fmt: skip
        closed(call)
    assert done.result(0) is None, "the outcome stays"
    fails(Closed, lambda: running.result(0))
    running.ready(0)
    assert views[0].numpy().tobytes() == before[0], "views stay readable"
    assert cache.free().result(LIMIT) is None
    assert (peer.alive, peer.name, peer.metadata, grant.token) == (False, "remote", b"", token)
    assert repr(local)


def test_closed_engine_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), Engine() as engine:
        1 / 0  # noqa: B018
    assert engine.closed


def test_engine_that_nobody_refers_to_is_closed(start: Open) -> None:
    address = Engine(listen="127.0.0.1:0").address
    gc.collect()
    assert start(listen=address).address == address


def test_views_outlive_the_engine() -> None:
    with Engine(pool="1MiB") as engine:
        array = allocate(engine, seed=5).tensors[0].numpy()
        expected = array.copy()
    del engine
    gc.collect()
    assert (array == expected).all()
    array[:] = 7


def test_close_waits_for_transfers(pair: Pair) -> None:
    mine, _ = pair.caches()
    push = pair.local.push(pair.peer["kv"][[1]], mine[[2]], layerwise=True)
    closing = threading.Thread(target=pair.local.close, args=(LIMIT,))
    closing.start()
    eventually(lambda: pair.local.closed)
    for layer in range(4):
        push.ready(layer)
    closing.join(LIMIT)
    assert not closing.is_alive()
    assert push.result(0) is None


def test_close_ends_transfers_after_its_time(pair: Pair) -> None:
    mine, _ = pair.caches()
    push = pair.local.push(pair.peer["kv"][[1]], mine[[2]], layerwise=True)
    pair.local.close(0.05)
    assert push.done()
    fails(Closed, push.result)


def test_wrong_times_to_close(engine: Engine) -> None:
    check_times(engine.close, zero=True)
    assert not engine.closed
    engine.close(None)
    assert engine.closed


@pytest.mark.parametrize("limit", [0, -1, 2**32])
def test_wrong_limits_of_events(engine: Engine, limit: int) -> None:
    refused("limit", lambda: engine.events(limit))


@pytest.mark.parametrize("limit", [True, 1.0, "1", None])
def test_wrong_types_of_limits(engine: Engine, limit: Any) -> None:
    with pytest.raises(TypeError):
        engine.events(limit)


def test_limit_of_events(engine: Engine) -> None:
    cache = allocate(engine)
    started = [engine.copy(cache[[1]], cache[[2]]) for _ in range(5)]
    eventually(lambda: all(transfer.done() for transfer in started))
    assert [len(engine.events(2)) for _ in range(4)] == [2, 2, 1, 0]


def test_engines_of_many_threads(start: Open) -> None:
    """Engines open, link, pull and close in several threads at once."""
    hub = start(listen="127.0.0.1:0")
    theirs = allocate(hub, seed=9)

    def one(number: int) -> None:
        for round_ in range(5):
            with Engine(pool="256KiB", page="4KiB", name=f"{number}/{round_}") as engine:
                mine = allocate(engine)
                peer = engine.link(address(hub)).result(LIMIT)
                engine.pull(mine[:], peer["kv"][0:16], verify="full").result(LIMIT)
                assert contents(mine) == contents(theirs)

    together(6, one)
    eventually(lambda: hub.peers == [])
    assert len(of(PeerUp, hub.events())) == 30


def test_attributes_cannot_be_set(engine: Engine) -> None:
    for name in ("name", "timeout", "other"):
        with pytest.raises(AttributeError):
            setattr(engine, name, 1)


def test_forked_child() -> None:
    """The child cannot use what the parent opened, and may open its own engine. The parent goes on."""
    run_alone("""
import warnings; warnings.simplefilter("ignore")  # newer versions of Python warn of a fork with threads
remote = Engine(pool="1MiB", listen="127.0.0.1:0", name="remote")
engine = Engine(pool="1MiB", name="local")
kv, _ = allocate(engine, seed=1), allocate(remote, seed=2)
expected = contents(kv)
peer = engine.link(remote.address).result(LIMIT)
transfer, grant = engine.copy(kv[[1]], kv[[1]]), engine.lend(kv[[1]], ttl=LIMIT)
transfer.result(LIMIT)
child = os.fork()
if not child:
    try:
        for call in (engine.stats, engine.events, engine.fileno, lambda: engine.peers, lambda: kv.tensors, kv.free,
                     lambda: allocate(engine, "b"), lambda: engine.copy(kv[[1]], kv[[2]]), grant.revoke, peer.close,
                     lambda: engine.pull(kv[[1]], peer["kv"][[1]]), lambda: peer.send(b"x"), transfer.result):
            try:
                call()
            except Closed as error:
                assert error.code == "forked" and "fork" in str(error), error
            else:
                raise AssertionError(call)
        assert engine.closed
        engine.close()
        with Engine(pool="1MiB") as own:
            mine = allocate(own, seed=3)
            own.copy(mine[[1]], mine[[2]]).result(LIMIT)
            assert blocks_of(mine, [1]) == blocks_of(mine, [2])
        os._exit(0)
    except BaseException:
        import traceback; traceback.print_exc()
        os._exit(1)
assert os.waitpid(child, 0)[1] == 0
assert contents(kv) == expected
engine.pull(kv[[3]], peer["kv"][[4]]).result(LIMIT)
assert blocks_of(kv, [3]) == [[row[4 * 96 : 5 * 96]] for row in contents(_)]
""")


def test_engine_open_at_the_end_of_the_program() -> None:
    """A program may end without closing, while transfers run and views are held."""
    run_alone("""
remote = Engine(pool="1MiB", listen="127.0.0.1:0")
engine = Engine(pool="1MiB")
kv, _ = allocate(engine), allocate(remote)
views = kv.tensors
push = engine.push(engine.link(remote.address).result(LIMIT)["kv"][[1]], kv[[1]], layerwise=True)
""")


def test_layout_values() -> None:
    import copy  # noqa: PLC0415
    import pickle  # noqa: PLC0415

    of = layout(heads=range(1, 3), total_heads=4, layers=range(2, 5), order="HND", kv="k_then_v", model="m")
    assert (of.layers, of.heads, of.total_heads, of.tensors) == (range(2, 5), range(1, 3), 4, 3)
    assert of.shape(7) == [7, 2, 2, 4, 3]
    assert layout().shape(7) == [7, 4, 4, 3]
    assert layout(order="HND", heads=2).shape(7) == [7, 2, 4, 3]
    assert layout(kv="latent", heads=None).shape(7) == [7, 4, 3]
    assert (layout(kv="latent", heads=None).heads, layout().tensors) == (range(1), 4)
    assert of == pickle.loads(pickle.dumps(of)) == copy.copy(of)  # noqa: S301
    assert hash(of) == hash(pickle.loads(pickle.dumps(of)))  # noqa: S301
    assert of != of.__replace__(model="n")
    assert of.__replace__(block_tokens=8).block_tokens == 8
    with pytest.raises(AttributeError):
        of.model = "n"  # type: ignore[misc]
    assert "block_tokens=4" in repr(of)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("layers", value) for value in [0, -1, range(0), range(3, 1), range(0, 4, 2), range(-1, 2), 2**32]],
        *[("block_tokens", value) for value in [0, -1, 2**32]],
        *[("head_dim", value) for value in [0, -1, 2**32]],
        *[("heads", value) for value in [0, range(0), range(0, 4, 2)]],
        *[("dtype", value) for value in ["", "float17", "FLOAT16", "str"]],
        *[("order", value) for value in ["", "nhd", "DHN"]],
        *[("kv", value) for value in ["", "both"]],
        ("model", "x" * 257),
    ],
    ids=short,
)
def test_wrong_values_of_layouts(name: str, value: Any) -> None:
    refused(name, lambda: layout(**{name: value}))


def test_heads_outside_the_model() -> None:
    with pytest.raises(InvalidArgument):
        layout(heads=range(2, 5), total_heads=4)
    with pytest.raises(TypeError):
        layout(heads=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("layers", "block_tokens", "heads", "head_dim") for value in (True, 1.0, "2", [1])]
    + [("dtype", None), ("order", 1), ("kv", 1), ("model", b"m"), ("tokens", 1)],
    ids=short,
)
def test_wrong_types_of_layouts(name: str, value: Any) -> None:
    with pytest.raises(TypeError):
        layout(**{name: value})


def test_views_have_their_class(engine: Engine) -> None:
    assert isinstance(allocate(engine).tensors[0], TensorView)
