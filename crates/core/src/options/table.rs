//! The table of options: every option of an engine, with all of its names, its meaning and what it sets.
//!
//! Everything else about options is made from this table: the readers in `texts` and `values`, the attributes of
//! `LLMConfig`, `docs/options.md` and `llm-datadist options`.

use super::pool::{device_pool, host_pool, page, pool};
use super::row::OptionKind::{Count, Flag, Size, Text, Time};
use super::row::OptionRow;
use super::row::TimeUnit::{Micros, Millis, Seconds};
use super::rules::{
    BACKENDS, HUGE_PAGES, LINK_TRANSPORTS, SWAP_IN_PATHS, addresses, heartbeat, link_token, path, rank_hosts,
    rank_port, remote_memory, token_file, total_time, transfer_backend,
};
use crate::config::Mode;
use crate::validate::{one_of, socket_address, verify};

const HOUR_MS: i64 = 3_600_000;
/// Maximum size of a host pool in bytes (contract §5.1).
const HOST_POOL_LIMIT: u64 = 20 << 30;

macro_rules! options {
    ($($(#[doc = $meaning:literal])* ($name:literal, $key:literal, $step:literal) $(.$set:ident($($to:expr),*))*;)*) => {
        /// Every option, in the order in which `LLMConfig` writes them; then those of the native API alone, and keys
        /// that have no attribute.
        pub static OPTIONS: [OptionRow; [$($key),*].len()] = [$(
            OptionRow::new($name, $key, $step)$(.$set($($to),*))*.meaning(concat!($($meaning),*).trim_ascii())
        ),*];
    };
}

// Each row has its attribute, its key and the step in which it is read, or 0 if other code reads it. Its comment is its
// meaning, in Markdown.
options! {
    /// Number of the device (int32, 0 or above), or a list of them. An engine has one device: `init` refuses a longer
    /// list.
    ("device_id", "ge.exec.deviceId", 3).default("0 in CacheManager mode; KvCacheManager mode needs it")
        .of_types(&["int", "list", "tuple"])
        .takes(Count(0, i32::MAX as u32, |config, device| config.device_id = device));
    /// Time limit of a call that moves bytes, in milliseconds (int32, above 0), as a number or as a text of digits.
    ("sync_kv_timeout", "llm.SyncKvCacheWaitTime", 2).default("1000 ms").of_types(&["int", "str"])
        .takes(Time(1, i64::MAX, Millis, |config, limit| config.sync_timeout = limit));
    /// Path of a deployment description. It has no effect.
    ("deploy_res_path", "llm.deployResPath", 0).of_types(&["str"]);
    /// Sizes of buffers as JSON. It has no effect in Python (contract §5.3).
    ("buf_pool_cfg", "llm.BufPoolCfg", 0).of_types(&["str"]);
    /// The device pool as a JSON object: `{"memory_size": bytes, "page_shift": 10 to 30}`. `memory_size` may also be a
    /// text with a unit: `"64MiB"` (KiB, MiB, GiB, TiB). A page has `1 << page_shift` bytes; `page_shift` is 16 by
    /// default (contract §5.1).
    ("mem_pool_cfg", "llm.MemPoolConfig", 1).default("no device pool")
        .takes(Text(|config, name, text| pool(name, text, u64::MAX).map(|pool| config.device_pool = pool)));
    /// The host pool, in the format of `mem_pool_cfg`; at most 20 GiB (contract §5.1).
    ("host_mem_pool_cfg", "llm.HostMemPoolConfig", 1).default("no host pool")
        .takes(Text(|config, name, text| pool(name, text, HOST_POOL_LIMIT).map(|pool| config.host_pool = pool)));
    /// Whether the engine has a `CacheManager` (`True`) or a `KvCacheManager` (`False`) (contract §0).
    ("enable_cache_manager", "llm.EnableCacheManager", 1).default("`False`")
        .takes(Flag(|config, enabled| config.mode = if enabled { Mode::CacheManager } else { Mode::KvCacheManager }));
    /// Whether transfers are one-sided: remote-accessible mode (contract §12.4). Both sides of a link need the same
    /// value.
    ("enable_remote_cache_accessible", "llm.EnableRemoteCacheAccessible", 1).default("`False`")
        .takes(Flag(|config, enabled| config.remote_accessible = enabled && config.mode == Mode::CacheManager));
    /// Address at which the engine listens for peers: `ip:port`, or `[ipv6]:port`, which the original does not have.
    /// Host names and zones (`%eth0`) are not supported. Port 0 takes a free port, which `LLMDataDist.listen_ip_info`
    /// returns.
    ("listen_ip_info", "llm.listenIpInfo", 0).of_types(&["str"]).default("no listener");
    /// Time limit of a link that `LLMDataDist.link` makes, in seconds (0 to 2^32 - 1). 0 means `HCCL_CONNECT_TIMEOUT`,
    /// or 120 s if that is not set.
    ("link_total_time", "llm.LinkTotalTime", 4).default("0")
        .takes(Time(0, u32::MAX as i64, Seconds, total_time));
    /// Number of attempts of `LLMDataDist.link` within `link_total_time` (1 to 100). One attempt takes at most its
    /// share of that time.
    ("link_retry_count", "llm.LinkRetryCount", 5).default("1")
        .takes(Count(1, 100, |config, count| config.links.retries = count));
    /// RDMA traffic class (uint32). It has no effect.
    ("rdma_traffic_class", "llm.RdmaTrafficClass", 0).of_types(&["int"]);
    /// RDMA service level (uint32). It has no effect.
    ("rdma_service_level", "llm.RdmaServiceLevel", 0).of_types(&["int"]);
    /// Communication resources of this side as JSON; the text is not read. Setting it, even to an empty text, makes
    /// `"1"` the default of `llm.EnableCacheManager` and `llm.EnableRemoteCacheAccessible`. With a text that is not
    /// empty, link calls need no local address (contract §6.2, §6.8).
    ("local_comm_res", "llm.LocalCommRes", 0).of_types(&["str"]);
    /// What moves bytes between hosts: `"sockets"`; `"ucx"`, which fails if UCX cannot be used; or `"auto"` (default):
    /// UCX if both ends have a token, an RDMA device and equal, usable versions of it. `"hixl"` is `"auto"` with the
    /// rules of contract §6.12.
    ("transfer_backend", "llm.TransferBackend", 5).takes(Text(|config, _, text| transfer_backend(config, text)));
    /// Settings of the backend `"hixl"` as a JSON object. They are checked if that backend is chosen, and have no effect.
    ("global_resource_config", "llm.GlobalResourceConfig", 0).of_types(&["str"]);
    /// Number of threads that copy, the calling thread included (1 to 256).
    ("copy_workers", "llm.CopyWorkers", 9).native("copy_workers").default("4")
        .takes(Count(1, 256, |config, count| config.copy_workers = Some(count as usize)));
    /// Maximum number of transfers of the native API that run or whose outcome was not taken (1 to 1048576).
    ("max_transfers", "llm.MaxTransfers", 9).native("max_transfers").default("4096")
        .takes(Count(1, 1 << 20, |config, count| config.max_transfers = count as usize));
    /// How long a thread that has run a transfer polls for the next one before it sleeps, in microseconds (0 to 10000).
    /// Starting a transfer or reporting a layer is faster while a thread polls. No thread polls if the thread that calls
    /// `init` may use only one CPU.
    ("transfer_poll_us", "llm.TransferPollUs", 9).native("transfer_poll").default("50 µs")
        .takes(Time(0, 10_000, Micros, |config, time| config.transfer_poll = time));
    /// Path of swap-ins: `"direct"` is one copy, `"ring"` copies through a staging ring, `"auto"` chooses.
    ("swap_in_path", "llm.SwapInPath", 9).native("swap_in_path").default("`\"auto\"`")
        .takes(Text(|config, name, text| one_of(name, text, &SWAP_IN_PATHS).map(|path| config.swap_in = path)));
    /// How thoroughly pulls, pushes, layer-wise transfers, copies and swaps compare the moved bytes with their source:
    /// `"off"`, `"sample"` (one block in 64), `"full"` (every block). In the native API, the argument `verify` of a call
    /// overrides it.
    ("verify", "llm.Verify", 11).native("verify").default("`\"off\"`")
        .takes(Text(|config, _, text| verify(text).map(|how| config.verify = how)));
    /// Whether memory is put into huge pages. `"auto"`: the kernel decides; one hint is logged if peers read registered
    /// memory from small pages, which takes twice as long. `"off"`: the same without the hint. `"eager"`: `init`
    /// commits and merges the pools, and `register_*` merges its memory.
    ("huge_pages", "llm.HugePages", 11).native("huge_pages").default("`\"auto\"`")
        .takes(Text(|config, name, text| one_of(name, text, &HUGE_PAGES).map(|choice| config.huge_pages = choice)));
    /// Secret that both ends of a link must have, at least 16 characters. It is never shown.
    ("link_token", "llm.LinkToken", 7).native("token").or_variable("LLM_DATADIST_TOKEN")
        .default("`LLM_DATADIST_TOKEN_FILE` or `LLM_DATADIST_TOKEN`")
        .takes(Text(|config, name, text| link_token(name, text).map(|token| config.links.token = Some(token))));
    /// Absolute path of a file with the token, in place of `link_token`. `init` reads it. It must be a regular file, or
    /// a link to one, of this user or root, without access for others (mode 0600 or 0400), of at most 4096 bytes. One
    /// line break at the end is not part of the token.
    ("link_token_file", "llm.LinkTokenFile", 7).native("token_file").or_variable("LLM_DATADIST_TOKEN_FILE")
        .default("as `link_token`")
        .takes(Text(|config, name, text| token_file(name, text).map(|path| config.links.token_file = Some(path))));
    /// Whether an engine without a token admits every peer that reaches its listener, of any user on any host. Both
    /// sides of a link need it.
    ("link_accept_remote", "llm.LinkAcceptRemote", 7).native("accept_remote")
        .or_variable("LLM_DATADIST_ACCEPT_REMOTE").default("`LLM_DATADIST_ACCEPT_REMOTE`, or `False`")
        .takes(Flag(|config, enabled| config.links.accept_remote = enabled));
    /// Interval of the heartbeats of an idle link, in milliseconds (1 to 3600000).
    ("link_heartbeat", "llm.LinkHeartbeat", 7).native("heartbeat").default("1000 ms")
        .takes(Time(1, HOUR_MS, Millis, heartbeat));
    /// Time in milliseconds after which a link to a silent peer breaks (2 to 86400000); at least two heartbeats.
    ("link_silence", "llm.LinkSilence", 7).native("silence").default("5000 ms")
        .takes(Time(2, 24 * HOUR_MS, Millis, |config, time| config.links.silence = time));
    /// Longest time in milliseconds for which a peer may keep rows of this process pinned for one transfer, whatever
    /// deadline it announces (1 to 86400000).
    ("link_pin_limit", "llm.LinkPinLimit", 8).native("pin_limit").default("600000 ms")
        .takes(Time(1, 24 * HOUR_MS, Millis, |config, time| config.links.pin_limit = time));
    /// How bytes travel: `"shm"` is shared memory, or no link; `"tcp"` is TCP, on one host as well; `"auto"` uses
    /// shared memory inside a host and TCP otherwise.
    ("link_transport", "llm.LinkTransport", 8).native("transport").or_variable("LLM_DATADIST_TRANSPORT")
        .default("`LLM_DATADIST_TRANSPORT`, or `\"auto\"`")
        .takes(Text(|config, name, text| one_of(name, text, &LINK_TRANSPORTS).map(|how| config.links.transport = how)));
    /// Absolute path of the library of UCX.
    ("ucx_library", "llm.UcxLibrary", 6).native("ucx_library").default("`libucp.so.0`, which the system finds")
        .takes(Text(|config, name, text| path(name, text).map(|path| config.links.fabric.ucx_library = Some(path))));
    /// Number of TCP connections that share one large pull or push, 1 to 16; each carries at least 8 MiB. 0 means 4, or
    /// the number of addresses of the peer if that is larger.
    ("link_streams", "llm.LinkStreams", 8).native("streams").default("0")
        .takes(Count(0, 16, |config, count| config.links.streams = count as usize));
    /// IP addresses of this host, separated by commas, over which peers spread the connections of large pulls and
    /// pushes, beside the address of `listen_ip_info` (at most 15).
    ("link_addresses", "llm.LinkAddresses", 8).native("addresses")
        .takes(Text(|config, name, text| addresses(name, text).map(|list| config.links.addresses = list)));
    /// Bytes of address space of this process in which the memory of all peers may be mapped. One link may use half of
    /// it. Memory that does not fit is sent by its owner.
    ("link_remote_memory", "llm.LinkRemoteMemory", 8).native("remote_memory")
        .default("4 times the memory of the host").takes(Size("", remote_memory));
    /// Port of device 0 for `LLMDataDist.link` (1 to 65535). Device `n` uses `rank_port + n`.
    ("rank_port", "llm.RankPort", 8).own().or_variable("LLM_DATADIST_RANK_PORT")
        .default("`LLM_DATADIST_RANK_PORT`, or 16666").takes(Count(1, u16::MAX as u32, rank_port));
    /// Addresses at which members of `LLMDataDist.link` can be reached: a JSON object from `device_ip` or cluster id to
    /// `ip:port`.
    ("rank_hosts", "llm.RankHosts", 8).own().or_variable("LLM_DATADIST_RANK_HOSTS")
        .default("`LLM_DATADIST_RANK_HOSTS`")
        .takes(Text(|config, name, text| rank_hosts(name, text).map(|hosts| config.links.rank_hosts = hosts)));
    /// Description of the cluster as JSON, for KvCacheManager mode (contract §9.7).
    ("cluster_info", "llm.ClusterInfo", 0).of_types(&["str"]).default("made by `init` in KvCacheManager mode");
    /// Largest size of an output. It has no effect.
    ("output_max_size", "llm.OutputMaxSize", 0).of_types(&["int"]);
    /// Whether `switch_role` is allowed in KvCacheManager mode (contract §6.9).
    ("enable_switch_role", "llm.EnableSwitchRole", 0).of_types(&["bool"]).default("`False`");
    /// Share of the memory that the process may use, for the pool of KvCacheManager mode (`float`, 0.0 to 1.0; contract
    /// §9.7).
    ("mem_utilization", "llm.MemoryUtilization", 0).of_types(&["float"]).default("0.95");
    /// Size of the device pool, from which caches are allocated.
    ("", "", 1).native("pool").takes(Size(" above 0", device_pool));
    /// Size of the host pool.
    ("", "", 1).native("host_pool").takes(Size(" above 0", host_pool));
    /// Size of the pages of both pools.
    ("", "", 2).native("page").default("`\"64KiB\"`")
        .takes(Size(" that is a power of two from 1KiB to 1GiB", page));
    /// Address at which the engine listens for peers: `ip:port` or `[ipv6]:port`. Host names and zones (`%eth0`) are
    /// not supported. Port 0 takes a free port.
    ("", "", 4).native("listen").default("no listener")
        .takes(Text(|config, name, text| socket_address(name, text).map(|at| config.links.listen = Some(at))));
    /// Time limit of a call that is given none.
    ("", "", 2).native("timeout").default("10")
        .takes(Time(1, 1_000_000_000_000_000, Micros, |config, limit| config.sync_timeout = limit));
    /// What moves bytes between hosts: `"sockets"`; `"ucx"`, which fails if UCX cannot be used; or `"auto"`: UCX if
    /// both ends have a token, an RDMA device and equal, usable versions of it.
    ("", "", 5).native("backend").default("`\"auto\"`")
        .takes(Text(|config, name, text| one_of(name, text, &BACKENDS[1..]).map(|what| config.links.fabric.backend = what)));
    ("", "env.HCCL_CONNECT_TIMEOUT", 0).or_variable("HCCL_CONNECT_TIMEOUT");
    ("", "llm.ListenIpInfo", 0);
    ("", "llm.Role", 0);
    ("", "llm.ListenIp", 0);
    ("", "llm.ListenPort", 0);
    ("", "ge.session_device_id", 0);
}
