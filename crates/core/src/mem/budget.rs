//! Address space that the memory of peers may take in this process, in all links together.
//!
//! A peer chooses how much memory it offers. Without a bound one offer could take all addresses of this process, and its
//! next allocation would end it. Not for: mapping (`foreign`), or which peer may offer how much (`links`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, getrlimit};

use super::limits;
use crate::error::{Error, ErrorKind, Result};

/// Limit where no option says otherwise: so many times the memory of the machine.
const TIMES_RAM: u64 = 4;

/// How much may be mapped, and how much is.
#[derive(Debug)]
pub struct MapBudget {
    limit: u64,
    used: AtomicU64,
}

/// A part of a budget; returned on drop.
#[derive(Debug)]
pub struct Reserved {
    budget: Arc<MapBudget>,
    bytes: u64,
}

impl MapBudget {
    /// A budget of `limit` bytes; of four times the memory of this machine if none is given.
    #[must_use]
    pub fn new(limit: Option<u64>) -> Arc<MapBudget> {
        let limit = limit.unwrap_or_else(|| limits::machine_bytes().saturating_mul(TIMES_RAM));
        Arc::new(MapBudget { limit, used: AtomicU64::new(0) })
    }

    /// Bytes that may be mapped.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Bytes that are reserved now.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes `bytes`, or says how many are left. Also refused if this process could then not allocate much more itself: a
    /// limited address space is filled by half at most.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reserved> {
        let taken = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.limit);
        let before = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken);
        before.map_err(|used| {
            Error::new(ErrorKind::System, "the memory of all peers together is more than may be mapped")
                .with("bytes", bytes)
                .with("mapped_bytes", used)
                .with("limit_bytes", self.limit)
        })?;
        let reserved = Reserved { budget: self.clone(), bytes };
        match limits::address_space_left() {
            Some(left) if bytes > left / 2 => Err(Error::new(
                ErrorKind::System,
                "this process has too few addresses left to map the memory of a peer",
            )
            .with("bytes", bytes)
            .with("left_bytes", left)
            .with("limit_as_bytes", getrlimit(Resource::As).current.unwrap_or(u64::MAX))),
            _ => Ok(reserved),
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
