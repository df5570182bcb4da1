"""The messages between the workers of prefill and decode. The engine carries them (``Peer.send``).

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
    """Decode asks for a request."""

    ticket: str  # the name under which the request is lent
    receive: int  # the number of the receive in decode, which may have several with one ticket
    view: str  # the view through which it reads
    prompt: str  # the digest of its prompt


@dataclass(frozen=True)
class Lent:
    """Prefill lends a part of a request."""

    ticket: str
    receive: int  # the number in the ``Ask``
    part: int  # the number of the part
    first: int  # the index of the first block in the prompt
    blocks: list[list[int]]  # for each KV cache group; 0 is a block without content
    # Tokens in hexadecimal digits, for each group and each cache of the view. Empty for a group without content.
    grants: list[list[str]] = field(repr=False)  # a log must not show them
    layers: int  # how many layers are in place, from the first on
    last: bool  # whether the part reaches the end of the prompt

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
    """A rank of decode needs no more blocks of a request."""

    ticket: str
    readers: int  # how many ranks of decode must send ``Done`` before the worker of prefill frees the blocks


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
    names = {one.name for one in fields(kind)} if kind else set()
    if kind is None or set(given) != names or not all(_VALID[name](value) for name, value in given.items()):
        raise ValueError("not a message of the connector")
    message: Message = kind(**given)
    return message


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def _is_table(value: Any, valid: Callable[[Any], bool]) -> bool:
    lists = isinstance(value, list) and all(isinstance(row, list) for row in value)
    return lists and all(valid(item) for row in value for item in row)


def _is_part(value: Any) -> bool:
    return isinstance(value, list) and len(value) == _PAIR and is_ticket(value[0]) and _is_number(value[1])


def _is_hex(token: Any) -> bool:
    try:
        bytes.fromhex(token)
    except (TypeError, ValueError):
        return False
    return True


_VALID: dict[str, Callable[[Any], bool]] = {
    "ticket": is_ticket,
    "prompt": lambda value: _is_text(value) and len(value) <= MAX_PROMPT,
    "reason": _is_text,
    "view": lambda value: _is_text(value) and value in VIEWS,
    "receive": _is_number,
    "part": _is_number,
    "first": _is_number,
    "layers": _is_number,
    "readers": lambda value: type(value) is int and 0 < value <= MAX_READERS,
    "last": lambda value: isinstance(value, bool),
    "blocks": lambda value: _is_table(value, _is_number),
    "grants": lambda value: _is_table(value, _is_hex),
    "parts": lambda value: isinstance(value, list) and all(map(_is_part, value)),
}
