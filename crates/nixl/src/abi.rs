//! The part of the interface of `libnixl_capi` that this crate uses: a structure, and a table of functions.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// A handle of the library.
pub(crate) type Handle = *mut c_void;
/// `nixl_capi_status_t`.
pub(crate) type RawStatus = c_int;
/// A function that destroys a handle.
pub(crate) type Destroy = unsafe extern "C" fn(Handle) -> RawStatus;

/// The only operation that this crate uses, of `nixl_capi_xfer_op_t`.
pub(crate) const READ: c_int = 0;
/// Memory of the host, of `nixl_capi_mem_type_t`.
pub(crate) const HOST_MEMORY: c_int = 0;

/// `nixl_capi_agent_config_t`, in both of its layouts.
///
/// The port has four bytes up to NIXL 1.5, and two in later versions, which moves the two numbers after it. Nothing listens, so the
/// port does not count, and all three numbers are 1.
#[repr(C)]
pub(crate) struct AgentConfig {
    pub(crate) progress_thread: bool,
    pub(crate) listen_thread: bool,
    pub(crate) short_port: u16,
    /// The long port, or the mode of synchronization: 1 is strict, so that any thread may use the agent.
    pub(crate) port_or_strict: c_uint,
    /// The mode of synchronization, or the number of workers.
    pub(crate) strict_or_workers: c_uint,
    /// The number of workers, or padding.
    pub(crate) workers: c_uint,
    pub(crate) progress_delay_us: u64,
    pub(crate) listen_delay_us: u64,
    pub(crate) telemetry: bool,
}

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of a loaded library.
        pub(crate) struct Api {
            $($(#[$doc])* pub(crate) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// Keeps the library loaded.
            _library: libloading::Library,
        }

        impl Api {
            /// Finds the functions in a library. Returns the name of one that is missing.
            ///
            /// # Safety
            ///
            /// Functions of these names in the library must have the signatures of NIXL.
            pub(crate) unsafe fn of(library: libloading::Library) -> Result<Api, (&'static str, libloading::Error)> {
                Ok(Api {
                    $($name: {
                        // SAFETY: promised by the caller.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> $result>(stringify!($name))
                        };
                        *found.map_err(|error| (stringify!($name), error))?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    nixl_capi_is_stub() -> bool;
    nixl_capi_create_configured_agent(*const c_char, *const AgentConfig, *mut Handle) -> RawStatus;
    nixl_capi_destroy_agent(Handle) -> RawStatus;
    nixl_capi_get_plugin_params(Handle, *const c_char, *mut Handle, *mut Handle) -> RawStatus;
    nixl_capi_destroy_mem_list(Handle) -> RawStatus;
    nixl_capi_create_params(*mut Handle) -> RawStatus;
    nixl_capi_params_add(Handle, *const c_char, *const c_char) -> RawStatus;
    nixl_capi_destroy_params(Handle) -> RawStatus;
    nixl_capi_create_backend(Handle, *const c_char, Handle, *mut Handle) -> RawStatus;
    nixl_capi_destroy_backend(Handle) -> RawStatus;
    nixl_capi_create_reg_dlist(c_int, *mut Handle) -> RawStatus;
    nixl_capi_reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize) -> RawStatus;
    nixl_capi_destroy_reg_dlist(Handle) -> RawStatus;
    nixl_capi_register_mem(Handle, Handle, Handle) -> RawStatus;
    nixl_capi_deregister_mem(Handle, Handle, Handle) -> RawStatus;
    nixl_capi_get_local_md(Handle, *mut Handle, *mut usize) -> RawStatus;
    nixl_capi_load_remote_md(Handle, *const c_void, usize, *mut *mut c_char) -> RawStatus;
    nixl_capi_create_xfer_dlist(c_int, *mut Handle) -> RawStatus;
    nixl_capi_xfer_dlist_add_desc(Handle, usize, usize, u64) -> RawStatus;
    nixl_capi_destroy_xfer_dlist(Handle) -> RawStatus;
    nixl_capi_create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle) -> RawStatus;
    nixl_capi_post_xfer_req(Handle, Handle, Handle) -> RawStatus;
    nixl_capi_get_xfer_status(Handle, Handle) -> RawStatus;
    nixl_capi_release_xfer_req(Handle, Handle) -> RawStatus;
    nixl_capi_destroy_xfer_req(Handle) -> RawStatus;
}
