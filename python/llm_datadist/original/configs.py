"""The options of an engine, as properties of one object.

Setters check one value each; ``LLMDataDist.init`` reads the texts that ``LlmConfig.generate_options`` writes.
"""

from __future__ import annotations

from typing import Any, Union

from llm_datadist import _core
from llm_datadist.original.arguments import check_dict
from llm_datadist.original.cluster_info import LLMClusterInfo, LLMRole, trans_str_ip
from llm_datadist.original.logged_calls import shown
from llm_datadist.original.option_properties import OPTIONS, OptionProperties
from llm_datadist.original.option_types import Secret
from llm_datadist.original.spelling import LISTED, refusal, report_unknown, resembles

__all__ = ["LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig", "trans_str_ip"]


class LlmConfig(OptionProperties):
    """The options of an engine. ``generate_options`` writes them for ``LLMDataDist.init``.

    A setter keeps the old value if it raises. ``init`` checks the content of a text. Where ``None`` is allowed, it
    unsets the option, but a key that was written stays in the dict. Assigning an attribute that does not exist has no
    effect, and is logged at ERROR with the nearest name of an option.

    Raises:
        AttributeError: the assigned attribute does not exist, and its name resembles that of an option which the
            original does not have, such as ``verify`` or ``link_token``.
        TypeError: a setter was given a value of a wrong type.
        ValueError: a setter was given an integer outside its width, or ``cluster_info`` a text that is not JSON.
        RuntimeError: ``cluster_info`` was given an invalid address.
        LLMException: ``LLM_PARAM_INVALID``: a setter was given a value that is not allowed.
    """

    def __init__(self) -> None:
        self._ge_options: dict[str, str] = {}
        self._options: dict[str, str] = {}
        self._device_id: Union[int, list[int], tuple[int, ...], None] = None
        for option in OPTIONS:
            setattr(self, option.attribute, None)
        self._mem_utilization = 0.95

    def __setattr__(self, name: str, value: Any) -> None:
        # A name with an underscore in front is an attribute of the class itself, or of a subclass.
        if not name.startswith("_") and not hasattr(type(self), name):
            if resembles(name, _NAMES, _OWN_NAMES):
                raise AttributeError(f"LLMConfig has no attribute {refusal(name, _NAMES, LISTED)}")
            report_unknown("attribute of LLMConfig", [name], _NAMES, LISTED)
        super().__setattr__(name, value)

    @property
    def ge_options(self) -> dict[str, str]:
        """Further keys and texts, which are written before all others.

        The getter returns the live dict. ``init`` ignores keys that it does not know.

        Raises:
            AttributeError: the value is ``None``.
            TypeError: the value is not a dict, or a key or value is not a ``str``.
        """
        return self._ge_options

    @ge_options.setter
    def ge_options(self, ge_options: dict[str, str]) -> None:
        check_dict("ge_options", ge_options, str, str)
        self._ge_options = ge_options

    @property
    def options(self) -> dict[str, str]:
        """The result of ``generate_options``, with the same errors."""
        return self.generate_options()

    def generate_options(self) -> dict[str, str]:
        """Write the options into one dict and return it: the same dict on every call.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``: the list in ``device_id`` was emptied after it was set.
            TypeError: an element of that list is no longer an ``int``.
        """
        self._options.update(self._ge_options)
        for option in OPTIONS:
            self._options.update(option.entries(self))
        return self._options

    def gen_options(self) -> dict[str, str]:
        """Return the result of ``generate_options``, with the same errors."""
        return self.generate_options()

    def __repr__(self) -> str:
        given: dict[str, Any] = {option.name: getattr(self, option.attribute) for option in OPTIONS}
        parts = [
            f"{name}={_NOT_SHOWN!r}" if name == "link_token" else f"{name}={shown(value)}"
            for name, value in given.items()
            if value is not None and (name, value) != ("mem_utilization", 0.95)
        ]
        if self._ge_options:
            hidden = {key: _NOT_SHOWN if _is_secret(key) else value for key, value in self._ge_options.items()}
            parts.append(f"ge_options={shown(hidden)}")
        return f"LLMConfig({', '.join(parts)})"


_NOT_SHOWN = Secret()


def _is_secret(key: object) -> bool:
    """Return whether the value of an option must not be shown. A misspelt key of the token counts as secret too."""
    if key == "llm.LinkTokenFile":
        return False
    return "token" in str(key).lower() or _core.nearest(str(key), ["llm.LinkToken"]) is not None


_NAMES = frozenset([*(option.name for option in OPTIONS), "ge_options"])
_OWN_NAMES = frozenset(option.name for option in OPTIONS if option.own)

LLMConfig = LlmConfig
