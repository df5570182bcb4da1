//! What a library that reads memory of other hosts provides. The crates `ucx` and `nixl` implement these traits, so that the
//! engine need not know which library it uses.
//!
//! Each side maps memory ([`Fabric::map`]), and sends the keys and the address of its fabric to the other one over a channel
//! that the caller provides. The other side connects ([`Fabric::peer`]) and reads ([`Peer::read`]).
//!
//! When a read returns, also without success, the library no longer writes to its destinations. These traits have no call that
//! writes into memory of another process. NIXL cannot keep a peer that breaks the rules from writing (docs/networks.md).

#![allow(unsafe_code, reason = "addresses")]

mod environment;
mod error;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

pub use environment::with_ucx_environment;
pub use error::{Error, Status};

/// A library in this process, and the memory that it has mapped.
pub trait Fabric: fmt::Debug + Send + Sync {
    /// Returns the version of the library.
    fn version(&self) -> Version;

    /// Returns the address that peers need. Take it after memory was mapped: the address may describe that memory.
    fn address(&self) -> Result<Vec<u8>, Error>;

    /// Maps memory of this process, so that peers with its key and the address of the fabric can read it.
    ///
    /// # Safety
    ///
    /// The memory must stay mapped until the value is dropped, and may be read by others at any time.
    unsafe fn map(&self, start: u64, len: u64) -> Result<Box<dyn Mapping>, Error>;

    /// Returns a peer with the fabric of this address. Nothing is connected until it is read.
    fn peer(&self, address: Vec<u8>) -> Box<dyn Peer>;

    /// Returns what the fabric has done.
    fn counts(&self) -> Counts;
}

/// Mapped memory. Drop unmaps it, and waits for that.
pub trait Mapping: fmt::Debug + Send + Sync {
    /// Returns the key with which peers read the memory. Any process that has the key and the address of the fabric can
    /// read it. It is empty if the address is enough.
    fn key(&self) -> &Arc<Vec<u8>>;
}

/// A peer that can be read. Drop closes its connections.
pub trait Peer: fmt::Debug + Send + Sync {
    /// Reads `pieces` with `key`, and returns when all bytes are in place.
    ///
    /// `cancelled` is called about every 100 ms. When it returns `true`, the read ends with [`Error::Cancelled`]. Whatever the
    /// result, nothing of the read touches memory after the return.
    ///
    /// # Safety
    ///
    /// The destinations must be memory of this process that is writable until the return.
    unsafe fn read(
        &self,
        key: &Arc<Vec<u8>>,
        pieces: Vec<Piece>,
        deadline: Option<Instant>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error>;
}

/// One piece of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The address of the destination in this process.
    pub local: u64,
    /// The address of the source in the process of the peer.
    pub remote: u64,
    /// Number of bytes.
    pub len: u64,
}

/// What a fabric has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads that succeeded.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Reads that failed or were given up.
    pub failures: u64,
    /// Connections (UCX) or agents (NIXL) that were closed by force to end a read.
    pub forced_closes: u64,
    /// Workers of UCX that were replaced, after 100 forced closes or because requests did not end. Always 0 for NIXL.
    pub renewals: u64,
}

/// The version of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Versions with other numbers are incompatible.
    pub major: u32,
    /// Raised by new features.
    pub minor: u32,
    /// Raised by corrections.
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}
