//! Windows: bounds-checked ranges of bytes inside one tensor or buffer, and what this process can do with them.

use std::marker::PhantomData;

/// Name of address lists in out-of-memory errors.
pub(super) const ADDRESSES: &str = "the addresses of tensors";

/// How this process can access the bytes of a window.
///
/// It is as wide as the other parts of a window, so that a window is copied word by word. With padding, the compiler copies
/// overlapping parts, which stalls the processor at each window of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Reach {
    /// Memory of this process: the CPU reads and writes it.
    Host,
    /// Memory of another process, mapped here, or bytes that this process only reads: the CPU reads it.
    HostRead,
    /// Memory of another process, not mapped here: only the kernel can read it, on request.
    Process,
    /// Memory of another process, perhaps on another host: only UCX can read it.
    Fabric,
    /// Memory of a device: only the device reads and writes it.
    Device,
}

const _: () = assert!(size_of::<Reach>() == size_of::<u64>(), "a window would have padding");

/// Whether a copy reads or writes memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The copy reads it.
    Read,
    /// The copy writes it.
    Write,
}

impl Reach {
    /// Returns whether the CPU can dereference the addresses, at least to read.
    pub fn host_addressable(self) -> bool {
        matches!(self, Reach::Host | Reach::HostRead)
    }

    /// Returns whether this is memory of another process.
    pub fn is_peer(self) -> bool {
        matches!(self, Reach::HostRead | Reach::Process | Reach::Fabric)
    }

    /// Returns whether this process may write there. No process writes into the memory of another one.
    pub fn writable(self) -> bool {
        matches!(self, Reach::Host | Reach::Device)
    }
}

/// A bounds-checked range of bytes inside one tensor, `BounceBuffer` or borrowed slice. It describes a
/// location only: there is no way to read it as a slice.
#[derive(Clone, Copy, Debug)]
pub struct Window<'a> {
    addr: u64,
    len: u64,
    reach: Reach,
    /// Keeps the memory alive while the window is in use.
    tensors: PhantomData<&'a ()>,
}

impl<'a> Window<'a> {
    /// Makes a window of bytes that nobody writes while it lives. It can only be read.
    pub fn of_slice(bytes: &'a [u8]) -> Self {
        Window::inside(bytes.as_ptr() as u64, bytes.len() as u64, Reach::HostRead)
    }

    /// Makes a window of bytes that nobody else accesses while it or a copy of it lives. Tests have no tensors for that.
    #[cfg(feature = "testing")]
    pub fn of_slice_mut(bytes: &'a mut [u8]) -> Self {
        Window::inside(bytes.as_mut_ptr() as u64, bytes.len() as u64, Reach::Host)
    }
}

impl Window<'_> {
    /// Makes a window whose bounds [`Tensors::window`](super::Tensors::window) or the buffer has checked.
    pub(super) fn inside(addr: u64, len: u64, reach: Reach) -> Self {
        Window { addr, len, reach, tensors: PhantomData }
    }

    /// Returns the address of the first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the part from byte `at` on, of at most `most` bytes.
    #[must_use]
    pub fn part(&self, at: u64, most: u64) -> Self {
        let at = at.min(self.len);
        Window { addr: self.addr + at, len: (self.len - at).min(most), ..*self }
    }

    /// Returns how this process can access it.
    pub fn reach(&self) -> Reach {
        self.reach
    }

    /// Returns whether the CPU can dereference it, at least to read.
    pub fn host_addressable(&self) -> bool {
        self.reach.host_addressable()
    }

    /// Returns whether the two windows have a byte in common. Memory that only the kernel or UCX can read overlaps no
    /// memory with an address in this process.
    pub fn overlaps(&self, other: &Window<'_>) -> bool {
        let elsewhere = |reach| matches!(reach, Reach::Process | Reach::Fabric);
        elsewhere(self.reach) == elsewhere(other.reach)
            && self.addr < other.addr + other.len
            && other.addr < self.addr + self.len
    }
}

/// One or more bounds-checked windows of equal length at a constant distance, all inside one tensor.
#[derive(Clone, Copy, Debug)]
pub struct Windows<'a> {
    first: Window<'a>,
    count: u64,
    step: i64,
}

impl<'a> Windows<'a> {
    /// Makes `count` windows, of which [`Tensors::windows`](super::Tensors::windows) has checked the first and the
    /// last. All others are between these.
    pub(super) fn inside(first: Window<'a>, count: u64, step: i64) -> Self {
        Windows { first, count, step }
    }

    /// Returns the first window.
    pub fn first(&self) -> Window<'a> {
        self.first
    }

    /// Returns the number of windows, at least one.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the windows as one if each starts where the one before it ends.
    #[must_use]
    pub fn joined(self) -> Self {
        let Windows { first, count, step } = self;
        let whole = if i64::try_from(first.len) == Ok(step) { first.len.checked_mul(count) } else { None };
        whole.map_or(self, |len| Window { len, ..first }.into())
    }

    /// Returns both as one window, if both are single and `next` starts where this one ends.
    pub fn followed_by(&self, next: &Self) -> Option<Self> {
        let (this, that) = (self.first, next.first);
        let follows = (self.count, next.count) == (1, 1)
            && this.reach == that.reach
            && this.addr.checked_add(this.len) == Some(that.addr);
        follows.then(|| Window { len: this.len + that.len, ..this }.into())
    }

    /// Returns the first `count` windows, or all if there are fewer. At least one remains, also if `count` is 0.
    #[must_use]
    pub fn first_of(self, count: u64) -> Self {
        Windows { count: self.count.min(count).max(1), ..self }
    }

    /// Returns the bytes of all windows together.
    pub fn bytes(&self) -> u64 {
        self.first.len.saturating_mul(self.count)
    }

    /// Returns the bytes from the start of one window to the start of the next.
    pub fn step(&self) -> i64 {
        self.step
    }

    /// Returns whether a byte from the first to the last window is also between the first and the last of `other`.
    pub fn overlaps(&self, other: &Windows<'_>) -> bool {
        self.hull().overlaps(&other.hull())
    }

    /// Returns the smallest window that contains all of them.
    fn hull(&self) -> Window<'a> {
        // Inside the tensor, so the distance of the last window fits.
        let distance = self.step.wrapping_mul(self.count.cast_signed() - 1);
        let addr = self.first.addr.min(self.first.addr.wrapping_add_signed(distance));
        Window { addr, len: self.first.len + distance.unsigned_abs(), ..self.first }
    }

    /// Returns every window.
    pub fn iter(self) -> impl Iterator<Item = Window<'a>> {
        let Windows { first, count, step } = self;
        (0..count).map(move |k| Window {
            addr: first.addr.wrapping_add_signed(step.wrapping_mul(k.cast_signed())),
            ..first
        })
    }
}

impl<'a> From<Window<'a>> for Windows<'a> {
    fn from(first: Window<'a>) -> Self {
        Windows { first, count: 1, step: 0 }
    }
}
