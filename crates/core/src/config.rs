//! The engine's configuration as plain values. Reading option texts is `check`'s work.
//!
//! Not for: parsing, defaults that depend on the machine (`engine::workers` reads those).

use std::time::Duration;

use crate::id::ClusterId;

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

/// One memory pool: bytes, and the binary logarithm of its page size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Capacity in bytes.
    pub memory_size: u64,
    /// Page size is `1 << page_shift` bytes; 10 to 30.
    pub page_shift: u32,
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

/// Everything an engine is opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// What it does for others.
    pub role: Role,
    /// Its own name.
    pub cluster: ClusterId,
    /// Device pool, if any.
    pub device_pool: Option<PoolConfig>,
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
            device_pool: None,
            host_pool: None,
            sync_timeout: Self::DEFAULT_TIMEOUT,
            device_id: 0,
            remote_accessible: false,
            copy_workers: None,
            swap_in: SwapInPath::Auto,
            kernel: KernelChoice::Auto,
        }
    }
}
