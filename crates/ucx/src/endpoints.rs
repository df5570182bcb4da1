//! Endpoints: connections to the worker of a peer. A read has one to itself.

use std::cell::Cell;
use std::collections::HashMap;
use std::ptr::null_mut;
use std::rc::Rc;
use std::sync::Arc;

use crate::abi::{
    Api, CLOSE_FORCE, EP_ERROR_HANDLER, EP_ERROR_MODE, EP_REMOTE_ADDRESS, ERROR_MODE_NONE, ERROR_MODE_PEER,
    EndpointParams, Handle, OP_FLAGS, RawStatus, RequestParams,
};
use crate::error::{Error, Status};
use crate::status::{IN_PROGRESS, OK, check, peer_failed};
use crate::worker::Worker;

/// Zeros behind bytes from a peer that the library reads without a length.
const PADDING: usize = 64 << 10;

/// An open endpoint.
pub(crate) struct Endpoint {
    api: Arc<Api>,
    pub(crate) handle: Handle,
    /// Set by the library when the endpoint has failed. Not a `Box`: moving a `Box` asserts unique access to
    /// its content, and the library holds a pointer to it.
    failure: Rc<Cell<RawStatus>>,
    /// Unpacked keys of the peer's memory.
    keys: HashMap<Arc<Vec<u8>>, Handle>,
}

extern "C" fn endpoint_failed(argument: Handle, _endpoint: Handle, status: RawStatus) {
    // SAFETY: the argument is the cell of an endpoint, which lives until the endpoint is closed, and only the thread of
    // the fabric uses either.
    let failure = unsafe { &*argument.cast::<Cell<RawStatus>>() };
    failure.set(status);
}

impl Endpoint {
    /// Begins to connect to the worker at `address`. With `peer_failures`, UCX reports that the peer has failed.
    pub(crate) fn connect(worker: &Worker, address: &[u8], peer_failures: bool) -> Result<Endpoint, Error> {
        let (failure, padded) = (Rc::new(Cell::new(OK)), padded(address));
        let params = EndpointParams {
            mask: EP_REMOTE_ADDRESS | EP_ERROR_MODE | EP_ERROR_HANDLER,
            address: padded.as_ptr().cast(),
            error_mode: if peer_failures { ERROR_MODE_PEER } else { ERROR_MODE_NONE },
            error_handler: Some(endpoint_failed),
            error_argument: Rc::as_ptr(&failure).cast_mut().cast(),
            rest: [0; 8],
        };
        let mut handle = null_mut();
        // SAFETY: the worker is open and the parameters are valid for the call; the cell outlives the endpoint. The library
        // trusts the address, as it trusts keys (see `key`).
        let status = unsafe { (worker.api.ucp_ep_create)(worker.handle, &raw const params, &raw mut handle) };
        check("ucp_ep_create", status)?;
        Ok(Endpoint { api: worker.api.clone(), handle, failure, keys: HashMap::new() })
    }

    /// Returns `Err` if the endpoint has failed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self.failure.get() {
            OK => Ok(()),
            status => Err(peer_failed(status)),
        }
    }

    /// Returns the handle for a key of the peer's memory.
    pub(crate) fn key(&mut self, key: &Arc<Vec<u8>>) -> Result<Handle, Error> {
        if let Some(handle) = self.keys.get(key) {
            return Ok(*handle);
        }
        let (mut handle, padded) = (null_mut(), padded(key));
        // SAFETY: the endpoint is open. The library takes no length, and trusts the bytes. The
        // engine trusts a peer that may use UCX (docs/networks.md).
        // Zeros follow them, so that lengths inside them that are too large by little lead nowhere else.
        let status =
            unsafe { (self.api.ucp_ep_rkey_unpack)(self.handle, padded.as_ptr().cast(), &raw mut handle) };
        check("ucp_ep_rkey_unpack", status)?;
        self.keys.insert(key.clone(), handle);
        Ok(handle)
    }

    /// Begins to close it. All of its requests end, and `Closing::ended` becomes true after that.
    pub(crate) fn close(self) -> Closing {
        // SAFETY: a request without parameters but the flag.
        let mut params: RequestParams = unsafe { std::mem::zeroed() };
        (params.mask, params.flags) = (OP_FLAGS, CLOSE_FORCE);
        // SAFETY: the endpoint is open, and not used afterwards.
        let request = unsafe { (self.api.ucp_ep_close_nbx)(self.handle, &raw const params) };
        let request = request_of(request).ok().flatten();
        Closing { api: self.api, request, keys: self.keys.into_values().collect(), _failure: self.failure }
    }
}

/// An endpoint that is being closed.
pub(crate) struct Closing {
    api: Arc<Api>,
    request: Option<Handle>,
    /// The keys of its requests, which have ended when the endpoint is closed.
    keys: Vec<Handle>,
    /// The library may still report that the endpoint has failed.
    _failure: Rc<Cell<RawStatus>>,
}

impl Closing {
    /// Whether the endpoint is closed.
    pub(crate) fn ended(&mut self) -> bool {
        if let Some(request) = self.request {
            // SAFETY: a request of this endpoint that is not freed yet.
            if unsafe { (self.api.ucp_request_check_status)(request) } == IN_PROGRESS {
                return false;
            }
            // SAFETY: it has ended, and is not used afterwards.
            unsafe { (self.api.ucp_request_free)(request) };
            self.request = None;
        }
        for key in self.keys.drain(..) {
            // SAFETY: unpacked for this endpoint in a worker that is still open. Its requests have ended.
            unsafe { (self.api.ucp_rkey_destroy)(key) };
        }
        true
    }
}

/// Returns bytes from a peer with zeros behind them.
fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut padded = vec![0; bytes.len() + PADDING];
    padded[..bytes.len()].copy_from_slice(bytes);
    padded
}

/// Tells apart what a call returns: `None` if it has ended at once, a request, or an error.
pub(crate) fn request_of(returned: Handle) -> Result<Option<Handle>, Status> {
    // The library returns small negative numbers as errors.
    match returned as isize {
        0 => Ok(None),
        status @ -127..=-1 => {
            Err(crate::status::status(RawStatus::try_from(status).unwrap_or(RawStatus::MIN)))
        }
        _ => Ok(Some(returned)),
    }
}
