//! The tensors of one cache: their sizes, arbitrary addresses, one owner.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use super::adopted::Adopted;
use super::fabric_region::FabricRegion;
use super::maps;
use super::peer_mapping::PeerMapping;
use super::peer_process::PeerProcess;
use super::region::Region;
use super::window::{ADDRESSES, Access, Reach, Window, Windows};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::Geometry;

/// The tensors of one cache. They have arbitrary addresses, and one owner, which is dropped with this value.
pub struct Tensors {
    /// Shared with the caller's handles, because a copy of the list might fail after the cache has been
    /// created.
    addrs: Arc<Vec<u64>>,
    /// The bytes of each tensor.
    tensor_bytes: u64,
    /// Whether each tensor starts where the one before it ends, because the owner was asked for that. Tensors
    /// that happen to lie so do not count.
    contiguous: bool,
    reach: Reach,
    /// What only memory of the caller has.
    adopted: Option<AdoptedRows>,
    /// What the addresses belong to, dropped with them. `None` for memory that the caller keeps.
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// The rows of memory of the caller, and whether they have pages.
struct AdoptedRows {
    /// The first copy that reads, and the first that writes, store the first address that has no page with that access; `None`
    /// if all have one.
    unmapped: [OnceLock<Option<u64>>; 2],
    geometry: Geometry,
}

/// The offsets of some tensors in their region, each `step` bytes after the one before.
#[derive(Clone, Copy, Debug)]
pub struct Spaced {
    /// The offset of the first tensor.
    pub first: u64,
    /// Bytes from one offset to the next.
    pub step: u64,
    /// How many tensors there are.
    pub count: u64,
}

impl Spaced {
    fn one(offset: u64) -> Spaced {
        Spaced { first: offset, step: 0, count: 1 }
    }

    /// Returns the offset at which the last tensor ends, or `None` if that exceeds 64 bits.
    fn end(&self, tensor_bytes: u64) -> Option<u64> {
        let Some(last) = self.count.checked_sub(1) else { return Some(0) };
        last.checked_mul(self.step)?.checked_add(self.first)?.checked_add(tensor_bytes)
    }
}

impl Tensors {
    /// Creates tensors of `tensor_bytes` bytes at `offsets` of `region`; `owner` is dropped with them.
    /// Returns `Err` if a tensor exceeds the region, or if there is no memory for the list.
    pub fn carved(
        region: Arc<Region>,
        offsets: impl IntoIterator<Item = u64>,
        tensor_bytes: u64,
        owner: impl Any + Send + Sync,
    ) -> Result<Tensors> {
        Self::spaced(region, offsets.into_iter().map(Spaced::one), 0, tensor_bytes, owner)
    }

    /// Creates tensors as [`carved`](Self::carved) does, about `count` of them.
    pub fn spaced(
        region: Arc<Region>,
        offsets: impl IntoIterator<Item = Spaced>,
        count: usize,
        tensor_bytes: u64,
        owner: impl Any + Send + Sync,
    ) -> Result<Tensors> {
        let reach = if region.host_addressable() { Reach::Host } else { Reach::Device };
        let range = (region.base(), region.len());
        Tensors::inside(range, offsets, count, tensor_bytes, reach, Arc::new((owner, region)))
    }

    /// Creates `count` tensors as [`carved`](Self::carved) does, one after the other from `offset` on, without
    /// gaps.
    pub fn contiguous(
        region: Arc<Region>,
        offset: u64,
        count: u32,
        tensor_bytes: u64,
        owner: impl Any + Send + Sync,
    ) -> Result<Tensors> {
        let all = Spaced { first: offset, step: tensor_bytes, count: count.into() };
        let tensors = Self::spaced(region, [all], count as usize, tensor_bytes, owner)?;
        Ok(Tensors { contiguous: true, ..tensors })
    }

    /// Creates read-only tensors of `tensor_bytes` bytes at `offsets` of a peer's memory that is mapped here.
    /// Returns `Err` if a tensor exceeds the mapping, or if there is no memory for the list.
    pub fn mapped(
        region: Arc<PeerMapping>,
        offsets: impl IntoIterator<Item = u64>,
        tensor_bytes: u64,
    ) -> Result<Tensors> {
        let range = (region.base(), region.len());
        Tensors::inside(range, offsets.into_iter().map(Spaced::one), 0, tensor_bytes, Reach::HostRead, region)
    }

    /// Creates read-only tensors of `tensor_bytes` bytes at the addresses `addrs` of another process, which
    /// the CPU cannot dereference. Returns `Err` of kind [`ErrorKind::System`] if a tensor exceeds the
    /// address space. Any other invalid address is reported when it is read.
    pub fn of_process(process: Arc<PeerProcess>, addrs: Vec<u64>, tensor_bytes: u64) -> Result<Tensors> {
        if let Some(addr) = addrs.iter().find(|addr| addr.checked_add(tensor_bytes).is_none()) {
            let text = format!("{tensor_bytes} bytes at {addr:#x} exceed the address space");
            return Err(Error::new(ErrorKind::System, text).with("pid", process.pid()));
        }
        Ok(Tensors::new(Arc::new(addrs), tensor_bytes, Reach::Process, Some(process)))
    }

    /// Creates read-only tensors of `tensor_bytes` bytes at `offsets` of a peer's memory that UCX reads. Returns `Err` if a
    /// tensor exceeds the region, or if there is no memory for the list.
    pub fn of_fabric(
        region: Arc<FabricRegion>,
        offsets: impl IntoIterator<Item = u64>,
        tensor_bytes: u64,
    ) -> Result<Tensors> {
        let range = (region.base(), region.len());
        Tensors::inside(range, offsets.into_iter().map(Spaced::one), 0, tensor_bytes, Reach::Fabric, region)
    }

    /// Creates tensors over the caller's own memory.
    #[expect(clippy::needless_pass_by_value, reason = "takes over the caller's promise")]
    pub fn adopted(adopted: Adopted) -> Tensors {
        let geometry = adopted.layout().geometry;
        let rows = AdoptedRows { unmapped: Default::default(), geometry };
        let bytes = geometry.tensor_bytes();
        let tensors = Tensors::new(adopted.shared_addrs(), bytes, Reach::Host, adopted.owner());
        Tensors { adopted: Some(rows), ..tensors }
    }

    /// Creates tensors at `offsets`, about `count` in all, of the memory of `owner`, which has `len` bytes from `base` on.
    /// Returns `Err` if a tensor exceeds that range, or if there is no memory for the list.
    fn inside(
        (base, len): (u64, u64),
        offsets: impl IntoIterator<Item = Spaced>,
        count: usize,
        tensor_bytes: u64,
        reach: Reach,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Tensors> {
        let offsets = offsets.into_iter();
        let mut addrs = fallible::with_capacity(ADDRESSES, count.max(offsets.size_hint().0))?;
        for spaced in offsets {
            let Spaced { first, step, count } = spaced;
            if spaced.end(tensor_bytes).is_none_or(|end| end > len) {
                let text = format!(
                    "{count} tensors of {tensor_bytes} bytes, {step} apart from {first} on, are outside their region"
                );
                return Err(Error::new(ErrorKind::System, text).with("region_bytes", len));
            }
            // What is inside the region has addresses, and was counted by its length.
            fallible::grow(ADDRESSES, &mut addrs, usize::try_from(count).unwrap_or(usize::MAX))?;
            addrs.extend((0..count).map(|tensor| base + first + tensor * step));
        }
        Ok(Tensors::new(Arc::new(addrs), tensor_bytes, reach, Some(owner)))
    }

    fn new(
        addrs: Arc<Vec<u64>>,
        tensor_bytes: u64,
        reach: Reach,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Tensors {
        Tensors { addrs, tensor_bytes, contiguous: false, reach, adopted: None, _owner: owner }
    }

    /// Returns the address of every tensor.
    pub fn addrs(&self) -> &[u64] {
        &self.addrs
    }

    /// Returns the shared list with the address of every tensor.
    pub fn shared_addrs(&self) -> Arc<Vec<u64>> {
        self.addrs.clone()
    }

    /// Returns the bytes of one tensor.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }

    /// Returns the address of the first byte if all tensors are one range of bytes: they were created
    /// [`contiguous`](Self::contiguous), or there is only one.
    pub fn one_range(&self) -> Option<u64> {
        match &self.addrs[..] {
            [only] => Some(*only),
            [first, ..] if self.contiguous => Some(*first),
            _ => None,
        }
    }

    /// Returns how this process can access the tensors.
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// Returns whether they are in memory of the caller in this process, without gaps between rows.
    pub(super) fn adopted_whole(&self) -> bool {
        self.adopted.as_ref().is_some_and(|adopted| !adopted.geometry.row_sizes().has_gaps())
    }

    /// Returns whether the CPU can dereference the addresses, at least to read.
    pub fn host_addressable(&self) -> bool {
        self.reach().host_addressable()
    }

    /// Returns `Err` of kind [`ErrorKind::InvalidArgument`] if adopted memory has no pages in this process
    /// with the access needed.
    ///
    /// Without this check, a copy could crash half-way instead of returning an error. The kernel is asked
    /// once for reads and once for writes, at the first copy of that kind. Unmapping the memory later breaks
    /// the promise of [`Adopted`]. Gaps between rows need no pages.
    pub fn check_present(&self, access: Access) -> Result<()> {
        let Some(AdoptedRows { unmapped, geometry }) = &self.adopted else { return Ok(()) };
        let unmapped = unmapped[access as usize].get_or_init(|| {
            let write = access == Access::Write;
            let tensors = self.addrs.iter().map(|&addr| (addr, self.tensor_bytes));
            let unmapped = maps::first_unmapped(tensors, write)?;
            if !geometry.row_sizes().has_gaps() {
                return Some(unmapped);
            }
            let row_at = |addr: u64| move |row| (addr + geometry.row_start(row), geometry.row_bytes());
            maps::first_unmapped(
                self.addrs.iter().flat_map(|&addr| (0..geometry.rows()).map(row_at(addr))),
                write,
            )
        });
        let Some(addr) = unmapped else { return Ok(()) };
        let way = if access == Access::Write { "writable" } else { "readable" };
        let text = format!("registered memory is not mapped {way} in this process, from {addr:#x} on");
        Err(Error::new(ErrorKind::InvalidArgument, text).with("tensor_bytes", self.tensor_bytes))
    }

    /// Returns a window of `len` bytes of one tensor from `offset` on. Returns `Err` of kind
    /// [`ErrorKind::System`] if they are not all inside the tensor, or there is no such tensor.
    #[inline]
    pub fn window(&self, tensor: usize, offset: u64, len: u64) -> Result<Window<'_>> {
        Ok(Window::inside(self.address(tensor, offset, len)?, len, self.reach()))
    }

    /// Returns `count` windows of `len` bytes of one tensor, the first from `offset` on and each `step` bytes after the
    /// one before. Returns `Err` of kind [`ErrorKind::System`] if one of them is not inside the tensor, there is no
    /// such tensor, or `count` is 0.
    #[inline]
    pub fn windows(
        &self,
        tensor: usize,
        offset: u64,
        len: u64,
        (count, step): (u64, i64),
    ) -> Result<Windows<'_>> {
        let first = self.window(tensor, offset, len)?;
        if count != 1 {
            self.check_last(tensor, offset, len, (count, step))?;
        }
        Ok(Windows::inside(first, count, step))
    }

    /// Returns the address of `len` bytes of one tensor from `offset` on.
    ///
    /// Returns a number instead of a window: the compiler would return a `Result` of a window through the stack, and reading it
    /// back stalls the processor for each window of a plan.
    #[inline]
    fn address(&self, tensor: usize, offset: u64, len: u64) -> Result<u64> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.tensor_bytes);
        match self.addrs.get(tensor) {
            Some(&addr) if inside => Ok(addr + offset),
            _ => Err(self.outside(tensor, offset, len)),
        }
    }

    /// Checks that the last of `count` windows is inside the tensor. The caller has checked the first. Returns `Err` if `count` is
    /// 0. Not inlined, so that the usual case, one window, can be inlined.
    #[inline(never)]
    fn check_last(&self, tensor: usize, offset: u64, len: u64, (count, step): (u64, i64)) -> Result<()> {
        let distance = count.checked_sub(1).and_then(|steps| i64::try_from(steps).ok()?.checked_mul(step));
        let last = distance.and_then(|distance| offset.checked_add_signed(distance)).unwrap_or(u64::MAX);
        self.address(tensor, last, len).map(drop)
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

impl fmt::Debug for Tensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensors({} × {} bytes)", self.addrs.len(), self.tensor_bytes)
    }
}
