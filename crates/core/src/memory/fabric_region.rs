//! Memory that UCX reads: pools of this process that peers may read, and pools of peers.

use std::cell::RefCell;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use llm_datadist_ucx as ucx;
use llm_datadist_ucx::{Fabric, Mapping, Peer, Piece};

use super::region::Region;
use super::window::{Reach, Window};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::Deadline;
use crate::sync::Mutex;

/// Name of lists of pieces in out-of-memory errors.
const PIECES: &str = "the pieces of a read";
/// What a call does, in its errors.
const READING: &str = "reading a peer by UCX";

/// Loads the library of UCX at `path`, or the one of this name that the system finds. Returns `Err` with the reason if it
/// cannot be used.
pub fn load_ucx(path: &Path) -> Result<ucx::Library, ucx::Error> {
    static LOADED: LazyLock<Mutex<Vec<ucx::Library>>> = LazyLock::new(Mutex::default);
    let mut loaded = LOADED.lock();
    if let Some(library) = loaded.iter().find(|library| library.path() == path) {
        return Ok(library.clone());
    }
    // SAFETY: the path is that of an option, or the name of UCX's library, so the user has chosen the code. Rust's functions
    // lock the environment, and loads take turns. That no other code of the process reads it meanwhile through functions
    // of C cannot be checked, so each library is loaded once.
    let library = unsafe { ucx::Library::open(path) }?;
    loaded.push(library.clone());
    Ok(library)
}

/// A pool of this process that peers can read.
#[derive(Debug)]
pub struct SharedRegion {
    // Dropped before the region.
    mapping: Mapping,
    region: Arc<Region>,
}

impl SharedRegion {
    /// Maps a region for reads of peers. Returns `Err(NotEnabled)` with the reason if UCX refuses, for example because the
    /// memory cannot be pinned.
    pub fn share(fabric: &Fabric, region: Arc<Region>) -> Result<SharedRegion> {
        // SAFETY: the region outlives the mapping, as the order of the fields ensures (promise 1). What a peer reads while
        // it is written is discarded (`session::peer_snapshot`).
        let mapping = unsafe { fabric.map(region.base(), region.len()) };
        let mapping = mapping.map_err(|error| {
            let text = format!(
                "UCX cannot map a pool: {error}; RDMA devices pin the pool, and `ulimit -l` must allow that"
            );
            Error::new(ErrorKind::NotEnabled, text).with("bytes", region.len())
        })?;
        Ok(SharedRegion { mapping, region })
    }

    /// Returns the address of the first byte, the number of bytes, and the key with which peers read them.
    pub fn offer(&self) -> (u64, u64, &Arc<Vec<u8>>) {
        (self.region.base(), self.region.len(), self.mapping.key())
    }
}

/// A pool of a peer that this process can read.
pub struct FabricRegion {
    peer: Arc<Peer>,
    base: u64,
    len: u64,
    key: Arc<Vec<u8>>,
    ended: AtomicBool,
}

impl FabricRegion {
    /// Creates the region that a peer has offered. Returns `Err(System)` if it exceeds the address space.
    pub fn new(peer: Arc<Peer>, (base, len): (u64, u64), key: Arc<Vec<u8>>) -> Result<FabricRegion> {
        if base.checked_add(len).is_none() {
            let text = "the peer offers a pool for UCX that exceeds the address space";
            return Err(Error::new(ErrorKind::System, text)
                .with("address", format_args!("{base:#x}"))
                .with("bytes", len));
        }
        Ok(FabricRegion { peer, base, len, key, ended: AtomicBool::new(false) })
    }

    /// Returns the address of the first byte in the process of the peer.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Has reads in progress, and further ones, fail soon: the link to the peer has ended.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Reads every source of `pairs` into its destination. When it returns, nothing touches the destinations any more.
    ///
    /// Returns `Err(NotEnabled)` with the reason if UCX fails, `Err(Timeout)` at the deadline, `Err(Interrupted)` if the
    /// caller was interrupted, and `Err(NotLinked)` if the link has ended.
    pub fn read(&self, pairs: &[(Window<'_>, Window<'_>)], deadline: Deadline) -> Result<()> {
        let piece = |(src, dst): &(Window<'_>, Window<'_>)| {
            if src.len() != dst.len() || src.reach() != Reach::Fabric || dst.reach() != Reach::Host {
                return Err(Error::new(ErrorKind::System, "UCX does not read this pair of windows")
                    .with("src", format_args!("{:?}", src.reach()))
                    .with("dst", format_args!("{:?}", dst.reach()))
                    .with("src_bytes", src.len())
                    .with("dst_bytes", dst.len()));
            }
            Ok(Piece { local: dst.addr(), remote: src.addr(), len: src.len() })
        };
        let pieces = fallible::try_collect(PIECES, pairs.iter().map(piece))?;
        let interruption = RefCell::new(None);
        let waiting = || {
            let mut interruption = interruption.borrow_mut();
            if interruption.is_none() {
                *interruption = self.interruption(deadline).err();
            }
            interruption.is_some()
        };
        // SAFETY: the destinations are windows of live tensors or buffers that are writable host memory, as checked above,
        // and stay so until the return (promise 3).
        let read = unsafe { self.peer.read(&self.key, pieces, Some(deadline.at()), &waiting) };
        read.map_err(|error| match error {
            ucx::Error::DeadlinePassed => deadline.error(READING),
            ucx::Error::Cancelled => interruption.take().unwrap_or_else(|| deadline.error(READING)),
            other => Error::new(ErrorKind::NotEnabled, other.to_string()),
        })
    }

    fn interruption(&self, deadline: Deadline) -> Result<()> {
        if self.ended.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::NotLinked, format!("the link ended while {READING}")));
        }
        deadline.interruption(READING)
    }
}

impl fmt::Debug for FabricRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FabricRegion({} bytes)", self.len)
    }
}
