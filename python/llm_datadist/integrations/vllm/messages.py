"""The messages between the workers of prefill and decode. The engine carries them (``LLMDataDist.notify``).

Decode asks for a request (``Ask``). Prefill lends its blocks in parts (``Lent``), and reports how many layers of each
are computed (``Ready``). At the end decode sends ``Done``, even if it has read nothing. Each message is a JSON
object. The receiver drops a message that it cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Callable  # noqa: TC003 - evaluated when the module is imported
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Union

from llm_datadist.integrations.vllm.group_caches import VIEWS
from llm_datadist.integrations.vllm.handover import MAX_PROMPT, is_ticket

__all__ = ["Ask", "Done", "Gone", "Lent", "Message", "Ready", "decode", "encode"]

MAX_READERS = 4096
MAX_NUMBER = 2**31
_PAIR = 2


@dataclass(frozen=True)
class Ask:
    """Decode asks for a request.

    Attributes:
        ticket: the name under which the request is lent.
        receive: the number of the receive in decode. A cluster may have several receives with one ticket.
        view: the view through which it reads.
        prompt: the digest of its prompt.
    """

    ticket: str
    receive: int
    view: str
    prompt: str


@dataclass(frozen=True)
class Lent:
    """Prefill lends a part of a request.

    Attributes:
        ticket: the name under which the request is lent.
        receive: the number in the ``Ask``.
        part: the number of the part.
        first: the index of the first block in the prompt.
        blocks: the blocks, for each KV cache group. 0 is a block without content.
        grants: tokens in hexadecimal digits, for each group and each cache of the view. Empty for a group without
            content.
        layers: how many layers are in place, from the first on.
        last: whether the part reaches the end of the prompt.
    """

    ticket: str
    receive: int
    part: int
    first: int
    blocks: list[list[int]]
    grants: list[list[str]] = field(repr=False)  # a log must not show them
    layers: int
    last: bool

    def tokens(self) -> list[list[bytes]]:
        """Return the tokens of the grants."""
        return [[bytes.fromhex(token) for token in tokens] for tokens in self.grants]


@dataclass(frozen=True)
class Ready:
    """The first ``layers`` layers of these parts are in place. Each part is a list of a ticket and a number."""

    parts: list[list[Any]]
    layers: int


@dataclass(frozen=True)
class Gone:
    """Prefill does not lend the request to this receive, or has stopped lending it."""

    ticket: str
    receive: int
    reason: str


@dataclass(frozen=True)
class Done:
    """A rank of decode needs no more blocks of a request.

    Attributes:
        ticket: the name under which the request is lent.
        readers: number of ranks of decode that must send ``Done`` before the worker of prefill frees the blocks.
    """

    ticket: str
    readers: int


Message = Union[Ask, Lent, Ready, Gone, Done]
_KINDS = {"ask": Ask, "lent": Lent, "ready": Ready, "gone": Gone, "done": Done}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """Return the payload of a message."""
    return json.dumps({"is": _NAMES[type(message)], **asdict(message)}, separators=(",", ":")).encode()


def decode(payload: bytes) -> Message:
    """Read a payload.

    Raises:
        ValueError: it is not a message.
    """
    try:
        given = json.loads(payload)
    except RecursionError:
        given = None
    name = given.pop("is", None) if isinstance(given, dict) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or set(given) != {one.name for one in fields(kind)} or not all(map(_valid, given.items())):
        raise ValueError("not a message of the connector")
    message: Message = kind(**given)
    return message


def _valid(item: tuple[str, Any]) -> bool:
    name, value = item
    return bool(_VALID.get(name, _is_text)(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_prompt(value: Any) -> bool:
    return _is_text(value) and len(value) <= MAX_PROMPT


def _is_view(value: Any) -> bool:
    return _is_text(value) and value in VIEWS


def _is_readers(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_READERS


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def _is_table(value: Any, valid: Callable[[Any], bool]) -> bool:
    lists = isinstance(value, list) and all(isinstance(row, list) for row in value)
    return lists and all(valid(item) for row in value for item in row)


def _is_parts(value: Any) -> bool:
    pairs = isinstance(value, list) and all(isinstance(pair, list) and len(pair) == _PAIR for pair in value)
    return pairs and all(is_ticket(ticket) and _is_number(number) for ticket, number in value)


def _is_hex(token: Any) -> bool:
    try:
        bytes.fromhex(token)
    except (TypeError, ValueError):
        return False
    return True


_VALID: dict[str, Callable[[Any], bool]] = {
    "ticket": is_ticket,
    "prompt": _is_prompt,
    "receive": _is_number,
    "readers": _is_readers,
    "view": _is_view,
    "part": _is_number,
    "first": _is_number,
    "layers": _is_number,
    "last": lambda value: isinstance(value, bool),
    "blocks": lambda value: _is_table(value, _is_number),
    "grants": lambda value: _is_table(value, _is_hex),
    "parts": _is_parts,
}
