"""What an integration does if Ctrl-C, or another exception of a signal handler, interrupts a wait for transfers."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator, Sequence

    from llm_datadist.events import Transfer

__all__ = ["cancelled_if_interrupted"]

_LIMIT_S = 30.0


@contextmanager
def cancelled_if_interrupted(transfers: Sequence[Transfer], logger: logging.Logger) -> Iterator[None]:
    """Return a context for a wait for transfers.

    If an exception leaves the context, the transfers that still run are cancelled. The exception goes on when nothing
    of them touches memory of this process any more. That wait also ends after 30 s and at a second Ctrl-C. The log then
    says that the memory is still in use.

    Args:
        transfers: what is waited for.
        logger: where to log that transfers still run.
    """
    try:
        yield
    except BaseException:
        deadline = time.monotonic() + _LIMIT_S
        for transfer in transfers:
            transfer.cancel()
        try:
            for transfer in transfers:
                transfer.exception(max(0, int(1000 * (deadline - time.monotonic()))))
        except TimeoutError:
            pass  # logged below, like a second Ctrl-C
        finally:
            running = sum(not transfer.done() for transfer in transfers)
            if running:
                text = "%d cancelled transfers still use their memory: close the engine before you free it"
                logger.error(text, running)  # noqa: TRY400 - the exception goes on
        raise
