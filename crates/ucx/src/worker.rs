//! A context of UCX and its workers.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::null_mut;
use std::sync::Arc;

use crate::abi::{API, Api, FEATURE_RMA, FEATURE_WAKEUP, Handle, PARAM_FEATURES, Params, WorkerParams};
use crate::error::Error;
use crate::library::Library;
use crate::status::{BUSY, OK, check};

/// A context: the devices and transports of this process.
pub(crate) struct Context {
    pub(crate) api: Arc<Api>,
    pub(crate) handle: Handle,
}

impl Context {
    pub(crate) fn open(library: &Library, settings: &[(String, String)]) -> Result<Context, Error> {
        let api = library.api.clone();
        let mut config = null_mut();
        // SAFETY: null stands for the defaults and the environment; `config` is written.
        let read = unsafe { (api.ucp_config_read)(std::ptr::null(), std::ptr::null(), &raw mut config) };
        check("ucp_config_read", read)?;
        let opened = Self::configure(&api, config, settings).and_then(|()| {
            let params =
                Params { mask: PARAM_FEATURES, features: FEATURE_RMA | FEATURE_WAKEUP, rest: [0; 9] };
            let mut handle = null_mut();
            // SAFETY: the parameters and the configuration are valid; `handle` is written.
            let status =
                unsafe { (api.ucp_init_version)(API.0, API.1, &raw const params, config, &raw mut handle) };
            check("ucp_init_version", status).map(|()| handle)
        });
        // SAFETY: it was read above, and is not used afterwards.
        unsafe { (api.ucp_config_release)(config) };
        opened.map(|handle| Context { api, handle })
    }

    fn configure(api: &Api, config: Handle, settings: &[(String, String)]) -> Result<(), Error> {
        for (name, value) in settings {
            let text = |text: &str| {
                CString::new(text).map_err(|_| {
                    Error::Library(format!("UCX cannot be used: the setting {name} contains a zero byte"))
                })
            };
            let (name_there, value_there) = (text(name)?, text(value)?);
            // SAFETY: the configuration is open, and both texts end with a zero byte.
            let status =
                unsafe { (api.ucp_config_modify)(config, name_there.as_ptr(), value_there.as_ptr()) };
            if let Err(error) = check("ucp_config_modify", status) {
                return Err(Error::Library(format!(
                    "UCX cannot be used: it refuses the setting {name}={value}: {error}"
                )));
            }
        }
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened above. `thread::State` drops workers and mappings before the context.
        unsafe { (self.api.ucp_cleanup)(self.handle) };
    }
}

/// A worker: the connections of one thread.
pub(crate) struct Worker {
    pub(crate) api: Arc<Api>,
    pub(crate) handle: Handle,
    event_fd: i32,
}

impl Worker {
    pub(crate) fn create(context: &Context) -> Result<Worker, Error> {
        let api = context.api.clone();
        let (params, mut handle, mut event_fd) = (WorkerParams { mask: 0, rest: [0; 24] }, null_mut(), -1);
        // SAFETY: the context is open; `handle` is written.
        let status = unsafe { (api.ucp_worker_create)(context.handle, &raw const params, &raw mut handle) };
        check("ucp_worker_create", status)?;
        let mut worker = Worker { api, handle, event_fd };
        // SAFETY: the worker is open; `event_fd` is written.
        let status = unsafe { (worker.api.ucp_worker_get_efd)(worker.handle, &raw mut event_fd) };
        check("ucp_worker_get_efd", status)?;
        worker.event_fd = event_fd;
        Ok(worker)
    }

    /// Returns the address, for peers.
    pub(crate) fn address(&self) -> Result<Vec<u8>, Error> {
        let (mut address, mut len) = (null_mut(), 0);
        // SAFETY: the worker is open; both are written.
        let status =
            unsafe { (self.api.ucp_worker_get_address)(self.handle, &raw mut address, &raw mut len) };
        check("ucp_worker_get_address", status)?;
        // SAFETY: the library has returned `len` bytes there, which it keeps until they are released.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) }.to_vec();
        // SAFETY: got above, and not used afterwards.
        unsafe { (self.api.ucp_worker_release_address)(self.handle, address) };
        Ok(bytes)
    }

    /// Does what can be done now. Returns whether there was anything.
    pub(crate) fn progress(&self) -> bool {
        // SAFETY: the worker is open, and only its thread is here.
        unsafe { (self.api.ucp_worker_progress)(self.handle) > 0 }
    }

    /// Prepares for sleeping. Returns `false` if something has happened, so that the thread must not sleep yet.
    pub(crate) fn arm(&self) -> Result<bool, Error> {
        // SAFETY: the worker is open.
        match unsafe { (self.api.ucp_worker_arm)(self.handle) } {
            OK => Ok(true),
            BUSY => Ok(false),
            status => check("ucp_worker_arm", status).map(|()| false),
        }
    }
}

impl AsFd for Worker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the worker keeps its descriptor open until it is destroyed.
        unsafe { BorrowedFd::borrow_raw(self.event_fd) }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: created above. Its endpoints were closed before, or end with it.
        unsafe { (self.api.ucp_worker_destroy)(self.handle) };
    }
}
