"""What decode needs to know about a request of prefill, as ``kv_transfer_params``.

Prefill answers it, or the program between the two servers (the proxy) writes it and starts both at the same time. The
dict travels through several programs, so it has JSON values only, and decode checks it like any input from the network.
"""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Handover", "is_ticket", "own_ticket", "prompt_digest", "ticket_of"]

KEY = "llm_datadist"
MAX_RANKS = 1024
MAX_TICKET = 256
# The longest digest of a prompt.
MAX_PROMPT = 64


@dataclass(frozen=True)
class Handover:
    """Where the KV cache of one request can be had.

    Attributes:
        ticket: the name under which prefill lends the request.
        engine_id: the engine id of the vLLM of prefill.
        addresses: ``host:port`` of the engine of each tensor-parallel rank, in order.
        prompt: a digest of the prompt (``prompt_digest``).
        block_sizes: tokens in a block of prefill, for each KV cache group.
    """

    ticket: str
    engine_id: str
    addresses: list[str]
    prompt: str
    block_sizes: list[int]

    def params(self) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of the answer of prefill."""
        return {"do_remote_prefill": True, "do_remote_decode": False, KEY: asdict(self)}

    @classmethod
    def parse(cls, params: Mapping[str, Any], block_sizes: list[int], prompt: str) -> Handover:
        """Read the ``kv_transfer_params`` of a request to decode.

        Args:
            params: what prefill has answered, or what the proxy has written. The proxy may leave out ``prompt`` and
                ``block_sizes``: prefill compares the prompt before it lends blocks.
            block_sizes: tokens in a block here, for each KV cache group.
            prompt: the digest of the prompt here.

        Raises:
            ValueError: something is missing, has another type or an impossible value, or belongs to another prompt.
        """
        given = params.get(KEY)
        if not isinstance(given, dict):
            text = f"kv_transfer_params has no {KEY!r}; pass what prefill has answered, unchanged"
            raise ValueError(text)  # noqa: TRY004 - input from the network
        given = {"prompt": prompt, "block_sizes": block_sizes, **given}
        names = ("ticket", "engine_id", "addresses", "prompt", "block_sizes")
        ticket, engine_id, addresses, theirs, sizes = (given.get(name) for name in names)
        _check_ticket(ticket)
        _ensure(isinstance(engine_id, str), "engine_id must be a text")
        _ensure(_is_list(addresses, str) and 0 < len(addresses or "") <= MAX_RANKS, f"1 to {MAX_RANKS} addresses")
        _ensure(_is_list(sizes, int) and all(size > 0 for size in sizes or ()), "block_sizes must be above 0")
        _ensure(len(sizes or ()) == len(block_sizes), f"block_sizes of {len(block_sizes)} KV cache groups")
        _ensure(theirs == prompt, "prefill has computed another prompt")
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


def prompt_digest(num_tokens: int, tokens: list[int] | None) -> str:
    """Return a digest of a prompt: the number of its tokens, and a hash of them unless it has none (embeddings)."""
    text = "" if tokens is None else blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()
    return f"{num_tokens}:{text}"


def own_ticket(request_id: str) -> str:
    """Return the ticket of a request to which the proxy has given none."""
    return request_id if is_ticket(request_id) else blake2b(request_id.encode(), digest_size=16).hexdigest()


def is_ticket(value: Any) -> bool:
    """Whether a value can be a ticket."""
    return isinstance(value, str) and 0 < len(value) <= MAX_TICKET and value.isascii()


def _check_ticket(ticket: Any) -> None:
    _ensure(is_ticket(ticket), f"ticket must be a text of 1 to {MAX_TICKET} ASCII characters")


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _ensure(holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"kv_transfer_params[{KEY!r}] is invalid: {rule}")
