"""What decode needs to know about a request of prefill, as ``kv_transfer_params``.

Prefill returns it in its response, or the program between the two servers (the proxy) writes it and sends the request
to both at the same time. The dict passes through several programs, so it has JSON values only, and decode checks it
like any input from the network.
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, structs, to_builtins

from llm_datadist.integrations.vllm.ranks import engine_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_datadist.integrations.vllm.allowed_peers import AllowedPeers

__all__ = [
    "MAX_DECODES",
    "Handover",
    "Prompt",
    "Ticket",
    "digest_of",
    "names_prefill",
    "new_ticket",
    "prompt_digest",
    "ticket_of",
]

KEY = "llm_datadist"
# Maximum number of decodes that receive one request.
MAX_DECODES = 1024

# Annotations need these at run time.
Ticket = Annotated[str, Meta(min_length=1, max_length=256, pattern="^[\x00-\x7f]*\\Z")]
Prompt = Annotated[str, Meta(max_length=64)]


class Handover(Struct, frozen=True):
    """The location of the KV cache of one request."""

    ticket: Ticket  # the name under which prefill lends the request
    engine_id: str  # the engine id of the vLLM of prefill
    # ``ip:port`` of the engine of each worker, in order: the tensor-parallel ranks of the first stage, then the next
    addresses: Annotated[list[str], Meta(min_length=1, max_length=1024)]
    prompt: Prompt  # a digest of the prompt (``prompt_digest``)
    block_sizes: list[Annotated[int, Meta(gt=0)]]  # tokens in a block of prefill, for each KV cache group
    stages: Annotated[int, Meta(ge=1, le=1024)] = 1  # pipeline stages of prefill
    decodes: Annotated[int, Meta(ge=1, le=MAX_DECODES)] = 1  # how many decodes receive the request

    def workers(self, stage: int) -> list[tuple[str, str]]:
        """Return the address and the name of the engine of each tensor-parallel rank of a pipeline stage."""
        ranks = len(self.addresses) // self.stages
        return [
            (self.addresses[worker], engine_name(self.engine_id, worker))
            for worker in range(stage * ranks, (stage + 1) * ranks)
        ]

    def params(self) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of the response of prefill. ``addresses`` stays the same list.

        Everything is under one key, because the responses of several connectors in one vLLM must have different keys.
        """
        return {KEY: {**to_builtins(self), "addresses": self.addresses}}

    @classmethod
    def parse(
        cls, params: Mapping[str, Any], block_sizes: list[int], prompt: str, allowed: AllowedPeers, stages: int = 1
    ) -> Handover:
        """Read the ``kv_transfer_params`` of a request to decode, which prefill has returned or the proxy has written.

        The proxy may leave out ``prompt``, ``block_sizes`` and ``stages``. They are those of this side then: prefill
        compares the prompt before it lends blocks.

        Raises:
            ValueError: something is missing, has another type or an impossible value, or belongs to another prompt; or
                an address is not allowed.
        """
        given = params.get(KEY)
        if not isinstance(given, dict):
            text = f"kv_transfer_params[{KEY!r}] must be an object (got {given!r:.200})"
            raise ValueError(text)  # noqa: TRY004 - input from the network
        handover: Handover = _checked({"prompt": prompt, "block_sizes": block_sizes, "stages": stages, **given}, cls)
        rule = f"block_sizes must have {len(block_sizes)} entries, one for each KV cache group"
        _ensure(len(handover.block_sizes) == len(block_sizes), rule, handover.block_sizes)
        _ensure(handover.stages == stages, f"stages must be {stages}, as in this vLLM", handover.stages)
        rule = f"addresses must be a multiple of {stages}, one for each worker"
        _ensure(not len(handover.addresses) % stages, rule, handover.addresses)
        rule = f"prompt must be the digest of the prompt of this request, {prompt!r}"
        _ensure(handover.prompt == prompt, rule, handover.prompt)
        return structs.replace(handover, addresses=[allowed.checked(address) for address in handover.addresses])


def names_prefill(params: Mapping[str, Any]) -> bool:
    """Whether the parameters name the prefill of a request. Requests of other connectors may have the same flags."""
    given = params.get(KEY)
    if isinstance(given, dict):
        return "addresses" in given or bool(params.get("do_remote_prefill"))
    return KEY in params


def ticket_of(params: Mapping[str, Any]) -> str | None:
    """Return the ticket that the proxy has given to a request of prefill, or ``None``.

    Raises:
        ValueError: it is not a ticket.
    """
    given = params.get(KEY)
    return str(_checked(given.get("ticket"), Ticket)) if isinstance(given, dict) else None


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
    lora = request.lora_request
    return prompt_digest(request.num_prompt_tokens, request.prompt_token_ids, "" if lora is None else lora.lora_name)


def new_ticket() -> str:
    """Return a ticket for a request to which the proxy has given none. Nobody can guess it."""
    return secrets.token_hex(16)


def _checked(given: Any, kind: Any) -> Any:
    try:
        return convert(given, kind)
    except ValidationError as error:
        _ensure(False, str(error), given)


def _ensure(holds: bool, rule: str, given: Any) -> None:
    if not holds:
        raise ValueError(f"kv_transfer_params[{KEY!r}] is invalid: {rule} (got {given!r:.200})")
