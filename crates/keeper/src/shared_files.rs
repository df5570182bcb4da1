//! The memory of a keeper that outlives the process that serves from it: files that clients map, and two that they do not get.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use llm_datadist_core::bindings::keeper::{
    Copy, Generations, Kernel, Region, SharedWords, Tensors, Window, copy_all, page_size,
};
use llm_datadist_core::{Error, ErrorKind, Result};

use crate::index::{self, Index};
use crate::namespaces;

/// Pages that are touched with one call.
const BATCH: usize = 1024;

/// The files, all mapped for writing. They are sealed, so a process can write them only if it has inherited these mappings by a fork.
#[derive(Debug)]
pub(crate) struct SharedFiles {
    pub(crate) slots: u32,
    pub(crate) slot_bytes: u64,
    values: Arc<Region>,
    pub(crate) index: Index<SharedWords>,
    pub(crate) generations: Generations,
    /// For each slot, the number of uses of all slots when it was used last. Clients do not get it.
    pub(crate) uses: Arc<SharedWords>,
    /// The namespaces. Clients do not get it.
    pub(crate) namespaces: Arc<SharedWords>,
}

impl SharedFiles {
    /// Creates files for `slots` slots of `slot_bytes` bytes. Returns `Err` of kind `OutOfMemory` if memory is short, of kind `System`
    /// if the system refuses it, and of kind `NotEnabled` if the kernel cannot prevent clients from writing.
    pub(crate) fn new(slots: u32, slot_bytes: u64) -> Result<SharedFiles> {
        let words = SharedWords::new("llm_datadist index", index::words(slots))?;
        let files = SharedFiles {
            slots,
            slot_bytes,
            values: Arc::new(Region::shared("llm_datadist values", u64::from(slots) * slot_bytes)?),
            index: Index::new(words, slots),
            generations: Generations::new()?,
            uses: Arc::new(SharedWords::new("llm_datadist uses", slots.into())?),
            namespaces: Arc::new(SharedWords::new("llm_datadist namespaces", namespaces::WORDS)?),
        };
        files.descriptors()?;
        Ok(files)
    }

    /// Returns the descriptors for clients, in the order in which they are sent. Returns `Err(NotEnabled)` if the kernel cannot prevent
    /// clients from writing.
    pub(crate) fn descriptors(&self) -> Result<[BorrowedFd<'_>; 3]> {
        let files = (self.values.descriptor(), self.index.descriptor(), self.generations.descriptor());
        if let (Some(values), Some(index), Some(generations)) = files {
            return Ok([values, index, generations]);
        }
        let text = "this kernel cannot share memory that others may only read; a keeper needs Linux 5.1";
        Err(Error::new(ErrorKind::NotEnabled, text))
    }

    /// Returns the bytes of all slots.
    pub(crate) fn bytes(&self) -> u64 {
        self.values.len()
    }

    /// Returns the slots as one tensor.
    pub(crate) fn tensor(&self) -> Result<Tensors> {
        Tensors::carved(self.values.clone(), [0], self.bytes(), ())
    }

    /// Takes memory for slots from the system, the given bytes as far as there are so many, before there are values.
    pub(crate) fn prepare(&self, bytes: Range<u64>) -> Result<()> {
        let (tensor, end) = (self.tensor()?, self.bytes().min(bytes.end));
        let pages: Vec<u64> = (bytes.start..end).step_by(page_size()).collect();
        for pages in pages.chunks(BATCH) {
            let touch = |&page| Ok(Copy::one(Window::of_slice(&[0]), tensor.window(0, page, 1)?));
            copy_all(&pages.iter().map(touch).collect::<Result<Vec<_>>>()?, Kernel::PLAIN)?;
        }
        Ok(())
    }
}
