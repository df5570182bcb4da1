//! A fake device for tests: its addresses are not host addresses, it counts copies, and it can be slow or
//! fail.
//!
//! Code that dereferences a device address by mistake faults at once, because nothing is mapped there. The
//! device does not model the speed of any hardware. Its memory stays until the device drops. So a late copy
//! after the end of a call writes to memory that still exists, where the test that checks for it can see it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use llm_datadist_core::testing::device::{Copier, Copy, Device, HostReach};
use llm_datadist_core::testing::error::{Error, ErrorKind, Result};
use llm_datadist_core::testing::memory::kernels::{self, Kernel};
use llm_datadist_core::testing::memory::{Region, Tensors, Window};
use std::sync::{Mutex, PoisonError};

/// Not canonical on any 64-bit machine, so an access faults.
const BASE: u64 = 0xDEAD_0000_0000_0000;

/// The first address that no device of this process has used.
static NEXT: AtomicU64 = AtomicU64::new(BASE);
/// The regions of all devices of this process.
static REGIONS: Mutex<Vec<(u64, Weak<Tensors>)>> = Mutex::new(Vec::new());

/// Returns the host address of the byte at an address of a simulated device; `None` for other addresses.
#[must_use]
pub fn host_address(addr: u64) -> Option<u64> {
    let mut regions = REGIONS.lock().unwrap_or_else(PoisonError::into_inner);
    regions.retain(|(_, bytes)| bytes.strong_count() > 0);
    let inside = |(base, bytes): &(u64, Weak<Tensors>)| {
        let bytes = bytes.upgrade()?;
        let offset = addr.checked_sub(*base).filter(|&offset| offset < bytes.tensor_bytes())?;
        Some(bytes.addrs()[0] + offset)
    };
    regions.iter().find_map(inside)
}

/// A device with memory that the CPU cannot address.
#[derive(Debug)]
pub struct SimDevice {
    reach: HostReach,
    fail_after: AtomicU64,
    copies: AtomicU64,
    before_copies: Hook,
    memory: Mutex<Vec<Backing>>,
}

/// Called before each batch of copies.
struct Hook(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

/// The host memory that holds the bytes of one region.
#[derive(Debug)]
struct Backing {
    base: u64,
    bytes: Arc<Tensors>,
}

impl SimDevice {
    /// Creates a device that host memory reaches by `reach`.
    #[must_use]
    pub fn new(reach: HostReach) -> Self {
        SimDevice {
            reach,
            fail_after: AtomicU64::new(u64::MAX),
            copies: AtomicU64::new(0),
            before_copies: Hook(Box::new(|| ())),
            memory: Mutex::new(Vec::new()),
        }
    }

    /// Calls `hook` on the copying thread before each batch of copies.
    #[must_use]
    pub fn before_copies(self, hook: impl Fn() + Send + Sync + 'static) -> Self {
        SimDevice { before_copies: Hook(Box::new(hook)), ..self }
    }

    /// Makes every copy after the next `copies` ones fail.
    pub fn fail_after(&self, copies: u64) {
        self.fail_after.store(copies, Ordering::SeqCst);
    }

    /// Returns the number of copies made, without those that were made to fail.
    pub fn copies(&self) -> u64 {
        self.copies.load(Ordering::SeqCst)
    }

    fn one(&self, (src, dst): (Window<'_>, Window<'_>), kernel: Kernel) -> Result<()> {
        let left =
            self.fail_after.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| Some(n.saturating_sub(1)));
        if left == Ok(0) {
            return Err(Error::new(ErrorKind::System, "the simulated device failed as requested"));
        }
        self.copies.fetch_add(1, Ordering::SeqCst);
        let (src_bytes, dst_bytes) = (self.backing(src), self.backing(dst));
        let src = Self::real(src, src_bytes.as_ref())?;
        let dst = Self::real(dst, dst_bytes.as_ref())?;
        kernels::copy(src, dst, kernel)
    }

    /// Returns the memory behind a device address, and the offset in it; `None` for a host address.
    fn backing(&self, window: Window<'_>) -> Option<(Arc<Tensors>, u64)> {
        if window.host_addressable() {
            return None;
        }
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let inside = |backing: &&Backing| {
            (backing.base..backing.base + backing.bytes.tensor_bytes()).contains(&window.addr())
        };
        memory.iter().find(inside).map(|backing| (backing.bytes.clone(), window.addr() - backing.base))
    }

    fn real<'a>(window: Window<'a>, backing: Option<&'a (Arc<Tensors>, u64)>) -> Result<Window<'a>> {
        match backing {
            Some((bytes, offset)) => bytes.window(0, *offset, window.len()),
            None => Ok(window),
        }
    }
}

impl Device for SimDevice {
    fn allocate(&self, name: &str, len: u64) -> Result<Region> {
        let real = Arc::new(Region::shared(name, len)?);
        let bytes = Arc::new(Tensors::carved(real, [0], len, ())?);
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let base = NEXT.fetch_add(len.next_multiple_of(4096) + 4096, Ordering::Relaxed);
        REGIONS.lock().unwrap_or_else(PoisonError::into_inner).push((base, Arc::downgrade(&bytes)));
        memory.push(Backing { base, bytes });
        Ok(Region::opaque(base, len))
    }

    fn host_reach(&self) -> HostReach {
        self.reach
    }
}

impl Copier for SimDevice {
    fn copy(&self, batch: &[Copy<'_>], kernel: Kernel) -> Result<()> {
        (self.before_copies.0)();
        batch.iter().flat_map(|copy| copy.pairs()).try_for_each(|pair| self.one(pair, kernel))
    }
}
