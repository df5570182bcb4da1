//! Memory of the caller, with the caller's promise about it.

use std::sync::Arc;

use crate::error::Result;
use crate::fallible;
use crate::model::{CacheDesc, CacheKind};
use crate::validate::{self, Side};

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
        let addrs = Arc::new(fallible::copied(super::window::ADDRESSES, addrs)?);
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

    /// The address of every tensor, shared.
    pub(super) fn shared_addrs(&self) -> Arc<Vec<u64>> {
        self.addrs.clone()
    }

    /// The address of every tensor.
    pub(super) fn addrs(&self) -> &[u64] {
        &self.addrs
    }
}
