"""The work of the model's thread in a step does not grow with the number of requests that wait.

It is counted in lines of Python of the integration. Work inside one line, such as a copy of a list, a search in it, or
a call of the engine, counts as one line, however long it takes. Not for: times (`benches/vllm/step_costs.py`).
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import llm_datadist.integrations.vllm as integration
from counted_lines import lines
from llm_datadist.integrations.vllm.allowed_peers import AllowedPeers
from llm_datadist.integrations.vllm.handover import Handover, prompt_digest
from llm_datadist.integrations.vllm.ranks import Shard
from llm_datadist.integrations.vllm.scheduler import SchedulerSide
from llm_datadist.integrations.vllm.settings import Settings
from llm_datadist.integrations.vllm.transfer_thread import TransferThread
from peers import eventually
from test_vllm_parts import Output, Request, cached

FOLDER = os.path.dirname(integration.__file__)  # noqa: PTH120 - compared with names of files of code
LAYERS = ["layer 0", "layer 1"]
SMALL, LARGE = 10, 1000


def scheduled(name: str) -> Output:
    """A step that computes a part of one request."""
    return Output({name: 64}, scheduled_cached_reqs=cached(**{name: (0, [1, 2])}))


class Waiting:
    """Both halves of a connector, with requests that wait for a link to prefill, or to be computed for decode."""

    def __init__(self, count: int) -> None:
        options = {"producer": True, "consumer": True, "layerwise": True}
        self.scheduler = SchedulerSide("engine", [32], AllowedPeers(["10.0.0.0/8"]), **options)
        self.scheduler.set_addresses({0: "10.0.0.1:1"})
        for number in range(count):
            given = Handover(f"held {number}", "prefill", ["10.0.0.1:1"], prompt_digest(100, None), [32]).params()
            self.scheduler.arrived(Request(f"held {number}", kv_transfer_params=given))
            ticket = {"do_remote_decode": True, "llm_datadist": {"ticket": f"waits {number}"}}
            self.scheduler.arrived(Request(f"waits {number}", kv_transfer_params=ticket))
        # Links that never come about.
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        engine: Any = SimpleNamespace(
            fileno=lambda: self.wake, events=list, close=lambda: None, link=lambda *_, **__: Mock()
        )
        group: Any = SimpleNamespace(form=SimpleNamespace(block_size=32, layers=len(LAYERS)), lend=lambda *_: [])
        self.transfers = TransferThread(engine, [group], Shard(0, 1, 2), None, Settings(), [LAYERS])
        self.step(scheduled("another"))
        held = self.transfers._receiving._ongoing
        eventually(lambda: len(held) == count)

    def step(self, output: Any) -> None:
        """Do what vLLM does in a step."""
        step = self.scheduler.take_step(output)
        self.transfers.begin(step)
        self.transfers.submit(step)
        for layer in LAYERS:
            self.transfers.layer_saved(layer)
        self.transfers.step_saved()
        self.transfers.take()
        self.transfers.take_observations()
        self.scheduler.received(set())
        self.scheduler.freed(set())

    def close(self) -> None:
        self.transfers.close()
        os.close(self.wake)


def cost(count: int) -> tuple[int, int, int]:
    """Return the work of a step that computes nothing of a waiting request, of one that does, and of a turn."""
    waiting = Waiting(count)
    try:
        idle = lines(lambda: waiting.step(scheduled("another")), FOLDER)
        computes = lines(lambda: waiting.step(scheduled("waits 0")), FOLDER)
    finally:
        waiting.close()
    # The thread has ended, so this one may do its work. The second turn has nothing to do.
    waiting.transfers._run_once()
    return idle, computes, lines(lambda: (waiting.transfers._until_due(), waiting.transfers._run_once())[0], FOLDER)


def test_the_work_of_a_step_does_not_grow_with_the_requests_that_wait() -> None:
    small, large = cost(SMALL), cost(LARGE)
    assert min(small) > 10
    assert large == small
