"""The messages between the workers of prefill and decode, in MessagePack. The engine carries them (``Peer.send``).

Decode holds a request from the time at which it arrives in its queue (``Hold``), and asks for its blocks when it has
room for them (``Ask``). Prefill lends the blocks in parts (``Lent``), and reports how many layers of each are computed
(``Ready``). At the end decode sends ``Done``, even if it has read nothing. The receiver drops a message that it cannot
read, and ignores fields that it does not know.
"""

from __future__ import annotations

from typing import Annotated, Union

from msgspec import Meta, MsgspecError, Struct, msgpack

from llm_datadist.integrations.vllm.group_caches import VIEWS
from llm_datadist.integrations.vllm.handover import MAX_DECODES, Prompt, Ticket

__all__ = [
    "MAX_NUMBER",
    "MAX_REASON",
    "Ask",
    "Done",
    "Gone",
    "Hold",
    "Lent",
    "Message",
    "Ready",
    "decode",
    "encode",
    "printable",
]

MAX_NUMBER = 2**31
# Maximum number of characters of a peer's reason that are used.
MAX_REASON = 1000

# Annotations need these at run time.
Number = Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]
Readers = Annotated[int, Meta(ge=1, le=4096)]
Decodes = Annotated[int, Meta(ge=1, le=MAX_DECODES)]
View = Annotated[str, Meta(pattern=rf"^({'|'.join(VIEWS)})\Z")]


class Hold(Struct, tag="hold", frozen=True):
    """A rank of decode will read a request, or report that it needs nothing. Prefill keeps it as long as the link."""

    ticket: Ticket  # the name under which the request is lent
    readers: Readers  # how many ranks of this decode hold it at this worker of prefill, before its blocks are freed
    decodes: Decodes = 1  # how many decodes hold it, before its blocks are freed


class Ask(Struct, tag="ask", frozen=True):
    """Decode asks for the blocks of a request."""

    ticket: Ticket
    receive: Number  # the number of the receive in decode, which may have several with one ticket
    view: View  # the view through which it reads
    prompt: Prompt  # the digest of its prompt


class Lent(Struct, tag="lent", frozen=True):
    """Prefill lends a part of a request."""

    ticket: Ticket
    receive: Number  # the number in the ``Ask``
    part: Number  # the number of the part
    first: Number  # the index of the first block in the prompt
    blocks: list[list[Number]]  # for each KV cache group; 0 is a block without content
    grants: list[list[bytes]]  # tokens, for each group and each cache of the view. Empty for a group without content
    layers: Number  # how many layers are in place, from the first on
    last: bool  # whether the part reaches the end of the prompt

    def __repr__(self) -> str:
        """Leave out the tokens, which a log must not show."""
        return f"Lent({self.ticket!r}, part {self.part}, receive {self.receive})"


class Ready(Struct, tag="ready", frozen=True):
    """The first ``layers`` layers of these parts are in place. Each part is a ticket and a number."""

    parts: list[tuple[Ticket, Number]]
    layers: Number


class Gone(Struct, tag="gone", frozen=True):
    """Prefill does not lend the request to this receive, or has stopped lending it."""

    ticket: Ticket
    receive: Number
    reason: str


class Done(Struct, tag="done", frozen=True):
    """A rank of decode needs no more blocks of a request that it holds."""

    ticket: Ticket


def printable(reason: str) -> str:
    """Return a reason that a peer has given, fit for the log."""
    return "".join(letter if letter.isprintable() else "?" for letter in reason[:MAX_REASON])


Message = Union[Hold, Ask, Lent, Ready, Gone, Done]
_ENCODER = msgpack.Encoder()
_DECODER = msgpack.Decoder(Message)


def encode(message: Struct) -> bytes:
    """Return the payload of a message."""
    return _ENCODER.encode(message)


def decode(payload: bytes) -> Message:
    """Read a payload.

    Raises:
        ValueError: it is not a message.
    """
    try:
        return _DECODER.decode(payload)  # type: ignore[no-any-return]
    except (MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a message of the connector: {error}") from None
