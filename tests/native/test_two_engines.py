"""Several engines of one process: each has its own pools, caches, links and counters.

Not for: the threads that they share (`links/several_engines.rs` of the core).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist import LLMConfig, LLMDataDist, LLMRole
from llm_datadist.native import Completed, Engine, NotFound, PeerUp
from peers import eventually, together

from .helpers import LIMIT, Model, address, allocate, contents, fails, next_of, of, refused

if TYPE_CHECKING:
    from .conftest import Open, Pair


def test_everything_is_separate(start: Open) -> None:
    one, two = start(name="one"), start(name="two", pool="1MiB", host_pool=None)
    first, second = allocate(one, seed=1), allocate(two, seed=2)
    model = Model(second)
    one.copy(first[[1]], first[[2]])
    assert next_of(one, Completed).error is None
    assert two.events() == []
    model.check(second)
    assert [set(engine.stats()["pools"]) for engine in (one, two)] == [{"device", "host"}, {"device"}]
    assert two.stats()["ops"]["copy_blocks"]["calls"] == 0
    second.free()
    assert (one.stats()["table"]["caches"], two.stats()["table"]["caches"]) == (1, 0)


def test_rows_of_another_engine(pair: Pair) -> None:
    mine, theirs = pair.caches()
    local, remote = pair.local, pair.remote
    refused("dst", lambda: local.copy(theirs[[1]], mine[[1]]), "remote")
    refused("src", lambda: local.copy(mine[[1]], theirs[[1]]), "remote")
    refused("dst", lambda: local.pull(theirs[[1]], pair.peer["kv"][[1]]), "remote")
    refused("src", lambda: local.pull(mine[[1]], pair.back["kv"][[1]]), "remote")
    refused("src", lambda: local.push(pair.peer["kv"][[1]], theirs[[1]]), "remote")
    refused("rows", lambda: remote.lend(mine[[1]], ttl=1.0), "local")
    refused(
        "dst", lambda: local.pull([(mine[[1]], pair.peer["kv"][[1]]), (theirs[[1]], pair.peer["kv"][[1]])]), "remote"
    )


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


def test_beside_the_class_of_the_original(start: Open) -> None:
    """An `LLMDataDist` and native engines work in one process. A native engine does not find its caches by name."""
    engine = start()
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.mem_pool_cfg = '{"memory_size": "1MiB"}'
    config.listen_ip_info = "127.0.0.1:0"
    with LLMDataDist(LLMRole.MIX, 7) as dist:
        dist.init(config.generate_options())
        mine = allocate(engine, seed=1)
        peer = engine.link(dist.listen_ip_info).result(LIMIT)
        fails(NotFound, lambda: engine.pull(mine[[1]], peer["kv"][[1]]))
    engine.copy(mine[[1]], mine[[2]]).result(LIMIT)
