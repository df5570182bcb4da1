"""More than one of anything, without vLLM: data-parallel ranks, nodes, pipeline stages, decodes, and peers that go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.integrations.vllm.step import Await, Receive
from peers import eventually, free_ports
from test_vllm_transfers import LONG, TOKENS, Side, blocks_of, hand_over, sides, started, whole

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

TOKEN = {"token": "0123456789abcdef"}
TCP = {"transport": "tcp"}


def running(*names: str, **given: Any) -> AbstractContextManager[tuple[Side, ...]]:
    """Start vLLMs with one worker each, or as many as `given` has."""
    return started(*[Side(name, **{"ranks": 1, "heads": 2, **LONG, **given}) for name in names])


def test_data_parallel_ranks_of_one_host_do_not_collide() -> None:
    """Two ranks with two workers each and one configuration. Decode reads both."""
    port = free_ports(4)
    with (
        running("prefill_dp0", ranks=2, port=port) as (first,),
        running("prefill_dp1", ranks=2, port=port, replica=1) as (second,),
        running("decode") as (decode,),
    ):
        found = [worker.address() for side in (first, second) for worker in side.workers]
        assert found == [f"127.0.0.1:{port + worker}" for worker in range(4)]
        for side in (first, second, first):
            hand_over(side, decode, f"of {side.name} {decode.workers[0].peers()}")
        assert decode.workers[0].peers() == 4


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_each_stage_reads_the_same_stage(ranks: tuple[int, int]) -> None:
    """Each stage of the pipeline has other layers, whatever the tensor-parallel sizes."""
    sequences = [whole(2, TOKENS) ^ np.uint16(stage) for stage in range(2)]
    assert not (sequences[0] == sequences[1]).any()
    with sides({"ranks": ranks[0]}, {"ranks": ranks[1]}, stages=2) as (prefill, decode):
        blocks = blocks_of(prefill, TOKENS)
        for number, worker in enumerate(prefill.workers):
            worker.write(blocks, range(TOKENS), sequences[number // ranks[0]])
        prefill.send("there", blocks)
        decode.receive(prefill.handover("there"), TOKENS)
        decode.received()
        for number, worker in enumerate(decode.workers):
            assert worker.wrong(blocks_of(decode, TOKENS), range(TOKENS), sequences[number // ranks[1]]) == []
        prefill.frees()
        # A worker is linked to workers of its stage only.
        linked = max(ranks) // ranks[0], max(ranks) // ranks[1]
        assert [{worker.peers() for worker in side.workers} for side in (prefill, decode)] == [{n} for n in linked]


def test_workers_on_several_nodes_are_reached_at_their_own_addresses() -> None:
    """Each worker listens at the address that vLLM has chosen for its host, because there is a token."""
    options: dict[str, Any] = {"engine_options": {**TOKEN, **TCP}}
    nodes = {0: "127.0.0.2", 1: "127.0.0.3"}
    with (
        running("prefill", ranks=2, nodes=nodes, **options) as (prefill,),
        running("decode", nodes={0: "127.0.0.4"}, **options) as (decode,),
    ):
        assert [worker.address().rpartition(":")[0] for worker in prefill.workers] == ["127.0.0.2", "127.0.0.3"]
        hand_over(prefill, decode, "there")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104
@pytest.mark.parametrize("options", [{}, {"engine_options": TCP}])
def test_workers_that_listen_everywhere_are_reached_where_they_say(host: str, options: dict[str, Any]) -> None:
    with (
        running("prefill", host=host, advertise="127.0.0.5", **options) as (prefill,),
        running("decode", **options) as (decode,),
    ):
        (worker,) = prefill.workers
        port = worker.listens().rpartition(":")[2]
        assert worker.listens() == (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        assert worker.address() == f"127.0.0.5:{port}"
        hand_over(prefill, decode, "there")


def test_several_decodes_read_one_prefill_at_the_same_time() -> None:
    """Each has requests of its own. One that is killed takes nothing from the others."""
    with running("prefill", lease_ms=3_600_000) as (prefill,), running("one", "two", "killed") as decodes:
        names = {side.name: [f"{side.name} {number}" for number in range(20)] for side in decodes}
        sequence, blocks = prefill.compute(), blocks_of(prefill, TOKENS)
        for side in decodes:
            side.do(awaited=[Await(name, prefill.handover(name)) for name in names[side.name]])
        eventually(lambda: prefill.workers[0].held() == 60)
        decodes[2].workers[0].kill()
        for name in (*names["one"], *names["two"], *names["killed"]):
            prefill.send(name, blocks)
        for side in decodes[:2]:
            ours = [blocks_of(side, TOKENS)]
            side.do(receives=[Receive(name, ours, 0, TOKENS) for name in names[side.name]])
        for side in decodes[:2]:
            eventually(lambda side=side: len(side.workers[0].look().received) == 20)
            assert not side.workers[0].look().failed
            assert side.workers[0].wrong(blocks_of(side, TOKENS), range(TOKENS), sequence) == []
        # Also those of the killed one, long before their leases would end.
        eventually(lambda: len(prefill.workers[0].look().sent) == 60)


def test_several_decodes_may_read_one_request() -> None:
    """The second one holds it after the first one has read it. Prefill waits for both, whatever their ranks."""
    with running("prefill") as (prefill,), running("one") as (one,), running("two", ranks=2) as (two,):
        sequence, blocks = prefill.compute(), blocks_of(prefill, TOKENS)
        prefill.send("there", blocks)
        for side in (one, two):
            assert not prefill.workers[0].look().sent
            side.receive(prefill.handover("there", decodes=2), TOKENS)
            side.received(sequence)
        prefill.frees()


def test_decodes_come_and_go() -> None:
    """Prefill keeps nothing of them, whether they are closed in order or killed while they hold requests."""
    with running("prefill") as (prefill,):
        for number in range(6):
            with running(f"decode {number}") as (decode,):
                hand_over(prefill, decode, f"request {number}")
                assert prefill.workers[0].peers() == 1
                handover = prefill.handover(f"held {number}")
                decode.do(awaited=[Await("held", handover)])
                eventually(prefill.workers[0].held)
                if number % 2:
                    decode.workers[0].kill()
            eventually(lambda: not prefill.workers[0].peers())
            eventually(lambda: not prefill.workers[0].remembered())


def test_prefills_come_and_go() -> None:
    """A prefill returns at another port with the same engine id, so decode learns its address with each request."""
    with running("decode") as (decode,):
        ports = set()
        for number in range(4):
            with running("prefill") as (prefill,):
                ports.add(prefill.workers[0].address())
                hand_over(prefill, decode, f"request {number}")
                assert (decode.workers[0].peers(), decode.workers[0].remembered()) == (1, {})
                gone = prefill.handover("gone")
                prefill.workers[0].kill()
            eventually(lambda: not decode.workers[0].peers())
            decode.receive(gone, TOKENS, name=f"gone {number}")
            decode.fails("Connection refused", f"gone {number}")
        assert len(ports) == 4
        assert decode.workers[0].remembered() == {}
