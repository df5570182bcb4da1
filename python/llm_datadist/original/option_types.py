"""The properties of ``LlmConfig``: which values each accepts, and which keys it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Generic, Optional, TypeVar, Union, overload

from llm_datadist import _core
from llm_datadist.original.cluster_info import trans_str_ip
from llm_datadist.original.logged_calls import shown
from llm_datadist.original.status import raise_if_false

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.option_table import Row

__all__ = ["Option", "Secret", "read_json"]

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


def _device_id(value: Any) -> Any:
    ids = _ids(value)
    raise_if_false(len(ids), "device_id={} names no device; give at least one", value)
    for device_id in ids:
        _core.check_option("device_id", device_id)
    return value


def _ids(value: Any) -> Union[list[int], tuple[int, ...]]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _sync_timeout(value: Any) -> Any:
    """Check milliseconds, as a number or as a text."""
    number = value
    if isinstance(value, str):
        digits = value.isascii() and value.isdigit()
        raise_if_false(digits, "sync_kv_timeout={} is not a decimal number of milliseconds", shown(value))
        number = int(value)
    _core.check_option("sync_kv_timeout", number)
    return value


def _cluster_info(value: str) -> str:
    """Convert the addresses in a JSON text to integers."""
    import json  # noqa: PLC0415  (imported when it is needed)

    description = read_json(value)
    _core.check_isinstance("cluster_info", description, dict, allow_none=False)
    addresses = description.get("listen_ip_info", [])
    _core.check_isinstance("cluster_info listen_ip_info", addresses, list, dict, allow_none=False)
    for info in addresses:
        if "ip" in info:
            _core.check_isinstance("cluster_info listen_ip_info ip", info["ip"], [str, int], allow_none=False)
            info["ip"] = trans_str_ip(info["ip"])
    return json.dumps(description)


def _checked_by(check: Callable[..., None], *name: str) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        check(*name, value)
        return value

    return checked


_Value = TypeVar("_Value")
_CLASSES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple)}

# Options of the original that may not be unset, each with a function that checks a value and returns what to keep.
_RULES: dict[str, Callable[[Any], Any]] = {
    "cluster_info": _cluster_info,
    "device_id": _device_id,
    "link_retry_count": _checked_by(_core.check_option, "link_retry_count"),
    "link_total_time": _checked_by(_core.check_option, "link_total_time"),
    "mem_utilization": _checked_by(_core.check_mem_utilization),
    "rdma_service_level": _checked_by(_core.check_uint32, "rdma_service_level"),
    "rdma_traffic_class": _checked_by(_core.check_uint32, "rdma_traffic_class"),
    "sync_kv_timeout": _sync_timeout,
}
_WRITTEN_IF_EMPTY = ("global_resource_config", "local_comm_res", "transfer_backend")
_INITIAL = {"link_retry_count": 1, "link_total_time": 0, "mem_utilization": 0.95}


class Option(property, Generic[_Value]):
    """One property of ``LlmConfig``: its type, its option key and when that key is written.

    The value is kept in the attribute of the same name with an underscore in front; ``None`` means that it is not set.

    Args:
        row: the option.
    """

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.__doc__ = row.meaning.replace("`", "``")
        self.key = row.key
        self.own = row.own
        self.name = row.attribute
        self.attribute = f"_{row.attribute}"
        self._allowed = [_CLASSES[name] for name in row.types]
        own_rule = _checked_by(_core.check_option, self.name) if row.own and row.types != ["bool"] else None
        self._rule = own_rule or _RULES.get(self.name)
        # What the getter returns while the option is not set.
        unset = {"bool": False, "str": None if row.own else ""}.get(row.types[0]) if len(row.types) == 1 else None
        self.initial: Any = _INITIAL.get(self.name, unset)

    @overload
    def __get__(self, config: None, owner: Optional[type] = None) -> Option[_Value]: ...
    @overload
    def __get__(self, config: object, owner: Optional[type] = None) -> _Value: ...
    def __get__(self, config: Optional[object], owner: Optional[type] = None) -> Union[Option[_Value], _Value]:
        if config is None:
            return self
        value: Optional[_Value] = getattr(config, self.attribute)
        return self.initial if value is None else value

    def __set__(self, config: object, value: Optional[_Value]) -> None:
        _core.check_isinstance(self.name, value, self._allowed, allow_none=self.name not in _RULES)
        kept = value if value is None or self._rule is None else self._rule(value)
        setattr(config, self.attribute, kept)

    def entries(self, config: object) -> Iterator[tuple[str, str]]:
        """Yield the keys and texts to write."""
        value = getattr(config, self.attribute)
        if value is None or (value == "" and self.name not in _WRITTEN_IF_EMPTY):
            return
        if self.name == "device_id":
            _device_id(value)  # the caller may have changed the list since it was set
            ids = _ids(value)
            yield self.key, ";".join(str(device_id) for device_id in ids)
            yield "ge.session_device_id", str(ids[0])
        elif self._allowed == [bool]:
            if value or self.name != "enable_switch_role":  # which is written only if it is true
                yield self.key, "1" if value else "0"
        else:
            yield self.key, Secret(value) if self.name == "link_token" else str(value)
