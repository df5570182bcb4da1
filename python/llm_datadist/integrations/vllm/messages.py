"""The messages between the workers of prefill and decode. The engine carries them (``LLMDataDist.notify``).

Decode asks for a request, and prefill lends its blocks. Decode reports that it is done through the grant, or with
``Done`` if it did not need any block. Each message is a JSON object. The receiver drops a message that it cannot read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Union

from llm_datadist.integrations.vllm.group_caches import VIEWS

__all__ = ["Ask", "Done", "Gone", "Lent", "Message", "decode", "encode"]

MAX_READERS = 4096


@dataclass(frozen=True)
class Ask:
    """Decode asks for the blocks of a request: how many ranks read this worker, and through which view."""

    request: str
    readers: int
    view: str


@dataclass(frozen=True)
class Lent:
    """Prefill has lent them: tokens in hexadecimal digits, for each group and each cache of the view."""

    request: str
    grants: list[list[str]]

    def tokens(self) -> list[list[bytes]]:
        """Return the tokens of the grants."""
        return [[bytes.fromhex(token) for token in tokens] for tokens in self.grants]


@dataclass(frozen=True)
class Gone:
    """Prefill does not have the request, or no longer."""

    request: str
    reason: str


@dataclass(frozen=True)
class Done:
    """One of ``readers`` ranks of decode needs nothing from this worker."""

    request: str
    readers: int


Message = Union[Ask, Lent, Gone, Done]
_KINDS = {"ask": Ask, "lent": Lent, "gone": Gone, "done": Done}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(message: Message) -> bytes:
    """Return the payload of a message."""
    return json.dumps({"is": _NAMES[type(message)], **asdict(message)}).encode()


def decode(payload: bytes) -> Message:
    """Read a payload.

    Raises:
        ValueError: it is not a message.
    """
    given = json.loads(payload)
    name = given.pop("is", None) if isinstance(given, dict) else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or set(given) != {field.name for field in fields(kind)} or not all(map(_valid, given.items())):
        raise ValueError("not a message of the connector")
    message: Message = kind(**given)
    return message


def _valid(item: tuple[str, Any]) -> bool:
    name, value = item
    if name == "readers":
        return type(value) is int and 0 < value <= MAX_READERS
    if name == "grants":
        lists = isinstance(value, list) and all(isinstance(tokens, list) for tokens in value)
        return lists and all(_is_hex(token) for tokens in value for token in tokens)
    return isinstance(value, str) and (name != "view" or value in VIEWS)


def _is_hex(token: Any) -> bool:
    try:
        bytes.fromhex(token)
    except (TypeError, ValueError):
        return False
    return True
