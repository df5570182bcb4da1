//! The tensors of one cache: equal sizes, any addresses, one owner.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use super::adopted::Adopted;
use super::peer_mapping::PeerMapping;
use super::peer_process::PeerProcess;
use super::region::Region;
use super::smaps;
use super::window::{Access, Reach, Window};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;

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
    Process(Arc<PeerProcess>),
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
        region: Arc<PeerMapping>,
        offsets: impl IntoIterator<Item = u64>,
        tensor_bytes: u64,
    ) -> Result<Tensors> {
        let addrs = inside(region.base(), region.len(), offsets, tensor_bytes)?;
        Ok(Tensors { addrs, tensor_bytes, memory: Memory::Mapped, _owner: Some(Box::new(region)) })
    }

    /// Tensors of `tensor_bytes` at the addresses `addrs` of another process: to be read, never written, and not by the
    /// CPU. Wrong addresses are reported by the read.
    pub fn of_process(process: Arc<PeerProcess>, addrs: Vec<u64>, tensor_bytes: u64) -> Result<Tensors> {
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
            tensor_bytes: adopted.side().geometry.tensor_bytes(),
            addrs: adopted.shared_addrs(),
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
    pub fn process(&self) -> Option<&Arc<PeerProcess>> {
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
            Some(&addr) if inside => Ok(Window::inside(addr + offset, len, self.reach())),
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
    fallible::grow(super::window::ADDRESSES, &mut addrs, offsets.size_hint().0)?;
    for offset in offsets {
        fallible::push(super::window::ADDRESSES, &mut addrs, at(offset)?)?;
    }
    Ok(Arc::new(addrs))
}

impl fmt::Debug for Tensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensors({} × {} bytes)", self.addrs.len(), self.tensor_bytes)
    }
}
