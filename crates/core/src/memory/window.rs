//! Windows: bytes inside one tensor, cut with checked bounds, and what this process can do with them.

use std::marker::PhantomData;

/// Name of these lists in out-of-memory errors.
pub(super) const ADDRESSES: &str = "the addresses of tensors";

/// What this process can do with the bytes of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The CPU reads and writes them.
    Host,
    /// The CPU reads them: another process's memory, mapped.
    HostRead,
    /// Only the kernel reads them, on request: another process's memory.
    Process,
    /// Only their device reads and writes them.
    Device,
}

/// What a copy does with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads it.
    Read,
    /// Writes it.
    Write,
}

impl Reach {
    /// Whether the CPU can dereference the addresses, to read at least.
    #[must_use]
    pub fn host_addressable(self) -> bool {
        matches!(self, Reach::Host | Reach::HostRead)
    }

    /// Whether it is another process's memory.
    #[must_use]
    pub fn foreign(self) -> bool {
        matches!(self, Reach::HostRead | Reach::Process)
    }

    /// Whether anybody here may write there. Nobody writes into another process.
    #[must_use]
    pub fn writable(self) -> bool {
        matches!(self, Reach::Host | Reach::Device)
    }
}

/// Bytes inside one tensor, bounds checked. Says where, not what: there is no way to read it as a slice.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    addr: u64,
    len: u64,
    reach: Reach,
    /// The tensors stay while the window is in use.
    tensors: PhantomData<&'a ()>,
}

impl Window<'_> {
    /// A window whose bounds [`Tensors::window`](super::Tensors::window) has checked.
    pub(super) fn inside(addr: u64, len: u64, reach: Reach) -> Self {
        Window { addr, len, reach, tensors: PhantomData }
    }

    /// Address of the first byte.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What this process can do with it.
    #[must_use]
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// Whether the CPU can dereference it, to read at least.
    #[must_use]
    pub fn host_addressable(&self) -> bool {
        self.reach.host_addressable()
    }

    /// Whether both name some byte in common. Addresses of another process name no byte of this one.
    #[must_use]
    pub fn overlaps(&self, other: &Window<'_>) -> bool {
        (self.reach == Reach::Process) == (other.reach == Reach::Process)
            && self.addr < other.addr + other.len
            && other.addr < self.addr + self.len
    }
}
