"""Copies a block on the device, swaps it out and in again: `.venv/bin/python examples/copy_and_swap.py`."""

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
)

config = LLMConfig()
config.enable_cache_manager = True
config.sync_kv_timeout = 1000  # milliseconds, for every call that waits or moves bytes
config.mem_pool_cfg = '{"memory_size": 67108864, "page_shift": 16}'
config.host_mem_pool_cfg = '{"memory_size": 67108864}'
dist = LLMDataDist(LLMRole.PROMPT, 1)
dist.init(config.generate_options())
manager = dist.cache_manager

# 4 layers, K and V each: 8 tensors of 64 blocks; a block holds 16 tokens of 2 heads of 64 values.
shape = [64, 16, 2, 64]
device = manager.allocate_blocks_cache(CacheDesc(8, shape, DataType.DT_FLOAT16), BlocksCacheKey(1, 0))
host = manager.allocate_blocks_cache(CacheDesc(8, shape, DataType.DT_FLOAT16, Placement.HOST))

for layer, view in enumerate(manager.tensor_views(device)):
    view.numpy()[3] = layer + 0.5

manager.copy_blocks(device, {3: [4, 5]})  # two requests continue from one block
manager.swap_blocks(device, host, {3: 0})  # out ...
manager.swap_blocks(host, device, {0: 9})  # ... and in, to another block

for layer, view in enumerate(manager.tensor_views(device)):
    blocks = view.numpy()
    assert (blocks[[4, 5, 9]] == layer + 0.5).all()

pool = manager.stats()["pools"]["device"]
print(f"device pool: {pool['used_bytes']:,} of {pool['capacity_bytes']:,} bytes used")
dist.finalize()
