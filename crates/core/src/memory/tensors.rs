//! Equal tensors that share an owner, and windows cut from them with checked bounds.
//!
//! Not for: shapes and types (`desc`), or who may use which rows when (`table::pin`).

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use super::smaps;
use super::{ForeignProcess, ForeignRegion, Region};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{CacheDesc, CacheKind};
use crate::validate::{self, Side};

/// Name of these lists in out-of-memory errors.
const ADDRESSES: &str = "the addresses of tensors";

/// Addresses of the caller's own memory, one per tensor, with the caller's promise about them.
///
/// The promise is this value: registering takes an `Adopted`, so nothing above this room is unsafe.
#[derive(Debug)]
pub struct Adopted {
    desc: CacheDesc,
    side: Side,
    addrs: Arc<Vec<u64>>,
}

impl Adopted {
    /// Takes `addrs`, one per tensor of `desc`, each above zero (contract §4.3, §7.6).
    ///
    /// # Safety
    ///
    /// From every address on, the bytes of one tensor must stay readable and writable as long as this value, or a
    /// cache made from it, is used in a copy. Tensors that share bytes with other tensors are pinned apart: copies
    /// between them stay inside the memory given, but their order is undefined.
    pub unsafe fn new(desc: &CacheDesc, kind: CacheKind, addrs: &[u64]) -> Result<Adopted> {
        let side = validate::addresses(desc, kind, addrs)?;
        let addrs = Arc::new(fallible::copied(ADDRESSES, addrs)?);
        Ok(Adopted { desc: desc.clone(), side, addrs })
    }

    /// What the caller said it is.
    #[must_use]
    pub fn desc(&self) -> &CacheDesc {
        &self.desc
    }

    /// Its sizes, kind and placement.
    #[must_use]
    pub fn side(&self) -> Side {
        self.side
    }

    /// The address of every tensor.
    pub(super) fn addrs(&self) -> &[u64] {
        &self.addrs
    }
}

/// The tensors of one cache: equal sizes, any addresses, one owner that is let go when this drops.
pub struct Tensors {
    /// Shared with the handles of the caller, for which a copy might fail once the cache is made.
    addrs: Arc<Vec<u64>>,
    tensor_bytes: u64,
    memory: Memory,
    /// Gives the memory back when dropped (a lease of a pool, a mapping); nothing for adopted memory.
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

enum Memory {
    Carved(Arc<Region>),
    /// Set by the first copy that reads, and by the first that writes: where the addresses are not mapped so.
    Adopted([OnceLock<Option<u64>>; 2]),
    /// Another process's memory, mapped here for reading.
    Mapped,
    /// Another process's memory, not mapped here.
    Process(Arc<ForeignProcess>),
}

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

impl Tensors {
    /// Tensors of `tensor_bytes` at `offsets` of `region`; `owner` is dropped with them. `Err` if one sticks out.
    pub fn carved(
        region: Arc<Region>,
        offsets: impl IntoIterator<Item = u64>,
        tensor_bytes: u64,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Tensors> {
        let addrs = inside(region.base(), region.len(), offsets, tensor_bytes)?;
        Ok(Tensors { addrs, tensor_bytes, memory: Memory::Carved(region), _owner: Some(owner) })
    }

    /// Tensors of `tensor_bytes` at `offsets` of another process's memory that is mapped here: to be read, never
    /// written. `Err` if one sticks out.
    pub fn mapped(
        region: Arc<ForeignRegion>,
        offsets: impl IntoIterator<Item = u64>,
        tensor_bytes: u64,
    ) -> Result<Tensors> {
        let addrs = inside(region.base(), region.len(), offsets, tensor_bytes)?;
        Ok(Tensors { addrs, tensor_bytes, memory: Memory::Mapped, _owner: Some(Box::new(region)) })
    }

    /// Tensors of `tensor_bytes` at the addresses `addrs` of another process: to be read, never written, and not by the
    /// CPU. Wrong addresses are reported by the read.
    pub fn of_process(process: Arc<ForeignProcess>, addrs: Vec<u64>, tensor_bytes: u64) -> Result<Tensors> {
        if let Some(addr) = addrs.iter().find(|addr| addr.checked_add(tensor_bytes).is_none()) {
            let text = format!("{tensor_bytes} bytes at {addr:#x} are outside every address space");
            return Err(Error::new(ErrorKind::System, text).with("pid", process.pid()));
        }
        let addrs = Arc::new(addrs);
        Ok(Tensors { addrs, tensor_bytes, memory: Memory::Process(process), _owner: None })
    }

    /// The caller's own memory.
    #[must_use]
    pub fn adopted(adopted: Adopted) -> Tensors {
        Tensors {
            tensor_bytes: adopted.side.geometry.tensor_bytes(),
            addrs: adopted.addrs,
            memory: Memory::Adopted(Default::default()),
            _owner: None,
        }
    }

    /// The address of every tensor.
    #[must_use]
    pub fn addrs(&self) -> &[u64] {
        &self.addrs
    }

    /// The same, shared.
    #[must_use]
    pub fn shared_addrs(&self) -> Arc<Vec<u64>> {
        self.addrs.clone()
    }

    /// Bytes of one tensor.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }

    /// What this process can do with them.
    #[must_use]
    pub fn reach(&self) -> Reach {
        match &self.memory {
            Memory::Carved(region) if !region.host_addressable() => Reach::Device,
            Memory::Carved(_) | Memory::Adopted(_) => Reach::Host,
            Memory::Mapped => Reach::HostRead,
            Memory::Process(_) => Reach::Process,
        }
    }

    /// Whether they are the caller's memory, in this process.
    pub(super) fn adopted_here(&self) -> bool {
        matches!(self.memory, Memory::Adopted(_))
    }

    /// Whether the CPU can dereference the addresses, to read at least.
    #[must_use]
    pub fn host_addressable(&self) -> bool {
        self.reach().host_addressable()
    }

    /// The process that must be asked for the bytes, if they are its own and not mapped here.
    #[must_use]
    pub fn process(&self) -> Option<&Arc<ForeignProcess>> {
        if let Memory::Process(process) = &self.memory { Some(process) } else { None }
    }

    /// `Err` if adopted addresses are not mapped in this process: the reason, instead of a fault in the middle of a
    /// copy. Asked of the kernel by the first copy of each kind; unmapping later breaks the promise of [`Adopted`].
    pub fn check_mapped(&self, access: Access) -> Result<()> {
        let Memory::Adopted(known) = &self.memory else { return Ok(()) };
        let unmapped = known[access as usize].get_or_init(|| {
            let ranges = self.addrs.iter().map(|&addr| (addr, self.tensor_bytes));
            smaps::first_unmapped(ranges, access == Access::Write)
        });
        let Some(addr) = unmapped else { return Ok(()) };
        let way = if access == Access::Write { "writable" } else { "readable" };
        let text = format!("registered memory is not mapped {way} in this process, from {addr:#x} on");
        Err(Error::new(ErrorKind::InvalidArgument, text).with("tensor_bytes", self.tensor_bytes))
    }

    /// `len` bytes of one tensor from `offset` on. `Err` if they are not all inside it.
    pub fn window(&self, tensor: usize, offset: u64, len: u64) -> Result<Window<'_>> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.tensor_bytes);
        match self.addrs.get(tensor) {
            Some(&addr) if inside => {
                Ok(Window { addr: addr + offset, len, reach: self.reach(), tensors: PhantomData })
            }
            _ => Err(self.outside(tensor, offset, len)),
        }
    }

    #[cold]
    fn outside(&self, tensor: usize, offset: u64, len: u64) -> Error {
        Error::new(
            ErrorKind::System,
            format!("{len} bytes at {offset} of tensor {tensor} are outside the cache"),
        )
        .with("tensors", self.addrs.len())
        .with("tensor_bytes", self.tensor_bytes)
    }
}

/// The addresses of tensors at `offsets` of `base..base + len`, or `Err` if one sticks out.
fn inside(
    base: u64,
    len: u64,
    offsets: impl IntoIterator<Item = u64>,
    tensor_bytes: u64,
) -> Result<Arc<Vec<u64>>> {
    let at = |offset: u64| {
        let end = offset.checked_add(tensor_bytes);
        if end.is_none_or(|end| end > len) {
            let text = format!("tensor at {offset} + {tensor_bytes} bytes is outside its region");
            return Err(Error::new(ErrorKind::System, text).with("region_bytes", len));
        }
        Ok(base + offset)
    };
    let (mut addrs, offsets) = (Vec::new(), offsets.into_iter());
    fallible::grow(ADDRESSES, &mut addrs, offsets.size_hint().0)?;
    for offset in offsets {
        fallible::push(ADDRESSES, &mut addrs, at(offset)?)?;
    }
    Ok(Arc::new(addrs))
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

impl fmt::Debug for Tensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensors({} × {} bytes)", self.addrs.len(), self.tensor_bytes)
    }
}

/// Bytes inside one tensor, bounds checked. Says where, not what: there is no way to read it as a slice.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    addr: u64,
    len: u64,
    reach: Reach,
    tensors: PhantomData<&'a Tensors>,
}

impl Window<'_> {
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
