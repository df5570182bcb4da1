"""A program for the API of LLM-DataDist, in two processes: it runs unchanged, because this package provides that API.

Prefill registers memory of its own as a cache. Decode links to prefill and pulls blocks of this cache. New programs use
the native API (`native_prefill_decode.py`). Run it: `python examples/lldd_two_processes.py`.
"""

from __future__ import annotations

import multiprocessing
import socket
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PREFILL, DECODE = 1, 2  # cluster ids
SHAPE = (8, 128, 16, 2, 64)  # K and V of 4 layers; blocks, tokens, heads and values
LIMIT_S = 30


def open_engine(role: LLMRole, cluster_id: int, listen: str = "") -> LLMDataDist:
    """Return an engine. A process has at most one."""
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    if listen:
        config.listen_ip_info = listen
    engine = LLMDataDist(role, cluster_id)
    engine.init(config.generate_options())
    return engine


def prefill(address: str, pipe: Connection) -> None:
    """Run the prefill process: register a cache under a key, and keep it until decode has pulled."""
    engine = open_engine(LLMRole.PROMPT, PREFILL, address)
    tensors = np.zeros(SHAPE, np.float16)
    for number, tensor in enumerate(tensors):
        tensor[[3, 4]] = number + 0.5  # where a model computes
    addresses = [tensor.ctypes.data for tensor in tensors]
    desc = CacheDesc(len(tensors), SHAPE[1:], DataType.DT_FLOAT16)
    cache = engine.cache_manager.register_blocks_cache(desc, addresses, BlocksCacheKey(PREFILL, model_id=0))
    pipe.send("ready")
    pipe.poll(LIMIT_S)
    engine.cache_manager.unregister_cache(cache.cache_id)
    engine.finalize()


def decode(address: str) -> None:
    """Run the decode process: link, pull two blocks, unlink."""
    engine = open_engine(LLMRole.DECODER, DECODE)
    tensors = np.zeros(SHAPE, np.float16)
    addresses = [tensor.ctypes.data for tensor in tensors]
    desc = CacheDesc(len(tensors), SHAPE[1:], DataType.DT_FLOAT16)
    cache = engine.cache_manager.register_blocks_cache(desc, addresses)

    ip, _, port = address.rpartition(":")
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PREFILL
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info(ip, int(port))
    code, _ = engine.link_clusters([peer], timeout=3000)
    if code != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"linking to {address} returned {code.name}; the log has the reason")

    engine.cache_manager.pull_blocks(BlocksCacheKey(PREFILL, model_id=0), cache, [3, 4], [20, 21])
    assert all((tensor[[20, 21]] == number + 0.5).all() for number, tensor in enumerate(tensors))
    print(f"pulled 2 blocks of {len(tensors)} tensors from cluster {PREFILL}")
    engine.unlink_clusters([peer], timeout=3000)
    engine.cache_manager.unregister_cache(cache.cache_id)
    engine.finalize()


def main() -> None:
    """Start the prefill process, and run the decode process in this one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"  # a server has a fixed port in place of a free one
    context = multiprocessing.get_context("spawn")  # not "fork": an engine does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(address, theirs), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(LIMIT_S):
        raise TimeoutError("prefill does not start")
    ours.recv()
    decode(address)
    ours.close()  # prefill ends
    process.join(LIMIT_S)
    if process.exitcode != 0:
        raise SystemExit(f"prefill did not end in order: its exit code is {process.exitcode}")


if __name__ == "__main__":
    main()
