//! Memory of the caller, together with the caller's promise that it stays valid.

use std::any::Any;
use std::sync::Arc;

use crate::error::Result;
use crate::fallible;
use crate::model::{CacheDesc, CacheKind, CacheLayout};
use crate::validate;

/// Addresses of the caller's own memory, one per tensor.
///
/// This value represents the caller's promise about them. Registration takes an `Adopted`, so no code above
/// this module is unsafe.
#[derive(Debug)]
pub struct Adopted {
    desc: CacheDesc,
    layout: CacheLayout,
    addrs: Arc<Vec<u64>>,
    owner: Option<Arc<dyn Any + Send + Sync>>,
    unordered: bool,
}

impl Adopted {
    /// Adopts `addrs`, one address per tensor of `desc`, each above zero (contract §4.3, §7.6). Returns `Err`
    /// if the addresses or the description are invalid, or if there is no memory for the list.
    ///
    /// # Safety
    ///
    /// The rows of one tensor from each address on must stay readable and writable as long as this value, or a cache made from
    /// it, is used in a copy. Gaps between rows are not touched. If tensors share bytes with other tensors, their pins do not
    /// exclude each other. Copies between them stay inside the given memory, but their order is undefined.
    pub unsafe fn new(desc: &CacheDesc, kind: CacheKind, addrs: &[u64]) -> Result<Adopted> {
        let layout = validate::addresses(desc, kind, addrs)?;
        let addrs = Arc::new(fallible::copied(super::window::ADDRESSES, addrs)?);
        Ok(Adopted { desc: desc.clone(), layout, addrs, owner: None, unordered: false })
    }

    /// Keeps `owner`, to which the memory belongs, until the last cache, transfer and view of the memory is gone. It may be
    /// dropped on any thread.
    #[must_use]
    pub fn owned_by(self, owner: Arc<dyn Any + Send + Sync>) -> Adopted {
        Adopted { owner: Some(owner), ..self }
    }

    /// Lets any number of calls use the memory at the same time, also to write the same bytes: none waits for another one. The
    /// program orders them. Otherwise a row has many readers or one writer. A push of a peer whose call has failed may write until
    /// its deadline, also after a later one.
    #[must_use]
    pub fn unordered(self) -> Adopted {
        Adopted { unordered: true, ..self }
    }

    /// Whether calls use the memory at the same time ([`unordered`](Self::unordered)).
    pub(crate) fn is_unordered(&self) -> bool {
        self.unordered
    }

    /// Returns the description that the caller gave.
    pub fn desc(&self) -> &CacheDesc {
        &self.desc
    }

    /// Returns the sizes, kind and placement.
    pub fn layout(&self) -> CacheLayout {
        self.layout
    }

    /// Returns the shared list with the address of every tensor.
    pub(super) fn shared_addrs(&self) -> Arc<Vec<u64>> {
        self.addrs.clone()
    }

    /// Returns what keeps the memory, if the caller gave something.
    pub(super) fn owner(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.owner.clone()
    }

    /// Returns the address of every tensor.
    pub(super) fn addrs(&self) -> &[u64] {
        &self.addrs
    }
}
