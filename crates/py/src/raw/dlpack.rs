//! `DLPack` capsules: made around the memory of a cache, and read where a call takes block indices or tensors.
//!
//! A capsule owns its tensor until a consumer renames it; then the consumer calls the deleter. Either way the deleter
//! runs exactly once. That of a cache's capsule releases one [`ProcessOwned`] cache, which needs no interpreter (tests:
//! `tests/test_views.py`).

use std::ffi::{CStr, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;

use llm_datadist_core::Result;
use llm_datadist_core::bindings::Cache;
use llm_datadist_core::bindings::fallible;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::engine::ProcessOwned;
use crate::error::Raise;

/// The device type of CPU memory in `DLPack`, and its only device number.
pub(crate) const DL_CPU: (i32, i32) = (1, 0);

/// Device types whose memory the CPU reads: plain, and pinned for CUDA or `ROCm`.
const READABLE_DEVICES: [i32; 3] = [DL_CPU.0, 3, 11];

/// Type codes of integers.
const SIGNED: u8 = 0;
pub(crate) const UNSIGNED: u8 = 1;

/// The flag of memory that must not be written.
const READ_ONLY: u64 = 1;

/// Name of the lists that are read, in out-of-memory errors.
const LISTS: &str = "the lists of a call";

/// Element type (`DLDataType`).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Element {
    /// Kind of number.
    pub(crate) code: u8,
    /// Bits of one value.
    pub(crate) bits: u8,
    /// Values in one element.
    pub(crate) lanes: u16,
}

impl Element {
    /// Whether one element is one integer.
    pub(crate) fn is_integer(self) -> bool {
        matches!(self.code, SIGNED | UNSIGNED) && self.lanes == 1
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "type code {}, {} bits, {} lanes", self.code, self.bits, self.lanes)
    }
}

/// `DLDevice`.
#[repr(C)]
struct DlDevice {
    kind: i32,
    id: i32,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    element: Element,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Legacy {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

/// A managed tensor with everything that its pointers refer to. The managed part is the first field, so that a pointer to
/// it is a pointer to the whole.
#[repr(C)]
struct Owned<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Vec<i64>,
    cache: ProcessOwned<Cache>,
}

/// One of the two layouts of a managed tensor.
trait Managed: Sized {
    /// Name of a capsule that owns its tensor.
    const NAME: &'static CStr;
    /// Creates the managed tensor around `tensor`.
    fn around(tensor: Tensor) -> Self;
}

impl Managed for Legacy {
    const NAME: &'static CStr = c"dltensor";

    fn around(tensor: Tensor) -> Self {
        Legacy { tensor, context: ptr::null_mut(), deleter: Some(delete::<Self>) }
    }
}

impl Managed for Versioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn around(tensor: Tensor) -> Self {
        let deleter: Option<unsafe extern "C" fn(*mut Self)> = Some(delete::<Self>);
        Versioned { major: 1, minor: 0, context: ptr::null_mut(), deleter, flags: 0, tensor }
    }
}

/// The memory of a cache that a capsule describes.
#[derive(Clone, Copy)]
pub(crate) enum CachePart {
    /// One tensor, in the shape of the cache.
    OneTensor(usize, Element),
    /// All tensors as one row of bytes; the cache must be contiguous.
    AllBytes,
}

impl CachePart {
    /// Returns the address, the shape and the element type.
    fn described(self, cache: &Cache) -> Result<(u64, Vec<i64>, Element)> {
        Ok(match self {
            CachePart::OneTensor(index, element) => (cache.addrs()[index], cache.shape().to_vec(), element),
            CachePart::AllBytes => {
                let byte = Element { code: UNSIGNED, bits: 8, lanes: 1 };
                (cache.one_range()?, vec![cache.bytes().cast_signed()], byte)
            }
        })
    }
}

/// Creates a capsule around a part of `cache`, in the layout of `DLPack` 1 or in the one before.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    cache: &Arc<Cache>,
    part: CachePart,
    versioned: bool,
    raise: Raise,
) -> PyResult<Bound<'py, PyAny>> {
    let wrap = if versioned { wrapped::<Versioned> } else { wrapped::<Legacy> };
    wrap(py, cache, part, raise)
}

fn wrapped<'py, M: Managed>(
    py: Python<'py>,
    cache: &Arc<Cache>,
    part: CachePart,
    raise: Raise,
) -> PyResult<Bound<'py, PyAny>> {
    let (address, mut shape, element) = part.described(cache).map_err(|error| raise(py, &error))?;
    let gaps = match part {
        CachePart::OneTensor(..) => strides_with_gaps(cache),
        CachePart::AllBytes => None,
    };
    let mut strides = gaps.unwrap_or_else(|| row_major(&shape));
    let tensor = Tensor {
        // The address passes through a C interface as a number; only the consumer dereferences it.
        data: ptr::with_exposed_provenance_mut(usize::try_from(address)?),
        device: DlDevice { kind: DL_CPU.0, id: DL_CPU.1 },
        ndim: i32::try_from(shape.len())?,
        element,
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    };
    // The vectors move into the box, but the memory that the tensor refers to is on the heap and does not move.
    let owned = Owned { managed: M::around(tensor), shape, strides, cache: ProcessOwned::new(cache.clone()) };
    let managed = Box::into_raw(Box::new(owned));
    // SAFETY: this thread is attached to the interpreter (`py`), the pointer is live and not null, and the name is static.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), M::NAME.as_ptr(), Some(destroy::<M>)) };
    // SAFETY: the call above gave a new reference, or null with the exception set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if capsule.is_err() {
        // SAFETY: no capsule was made, so nothing else owns the box.
        drop(unsafe { Box::from_raw(managed) });
    }
    capsule
}

/// Returns the strides of each dimension of a tensor of `cache`, in elements; `None` if there are no gaps between its rows.
pub(crate) fn strides_with_gaps(cache: &Cache) -> Option<Vec<i64>> {
    let geometry = cache.geometry();
    let mut strides = geometry.row_sizes().has_gaps().then(|| row_major(cache.shape()))?;
    // A row stride is a multiple of the element size.
    strides[0] = (geometry.row_stride() / cache.data_type().bytes()).cast_signed();
    Some(strides)
}

/// Returns the strides of each dimension without gaps, in elements.
fn row_major(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

/// The deleter of tensors of both layouts.
///
/// # Safety
/// `managed` must come from `wrapped::<M>` and must not be used again.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: `wrapped` leaked a box of `Owned<M>` whose first field is `managed` (`repr(C)`); DLPack calls a deleter
    // at most once, and `destroy` calls it only while nobody has taken the tensor over.
    drop(unsafe { Box::from_raw(managed.cast::<Owned<M>>()) });
}

/// The destructor of a capsule: runs the deleter if no consumer took the tensor over, which renames the capsule.
///
/// # Safety
/// Called by Python, with a capsule made by `wrapped::<M>`.
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python passes the live capsule to its destructor. The check sets no exception.
    let unconsumed = unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } == 1;
    if unconsumed {
        // SAFETY: the capsule is valid under this name, so the pointer is the one `wrapped` put in.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
        // SAFETY: the name says that the capsule still owns the tensor, and the capsule ends here.
        unsafe { delete::<M>(managed.cast()) };
    }
}

/// Whether the CPU reads the memory of a device with this `DLPack` type.
pub(crate) fn readable_device(kind: i32) -> bool {
    READABLE_DEVICES.contains(&kind)
}

/// A copy of what a capsule describes.
pub(crate) struct TensorCopy {
    /// Dimensions, outermost first.
    pub(crate) shape: Vec<i64>,
    /// Element type.
    pub(crate) element: Element,
    /// The integers. Unsigned numbers of 64 bits keep their bits. `None` if they were not read: another element type, device
    /// or number of dimensions.
    pub(crate) integers: Option<Vec<i64>>,
}

/// Copies the tensor in `capsule`, with its integers if it has one dimension. The capsule keeps the tensor. Returns `None` if
/// it is not a capsule of a known version, or was consumed.
pub(crate) fn copied_tensor(capsule: &Bound<'_, PyAny>) -> Result<Option<TensorCopy>> {
    let versioned = || content::<Versioned>(capsule).filter(|managed| managed.major == 1);
    let tensor = content::<Legacy>(capsule)
        .map(|managed| &managed.tensor)
        .or_else(|| versioned().map(|managed| &managed.tensor));
    let Some(tensor) = tensor else { return Ok(None) };
    let mut shape = fallible::with_capacity(LISTS, tensor.shape().len())?;
    shape.extend_from_slice(tensor.shape());
    Ok(Some(TensorCopy { shape, element: tensor.element, integers: tensor.integers()? }))
}

/// Where the memory of a tensor is, and how its elements lie there.
pub(crate) struct TensorMemory {
    /// Address of the first element.
    pub(crate) address: u64,
    /// Dimensions, outermost first.
    pub(crate) shape: Vec<i64>,
    /// Elements from one index of each dimension to the next; `None` if there are no gaps.
    pub(crate) strides: Option<Vec<i64>>,
    /// Element type.
    pub(crate) element: Element,
    /// Whether the producer forbids to write. Capsules of the layout before version 1 cannot say so.
    pub(crate) read_only: bool,
}

/// Returns where the tensor in `capsule` is. The memory stays valid as long as the capsule, which keeps the tensor. Returns
/// `None` if it is not a capsule of a known version, was consumed, or the CPU does not read the memory.
pub(crate) fn tensor_memory(capsule: &Bound<'_, PyAny>) -> Result<Option<TensorMemory>> {
    let versioned = || content::<Versioned>(capsule).filter(|managed| managed.major == 1);
    let (tensor, flags) = match (content::<Legacy>(capsule), versioned()) {
        (Some(managed), _) => (&managed.tensor, 0),
        (None, Some(managed)) => (&managed.tensor, managed.flags),
        (None, None) => return Ok(None),
    };
    if !readable_device(tensor.device.kind) {
        return Ok(None);
    }
    let copied = |numbers: &[i64]| fallible::collect(LISTS, numbers.iter().copied());
    let strides = tensor.per_dimension(tensor.strides).map(copied).transpose()?;
    Ok(Some(TensorMemory {
        address: tensor.first().expose_provenance() as u64,
        shape: copied(tensor.shape())?,
        strides,
        element: tensor.element,
        read_only: flags & READ_ONLY != 0,
    }))
}

impl Tensor {
    fn shape(&self) -> &[i64] {
        self.per_dimension(self.shape).unwrap_or(&[])
    }

    fn per_dimension(&self, numbers: *const i64) -> Option<&[i64]> {
        let count = usize::try_from(self.ndim).ok().filter(|_| !numbers.is_null())?;
        // SAFETY: DLPack requires `ndim` numbers in `shape`, and in `strides` unless it is null. They live as long as
        // the tensor, which the capsule owns during the two callers of `content`.
        Some(unsafe { std::slice::from_raw_parts(numbers, count) })
    }

    fn integers(&self) -> Result<Option<Vec<i64>>> {
        let Element { code, bits, lanes: 1 } = self.element else { return Ok(None) };
        match (code, bits) {
            (SIGNED, 8) => self.gathered(<i64 as From<i8>>::from),
            (UNSIGNED, 8) => self.gathered(<i64 as From<u8>>::from),
            (SIGNED, 16) => self.gathered(<i64 as From<i16>>::from),
            (SIGNED, 32) => self.gathered(<i64 as From<i32>>::from),
            (SIGNED, 64) => self.gathered(|number: i64| number),
            (UNSIGNED, 16) => self.gathered(<i64 as From<u16>>::from),
            (UNSIGNED, 32) => self.gathered(<i64 as From<u32>>::from),
            (UNSIGNED, 64) => self.gathered(u64::cast_signed),
            _ => Ok(None),
        }
    }

    /// Returns the elements, which are of type `T`, as words.
    fn gathered<T: Copy>(&self, widened: impl Fn(T) -> i64) -> Result<Option<Vec<i64>>> {
        let &[count] = self.shape() else { return Ok(None) };
        let (Ok(room), true) = (usize::try_from(count), readable_device(self.device.kind)) else {
            return Ok(None);
        };
        let step = self.per_dimension(self.strides).map_or(1, |steps| steps[0]);
        let mut words = fallible::with_capacity(LISTS, room)?;
        for row in 0..count {
            let step = row.wrapping_mul(step);
            let at = self.first().cast::<T>().wrapping_offset(step.try_into().unwrap_or(0));
            // SAFETY: the producer promises memory that the CPU reads at each index within the shape, by these steps; the
            // device was checked above. Only integers are read, so any bits are a value, and the element may be unaligned. A
            // thread that writes the tensor during the call breaks the contract of DLPack.
            words.push(widened(unsafe { at.read_unaligned() }));
        }
        Ok(Some(words))
    }

    /// Returns the address of the first element.
    fn first(&self) -> *const u8 {
        let data = self.data.cast_const().cast::<u8>();
        data.wrapping_add(self.byte_offset.try_into().unwrap_or(0))
    }
}

/// Returns what a capsule of layout `M` points to, while it still owns it. Only for use in `copied_tensor` and `tensor_memory`.
fn content<'a, M: Managed>(capsule: &'a Bound<'_, PyAny>) -> Option<&'a M> {
    // SAFETY: `capsule` proves attachment and is a live object of any type. The check sets no exception.
    if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), M::NAME.as_ptr()) } != 1 {
        return None;
    }
    // SAFETY: the capsule is valid under this name.
    let managed = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), M::NAME.as_ptr()) };
    // SAFETY: DLPack requires a capsule of this name to own a managed tensor of this layout, until a consumer renames the
    // capsule. No Python code runs in the two callers, so nothing does so meanwhile.
    unsafe { managed.cast::<M>().as_ref() }
}
