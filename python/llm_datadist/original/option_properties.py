"""The properties of ``LLMConfig``, made from the table of options. ``option_properties.pyi`` has their types."""

from __future__ import annotations

from typing import Any

from llm_datadist.option_table import Row, rows
from llm_datadist.original.option_types import (
    Checked,
    ClusterInfo,
    DeviceId,
    Flag,
    MemUtilization,
    Option,
    OwnOption,
    SwitchRole,
    SyncTimeout,
    Token,
    Uint32,
    WrittenIfEmpty,
)

__all__ = ["OPTIONS", "OptionProperties"]

# Properties with rules of their own.
_KINDS: dict[str, type[Option[Any]]] = {
    "cluster_info": ClusterInfo,
    "device_id": DeviceId,
    "enable_switch_role": SwitchRole,
    "global_resource_config": WrittenIfEmpty,
    "link_retry_count": Checked,
    "link_token": Token,
    "link_total_time": Checked,
    "local_comm_res": WrittenIfEmpty,
    "mem_utilization": MemUtilization,
    "rdma_service_level": Uint32,
    "rdma_traffic_class": Uint32,
    "sync_kv_timeout": SyncTimeout,
    "transfer_backend": WrittenIfEmpty,
}
# What the other ones of the original return while they are not set depends on their type.
_INITIAL = {"link_retry_count": 1, "link_total_time": 0, "mem_utilization": 0.95}
_UNSET = {"bool": False, "str": ""}


def _option(row: Row) -> Option[Any]:
    if row.types == ["bool"]:
        return _KINDS.get(row.attribute, Flag)(row, initial=False)
    if row.own:
        return _KINDS.get(row.attribute, OwnOption)(row)
    initial = _INITIAL.get(row.attribute, _UNSET.get(row.types[0]))
    return _KINDS.get(row.attribute, Option)(row, initial)


OPTIONS = tuple(_option(row) for row in rows() if row.key)
OptionProperties = type("OptionProperties", (), {option.name: option for option in OPTIONS})
