"""What prefill tells decode about a request, as ``kv_transfer_params``.

The dict travels through the answer of prefill, the program between the two servers (the proxy) and the request to
decode, so it has JSON values only, and decode checks it like any input from the network.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Handover", "digest"]

MAX_RANKS = 1024
MAX_BLOCKS = 2**24


@dataclass(frozen=True)
class Handover:
    """Where the KV cache of one request lies in prefill.

    Attributes:
        request: the id of the request in prefill.
        engine_id: the engine id of the vLLM of prefill.
        addresses: ``host:port`` of the engine of each tensor-parallel rank, in order.
        num_tokens: number of tokens of the prompt.
        prompt: a digest of the tokens of the prompt (``digest``).
        block_sizes: tokens in a block, for each KV cache group.
        blocks: the blocks of the prompt in the order of its tokens, for each KV cache group. 0 is a block without
            content, outside the window of a sliding-window group.
    """

    request: str
    engine_id: str
    addresses: list[str]
    num_tokens: int
    prompt: str
    block_sizes: list[int]
    blocks: list[list[int]]

    def params(self) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of the answer of prefill."""
        return {"do_remote_prefill": True, "do_remote_decode": False, "llm_datadist": asdict(self)}

    def check_prompt(self, num_tokens: int, tokens: list[int] | None) -> None:
        """Refuse the KV cache of another prompt, which a proxy may have mixed up.

        Raises:
            ValueError: the prompt differs from that of prefill.
        """
        _ensure(num_tokens == self.num_tokens, f"prefill has computed {self.num_tokens} tokens, not {num_tokens}")
        _ensure(digest(tokens) == self.prompt, "prefill has computed another prompt")

    @classmethod
    def parse(cls, params: Mapping[str, Any], num_groups: int) -> Handover:
        """Read the ``kv_transfer_params`` of a request to decode.

        Args:
            params: what prefill has answered.
            num_groups: number of KV cache groups here.

        Raises:
            ValueError: something is missing or has another type or an impossible value.
        """
        given = params.get("llm_datadist")
        if not isinstance(given, dict):
            text = "kv_transfer_params has no 'llm_datadist'; pass what prefill has answered, unchanged"
            raise ValueError(text)  # noqa: TRY004 - input from the network
        names = ("request", "engine_id", "addresses", "num_tokens", "prompt", "block_sizes", "blocks")
        request, engine_id, addresses, num_tokens, prompt, sizes, blocks = (given.get(name) for name in names)
        texts = all(isinstance(text, str) for text in (request, engine_id, prompt))
        _ensure(texts, "request, engine_id and prompt must be texts")
        _ensure(type(num_tokens) is int, "num_tokens must be a number")
        _ensure(_is_list(addresses, str) and 0 < len(addresses or "") <= MAX_RANKS, f"1 to {MAX_RANKS} addresses")
        _ensure(_is_list(sizes, int) and all(size > 0 for size in sizes or ()), "block_sizes must be above 0")
        groups = blocks if isinstance(blocks, list) and all(_is_list(group, int) for group in blocks) else []
        _ensure(
            len(groups) == len(sizes or ()) == num_groups, f"block_sizes and blocks of {num_groups} KV cache groups"
        )
        numbers = [block for group in groups for block in group]
        _ensure(len(numbers) <= MAX_BLOCKS and all(0 <= block < 2**31 for block in numbers), "blocks out of range")
        return cls(**{name: given[name] for name in names})


def digest(tokens: list[int] | None) -> str:
    """Return a digest of the tokens of a prompt, or an empty text for a prompt that has none (embeddings)."""
    return "" if tokens is None else blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _ensure(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"kv_transfer_params['llm_datadist'] is invalid: {rule}")
