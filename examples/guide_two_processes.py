"""Prefill and decode in two processes. The prefill process dies and is replaced.

Messages between the processes travel through a pipe, in place of the RPC of a real server. Run it:
`python examples/guide_two_processes.py`.
"""

from __future__ import annotations

import multiprocessing
import time
import zlib
from typing import TYPE_CHECKING, Any

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

PREFILL, DECODE = 1, 2  # cluster ids
BLOCKS = 128
DESC = CacheDesc(8, [BLOCKS, 16, 2, 64], DataType.DT_FLOAT16)  # 4 layers, K and V


def open_engine(role: LLMRole, cluster_id: int, listen: str = "") -> LLMDataDist:
    """Return an engine with a device pool. A process has at most one."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = '{"memory_size": 67108864}'
    config.sync_kv_timeout = 2000  # limit of one pull, in milliseconds
    config.listen_ip_info = listen
    engine = LLMDataDist(role, cluster_id)
    engine.init(config.generate_options())
    return engine


def checksum(tensors: list[Any], blocks: list[int]) -> int:
    """Return a checksum of blocks, over all tensors."""
    value = 0
    for tensor in tensors:
        for block in blocks:
            value = zlib.crc32(tensor[block].tobytes(), value)
    return value


def prefill(pipe: Connection) -> None:
    """Run the prefill process: compute prompts into blocks, and free them once decode has pulled them."""
    engine = open_engine(LLMRole.PROMPT, PREFILL, "127.0.0.1:0")  # port 0: any free port
    manager = engine.cache_manager
    cache = manager.allocate_blocks_cache(DESC, BlocksCacheKey(PREFILL, model_id=0))
    tensors = [view.numpy() for view in manager.tensor_views(cache)]
    free, used = list(range(BLOCKS)), {}
    pipe.send({"address": engine.listen_ip_info})
    while (message := pipe.recv())["do"] != "stop":
        request = message["request"]
        if message["do"] == "compute":
            used[request] = [free.pop() for _ in range(message["blocks"])]
            for number, tensor in enumerate(tensors):
                tensor[used[request]] = request + number / 8  # where a model computes
            pipe.send({"model_id": 0, "blocks": used[request], "checksum": checksum(tensors, used[request])})
        else:  # "release"
            free += used.pop(request)
    engine.finalize()


def start_prefill() -> tuple[BaseProcess, Connection, str]:
    """Start a prefill process; return it, its pipe and its address."""
    context = multiprocessing.get_context("spawn")  # not "fork": an engine does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours, ours.recv()["address"]


def peer_at(address: str) -> LLMClusterInfo:
    """Describe the prefill cluster for `link_clusters` and `unlink_clusters`."""
    ip, _, port = address.rpartition(":")
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PREFILL
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info(ip, int(port))
    return peer


def link(engine: LLMDataDist, address: str) -> None:
    """Link to the prefill process. `link_clusters` returns a code and does not raise if the link fails."""
    code, _ = engine.link_clusters([peer_at(address)], timeout=3000)
    if code != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"linking to {address} returned {code.name}; the log has the reason")


def kill(process: BaseProcess, engine: LLMDataDist) -> None:
    """Kill the prefill process, and wait until the engine has noticed."""
    process.kill()
    process.join()
    while engine.stats()["links"]:
        time.sleep(0.01)


def decode() -> None:
    """Run the decode process."""
    process, pipe, address = start_prefill()
    engine = open_engine(LLMRole.DECODER, DECODE)
    manager = engine.cache_manager
    cache = manager.allocate_blocks_cache(DESC)
    tensors = [view.numpy() for view in manager.tensor_views(cache)]
    free = list(range(BLOCKS))
    link(engine, address)
    print("transport:", engine.stats()["links"][0]["transport"])

    for request in (1, 2, 3):
        blocks = [free.pop() for _ in range(10)]
        for attempt in (1, 2):
            try:
                pipe.send({"do": "compute", "request": request, "blocks": len(blocks)})
                answer = pipe.recv()
                if request == 2 and attempt == 1:
                    kill(process, engine)  # for this example: the prefill process dies before the pull
                manager.pull_blocks(BlocksCacheKey(PREFILL, answer["model_id"]), cache, answer["blocks"], blocks)
                pipe.send({"do": "release", "request": request})
                break
            except (LLMException, EOFError, OSError) as error:  # from the engine, or from the pipe
                print(f"request {request}:", error.status_code.name if isinstance(error, LLMException) else repr(error))
                if attempt == 2:
                    raise
                engine.unlink_clusters([peer_at(address)], force=True)  # success, also where no link is left
                process, pipe, address = start_prefill()
                link(engine, address)  # the same engine: `cache` and the blocks remain valid
        assert checksum(tensors, blocks) == answer["checksum"]
        print(f"request {request}: {len(blocks)} blocks are in place")

    engine.unlink_clusters([peer_at(address)], timeout=3000)
    pipe.send({"do": "stop"})
    process.join(10)
    engine.finalize()


if __name__ == "__main__":
    decode()
