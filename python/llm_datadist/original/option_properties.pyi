# Written by tools/docs/options.py.
from typing import Any, Optional

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

OPTIONS: tuple[Option[Any], ...]

class OptionProperties:
    device_id: DeviceId
    sync_kv_timeout: SyncTimeout
    deploy_res_path: Option[str]
    buf_pool_cfg: Option[str]
    mem_pool_cfg: Option[str]
    host_mem_pool_cfg: Option[str]
    enable_cache_manager: Flag
    enable_remote_cache_accessible: Flag
    listen_ip_info: Option[str]
    link_total_time: Checked[int]
    link_retry_count: Checked[int]
    rdma_traffic_class: Uint32
    rdma_service_level: Uint32
    local_comm_res: WrittenIfEmpty
    transfer_backend: WrittenIfEmpty
    global_resource_config: WrittenIfEmpty
    copy_workers: OwnOption[int]
    max_transfers: OwnOption[int]
    transfer_poll_us: OwnOption[int]
    swap_in_path: OwnOption[str]
    verify: OwnOption[str]
    copy_kernel: OwnOption[str]
    huge_pages: OwnOption[str]
    link_token: Token
    link_token_file: OwnOption[str]
    link_accept_remote: Flag
    link_heartbeat: OwnOption[int]
    link_silence: OwnOption[int]
    link_pin_limit: OwnOption[int]
    link_transport: OwnOption[str]
    ucx_library: OwnOption[str]
    link_streams: OwnOption[int]
    link_addresses: OwnOption[str]
    link_remote_memory: OwnOption[int]
    rank_port: OwnOption[int]
    rank_hosts: OwnOption[str]
    cluster_info: ClusterInfo
    output_max_size: Option[Optional[int]]
    enable_switch_role: SwitchRole
    mem_utilization: MemUtilization
