"""The messages between the engines of two peer-to-peer tiers, in MessagePack.

``Contact`` travels in the handshake of vLLM's own control connection. The other two are messages of the engine: the
owner of rows offers them (``Offer``), and the reader answers only if it does not read them (``Refused``). The grant
reports to the owner that the rows were read.
"""

from __future__ import annotations

from typing import Annotated, Any, Union

import numpy as np
from msgspec import Meta, MsgspecError, Struct, msgpack

from llm_datadist.integrations.vllm.messages import MAX_REASON

__all__ = ["MAX_ROWS", "VERSION", "Contact", "Offer", "Refused", "decode", "decode_contact", "encode"]

VERSION = 1
# A message of the engine has at most 64 KiB, and a row takes 8 bytes: its numbers at the owner and at the reader.
MAX_ROWS = 8_000

_ROW = np.dtype("<u4")
_Number = Annotated[int, Meta(ge=0, lt=2**62)]
_Reason = Annotated[str, Meta(max_length=MAX_REASON)]
_Rows = Annotated[bytes, Meta(max_length=_ROW.itemsize * MAX_ROWS)]


class Contact(Struct, tag="contact", frozen=True):
    """Where a peer links to an engine, and the name by which it knows the messages of this engine."""

    version: int
    engine: Annotated[str, Meta(min_length=1, max_length=128)]
    address: Annotated[str, Meta(min_length=1, max_length=256)]


class Offer(Struct, tag="offer", frozen=True):
    """The owner lends rows, and wants the reader to pull them into rows of its own."""

    write: _Number  # the number of the write at the owner. A large one has several offers
    src: _Rows
    dst: _Rows
    token: bytes  # of the grant over ``src``

    @classmethod
    def of(cls, write: int, src: list[int], dst: list[int], token: bytes) -> Offer:
        """Return the offer of the rows ``src``, to be pulled into the rows ``dst``."""
        return cls(write, np.asarray(src, _ROW).tobytes(), np.asarray(dst, _ROW).tobytes(), token)

    def rows(self) -> tuple[list[int], list[int]]:
        """Return the rows that are read, and those that are written.

        Raises:
            ValueError: they are not pairs.
        """
        src, dst = (np.frombuffer(rows, _ROW).tolist() for rows in (self.src, self.dst))
        if not src or len(src) != len(dst):
            raise ValueError(f"an offer of {len(src)} rows for {len(dst)} rows")
        return src, dst

    def __repr__(self) -> str:
        """Leave out the token, which a log must not show."""
        return f"Offer({self.write}, {len(self.dst) // _ROW.itemsize} rows)"


class Refused(Struct, tag="refused", frozen=True):
    """The reader does not have the rows of a write, and will not read them."""

    write: _Number
    reason: _Reason


_Message = Union[Offer, Refused]
_ENCODER = msgpack.Encoder()
_MESSAGES = msgpack.Decoder(_Message)
_CONTACTS = msgpack.Decoder(Contact)


def encode(message: Struct) -> bytes:
    """Return the payload of a message."""
    return _ENCODER.encode(message)


def decode(payload: bytes) -> Offer | Refused:
    """Read a message of the engine.

    Raises:
        ValueError: it is not a message.
    """
    return _decoded(_MESSAGES, payload)  # type: ignore[no-any-return]


def decode_contact(payload: bytes) -> Contact:
    """Read what a peer has sent in vLLM's handshake.

    Raises:
        ValueError: it is not a contact, or one of another version.
    """
    contact: Contact = _decoded(_CONTACTS, payload)
    if contact.version != VERSION:
        raise ValueError(f"the peer has version {contact.version} of the messages, and this engine version {VERSION}")
    return contact


def _decoded(decoder: msgpack.Decoder[Any], payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except (MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a message of the peer-to-peer tier: {error}") from None
