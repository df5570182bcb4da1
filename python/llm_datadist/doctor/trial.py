"""Opens an engine, because limits of the process may refuse what no single system call shows."""

from __future__ import annotations

import logging

from llm_datadist import LLMConfig, LLMDataDist, LLMException, LLMRole

_POOL = '{"memory_size": "32MiB"}'


class _Errors(logging.Handler):
    """Keeps the texts of lines at ERROR."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the text of a line."""
        self.texts.append(record.getMessage())


def open_engine() -> str | None:
    """Open an engine with a pool and a listener, and close it. Return what fails, or ``None``.

    Environment variables count as for every engine, so that a token that cannot be read is found.
    """
    if LLMDataDist.llm_engine_instance is not None:
        return None  # this process has opened one
    config = LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = _POOL
    config.listen_ip_info = "127.0.0.1:0"
    logger, errors = logging.getLogger("LLM_DATADIST"), _Errors()
    propagate, logger.propagate = logger.propagate, False  # the report has the lines
    logger.addHandler(errors)
    try:
        with LLMDataDist(LLMRole.MIX, 1) as engine:
            engine.init(config.generate_options())
    except LLMException as error:
        return f"{error.status_code.name}: {error}"
    except (OSError, MemoryError, RuntimeError) as error:  # a limit that Python meets first
        return f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(errors)
        logger.propagate = propagate
    return "; ".join(errors.texts) or None
