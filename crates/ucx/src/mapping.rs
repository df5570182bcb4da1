//! Memory that is mapped for local access and for reads of peers.

use std::ptr::null_mut;
use std::sync::Arc;

use crate::abi::{
    Api, Handle, LOCAL_READ, LOCAL_WRITE, MAP_ADDRESS, MAP_LENGTH, MAP_PROTECTION, MapParams, REMOTE_READ,
};
use crate::error::Error;
use crate::status::check;
use crate::worker::Context;

/// Mapped memory. Drop unmaps it.
pub(crate) struct MappedMemory {
    api: Arc<Api>,
    context: Handle,
    pub(crate) handle: Handle,
    pub(crate) start: u64,
    pub(crate) len: u64,
}

impl MappedMemory {
    /// Maps memory, whose owner has promised that it stays mapped in this process (`Fabric::map`).
    pub(crate) fn map(context: &Context, start: u64, len: u64) -> Result<MappedMemory, Error> {
        let params = MapParams {
            mask: MAP_ADDRESS | MAP_LENGTH | MAP_PROTECTION,
            address: start as Handle,
            length: usize::try_from(len).unwrap_or(usize::MAX),
            flags: 0,
            protection: LOCAL_READ | LOCAL_WRITE | REMOTE_READ,
            rest: [0; 2],
        };
        let mut handle = null_mut();
        // SAFETY: the context is open, and the range is mapped; `handle` is written.
        let status = unsafe { (context.api.ucp_mem_map)(context.handle, &raw const params, &raw mut handle) };
        check("ucp_mem_map", status)?;
        Ok(MappedMemory { api: context.api.clone(), context: context.handle, handle, start, len })
    }

    /// Returns the key with which peers read it.
    pub(crate) fn key(&self) -> Result<Vec<u8>, Error> {
        let (mut key, mut len) = (null_mut(), 0);
        // SAFETY: the memory is mapped in the open context; both are written.
        let status =
            unsafe { (self.api.ucp_rkey_pack)(self.context, self.handle, &raw mut key, &raw mut len) };
        check("ucp_rkey_pack", status)?;
        // SAFETY: the library has returned `len` bytes there, which it keeps until they are released.
        let bytes = unsafe { std::slice::from_raw_parts(key.cast::<u8>(), len) }.to_vec();
        // SAFETY: got above, and not used afterwards.
        unsafe { (self.api.ucp_rkey_buffer_release)(key) };
        Ok(bytes)
    }

    /// Whether all these bytes lie in it.
    pub(crate) fn contains(&self, start: u64, len: u64) -> bool {
        start.checked_sub(self.start).is_some_and(|skip| skip <= self.len && len <= self.len - skip)
    }
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped above, in a context that is still open.
        let status = unsafe { (self.api.ucp_mem_unmap)(self.context, self.handle) };
        if let Err(error) = check("ucp_mem_unmap", status) {
            tracing::warn!(target: "llm_datadist::links", "UCX could not unmap {} bytes; peers may still read them: {error}", self.len);
        }
    }
}
