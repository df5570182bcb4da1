"""The work of the model's thread in a step does not grow with the number of requests that wait.

It is counted in lines of Python of the integration. Work inside one line, such as a copy of a list, a search in it, or
a call of the engine, counts as one line, however long it takes. Not for: times (`benches/vllm/step_costs.py`).
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import llm_datadist.integrations.vllm as integration
from llm_datadist.integrations.vllm.allowed_peers import AllowedPeers
from llm_datadist.integrations.vllm.handover import Handover, prompt_digest
from llm_datadist.integrations.vllm.ranks import Shard
from llm_datadist.integrations.vllm.scheduler import SchedulerSide
from llm_datadist.integrations.vllm.settings import Settings
from llm_datadist.integrations.vllm.transfer_thread import TransferThread
from peers import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

FOLDER = os.path.dirname(integration.__file__)  # noqa: PTH120 - compared with names of files of code
LAYERS = ["layer 0", "layer 1"]
SMALL, LARGE = 10, 1000


def lines(work: Callable[[], None]) -> int:
    """Return how many lines of the integration this thread runs."""
    count = 0

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        count += event == "line"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def request(name: str, params: dict[str, Any]) -> Any:
    tokens = {"num_prompt_tokens": 100, "prompt_token_ids": None, "lora_request": None}
    return SimpleNamespace(request_id=name, kv_transfer_params=params, **tokens)


def scheduled(name: str, computed: int) -> Any:
    """A step that computes a part of one request."""
    cached = SimpleNamespace(
        req_ids=[name], new_block_ids=[([1, 2],)], num_computed_tokens=[computed], resumed_req_ids=set()
    )
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={name: 64},
        preempted_req_ids=None,
        has_sync_kv_loads=False,
    )


class Waiting:
    """Both halves of a connector, with requests that wait for a link to prefill, or to be computed for decode."""

    def __init__(self, count: int) -> None:
        options = {"producer": True, "consumer": True, "layerwise": True}
        self.scheduler = SchedulerSide("engine", [32], AllowedPeers(["10.0.0.0/8"]), **options)
        self.scheduler.set_addresses({0: "10.0.0.1:1"})
        for number in range(count):
            given = Handover(f"held {number}", "prefill", ["10.0.0.1:1"], prompt_digest(100, None), [32]).params()
            self.scheduler.arrived(request(f"held {number}", given))
            ticket = {"do_remote_decode": True, "llm_datadist": {"ticket": f"waits {number}"}}
            self.scheduler.arrived(request(f"waits {number}", ticket))
        # Links that never come about.
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        engine: Any = SimpleNamespace(
            fileno=lambda: self.wake, events=list, close=lambda: None, link=lambda *_, **__: Mock()
        )
        group: Any = SimpleNamespace(form=SimpleNamespace(block_size=32, layers=len(LAYERS)), lend=lambda *_: [])
        self.transfers = TransferThread(engine, [group], Shard(0, 1, 2), None, Settings(), [LAYERS])
        self.step(scheduled("another", 0))
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
        idle = lines(lambda: waiting.step(scheduled("another", 0)))
        computes = lines(lambda: waiting.step(scheduled("waits 0", 0)))
    finally:
        waiting.close()
    # The thread has ended, so this one may do its work. The second turn has nothing to do.
    waiting.transfers._run_once()
    return idle, computes, lines(lambda: (waiting.transfers._until_due(), waiting.transfers._run_once())[0])


def test_the_work_of_a_step_does_not_grow_with_the_requests_that_wait() -> None:
    small, large = cost(SMALL), cost(LARGE)
    assert min(small) > 10
    assert large == small
