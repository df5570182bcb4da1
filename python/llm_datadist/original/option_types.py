"""The kinds of properties of ``LlmConfig``: which values each accepts, and which keys it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Optional, TypeVar, Union, overload

from llm_datadist import _core
from llm_datadist.original.cluster_info import trans_str_ip
from llm_datadist.original.logged_calls import shown
from llm_datadist.original.status import raise_if_false

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.option_table import Row

__all__ = [
    "Checked",
    "ClusterInfo",
    "DeviceId",
    "Flag",
    "MemUtilization",
    "Option",
    "OwnOption",
    "Secret",
    "SwitchRole",
    "SyncTimeout",
    "Token",
    "Uint32",
    "WrittenIfEmpty",
    "read_json",
]

# Most levels of nested JSON. The engine has the same limit (contract §17).
_DEEPEST_JSON = 64


def read_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        json.JSONDecodeError: the text is not JSON, or is nested deeper than 64 levels.
    """
    import json  # noqa: PLC0415  (imported when it is needed)

    too_deep = f"nested deeper than {_DEEPEST_JSON} levels"
    try:
        value = json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError(too_deep, text[:_DEEPEST_JSON], 0) from None
    level, depth = [value], 0
    while level:
        nested = [of for of in level if isinstance(of, (dict, list))]
        depth += bool(nested)
        if depth > _DEEPEST_JSON:
            raise json.JSONDecodeError(too_deep, text[:_DEEPEST_JSON], 0)
        level = [item for of in nested for item in (of.values() if isinstance(of, dict) else of)]
    return value


class Secret(str):
    """A text that is not shown where a dict of options is printed or logged."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'(not shown)'"


_Value = TypeVar("_Value")
_CLASSES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple)}


class Option(property, Generic[_Value]):
    """One property of ``LlmConfig``: its type, its option key and when that key is written.

    The value is kept in the attribute of the same name with an underscore in front; ``None`` means that it is not set.

    Args:
        row: the option.
        initial: the value that the getter returns while the option is not set.
    """

    # Whether `None` may be assigned, which unsets the option.
    _none = True
    # Whether an empty text is written.
    _empty = False

    def __init__(self, row: Row, initial: Any = None) -> None:
        super().__init__()
        self.__doc__ = row.meaning.replace("`", "``")
        self.key = row.key
        self.own = row.own
        self.name = row.attribute
        self.attribute = f"_{row.attribute}"
        self._allowed = [_CLASSES[name] for name in row.types]
        self._initial: _Value = initial

    @overload
    def __get__(self, config: None, owner: Optional[type] = None) -> Option[_Value]: ...
    @overload
    def __get__(self, config: object, owner: Optional[type] = None) -> _Value: ...
    def __get__(self, config: Optional[object], owner: Optional[type] = None) -> Union[Option[_Value], _Value]:
        if config is None:
            return self
        value: Optional[_Value] = getattr(config, self.attribute)
        return self._initial if value is None else value

    def __set__(self, config: object, value: Optional[_Value]) -> None:
        _core.check_isinstance(self.name, value, self._allowed, allow_none=self._none)
        self._check_value(value)
        setattr(config, self.attribute, value)

    def _check_value(self, value: Any) -> None:
        """Raise if a value of the right type is not allowed."""

    def entries(self, config: object) -> Iterator[tuple[str, str]]:
        """Yield the keys and texts to write."""
        value = getattr(config, self.attribute)
        if value is not None and (self._empty or value != ""):
            yield self.key, self._text(value)

    def _text(self, value: Any) -> str:
        """Return the text of a value."""
        return str(value)


class WrittenIfEmpty(Option[str]):
    """A text that is written even if it is empty."""

    _empty = True


class Flag(Option[bool]):
    """An option that is written as ``"1"`` or ``"0"``."""

    def _text(self, value: Any) -> str:
        return "1" if value else "0"


class SwitchRole(Flag):
    """``enable_switch_role``, which is written only if it is ``True``."""

    def entries(self, config: object) -> Iterator[tuple[str, str]]:
        """Yield the key and ``"1"``, or nothing."""
        return (entry for entry in super().entries(config) if entry[1] == "1")


class Uint32(Option[Optional[int]]):
    """A uint32."""

    _none = False

    def _check_value(self, value: Any) -> None:
        _core.check_uint32(self.name, value)


class DeviceId(Option[Union[int, list[int], tuple[int, ...], None]]):
    """``device_id``: the id of one device, or a list of ids."""

    _none = False

    def _check_value(self, value: Any) -> None:
        raise_if_false(len(self._ids(value)), "device_id={} names no device; give at least one", value)
        for device_id in self._ids(value):
            _core.check_option(self.name, device_id)

    def entries(self, config: object) -> Iterator[tuple[str, str]]:
        """Yield the key of all devices and that of the first one."""
        value = getattr(config, self.attribute)
        if value is not None:
            self._check_value(value)  # the caller may have changed the list since it was set
            ids = self._ids(value)
            yield self.key, ";".join(str(device_id) for device_id in ids)
            yield "ge.session_device_id", str(ids[0])

    @staticmethod
    def _ids(value: Any) -> Union[list[int], tuple[int, ...]]:
        return value if isinstance(value, (list, tuple)) else (value,)


class SyncTimeout(Option[Union[int, str, None]]):
    """``sync_kv_timeout``: milliseconds, as a number or as a text."""

    _none = False

    def _check_value(self, value: Any) -> None:
        if isinstance(value, str):
            digits = value.isascii() and value.isdigit()
            raise_if_false(digits, "sync_kv_timeout={} is not a decimal number of milliseconds", shown(value))
            value = int(value)
        _core.check_option(self.name, value)


class Checked(Option[_Value]):
    """An option whose value the engine checks."""

    _none = False

    def _check_value(self, value: Any) -> None:
        if value is not None:
            _core.check_option(self.name, value)


class MemUtilization(Option[float]):
    """``mem_utilization``: a share from 0.0 to 1.0."""

    _none = False

    def _check_value(self, value: Any) -> None:
        _core.check_mem_utilization(value)


class ClusterInfo(Option[str]):
    """``cluster_info``: a JSON text. The setter converts its addresses to integers."""

    _none = False

    def __set__(self, config: object, value: Optional[str]) -> None:
        import json  # noqa: PLC0415  (imported when it is needed)

        _core.check_isinstance(self.name, value, str, allow_none=False)
        description = read_json(value or "")
        _core.check_isinstance("cluster_info", description, dict, allow_none=False)
        addresses = description.get("listen_ip_info", [])
        _core.check_isinstance("cluster_info listen_ip_info", addresses, list, dict, allow_none=False)
        for info in addresses:
            if "ip" in info:
                _core.check_isinstance("cluster_info listen_ip_info ip", info["ip"], [str, int], allow_none=False)
                info["ip"] = trans_str_ip(info["ip"])
        super().__set__(config, json.dumps(description))


class OwnOption(Checked[Optional[_Value]]):
    """An option that the original lacks."""

    _none = True


class Token(OwnOption[str]):
    """``link_token``, whose value is never shown."""

    def _text(self, value: Any) -> str:
        return Secret(value)
