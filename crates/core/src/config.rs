//! The engine's configuration as plain values. Reading option texts is `check`'s work.
//!
//! Not for: parsing, defaults that depend on the machine (`engine::workers` reads those).

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::model::ClusterId;

/// What the cluster does for others. Informational in cache-manager mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Prefill.
    Prompt = 1,
    /// Decode.
    Decoder = 2,
    /// Both.
    Mix = 3,
}

impl Role {
    /// The role of a public number.
    #[must_use]
    pub const fn from_value(value: i64) -> Option<Role> {
        match value {
            1 => Some(Role::Prompt),
            2 => Some(Role::Decoder),
            3 => Some(Role::Mix),
            _ => None,
        }
    }

    /// The text other programs of this kind use for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Role::Prompt => "Prompt",
            Role::Decoder => "Decoder",
            Role::Mix => "Mix",
        }
    }
}

/// Which manager the engine serves. The modes differ in a few rules and codes (contract §9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// `CacheManager`: roles are informational, pools are configured.
    #[default]
    CacheManager,
    /// `KvCacheManager`: memory of the device alone, from a pool that is there unasked.
    KvCacheManager,
}

/// Parts per million of the memory this process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u32);

impl Share {
    /// All of it.
    const WHOLE: u32 = 1_000_000;
    /// The share where no option says otherwise.
    pub const DEFAULT: Share = Share(950_000);

    /// The share of a number from 0.0 to 1.0; what is outside counts as the nearest end.
    #[must_use]
    pub fn of(part: f64) -> Share {
        // Between 0 and a million, whatever was given: the cast of a float saturates, and no number becomes 0.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within 0 to a million")]
        let parts = (part.clamp(0.0, 1.0) * f64::from(Self::WHOLE)).round() as u32;
        Share(parts)
    }

    /// So much of `bytes`.
    #[must_use]
    pub fn of_bytes(self, bytes: u64) -> u64 {
        let part = u128::from(bytes) * u128::from(self.0) / u128::from(Self::WHOLE);
        u64::try_from(part).unwrap_or(bytes)
    }
}

/// One memory pool: bytes, and the binary logarithm of its page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Capacity in bytes.
    pub memory_size: u64,
    /// Page size is `1 << page_shift` bytes; 10 to 30.
    pub page_shift: u32,
}

impl PoolConfig {
    /// Page size where no option says otherwise (seed `deprecated.md`, `mem_pool_cfg`).
    pub const DEFAULT_PAGE_SHIFT: u32 = 16;

    /// A pool of about `bytes` in pages of the default size: at least one page, at most as many as a pool can have.
    #[must_use]
    pub fn about(bytes: u64) -> PoolConfig {
        let page_shift = Self::DEFAULT_PAGE_SHIFT;
        let pages = (bytes >> page_shift).clamp(1, u64::from(u32::MAX) - 1);
        PoolConfig { memory_size: pages << page_shift, page_shift }
    }
}

/// How a swap-in (host to device) travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwapInPath {
    /// Directly where the copy can go straight to its place, else through the ring.
    #[default]
    Auto,
    /// Straight to its place.
    Direct,
    /// Through the ring of block buffers (seed `deprecated.md`, `swap_blocks`).
    Ring,
}

/// Which host copy kernel runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KernelChoice {
    /// The one that measures faster for the size at hand.
    #[default]
    Auto,
    /// Ordinary stores, through the caches.
    Plain,
    /// Stores that bypass the caches, where the CPU has them.
    Streaming,
}

/// Whether memory is put into huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugeChoice {
    /// What the kernel gives by itself. One hint in the log if peers read registered memory slowly because of small pages.
    #[default]
    Auto,
    /// What the kernel gives by itself, without the hint.
    Off,
    /// What pools have touched, in the background. Calls that meet a page being merged wait for it, up to milliseconds.
    Merge,
    /// As `Merge`, and registered memory that peers read through the kernel.
    MergeRegistered,
    /// Pools before the engine is open, all of them committed, and registered memory when it is registered.
    Eager,
}

/// How the bytes of a link travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportChoice {
    /// Shared memory between processes of one host, sockets otherwise.
    #[default]
    Auto,
    /// Shared memory, or no link.
    Shm,
    /// Sockets, on one host as well.
    Tcp,
}

/// What both ends of a link must know. Never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(Box<[u8]>);

impl Token {
    /// The token of a text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Token(text.as_bytes().into())
    }

    /// Its bytes, to compute proofs with.
    #[must_use]
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
    /// Where to listen for peers, if anywhere; port 0 for any free one.
    pub listen: Option<SocketAddr>,
    /// What a peer must prove to know, and this side proves.
    pub token: Option<Token>,
    /// A file that holds the token instead. `DataDist::open` reads it, once; the rules are those of [`token_file`].
    ///
    /// [`token_file`]: crate::token_file
    pub token_file: Option<PathBuf>,
    /// Whether peers are admitted without any proof where no token is set: everybody who can reach a listener.
    pub accept_remote: bool,
    /// How often a link that is silent is tried.
    pub heartbeat: Duration,
    /// How long a peer may be silent before its link breaks.
    pub silence: Duration,
    /// For how long at most a peer may keep rows of this side pinned for one transfer, whatever deadline it announced.
    pub pin_limit: Duration,
    /// Limit of a rank-table link, all its tries together.
    pub total: Duration,
    /// How many tries of a rank-table link fit into that limit at least: one takes its share of it at most. There are
    /// more, because a try that is refused ends at once.
    pub retries: u32,
    /// How bytes travel.
    pub transport: TransportChoice,
    /// Streams of one large transfer between hosts.
    pub streams: usize,
    /// Port of device 0 for rank-table links; device `n` has the `n`-th after it.
    pub rank_port: u16,
    /// Where ends of rank-table links really are, by `device_ip` or cluster id.
    pub rank_hosts: BTreeMap<String, SocketAddr>,
    /// Whether both sides may link to each other (`llm.TransferBackend = hixl`).
    pub both_ways: bool,
    /// Bytes of address space that the memory of all peers may take in this process, half of it for one link; `None` for
    /// four times the memory of the machine. What does not fit is read through sockets.
    pub remote_memory: Option<u64>,
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
            streams: 1,
            rank_port: 16_666,
            rank_hosts: BTreeMap::new(),
            both_ways: false,
            remote_memory: None,
        }
    }
}

/// Everything an engine is opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// What it does for others.
    pub role: Role,
    /// Its own name.
    pub cluster: ClusterId,
    /// Which manager it serves.
    pub mode: Mode,
    /// Device pool, if any.
    pub device_pool: Option<PoolConfig>,
    /// How large a device pool is made where `device_pool` names none; `None` for no pool.
    pub device_share: Option<Share>,
    /// Host pool, if any.
    pub host_pool: Option<PoolConfig>,
    /// Limit of every call that waits or moves bytes (`sync_kv_timeout`).
    pub sync_timeout: Duration,
    /// Physical device number; informational on host-memory devices.
    pub device_id: u32,
    /// Whether transfers are one-sided.
    pub remote_accessible: bool,
    /// Workers that copy, the calling thread among them; `None` is [`Config::DEFAULT_WORKERS`].
    pub copy_workers: Option<usize>,
    /// How swap-ins travel.
    pub swap_in: SwapInPath,
    /// Which copy kernel runs.
    pub kernel: KernelChoice,
    /// Whether memory is put into huge pages.
    pub huge_pages: HugeChoice,
    /// How links are made and kept.
    pub links: LinkConfig,
}

impl Config {
    /// Limit of a call when no option says otherwise.
    pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(1);
    /// Workers when no option says otherwise: what the seed names for swap-out.
    pub const DEFAULT_WORKERS: usize = 4;

    /// A configuration without pools and with every default.
    #[must_use]
    pub fn new(role: Role, cluster: ClusterId) -> Self {
        Config {
            role,
            cluster,
            mode: Mode::CacheManager,
            device_pool: None,
            device_share: None,
            host_pool: None,
            sync_timeout: Self::DEFAULT_TIMEOUT,
            device_id: 0,
            remote_accessible: false,
            copy_workers: None,
            swap_in: SwapInPath::Auto,
            kernel: KernelChoice::Auto,
            huge_pages: HugeChoice::Auto,
            links: LinkConfig::default(),
        }
    }
}
