"""Reads of shuffled blocks between two processes of one host: ours and NIXL's, in turn, in one run.

``python benches/peer_nixl.py [--mib 256] [--rounds 5] [--blocks 16,64,256,1024]``, with ``nixl`` 1.5.1 and numpy
beside this package (``pip install --no-deps nixl nixl-cu12``). Every round is verified outside the clock.
NIXL as it comes (progress thread on), and with the settings that measured best for it: no progress thread,
shared-memory lanes, error handling off. Not for: other peers, or registered memory (``cargo bench --bench transfer``).
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

WAYS = {
    "as it comes": {},
    "tuned": {"UCX_TLS": "posix,sysv,self,tcp", "UCX_ERR": "none"},
}


def engine(role: LLMRole, cluster: int, pool: int, listen: str = "") -> LLMDataDist:
    """One of our engines with a device pool."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = 60_000
    config.mem_pool_cfg = f'{{"memory_size": {pool}}}'
    config.listen_ip_info = listen
    dist = LLMDataDist(role, cluster)
    dist.init(config.generate_options())
    return dist


def nixl(name: str, way: str) -> Any:
    """A NIXL agent."""
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415  (only where it is installed)

    if way == "tuned":
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
        return agent
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def fill(words: np.ndarray, seed: int) -> None:
    """Random contents."""
    words[:] = np.random.default_rng(seed).integers(0, 2**63, size=words.size, dtype=np.int64)


def target(way: str, size: int, rows: int, told_to: int) -> None:
    """The process that is read from: prints what the reader needs, and polls for NIXL until its input ends."""
    ours = engine(LLMRole.PROMPT, 1, size + (64 << 20), "127.0.0.1:0")
    cache = ours.cache_manager.allocate_blocks_cache(
        CacheDesc(1, [rows, size // rows], DataType.DT_INT8), BlocksCacheKey(1, 0)
    )
    fill(ours.cache_manager.tensor_views(cache)[0].numpy().reshape(-1).view(np.int64), 1)
    buffer = np.empty(size // 8, dtype=np.int64)
    fill(buffer, 1)
    agent = nixl("target", way)
    agent.register_memory([(buffer.ctypes.data, size, 0, "")], mem_type="DRAM")
    told = (ours.listen_ip_info, agent.get_agent_metadata(), buffer.ctypes.data)
    # A pipe of its own: the other library logs to the standard output.
    with os.fdopen(told_to, "wb") as pipe:
        pickle.dump(told, pipe)
    os.set_blocking(0, False)
    while True:
        try:
            if os.read(0, 1) == b"":
                break
        except BlockingIOError:
            pass
        agent.get_new_notifs()  # drives its transport where no thread does
        if way != "tuned":
            time.sleep(0.01)
    os._exit(0)


def measure(way: str, kib: int, options: argparse.Namespace) -> None:  # noqa: PLR0915  (one measurement, in order)
    """One block size, one setting of NIXL."""
    size, block = options.mib << 20, kib << 10
    rows = size // block
    environment = {**os.environ, **({"UCX_TLS": WAYS["tuned"]["UCX_TLS"]} if way == "tuned" else {})}
    os.environ.update(environment)
    told, telling = os.pipe()
    passed = ["--mib", str(options.mib), "--rows", str(rows), "--tell", str(telling)]
    child = subprocess.Popen(  # noqa: S603  (this file)
        [sys.executable, __file__, "--target", way, *passed],
        stdin=subprocess.PIPE,
        pass_fds=[telling],
        env=environment,
    )
    os.close(telling)
    with os.fdopen(told, "rb") as pipe:
        address, metadata, far = pickle.load(pipe)  # noqa: S301  (our own child)
    ours = engine(LLMRole.DECODER, 2, size + (64 << 20))
    info = LLMClusterInfo()
    info.remote_cluster_id = 1
    ip, port = address.rsplit(":", 1)
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info(ip, int(port))
    ours.link_clusters([info], 5000)
    cache = ours.cache_manager.allocate_blocks_cache(CacheDesc(1, [rows, block], DataType.DT_INT8))
    mine = ours.cache_manager.tensor_views(cache)[0].numpy().reshape(rows, block).view(np.int64)
    buffer = np.empty((rows, block // 8), dtype=np.int64)
    agent = nixl("reader", way)
    agent.register_memory([(buffer.ctypes.data, size, 0, "")], mem_type="DRAM")
    remote = agent.add_remote_agent(metadata)
    order = np.random.default_rng(2)
    src, dst = order.permutation(rows), order.permutation(rows)
    expected = np.empty_like(buffer)
    words = np.empty(size // 8, dtype=np.int64)
    fill(words, 1)
    expected[dst] = words.reshape(rows, -1)[src]
    source, into = src.tolist(), dst.tolist()
    near = [(buffer.ctypes.data + int(at) * block, block, 0) for at in dst]
    there = [(far + int(at) * block, block, 0) for at in src]
    handle = agent.initialize_xfer(
        "READ", agent.get_xfer_descs(near, mem_type="DRAM"), agent.get_xfer_descs(there, mem_type="DRAM"), remote
    )
    key = BlocksCacheKey(1, 0)

    def pull() -> None:
        ours.cache_manager.pull_blocks(key, cache, source, into)

    def read() -> None:
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state

    ratios, speeds = [], {"ours": [], "nixl": []}
    for round_ in range(options.rounds + 1):
        took = {}
        for name, call, out in (("ours", pull, mine), ("nixl", read, buffer)):
            out[:] = 0
            began = time.perf_counter()
            call()
            took[name] = time.perf_counter() - began
            assert (out == expected).all(), f"{name}: wrong bytes"
        if round_:
            ratios.append(took["nixl"] / took["ours"])
            for name, seconds in took.items():
                speeds[name].append(size / seconds / 1e9)
    median = {name: statistics.median(values) for name, values in speeds.items()}
    spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
    print(
        f"{way:12} {kib:5} KiB   ours {median['ours']:5.1f}   nixl {median['nixl']:5.1f}   "
        f"ratio {statistics.median(ratios):5.2f}  ({spread})",
        flush=True,
    )
    assert child.stdin is not None
    child.stdin.close()
    child.wait(20)


def main() -> None:
    """Measure every block size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", default="16,64,256,1024")
    parser.add_argument("--target")
    parser.add_argument("--reader")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tell", type=int)
    options = parser.parse_args()
    if options.target:
        target(options.target, options.mib << 20, options.rows, options.tell)
    elif options.reader:
        measure(options.reader, int(options.blocks), options)
        os._exit(0)
    else:
        print("GB/s = 10^9 bytes, medians; ratio of times, NIXL's to ours")
        for way in WAYS:
            for kib in options.blocks.split(","):
                passed = ["--mib", str(options.mib), "--rounds", str(options.rounds), "--blocks", kib]
                command = [sys.executable, __file__, "--reader", way, *passed]
                subprocess.run(command, check=False, timeout=300)  # noqa: S603  (this file)


if __name__ == "__main__":
    main()
