//! The configuration of the engine as plain values.
//!
//! `options` reads them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use crate::model::{ClusterId, Verify};

/// The role of a cluster. In `CacheManager` mode it is informational.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Prefill.
    Prompt = 1,
    /// Decode.
    Decoder = 2,
    /// Both prefill and decode.
    Mix = 3,
}

impl Role {
    /// Returns the role with a public number; `None` for any other number.
    pub const fn from_value(value: i64) -> Option<Role> {
        match value {
            1 => Some(Role::Prompt),
            2 => Some(Role::Decoder),
            3 => Some(Role::Mix),
            _ => None,
        }
    }

    /// Returns the name of the role in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Prompt => "Prompt",
            Role::Decoder => "Decoder",
            Role::Mix => "Mix",
        }
    }
}

/// The manager that the engine serves. The modes differ in a few rules and status codes (contract §9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// `CacheManager`: roles are informational, and pools exist only if they are configured.
    #[default]
    CacheManager,
    /// `KvCacheManager`: device memory only, from a pool that exists without being configured.
    KvCacheManager,
}

/// A share of the memory that this process may use, in parts per million.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u32);

impl Share {
    /// Parts per million of the whole.
    const WHOLE: u32 = 1_000_000;
    /// The share if no option gives one: 95 %.
    pub const DEFAULT: Share = Share(950_000);

    /// Returns the share for a number from 0.0 to 1.0. Numbers outside that range are clamped to it.
    pub fn of(part: f64) -> Share {
        // The result is 0 to one million for any input: the cast of a float saturates, and NaN becomes 0.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within 0 to a million")]
        let parts = (part.clamp(0.0, 1.0) * f64::from(Self::WHOLE)).round() as u32;
        Share(parts)
    }

    /// Returns this share of `bytes`.
    pub fn of_bytes(self, bytes: u64) -> u64 {
        let part = u128::from(bytes) * u128::from(self.0) / u128::from(Self::WHOLE);
        u64::try_from(part).unwrap_or(bytes)
    }
}

/// Size of a memory pool and of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Capacity in bytes.
    pub memory_size: u64,
    /// Binary logarithm of the page size in bytes; 10 to 30.
    pub page_shift: u32,
}

impl PoolConfig {
    /// Binary logarithm of the page size if no option gives one (contract §5.1).
    pub const DEFAULT_PAGE_SHIFT: u32 = 16;

    /// Returns a pool of about `bytes` bytes with pages of the default size: at least one page, and at most
    /// as many as a pool can have.
    pub fn about(bytes: u64) -> PoolConfig {
        let page_shift = Self::DEFAULT_PAGE_SHIFT;
        let pages = (bytes >> page_shift).clamp(1, u64::from(u32::MAX) - 1);
        PoolConfig { memory_size: pages << page_shift, page_shift }
    }
}

/// Route of a swap-in (host to device).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwapInPath {
    /// Straight to the destination if the device can read host memory directly, else through the ring.
    #[default]
    Auto,
    /// Straight to the destination blocks.
    Direct,
    /// Through the staging ring, a ring of buffers of whole blocks (contract §7.11).
    Ring,
}

/// How memory is put into huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugeChoice {
    /// Only huge pages that the kernel gives by itself. The engine logs one hint if peers read registered
    /// memory slowly because of small pages.
    #[default]
    Auto,
    /// Only huge pages that the kernel gives by itself, without the hint.
    Off,
    /// Pools are committed and merged completely before the engine is open, and registered memory when it is
    /// registered.
    Eager,
}

/// How the bytes of a link travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Through shared memory between processes of one host, otherwise over sockets.
    #[default]
    Auto,
    /// Through shared memory; linking fails if that is not possible.
    Shm,
    /// Over sockets, also on one host.
    Tcp,
}

/// Which library moves bytes between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// UCX if both ends have an RDMA device, otherwise sockets.
    #[default]
    Auto,
    /// The sockets of the engine.
    Sockets,
    /// UCX; opening the engine, linking or a call fails if it cannot be used.
    Ucx,
}

/// How bytes move between hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FabricConfig {
    /// What moves the bytes.
    pub backend: Backend,
    /// The path of UCX's library; `None` for `libucp.so.0`, which the system finds.
    pub ucx_library: Option<PathBuf>,
    /// Settings of UCX, by their names without the prefix `UCX_`.
    pub settings: Vec<(String, String)>,
    /// Whether [`Backend::Auto`] counts an RDMA device that does not exist. For tests.
    pub assume_device: bool,
}

/// The secret that both ends of a link must know. It is never part of any output.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Box<[u8]>);

impl Token {
    /// Returns the token for a text.
    pub fn new(text: &str) -> Self {
        Token(text.as_bytes().into())
    }

    /// Returns the bytes of the token, as the key of proofs.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// How links are made and kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkConfig {
    /// Address on which to listen for peers, if any. Port 0 means any free port.
    pub listen: Option<SocketAddr>,
    /// Token with which both sides authenticate.
    pub token: Option<Token>,
    /// File that contains the token, instead of `token`. `DataDist::open` reads it once: a regular file of this
    /// user or of root, which no other user may access.
    pub token_file: Option<PathBuf>,
    /// Whether to admit unauthenticated peers if no token is set. Then every peer that can reach a listener
    /// may link.
    pub accept_remote: bool,
    /// Interval of heartbeats on a silent link.
    pub heartbeat: Duration,
    /// Time for which a peer may be silent before its link breaks.
    pub silence: Duration,
    /// Longest time for which a peer may keep rows of this process pinned for one transfer, whatever deadline
    /// it announced.
    pub pin_limit: Duration,
    /// Time limit of a rank-table link, for all attempts together.
    pub total: Duration,
    /// Number of attempts of a rank-table link that fit into its limit: one attempt may take
    /// `total / retries` at most. There may be more attempts, because an attempt that is refused ends at once.
    pub retries: u32,
    /// How bytes travel.
    pub transport: TransportChoice,
    /// Most connections that share one large transfer over sockets; 0 for the default.
    pub streams: usize,
    /// Addresses of this host at which peers open streams of large transfers, beside the listening address.
    pub addresses: Vec<IpAddr>,
    /// Port of device 0 for rank-table links. Device `n` uses this port plus `n`.
    pub rank_port: u16,
    /// Real addresses of the members of rank-table links, by `device_ip` or cluster id.
    pub rank_hosts: BTreeMap<String, SocketAddr>,
    /// Whether both sides may link to each other (`llm.TransferBackend=hixl`).
    pub both_ways: bool,
    /// Bytes of address space that the memory of all peers may take in this process; one link may take half
    /// of it. `None` means four times the memory of the machine. The owner sends the bytes of memory
    /// that does not fit.
    pub remote_memory: Option<u64>,
    /// How bytes move between hosts.
    pub fabric: FabricConfig,
}

impl LinkConfig {
    /// Maximum number of further addresses.
    pub const MAX_ADDRESSES: usize = 15;
    /// Streams of one large transfer unless configured.
    const DEFAULT_STREAMS: usize = 4;

    /// Returns the largest number of streams of one transfer with a peer that has this number of addresses.
    pub(crate) fn max_streams(&self, addresses: usize) -> usize {
        match self.streams {
            0 => Self::DEFAULT_STREAMS.max(addresses),
            streams => streams,
        }
    }
}

impl Default for LinkConfig {
    fn default() -> Self {
        LinkConfig {
            listen: None,
            token: None,
            token_file: None,
            accept_remote: false,
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(5),
            pin_limit: Duration::from_secs(600),
            total: Duration::from_secs(120),
            retries: 1,
            transport: TransportChoice::Auto,
            streams: 0,
            addresses: Vec::new(),
            rank_port: 16_666,
            rank_hosts: BTreeMap::new(),
            both_ways: false,
            remote_memory: None,
            fabric: FabricConfig::default(),
        }
    }
}

/// The configuration with which an engine is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Role of the cluster.
    pub role: Role,
    /// Cluster id of the engine. A native engine draws it when it is opened.
    pub cluster: ClusterId,
    /// The name that peers see: at most 128 bytes of printable text. Empty: `cluster <id>`, if it is not a native engine.
    pub name: String,
    /// What peers read about the engine, at most 16 KiB.
    pub metadata: Vec<u8>,
    /// Whether this is an engine of the native API, whose program gives it no number: its cluster id is its incarnation, so a restarted
    /// peer is another peer. It keeps all events from the start, because its program polls for them.
    pub native: bool,
    /// The manager that the engine serves.
    pub mode: Mode,
    /// Device pool, if one is configured.
    pub device_pool: Option<PoolConfig>,
    /// Share of memory for a device pool if `device_pool` is `None`; `None` for no such pool.
    pub device_share: Option<Share>,
    /// Host pool, if one is configured.
    pub host_pool: Option<PoolConfig>,
    /// Time limit of every call that waits or moves bytes (`sync_kv_timeout`).
    pub sync_timeout: Duration,
    /// Maximum number of asynchronous calls that run or whose outcome was not taken.
    pub max_transfers: usize,
    /// How long a thread that has run an asynchronous call polls for the next one before it sleeps.
    pub transfer_poll: Duration,
    /// Physical device number. Informational for devices in host memory.
    pub device_id: u32,
    /// Whether the engine is in remote-accessible mode, in which transfers are one-sided.
    pub remote_accessible: bool,
    /// Number of threads that copy, including the calling thread; `None` for [`Config::DEFAULT_WORKERS`].
    pub copy_workers: Option<usize>,
    /// Route of swap-ins.
    pub swap_in: SwapInPath,
    /// How memory is put into huge pages.
    pub huge_pages: HugeChoice,
    /// How thoroughly calls compare the bytes that they have moved with their source, unless the call overrides it.
    pub verify: Verify,
    /// How links are made and kept.
    pub links: LinkConfig,
}

impl Config {
    /// Time limit of a call if no option gives one.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1);
    /// Time limit of a call of a native engine, unless the configuration says otherwise.
    pub const NATIVE_TIMEOUT: Duration = Duration::from_secs(10);
    /// Maximum number of asynchronous calls, unless the configuration says otherwise.
    pub const DEFAULT_TRANSFERS: usize = 4096;
    /// How long a thread polls for the next asynchronous call, unless the configuration says otherwise.
    pub const DEFAULT_TRANSFER_POLL: Duration = Duration::from_micros(50);
    /// Number of threads that copy if no option gives one: the number that the original's documentation
    /// states for swap-out (contract §7.11).
    pub const DEFAULT_WORKERS: usize = 4;

    /// Returns a configuration without pools and with every other value at its default.
    pub fn new(role: Role, cluster: ClusterId) -> Self {
        Config {
            role,
            cluster,
            name: String::new(),
            metadata: Vec::new(),
            native: false,
            mode: Mode::CacheManager,
            device_pool: None,
            device_share: None,
            host_pool: None,
            sync_timeout: Self::DEFAULT_TIMEOUT,
            max_transfers: Self::DEFAULT_TRANSFERS,
            transfer_poll: Self::DEFAULT_TRANSFER_POLL,
            device_id: 0,
            remote_accessible: false,
            copy_workers: None,
            swap_in: SwapInPath::Auto,
            huge_pages: HugeChoice::Auto,
            verify: Verify::Off,
            links: LinkConfig::default(),
        }
    }

    /// Returns the configuration of a [native](Self::native) engine without pools, and with every other value at its default.
    /// Peers may use its caches.
    pub fn native() -> Self {
        let unnumbered = Self::new(Role::Mix, ClusterId(0));
        Config { native: true, remote_accessible: true, sync_timeout: Self::NATIVE_TIMEOUT, ..unnumbered }
    }
}
