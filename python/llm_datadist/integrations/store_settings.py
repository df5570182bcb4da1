"""The options that the adapters for a keeper have in common, and the versions of their servers."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, Optional

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import replace

if TYPE_CHECKING:
    import logging
    from collections.abc import Mapping

    from typing_extensions import Self

__all__ = ["StoreSettings", "server_version"]

_Text = Annotated[str, Meta(min_length=1)]


class StoreSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The checked options that all adapters have. The how-to page "Share KV blocks between servers" describes them."""

    socket: _Text
    revision: _Text
    timeout_ms: Annotated[int, Meta(ge=1, le=60_000)] = 10_000
    checksums: bool = False
    token_file: Optional[_Text] = None
    keeper_user: Optional[Annotated[int, Meta(ge=0, le=2**32 - 1)]] = None

    @classmethod
    def parse(cls, adapter: str, given: Mapping[str, Any]) -> Self:
        """Check the options of ``adapter``.

        Raises:
            ValueError: an option is unknown or missing, has a value of another type, or is out of range.
        """
        try:
            settings = convert(dict(given), cls)
        except ValidationError as error:
            allowed = ", ".join(cls.__struct_fields__)
            raise ValueError(f"options of {adapter}: {error}; allowed: {allowed}") from None
        # Values with checksums have a namespace of their own, so that a keeper with values from before takes both.
        return replace(settings, revision=f"{settings.revision} checksums") if settings.checksums else settings

    @property
    def access(self) -> dict[str, Any]:
        """Arguments of ``Store`` and ``KeeperObserver``: the token, as a file, and the user of the keeper."""
        return {"token_file": self.token_file, "keeper_user": self.keeper_user}

    @property
    def store_options(self) -> dict[str, Any]:
        """Arguments of ``Store`` beside the namespace, the size of a value and the time limit."""
        return {"checksums": self.checksums, **self.access}

    @property
    def timeout_s(self) -> float:
        """The time limit of a call in seconds."""
        return self.timeout_ms / 1000


def server_version(logger: logging.Logger, package: str, tested: str) -> str:
    """Return the installed version of a server, and warn if it is not the tested one."""
    found = version(package)
    if found.partition("+")[0] != tested:
        text = (
            "llm_datadist was not tested with %s %s; tested: %s. Compare its tokens with those of a server without it"
        )
        logger.warning(text, package, found, tested)
    return found
