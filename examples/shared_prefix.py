"""Copies a prefix, computed once, into each request that starts with it: `.venv/bin/python examples/shared_prefix.py`.

Two references keep the prefix alive: its id until `deallocate_cache`, and its key until `remove_cache_key`.
"""

from llm_datadist import CacheDesc, CacheKey, DataType, LLMConfig, LLMDataDist, LLMException, LLMRole

config = LLMConfig()
config.enable_cache_manager = True
config.mem_pool_cfg = '{"memory_size": 16777216}'
dist = LLMDataDist(LLMRole.PROMPT, 1)
dist.init(config.generate_options())
manager = dist.cache_manager

TOKENS, VALUES = 128, 64
prefix_desc = CacheDesc(2, [1, TOKENS, VALUES], DataType.DT_FLOAT16)
request_desc = CacheDesc(2, [4, TOKENS, VALUES], DataType.DT_FLOAT16)  # four requests in one batch

prefix_key = CacheKey(1, req_id=2**64 - 1, prefix_id=7)
prefix = manager.allocate_cache(prefix_desc, [prefix_key])
for view in manager.tensor_views(prefix):
    view.numpy()[:] = 0.25

batch = manager.allocate_cache(request_desc, [CacheKey(1, req_id=number) for number in (100, 101, 102, 103)])
half = TOKENS // 2 * VALUES * 2  # bytes of the first half of a slot
for slot in range(4):
    manager.copy_cache(batch, prefix, slot, 0, 0, half, req_id=100 + slot)

for view in manager.tensor_views(batch):
    assert (view.numpy()[:, : TOKENS // 2] == 0.25).all()

manager.deallocate_cache(prefix)  # the key still holds it
manager.remove_cache_key(prefix_key)  # this releases the memory
try:
    manager.copy_cache(batch, prefix)
except LLMException as gone:
    print(f"{gone.status_code}: {gone}")
dist.finalize()
