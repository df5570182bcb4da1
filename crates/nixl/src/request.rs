//! One request of a read: a bounded number of its pieces.

use std::ffi::CStr;
use std::ptr::null_mut;

use llm_datadist_fabric::{Error, Piece};

use crate::abi::{HOST_MEMORY, Handle, READ};
use crate::agent::{Agent, Owned, address};
use crate::status::{IN_PROGRESS, check};

/// A posted request. Drop releases it. An unfinished request ends only with its agent.
pub(crate) struct Request<'a> {
    agent: &'a Agent,
    handle: Handle,
}

impl Request<'_> {
    /// Posts a request for these pieces of a peer. The destinations must be registered with the agent, and writable until the
    /// request has succeeded or the agent is destroyed.
    pub(crate) fn post<'a>(
        agent: &'a Agent,
        peer: &CStr,
        pieces: impl Iterator<Item = Piece>,
    ) -> Result<Request<'a>, Error> {
        let (api, local, remote) = (&agent.api, list(agent)?, list(agent)?);
        for Piece { local: to, remote: from, len } in pieces {
            for (list, start) in [(&local, to), (&remote, from)] {
                // SAFETY: the list is open, and takes numbers.
                let status = unsafe {
                    (api.nixl_capi_xfer_dlist_add_desc)(list.handle, address(start), address(len), 0)
                };
                check("nixl_capi_xfer_dlist_add_desc", status)?;
            }
        }
        let mut handle = null_mut();
        // SAFETY: the agent and both lists are open, the name ends with a zero byte, and `handle` is written.
        let status = unsafe {
            (api.nixl_capi_create_xfer_req)(
                agent.handle,
                READ,
                local.handle,
                remote.handle,
                peer.as_ptr(),
                &raw mut handle,
                null_mut(),
            )
        };
        check("nixl_capi_create_xfer_req", status)?;
        let request = Request { agent, handle };
        // SAFETY: the agent is open, and the request was created with it. The destinations are as the caller promises.
        let status = unsafe { (api.nixl_capi_post_xfer_req)(agent.handle, handle, null_mut()) };
        if status != IN_PROGRESS {
            check("nixl_capi_post_xfer_req", status)?;
        }
        Ok(request)
    }

    /// Makes progress. Returns whether all bytes of the request are in place.
    pub(crate) fn ended(&self) -> Result<bool, Error> {
        // SAFETY: the agent is open, and the request was created with it.
        let status = unsafe { (self.agent.api.nixl_capi_get_xfer_status)(self.agent.handle, self.handle) };
        if status == IN_PROGRESS {
            return Ok(false);
        }
        check("nixl_capi_get_xfer_status", status).map(|()| true)
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        let api = &self.agent.api;
        // SAFETY: as above. After a failure, the caller destroys the agent.
        unsafe { (api.nixl_capi_release_xfer_req)(self.agent.handle, self.handle) };
        // SAFETY: not used afterwards. If it could not be released, the library keeps it.
        unsafe { (api.nixl_capi_destroy_xfer_req)(self.handle) };
    }
}

/// Creates an empty list of pieces.
fn list(agent: &Agent) -> Result<Owned, Error> {
    let api = &agent.api;
    Owned::create(api, "nixl_capi_create_xfer_dlist", api.nixl_capi_destroy_xfer_dlist, |list| {
        // SAFETY: `list` is written.
        unsafe { (api.nixl_capi_create_xfer_dlist)(HOST_MEMORY, list) }
    })
}
