"""An asyncio prefill server that sends each layer to two decode processes while the next layer is computed.

Run it: `python examples/guide_layerwise_asyncio.py`. Pipes stand in for the RPC of a real server.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from typing import TYPE_CHECKING, Optional

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

PREFILL, DECODERS = 1, (11, 12)  # cluster ids
LAYERS = 4
DESC = CacheDesc(2 * LAYERS, [128, 16, 2, 64], DataType.DT_FLOAT16)


def open_engine(role: LLMRole, cluster_id: int, listen: str = "") -> LLMDataDist:
    """Return an engine whose caches peers access by key."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True  # needed on both sides
    config.mem_pool_cfg = '{"memory_size": 67108864}'
    config.listen_ip_info = listen
    engine = LLMDataDist(role, cluster_id)
    engine.init(config.generate_options())
    return engine


class ComputedLayers(LayerSynchronizer):
    """Tells a transfer which layers of one request are computed."""

    timeout_in_millis = 1000  # the engine waits this long for each layer

    def __init__(self) -> None:
        self.events = [threading.Event() for _ in range(LAYERS)]
        self.stopped = False

    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
        """Wait, on the thread of the transfer. The limit is 1 s longer than that of the engine, which decides."""
        return self.events[layer_index].wait((timeout_in_millis or 0) / 1000 + 1)

    def stop(self) -> None:
        """End the compute loop and the transfer's thread."""
        self.stopped = True
        for event in self.events:
            event.set()


class Server:
    """A prefill server with one engine."""

    def __init__(self, addresses: dict[int, str]) -> None:
        self.engine = open_engine(LLMRole.PROMPT, PREFILL)
        self.manager = self.engine.cache_manager
        self.cache = self.manager.allocate_blocks_cache(DESC)
        self.tensors = [view.numpy() for view in self.manager.tensor_views(self.cache)]
        peers = []
        for cluster_id, address in addresses.items():
            ip, _, port = address.rpartition(":")
            peer = LLMClusterInfo()
            peer.remote_cluster_id = cluster_id
            peer.append_local_ip_info("127.0.0.1", 0)
            peer.append_remote_ip_info(ip, int(port))
            peers.append(peer)
        code, _ = self.engine.link_clusters(peers, timeout=3000)  # blocks: call it before the loop or in a thread
        if code != LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"linking returned {code.name}; the log has the reason")

    def compute(self, request: int, blocks: list[int], layers: ComputedLayers, seconds: list[float]) -> None:
        """Compute the layers of one request; runs on a worker thread."""
        for layer in range(LAYERS):
            time.sleep(seconds[layer])  # where a model computes
            if layers.stopped:
                return
            for tensor in self.tensors[2 * layer : 2 * layer + 2]:
                tensor[blocks] = request
            layers.events[layer].set()

    async def serve(self, request: int, blocks: list[int], there: list[int], seconds: list[float]) -> None:
        """Compute a request and send it to every decode process."""
        layers, every = ComputedLayers(), range(LAYERS)
        configs = [TransferWithCacheKeyConfig(BlocksCacheKey(peer), every, every) for peer in DECODERS]
        task = self.manager.transfer_cache_async(self.cache, layers, configs, blocks, there)
        compute = asyncio.ensure_future(asyncio.to_thread(self.compute, request, blocks, layers, seconds))
        compute.add_done_callback(lambda done: task.cancel() if done.exception() else None)
        try:
            await task  # the event loop runs other coroutines meanwhile
        except asyncio.CancelledError:
            task.cancel()  # cancelling the coroutine alone does not end the transfer
            raise
        finally:
            layers.stop()
            await asyncio.gather(compute, task)  # only now may `blocks` be written or freed
            for peer, code, progress, error in zip(DECODERS, task.get_results(0), task.progress(), task.errors()):
                reason = str(error).partition(" (")[0] if error else "no error"
                print(f"request {request} to {peer}: {code.name}, {progress.layers_done} layers, {reason}")


async def serve_all(server: Server, pipes: list[Connection], processes: list[BaseProcess]) -> None:
    """Serve requests that succeed, take too long, are cancelled, and lose a destination."""
    fast = [0.01] * LAYERS
    await server.serve(1, [3, 4], [7, 8], fast)
    for pipe in pipes:
        pipe.send((1, [7, 8]))  # decode continues from here
        assert await asyncio.to_thread(pipe.recv), "every byte has arrived"
    await server.serve(2, [3, 4], [7, 8], [0.01, 0.01, 1.5, 0.01])  # layer 2 is too late
    try:
        await asyncio.wait_for(server.serve(3, [3, 4], [7, 8], [0.01, 0.5, 0.01, 0.01]), 0.3)
    except asyncio.TimeoutError:
        print("request 3: too late")
    processes[1].kill()
    await server.serve(4, [3, 4], [7, 8], [0.2, 0.01, 0.01, 0.01])


def decode(cluster_id: int, pipe: Connection) -> None:
    """Run a decode process: offer a cache by key, and check what arrives."""
    engine = open_engine(LLMRole.DECODER, cluster_id, "127.0.0.1:0")
    cache = engine.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(cluster_id))
    tensors = [view.numpy() for view in engine.cache_manager.tensor_views(cache)]
    pipe.send(engine.listen_ip_info)
    request, blocks = pipe.recv()
    pipe.send(all((tensor[blocks] == request).all() for tensor in tensors))
    pipe.recv()
    engine.finalize()


def main() -> None:
    """Start the decode processes and serve."""
    context = multiprocessing.get_context("spawn")  # not "fork": an engine does not survive a fork
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for cluster_id in DECODERS:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=decode, args=(cluster_id, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    server = Server({cluster_id: pipe.recv() for cluster_id, pipe in zip(DECODERS, pipes)})
    asyncio.run(serve_all(server, pipes, processes))
    pipes[0].send("stop")
    processes[0].join(10)
    server.engine.finalize()


if __name__ == "__main__":
    main()
