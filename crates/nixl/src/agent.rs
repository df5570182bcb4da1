//! An agent of NIXL, and the memory that it has registered.

use std::ffi::{CStr, CString};
use std::fmt;
use std::ops::Range;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use llm_datadist_fabric::Error;

use crate::abi::{AgentConfig, Api, Destroy, HOST_MEMORY, Handle, RawStatus};
use crate::status::check;

/// The plugin of NIXL that moves the bytes.
const BACKEND: &CStr = c"UCX";
/// The longest sleep of the thread of an agent that serves peers. A message of a peer wakes it earlier. NIXL uses a core for
/// delays of less than a millisecond, and no measurable time from 20 ms on.
const SERVING_DELAY_US: u64 = 20_000;

/// What an agent is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Peers read the memory that it registers. It has a thread.
    Serving,
    /// It reads one peer. It has no thread: asking for the status of a request makes progress.
    Reading,
}

/// An agent. Drop destroys it; after that, nothing of its requests touches memory.
pub(crate) struct Agent {
    pub(crate) api: Arc<Api>,
    pub(crate) handle: Handle,
}

// SAFETY: the mode of synchronization is strict (`AgentConfig`), so any thread may use the agent.
unsafe impl Send for Agent {}

impl Agent {
    /// Creates an agent whose backend has these settings of UCX.
    pub(crate) fn create(api: &Arc<Api>, role: Role, settings: &CStr) -> Result<Agent, Error> {
        let agent = Self::without_backend(api, role)?;
        let params = Owned::create(api, "nixl_capi_create_params", api.nixl_capi_destroy_params, |params| {
            // SAFETY: `params` is written.
            unsafe { (api.nixl_capi_create_params)(params) }
        })?;
        if !settings.is_empty() {
            // SAFETY: the parameters are open, and both texts end with a zero byte.
            let status = unsafe {
                (api.nixl_capi_params_add)(params.handle, c"engine_config".as_ptr(), settings.as_ptr())
            };
            check("nixl_capi_params_add", status)?;
        }
        // The handle only names the backend, which the agent owns.
        Owned::create(api, "nixl_capi_create_backend", api.nixl_capi_destroy_backend, |backend| {
            // SAFETY: the agent and the parameters are open; `backend` is written.
            unsafe { (api.nixl_capi_create_backend)(agent.handle, BACKEND.as_ptr(), params.handle, backend) }
        })?;
        Ok(agent)
    }

    /// Creates an agent that can neither register nor read.
    pub(crate) fn without_backend(api: &Arc<Api>, role: Role) -> Result<Agent, Error> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // A reading agent loads only serving agents, so the prefix keeps both names distinct.
        let prefix = if role == Role::Serving { "serving" } else { "reading" };
        let name = CString::new(format!("{prefix}-{}-{number}", std::process::id()));
        let name = name.map_err(|error| Error::System(error.to_string()))?;
        let config = AgentConfig {
            progress_thread: role == Role::Serving,
            listen_thread: false,
            short_port: 0,
            port_or_strict: 1,
            strict_or_workers: 1,
            workers: 1,
            progress_delay_us: SERVING_DELAY_US,
            listen_delay_us: 0,
            telemetry: false,
        };
        let mut handle = null_mut();
        // SAFETY: the name ends with a zero byte, the configuration is valid, and `handle` is written.
        let status = unsafe {
            (api.nixl_capi_create_configured_agent)(name.as_ptr(), &raw const config, &raw mut handle)
        };
        check("nixl_capi_create_configured_agent", status)?;
        Ok(Agent { api: api.clone(), handle })
    }

    /// Loads the plugin of the backend.
    pub(crate) fn load_plugin(&self) -> Result<(), Error> {
        let (mut kinds, mut params) = (null_mut(), null_mut());
        // SAFETY: the agent is open, the name ends with a zero byte, and both handles are written.
        let status = unsafe {
            (self.api.nixl_capi_get_plugin_params)(
                self.handle,
                BACKEND.as_ptr(),
                &raw mut kinds,
                &raw mut params,
            )
        };
        check("nixl_capi_get_plugin_params", status)?;
        // SAFETY: returned above, and not used afterwards.
        unsafe { (self.api.nixl_capi_destroy_mem_list)(kinds) };
        // SAFETY: as above.
        unsafe { (self.api.nixl_capi_destroy_params)(params) };
        Ok(())
    }

    /// Registers memory, whose owner has promised that it stays mapped in this process (`Fabric::map`, `Peer::read`).
    pub(crate) fn register(&self, ranges: &[Range<u64>]) -> Result<Registration, Error> {
        let api = &self.api;
        let create = |list| {
            // SAFETY: `list` is written.
            unsafe { (api.nixl_capi_create_reg_dlist)(HOST_MEMORY, list) }
        };
        let list = Owned::create(api, "nixl_capi_create_reg_dlist", api.nixl_capi_destroy_reg_dlist, create)?;
        for range in ranges {
            let (start, len) = (address(range.start), address(range.end - range.start));
            // SAFETY: the list is open, and takes numbers.
            let status = unsafe { (api.nixl_capi_reg_dlist_add_desc)(list.handle, start, len, 0, null(), 0) };
            check("nixl_capi_reg_dlist_add_desc", status)?;
        }
        // SAFETY: the agent and the list are open, and the memory is mapped.
        let status = unsafe { (api.nixl_capi_register_mem)(self.handle, list.handle, null_mut()) };
        check("nixl_capi_register_mem", status)?;
        Ok(Registration(list))
    }

    /// Ends a registration of this agent.
    pub(crate) fn deregister(&self, registration: &Registration) -> Result<(), Error> {
        let list = registration.0.handle;
        // SAFETY: the agent is open, and has registered the list.
        let status = unsafe { (self.api.nixl_capi_deregister_mem)(self.handle, list, null_mut()) };
        check("nixl_capi_deregister_mem", status)
    }

    /// Returns the address of the agent, and the keys of all memory that it has registered.
    pub(crate) fn address(&self) -> Result<Vec<u8>, Error> {
        let (mut data, mut len) = (null_mut(), 0);
        // SAFETY: the agent is open; both are written.
        let status = unsafe { (self.api.nixl_capi_get_local_md)(self.handle, &raw mut data, &raw mut len) };
        check("nixl_capi_get_local_md", status)?;
        let mut bytes = Vec::new();
        let reserved = bytes.try_reserve_exact(len);
        if reserved.is_ok() && len > 0 {
            // SAFETY: the library has allocated `len` bytes there.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len) });
        }
        // SAFETY: allocated by the library with `malloc`, and not used afterwards.
        unsafe { libc::free(data) };
        reserved
            .map_err(|_| Error::System(format!("no memory for the address of a NIXL agent ({len} bytes)")))?;
        Ok(bytes)
    }

    /// Takes the address of a peer. Returns its name, by which this agent reads it.
    pub(crate) fn load(&self, address: &[u8]) -> Result<CString, Error> {
        let mut name = null_mut();
        // SAFETY: the agent is open, the bytes have this length, and `name` is written. The library parses bytes of a peer;
        // the engine trusts a peer that may use NIXL (docs/networks.md).
        let status = unsafe {
            (self.api.nixl_capi_load_remote_md)(
                self.handle,
                address.as_ptr().cast(),
                address.len(),
                &raw mut name,
            )
        };
        check("nixl_capi_load_remote_md", status)?;
        // SAFETY: a text of the library that ends with a zero byte.
        let copied = unsafe { CStr::from_ptr(name) }.to_owned();
        // SAFETY: allocated by the library with `malloc`, and not used afterwards.
        unsafe { libc::free(name.cast()) };
        Ok(copied)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // SAFETY: created above, and not used afterwards. Registrations end with the agent.
        let status = unsafe { (self.api.nixl_capi_destroy_agent)(self.handle) };
        // The library refuses only a null handle.
        if let Err(error) = check("nixl_capi_destroy_agent", status) {
            tracing::error!(target: "llm_datadist::links", "NIXL could not destroy an agent, so unfinished reads may still write into this process: {error}; restart the process");
        }
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Agent({:?})", self.handle)
    }
}

/// Memory that an agent has registered. It ends with `Agent::deregister`, or with the agent.
pub(crate) struct Registration(Owned);

/// A handle that one function of the library destroys.
pub(crate) struct Owned {
    pub(crate) handle: Handle,
    destroy: Destroy,
    /// Keeps the function loaded.
    _api: Arc<Api>,
}

// SAFETY: the library does not tie lists and parameters to a thread, and `&mut` or `Drop` is needed to change them.
unsafe impl Send for Owned {}

impl Owned {
    /// Takes what `create` writes, unless its status is bad.
    pub(crate) fn create(
        api: &Arc<Api>,
        call: &'static str,
        destroy: Destroy,
        create: impl FnOnce(*mut Handle) -> RawStatus,
    ) -> Result<Owned, Error> {
        let mut handle = null_mut();
        check(call, create(&raw mut handle))?;
        Ok(Owned { handle, destroy, _api: api.clone() })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: created with this kind of handle, and not used afterwards.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// Returns an address or a length as the library takes it.
pub(crate) fn address(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
