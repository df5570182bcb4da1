"""Status codes, the exceptions that carry them, and functions that raise these exceptions.

The engine chooses the code of a failure. When it first needs one of these classes, it compares its table of codes with
the numbers here.
"""

from __future__ import annotations

from enum import IntEnum

from llm_datadist import log

__all__ = [
    "LLMException",
    "LLMMismatchException",
    "LLMStatusCode",
    "Status",
    "code_2_status",
    "handle_llm_status",
    "raise_if_false",
    "raise_if_true",
]


class NamedIntEnum(IntEnum):
    """An ``IntEnum`` whose ``str`` and default format are ``Class.MEMBER`` on every Python version."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, format_spec: str) -> str:
        # Numeric formats such as f"{code:#x}" format the number.
        if format_spec[-1:] in tuple("bcdoxXn"):
            return int.__format__(self, format_spec)
        return format(str(self), format_spec)


class LLMStatusCode(NamedIntEnum):
    """The result of a call. A code compares with an ``int`` and prints as ``LLMStatusCode.LLM_…``."""

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = 0x5010B001
    LLM_KV_CACHE_NOT_EXIST = 0x5010B002
    LLM_REPEAT_REQUEST = 0x5010B003
    LLM_REQUEST_ALREADY_COMPLETED = 0x5010B004
    LLM_PARAM_INVALID = 0x5010B005
    LLM_ENGINE_FINALIZED = 0x5010B006
    LLM_NOT_YET_LINK = 0x5010B007
    LLM_ALREADY_LINK = 0x5010B008
    LLM_LINK_FAILED = 0x5010B009
    LLM_UNLINK_FAILED = 0x5010B00A
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00B
    LLM_CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00C
    LLM_PROCESSING_LINK = 0x5010B00D
    LLM_DEVICE_OUT_OF_MEMORY = 0x5010B00E
    LLM_PREFIX_ALREADY_EXIST = 0x5010B00F
    LLM_PREFIX_NOT_EXIST = 0x5010B010
    LLM_SEQ_LENOVERLIMIT = 0x5010B011
    LLM_NO_FREE_BLOCK = 0x5010B012
    LLM_BLOCKS_OUT_OF_MEMORY = 0x5010B013
    LLM_EXIST_LINK = 0x5010B018
    LLM_FEATURE_NOT_ENABLED = 0x5010B019
    LLM_TIMEOUT = 0x5010B01A
    LLM_LINK_BUSY = 0x5010B01B
    LLM_OUT_OF_MEMORY = 0x5010B01C
    LLM_GRANT_ENDED = 0x4C440001
    LLM_VERIFY_FAILED = 0x4C440002
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1


class LLMException(RuntimeError):  # noqa: N818  (the public name)
    """A failed call. ``status_code`` is the kind of failure, and the text is its reason.

    Args:
        *args: as for ``RuntimeError``; the first is the text.
        status_code: the code, which ``status_code`` returns unchanged.
    """

    def __init__(self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_SUCCESS) -> None:
        super().__init__(*args)
        self._status_code = status_code
        self._arrived: list[tuple[int, list[tuple[int, int]]]] = []

    @property
    def status_code(self) -> LLMStatusCode:
        """The code that was passed to the constructor."""
        return self._status_code

    @property
    def arrived(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """Rows that a failed pull or push has written: ``[(tensor, [(first row, row after the last), ...]), ...]``.

        A row is a batch slot or a block of the destination. All bytes of these rows are in place. The list is empty for
        every other failure. The original does not have this attribute.
        """
        return self._arrived


class LLMMismatchException(LLMException, ValueError):  # noqa: N818  (named like the class it refines)
    """Arguments of ``swap_blocks`` that do not match; also a ``ValueError``."""


class Status:
    """A status code as an object.

    Args:
        status: the code.
    """

    def __init__(self, status: LLMStatusCode) -> None:
        self._status = status

    def is_ok(self) -> bool:
        """Return whether the code is ``LLM_SUCCESS``."""
        return self._status == LLMStatusCode.LLM_SUCCESS

    @property
    def status_code(self) -> LLMStatusCode:
        """The code."""
        return self._status

    def __repr__(self) -> str:
        return f"Status({self._status})"


# The engine never returns -1; the member exists for programs that use its name (contract §3.1).
_BY_VALUE = {int(code): code for code in LLMStatusCode if code is not LLMStatusCode.LLM_UNKNOWN_ERROR}


def code_2_status(code: int) -> LLMStatusCode:
    """Return the ``LLMStatusCode`` with the value ``code``.

    The result is ``LLM_FAILED`` for -1, and for a number that is not the value of a member.
    """
    return _BY_VALUE.get(code, LLMStatusCode.LLM_FAILED)


def handle_llm_status(code: int, func_name: str, other_info: object) -> None:
    """Raise an exception unless ``code`` is 0.

    Args:
        code: the number of a status code.
        func_name: name of the call, for the text.
        other_info: the reason, for the text.

    Raises:
        LLMException: ``code`` is not 0; with the status of ``code_2_status``.
    """
    if code != LLMStatusCode.LLM_SUCCESS:
        status = code_2_status(code)
        raise LLMException(f"{func_name} failed with {status}: {other_info}", status_code=status)


def raise_if_false(
    pred: object,
    fmt: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: object,
) -> None:
    """Log ``fmt.format(*args, **kwargs)`` at ERROR and raise it, if ``pred`` is falsy.

    Args:
        pred: the condition.
        fmt: the text, in the format of ``str.format``.
        *args: values for ``fmt``.
        status_code: the code of the exception.
        **kwargs: values for ``fmt``, by name.

    Raises:
        LLMException: ``pred`` is falsy; with the given ``status_code``.
    """
    if not pred:
        text = fmt.format(*args, **kwargs)
        log.error("%s", text)
        raise LLMException(text, status_code=status_code)


def raise_if_true(
    pred: object,
    fmt: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: object,
) -> None:
    """Log ``fmt.format(*args, **kwargs)`` at ERROR and raise it, if ``pred`` is truthy.

    The arguments are those of ``raise_if_false``.

    Raises:
        LLMException: ``pred`` is truthy; with the given ``status_code``.
    """
    raise_if_false(not pred, fmt, *args, status_code=status_code, **kwargs)
