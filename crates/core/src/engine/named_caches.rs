//! Caches that peers find by a name.

use std::sync::Arc;

use super::DataDist;
use crate::cache::Cache;
use crate::error::Result;
use crate::memory::Adopted;
use crate::model::{CacheDesc, CacheKind};
use crate::validate;

impl DataDist {
    /// Allocates a blocks cache as [`allocate`](Self::allocate) does, which peers find by `name`, of 1 to 128 bytes of printable
    /// text. The name is free again once the cache is deallocated. With `contiguous`, all tensors are one range of bytes: they
    /// follow one another in order, without gaps. Only the first one starts on a page boundary.
    ///
    /// Returns `Err(KeyTaken)` if a live cache of this engine has the name; then no memory was taken. Returns `Err(OutOfMemory)` if
    /// no free run of the pool is long enough.
    pub fn allocate_named(&self, name: &str, desc: &CacheDesc, contiguous: bool) -> Result<Arc<Cache>> {
        validate::cache_name(name)?;
        self.allocate_with(Some(name), desc, CacheKind::Blocks, &[], contiguous)
    }

    /// Registers the caller's memory as a cache that peers find by `name`; otherwise as [`register`](Self::register) does. If
    /// it is not `remote_accessible`, no peer finds it. The name is free again as soon as
    /// [`unregister`](Self::unregister) is called.
    ///
    /// Returns `Err(KeyTaken)` if a live cache of this engine has the name.
    pub fn register_named(
        &self,
        name: &str,
        adopted: Adopted,
        remote_accessible: bool,
    ) -> Result<Arc<Cache>> {
        validate::cache_name(name)?;
        self.register_with(Some(name), adopted, &[], Some(remote_accessible))
    }
}
