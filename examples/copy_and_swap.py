"""Copies a block on the device, swaps it out and in again: `.venv/bin/python examples/copy_and_swap.py`."""

from llm_datadist import Engine, KvLayout

layout = KvLayout(layers=4, block_tokens=16, heads=2, head_dim=64, dtype="float16")  # 8 tensors: K and V of each layer
with Engine(pool="64MiB", host_pool="64MiB") as engine:
    device = engine.allocate("kv", layout, blocks=64)
    host = engine.allocate("host", layout, blocks=64, pool="host")
    tensors = [tensor.numpy() for tensor in device.tensors]
    for number, tensor in enumerate(tensors):
        tensor[3] = number + 0.5

    engine.copy(device[[4, 5]], device[[3, 3]]).result()  # two requests continue from one block
    engine.copy(host[0], device[3]).result()  # swap out ...
    engine.copy(device[9], host[0]).result()  # ... and in, to another block

    assert all((tensor[[4, 5, 9]] == number + 0.5).all() for number, tensor in enumerate(tensors))
    pool = engine.stats()["pools"]["device"]
    print(f"device pool: {pool['used_bytes']:,} of {pool['capacity_bytes']:,} bytes used")
