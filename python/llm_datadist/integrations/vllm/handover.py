"""What decode needs to know about a request of prefill, as ``kv_transfer_params``.

Prefill returns it in its response, or the program between the two servers (the proxy) writes it and sends the request
to both at the same time. The dict passes through several programs, so it has JSON values only, and decode checks it
like any input from the network.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Handover", "digest_of", "is_ticket", "own_ticket", "prompt_digest", "ticket_of"]

KEY = "llm_datadist"
MAX_RANKS = 1024
MAX_TICKET = 256
# Maximum length of the digest of a prompt.
MAX_PROMPT = 64
# Maximum length of a value in an error.
MAX_SHOWN = 200


@dataclass(frozen=True)
class Handover:
    """The location of the KV cache of one request."""

    ticket: str  # the name under which prefill lends the request
    engine_id: str  # the engine id of the vLLM of prefill
    addresses: list[str]  # ``host:port`` of the engine of each tensor-parallel rank, in order
    prompt: str  # a digest of the prompt (``prompt_digest``)
    block_sizes: list[int]  # tokens in a block of prefill, for each KV cache group

    def params(self) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of the response of prefill."""
        return {"do_remote_prefill": True, "do_remote_decode": False, KEY: asdict(self)}

    @classmethod
    def parse(cls, params: Mapping[str, Any], block_sizes: list[int], prompt: str) -> Handover:
        """Read the ``kv_transfer_params`` of a request to decode, which prefill has returned or the proxy has written.

        The proxy may leave out ``prompt`` and ``block_sizes``. They are those of this side then: prefill compares the
        prompt before it lends blocks.

        Raises:
            ValueError: something is missing, has another type or an impossible value, or belongs to another prompt.
        """
        given = params.get(KEY)
        if not isinstance(given, dict):
            text = f"kv_transfer_params has no {KEY!r}; pass those of the response of prefill, unchanged"
            raise ValueError(text)  # noqa: TRY004 - input from the network
        given = {"prompt": prompt, "block_sizes": block_sizes, **given}
        names = ("ticket", "engine_id", "addresses", "prompt", "block_sizes")
        ticket, engine_id, addresses, theirs, sizes = (given.get(name) for name in names)
        _check_ticket(ticket)
        _ensure(isinstance(engine_id, str), "engine_id must be a string", engine_id)
        rule = f"addresses must be a list of 1 to {MAX_RANKS} strings"
        _ensure(_is_list(addresses, str) and 0 < len(addresses or "") <= MAX_RANKS, rule, addresses)
        rule = "block_sizes must be a list of integers above 0"
        _ensure(_is_list(sizes, int) and all(size > 0 for size in sizes or ()), rule, sizes)
        rule = f"block_sizes must have {len(block_sizes)} entries, one for each KV cache group"
        _ensure(len(sizes or ()) == len(block_sizes), rule, sizes)
        _ensure(theirs == prompt, f"prompt must be the digest of the prompt of this request, {prompt!r}", theirs)
        return cls(**{name: given[name] for name in names})


def ticket_of(params: Mapping[str, Any]) -> str | None:
    """Return the ticket that the proxy has given to a request of prefill, or ``None``.

    Raises:
        ValueError: it is not a ticket.
    """
    given = params.get(KEY)
    if not isinstance(given, dict):
        return None
    ticket = given.get("ticket")
    _check_ticket(ticket)
    return str(ticket)


def prompt_digest(num_tokens: int, tokens: list[int] | None, adapter: str = "") -> str:
    """Return a digest of a prompt: its length, and a hash of its token ids and its LoRA adapter.

    A prompt of embeddings has no ids, and embeddings are not compared.
    """
    if tokens is None and not adapter:
        return f"{num_tokens}:"
    key = blake2b(adapter.encode()).digest() if adapter else b""
    return f"{num_tokens}:{blake2b(array('q', tokens or ()).tobytes(), digest_size=16, key=key).hexdigest()}"


def digest_of(request: Any) -> str:
    """Return the digest of the prompt of a request of vLLM."""
    lora = getattr(request, "lora_request", None)
    return prompt_digest(request.num_prompt_tokens, request.prompt_token_ids, "" if lora is None else lora.lora_name)


def own_ticket(request_id: str) -> str:
    """Return the ticket of a request to which the proxy has given none."""
    return request_id if is_ticket(request_id) else blake2b(request_id.encode(), digest_size=16).hexdigest()


def is_ticket(value: Any) -> bool:
    """Whether a value can be a ticket."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TICKET and value.isascii()


def _check_ticket(ticket: Any) -> None:
    _ensure(is_ticket(ticket), f"ticket must be a string of 1 to {MAX_TICKET} ASCII characters", ticket)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _ensure(holds: bool, rule: str, given: Any) -> None:
    if not holds:
        shown = repr(given)
        shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"
        raise ValueError(f"kv_transfer_params[{KEY!r}] is invalid: {rule} (got {shown})")
