"""Workers of the vLLM integration in processes of their own, as in vLLM.

Not for: the scheduler's half, and vLLM itself.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import msgpack

from llm_datadist import Engine
from llm_datadist.integrations.vllm import outbox
from llm_datadist.integrations.vllm.addresses import advertised, listen_address
from llm_datadist.integrations.vllm.group_caches import GroupCaches
from llm_datadist.integrations.vllm.host_buffers import HostBuffers
from llm_datadist.integrations.vllm.identity import PROTOCOL, Identity
from llm_datadist.integrations.vllm.pages import PageFormat
from llm_datadist.integrations.vllm.ranks import Shard, engine_name
from llm_datadist.integrations.vllm.settings import Settings
from llm_datadist.integrations.vllm.transfer_thread import Ended, TransferThread
from peers import LIMIT, eventually
from vllm_device import FakeDevice
from vllm_pages import DIM, LAYERS, Pages

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from llm_datadist.integrations.vllm.step import Step

LIMIT_MS = int(LIMIT * 1000)
BLOCKS = 24
# Forks of a small process start at once, and no engine was opened in it.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Worker:
    """One rank, in its process: its engine, its pages and its transfers."""

    def __init__(self, name: str, worker: int, ranks: int, heads: int, given: dict[str, Any]) -> None:
        isa, block_size, tag = (given.pop(*pair) for pair in (("isa", "vec"), ("block_size", 32), ("tag", "model")))
        protocol = given.pop("protocol", PROTOCOL)
        identity = Identity({"model": given.pop("model", "model")}, protocol)
        if protocol != PROTOCOL:
            _speak_another_version()
            identity.facts["later"] = "unknown to the other side"
        self.log = _Lines()
        logging.getLogger("vllm.llm_datadist").addHandler(self.log)
        stages, replica = (given.pop(*pair) for pair in (("stages", 1), ("replica", 0)))
        own = given.pop("nodes", {}).get(worker, "")  # the address that vLLM has chosen for the host of the worker
        shard = Shard(worker % ranks, ranks, heads, worker // ranks, stages)
        settings = Settings.parse({"timeout_ms": LIMIT_MS, "lease_ms": LIMIT_MS, **given})
        self.engine = Engine(
            listen=listen_address(settings, shard, replica, lambda: own),
            name=engine_name(name, worker),
            metadata=identity.metadata(),
            **settings.engine_options,
        )
        self.reached = advertised(settings, str(self.engine.address), lambda: own)
        self.pages = Pages(isa, block_size, shard.heads, BLOCKS)
        order = "NHD" if isa.endswith("NHD") else "HND"
        slots = "2 slots" if isa.startswith("slots") else ""
        packing = isa if isa in ("vec", "amx") else ""
        form = PageFormat(LAYERS, block_size, self.pages.heads, heads, DIM, DIM, 2, packing, tag, order, slots)
        caches = GroupCaches(self.engine, 0, form)
        layers = [f"layer {n}" for n in range(LAYERS)]
        reached, self.device, host = self.pages.memory, None, None
        if given.pop("host_buffers", False):
            # The engine reaches the rows only, and `pages` are on the device.
            self.device = FakeDevice()
            reached = self.rows = np.full_like(self.pages.memory, 9)
            host = HostBuffers(self.device, dict(zip(layers, self.pages.memory)), dict(zip(layers, self.rows)))
        caches.register([layer.ctypes.data for layer in reached], BLOCKS, [form.page_bytes] * LAYERS)
        settings = Settings.parse({"timeout_ms": LIMIT_MS, "lease_ms": LIMIT_MS, **given})
        checked = identity if settings.check_compatibility else None
        self.exporter = _global_exporter() if settings.spans else None
        self.transfers = TransferThread(self.engine, [caches], shard, checked, settings, [layers], host)
        self.ended = Ended()
        self.twice: list[str] = []  # what `look` has got a second time

    def address(self) -> str:
        """Where peers reach the engine."""
        return self.reached

    def listens(self) -> str:
        return str(self.engine.address)

    def submit(self, step: Step) -> None:
        self.transfers.begin(step)
        self.transfers.submit(step)

    def layer_saved(self, layer: int) -> None:
        self.transfers.layer_saved(f"layer {layer}")

    def step_saved(self) -> None:
        self.transfers.step_saved()

    def look(self) -> Ended:
        """Return what has ended so far."""
        ended = self.transfers.take()
        self.twice += [*(self.ended.sent & ended.sent), *(self.ended.received & ended.received)]
        self.ended.sent |= ended.sent
        self.ended.received |= ended.received
        self.ended.failed |= ended.failed
        return self.ended

    def reported_twice(self) -> list[str]:
        return self.twice

    def observed(self) -> dict[str, Any] | None:
        return self.transfers.take_observations()

    def spans(self) -> list[tuple[str, dict[str, Any], str]]:
        """Return name, attributes and status of the spans so far."""
        done = self.exporter.get_finished_spans()
        return [(span.name, dict(span.attributes), span.status.status_code.name) for span in done]

    def lines(self) -> str:
        return "\n".join(self.log.lines)

    def peers(self) -> int:
        return len(self.engine.peers)

    def remembered(self) -> dict[str, int]:
        """The sizes of what this worker keeps of peers and requests."""
        lending, receiving = self.transfers._lending, self.transfers._receiving
        kept = {
            "loans": lending._loans,
            "held": lending._held,
            "receives": lending._receives,
            "leases": lending._leases,
            "ongoing": receiving._ongoing,
            "dials": receiving._dialing._calls,
            "dialing": receiving._dialing._waiting,
            "messages": self.transfers._outbox._waiting,
        }
        return {name: len(one) for name, one in kept.items() if one}

    def threads(self) -> list[str]:
        """The names of the threads of the process, those of the engine included."""
        return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]

    def tell(self, address: str, payloads: list[bytes]) -> None:
        """Send messages to the engine at an address."""
        peer = self.engine.link(address).result()
        for payload in payloads:
            peer.send(payload)

    def held(self, asked: bool = False) -> int:
        """The number of requests that decode holds here, or has asked for."""
        loans = list(self.transfers._lending._loans.values())
        return sum(bool(loan.receives if asked else loan.holders) for loan in loans)

    def waiting(self) -> int:
        """The number of messages that wait for room at their peers."""
        return sum(map(len, self.transfers._outbox._waiting.values()))

    def work(self) -> int:
        """The number of actions that wait for the transfer thread."""
        return len(self.transfers._work)

    def pause(self, paused: bool) -> None:
        """Have the transfer thread take no events until it goes on."""
        if paused:
            go_on, run_once = threading.Event(), self.transfers._run_once
            self.transfers._run_once = lambda: (go_on.wait(LIMIT), run_once())  # type: ignore[method-assign]
            self.go_on = go_on
        else:
            self.go_on.set()

    def fail_messages(self) -> None:
        """Have the transfer thread fail at each message."""
        self.transfers._heard = lambda _: 1 / 0  # type: ignore[method-assign]

    def fail_events(self) -> None:
        """Have the next call of ``Engine.events`` fail."""
        engine, thread = self.engine, self.transfers

        def events() -> Any:
            thread._engine = engine
            raise MemoryError("no memory for events")

        # With `fileno`, because the thread may not have begun to wait for the events.
        fake = SimpleNamespace(events=events, fileno=engine.fileno, close=engine.close)
        thread._engine = fake  # type: ignore[assignment]

    def break_thread(self) -> None:
        """End the transfer thread by an error, as soon as it wakes up."""
        self.transfers._run_once = lambda: sys.exit(1)  # type: ignore[method-assign]
        self.transfers._rouse()
        self.transfers._thread.join(LIMIT)

    def break_copies(self) -> None:
        """End the thread that copies to the device by an error."""
        self.fail_copies(SystemExit())
        host = self.transfers._host
        host.load(["layer 0"], [(0, 0)], None, lambda *_: None)
        eventually(lambda: not host.alive)

    def free(self, ticket: str) -> None:
        """Have the transfer thread report a request as sent, as when its lease ends."""
        self.transfers._submit([partial(self.transfers._freed, ticket, False)])

    def ends(self) -> bool:
        """Whether the transfer thread has ended."""
        self.transfers._thread.join(LIMIT)
        return not self.transfers._thread.is_alive()

    def write(self, blocks: list[int], tokens: range, whole: np.ndarray, layers: range = range(LAYERS)) -> None:
        """Write tokens; on a device, the model's stream does that later."""
        write = partial(self.pages.write, blocks, tokens, whole, layers)
        write() if self.device is None else self.device.model.put(write)

    def wrong(
        self, blocks: list[int], tokens: range, whole: np.ndarray, layers: range = range(LAYERS)
    ) -> list[tuple[int, int]]:
        return self.pages.wrong(blocks, tokens, whole, layers)

    def untouched(self, blocks: list[int]) -> bool:
        return not self.pages.memory[:, blocks].any()

    def hold_copies(self, direction: str, held: bool = True) -> None:
        """Hold the copies in one direction, or let them go on."""
        gate = self.device.gates[direction]
        gate.clear() if held else gate.set()

    def fail_copies(self, failure: BaseException) -> None:
        self.device.failure = failure

    def copies(self) -> list[tuple[str, tuple[str, ...], list[int], list[int]]]:
        """The copies that have begun."""
        return self.device.copies

    def saves(self) -> int:
        """The number of copies to host memory that wait or run."""
        return len(self.transfers._saves._saves)

    def close(self) -> None:
        self.transfers.close()
        self.engine.close()


def _speak_another_version() -> None:
    """Add a field to each message that this process sends."""
    encode = outbox.encode
    outbox.encode = lambda message: msgpack.encode({**msgpack.decode(encode(message)), "later": [1]})


def _global_exporter() -> Any:
    from opentelemetry import trace  # noqa: PLC0415 - only for the test of spans
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: PLC0415

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def _run(pipe: Connection, *given: Any) -> None:
    worker = _Worker(*given)
    pipe.send(None)
    name = ""
    while name != "close":
        name, args = pipe.recv()
        pipe.send(getattr(worker, name)(*args))


class Worker:
    """A handle of a worker in another process. Its methods are those of `_Worker`."""

    def __init__(self, *given: Any) -> None:
        self._pipe, there = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_run, args=(there, *given), daemon=True)
        self.process.start()
        there.close()

    def ready(self) -> Worker:
        self._heard()
        return self

    def close(self) -> None:
        """Close the worker in order, and check that its process ends."""
        if self.process.is_alive():
            self._called("close")
            self.process.join(LIMIT)
            assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LIMIT)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._called(name, *args)

    def _called(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        return self._heard()

    def _heard(self) -> Any:
        assert self._pipe.poll(LIMIT), "the worker does not answer"
        return self._pipe.recv()
