"""What an engine of the connector announces when it is linked, so that decode reads no KV cache of another model.

Connectors whose protocol versions are neighbours work together: they ignore fields, facts and kinds of messages that
they do not know, and fields that a version has added are optional.
"""

from __future__ import annotations

from msgspec import MsgspecError, Struct, json

__all__ = ["PROTOCOL", "Identity"]

# The version of the messages, of the parameters of requests, and of what the blocks of a request are.
PROTOCOL = 1


class Identity(Struct, frozen=True):
    """The identity of the engine of a worker."""

    facts: dict[str, str]  # what both sides must have in common, such as the name of the model
    protocol: int = PROTOCOL

    def metadata(self) -> bytes:
        """Return the ``metadata`` of the engine."""
        return json.encode(self)

    def check(self, metadata: bytes) -> None:
        """Compare the ``metadata`` of an engine of prefill with this one.

        Raises:
            ValueError: they do not fit together. The text shows both sides.
        """
        try:
            theirs = json.decode(metadata, type=Identity)
        except MsgspecError:
            raise ValueError(f"it is no engine of this connector (its metadata: {metadata[:64]!r})") from None
        if abs(theirs.protocol - self.protocol) > 1:
            raise ValueError(f"version {theirs.protocol} of the protocol in prefill, {self.protocol} in decode")
        names = [name for name in theirs.facts if theirs.facts[name] != self.facts.get(name, theirs.facts[name])]
        if names:
            both = [f"{name} is {theirs.facts[name]!r} in prefill, {self.facts[name]!r} here" for name in names]
            raise ValueError("; ".join(both))
