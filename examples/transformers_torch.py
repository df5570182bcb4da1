"""A model of `transformers` in two processes, `make example-torch`: prefill sends KV layer by layer, decode continues.

The past key values of both processes are tensors over a cache of the engine, without a copy (`EngineLayer`). Tokens and
logits are compared bit for bit with the unchanged model and its own cache in one process. The weights are drawn from
a seed; nothing is downloaded. Not for: blocks, swaps, several groups (`transformer/`).
"""

from __future__ import annotations

import multiprocessing as mp
import sys
import time
from typing import TYPE_CHECKING, Any, Callable

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from llm_datadist import Engine, KvLayout

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LIMIT_S = 60.0
LENGTHS = (200, 150, 310)  # prompts of one batch, padded on the left
NEW_TOKENS = 24
ROOM = 384
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=ROOM,
    initializer_range=0.06,
)


class EngineLayer(DynamicLayer):
    """Past key values of one layer in existing memory, `[batch, heads, tokens, values]`."""

    def __init__(self, keys: Any, values: Any, seen: int, computed: Callable[[], None]) -> None:
        super().__init__()
        self._room, self._computed = (keys, values), computed
        if seen:
            self._show(seen)

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Append keys and values; return all of them."""
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        for room, new in zip(self._room, (key_states, value_states)):
            room[:, :, start:end] = new
        self._show(end)
        self._computed()
        return self.keys, self.values

    def _show(self, tokens: int) -> None:
        self.lazy_initialization(*self._room)
        self.keys, self.values = (room[:, :, :tokens] for room in self._room)


class Node:
    """An engine with one cache for the whole batch, a block for each request."""

    def __init__(self, name: str) -> None:
        layout = KvLayout(
            layers=CONFIG.num_hidden_layers,
            block_tokens=ROOM,
            heads=CONFIG.num_key_value_heads,
            head_dim=CONFIG.hidden_size // CONFIG.num_attention_heads,
            dtype="float32",
            order="HND",
        )
        self.engine = Engine(pool="64MiB", listen="127.0.0.1:0", name=name, timeout=LIMIT_S)
        self.cache = self.engine.allocate("kv", layout, blocks=len(LENGTHS))
        self.tensors = [torch.from_dlpack(tensor).fill_(torch.nan) for tensor in self.cache.tensors]

    def past(self, seen: int, computed: Callable[[int], None] = lambda _: None) -> Cache:
        """Return past key values of `seen` tokens for `transformers`. `computed` is notified of each layer."""
        pairs = zip(self.tensors[::2], self.tensors[1::2])
        layers = [EngineLayer(*pair, seen, lambda layer=layer: computed(layer)) for layer, pair in enumerate(pairs)]
        return Cache(layers=layers)


def make_model() -> LlamaForCausalLM:
    """Return the model: the same weights in every process."""
    torch.set_num_threads(1)  # the same sums in the same order everywhere
    torch.manual_seed(7)
    return LlamaForCausalLM(CONFIG).eval()


def prompts() -> tuple[Any, Any]:
    """Return the prompts and the mask that leaves the padding out."""
    dice = torch.Generator().manual_seed(3)
    longest = max(LENGTHS)
    mask = torch.stack([(torch.arange(longest) >= longest - length).long() for length in LENGTHS])
    return torch.randint(CONFIG.vocab_size, mask.shape, generator=dice), mask


@torch.no_grad()
def prefill(model: LlamaForCausalLM, past: Cache) -> Any:
    """Compute the prompts; return the logits after their last tokens."""
    tokens, mask = prompts()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = model(tokens, attention_mask=mask, position_ids=positions, past_key_values=past, logits_to_keep=1)
    return found.logits[:, -1]


@torch.no_grad()
def decode(model: LlamaForCausalLM, past: Cache, logits: Any) -> Any:
    """Generate greedily, starting from the logits of the prompts. Return all logits, `[tokens, batch, vocabulary]`."""
    every, (_, mask) = [logits], prompts()
    while len(every) < NEW_TOKENS:
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)
        positions = mask.sum(-1, keepdim=True) - 1
        chosen = every[-1].argmax(-1, keepdim=True)
        found = model(chosen, attention_mask=mask, position_ids=positions, past_key_values=past)
        every.append(found.logits[:, -1])
    return torch.stack(every)


def run_prefill(pipe: Connection) -> None:
    """Run the prefill process: compute, and send each computed layer to the cache of decode."""
    node, model = Node("prefill"), make_model()
    peer = node.engine.link(received(pipe), name="decode").result()
    push = node.engine.push(peer["kv"][range(len(LENGTHS))], node.cache[:], layerwise=True)
    in_place: list[int] = []

    def computed(layer: int) -> None:
        in_place.append(push.bytes * CONFIG.num_hidden_layers // push.total if push.total else 0)
        push.ready(layer)

    start = time.perf_counter()
    logits = prefill(model, node.past(0, computed))
    end = time.perf_counter()
    push.result(LIMIT_S)
    exposed_ms = (time.perf_counter() - end) * 1e3
    text = (
        f"prefill {(end - start) * 1e3:.1f} ms, last layer in place {exposed_ms:.2f} ms later; in place as computed: "
    )
    pipe.send((logits.numpy(), text + " ".join(map(str, in_place))))
    node.engine.close()


def run_decode(pipe: Connection) -> tuple[Any, str]:
    """Run the decode process. Return the logits, and the report of prefill about the transfer."""
    node, model = Node("decode"), make_model()
    pipe.send(node.engine.address)
    logits, text = received(pipe)
    made = decode(model, node.past(max(LENGTHS)), torch.from_numpy(logits))
    node.engine.close()
    return made, text


def received(pipe: Connection) -> Any:
    """Wait for a message, at most `LIMIT_S`, or until the other process ends."""
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"no message within {LIMIT_S:g} s")
    return pipe.recv()


def main() -> int:
    """Compare both runs and return the exit status."""
    model = make_model()
    past = DynamicCache(config=CONFIG)
    alone = decode(model, past, prefill(model, past))
    context = mp.get_context("spawn")  # an engine does not survive a fork
    here, there = context.Pipe()
    other = context.Process(target=run_prefill, args=(there,), daemon=True)
    other.start()
    there.close()
    try:
        made, text = run_decode(here)
        other.join(LIMIT_S)
    finally:
        other.kill()
        other.join()
    print(text)
    for number, tokens in enumerate(made.argmax(-1).T.tolist()):
        print(f"request {number}: {LENGTHS[number]} tokens, then {' '.join(map(str, tokens))}")
    same = bool((alone.view(torch.int32) == made.view(torch.int32)).all())
    print(f"{made.numel():,} logits {'identical bit for bit' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
