//! The part of the interface of `libucp` that this crate uses: constants, structures, and a table of functions.
//!
//! UCX keeps its binary interface compatible by field masks: a structure may grow, and a field counts only if its bit
//! is set in the mask. So these structures end with the last field that is used here. They are the same from UCX 1.13 on.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// A handle of the library.
pub(crate) type Handle = *mut c_void;
/// `ucs_status_t`.
pub(crate) type RawStatus = i8;

/// The version of the interface that `ucp_init_version` is asked for.
pub(crate) const API: (c_uint, c_uint) = (1, 13);

pub(crate) const PARAM_FEATURES: u64 = 1;
pub(crate) const FEATURE_RMA: u64 = 1 << 1;
pub(crate) const FEATURE_WAKEUP: u64 = 1 << 4;

/// `ucp_params_t`.
#[repr(C)]
pub(crate) struct Params {
    pub(crate) mask: u64,
    pub(crate) features: u64,
    pub(crate) rest: [u64; 9],
}

/// `ucp_worker_params_t`. A mask of 0 asks for a worker that one thread uses.
#[repr(C)]
pub(crate) struct WorkerParams {
    pub(crate) mask: u64,
    pub(crate) rest: [u64; 24],
}

pub(crate) const EP_REMOTE_ADDRESS: u64 = 1;
pub(crate) const EP_ERROR_MODE: u64 = 1 << 1;
pub(crate) const EP_ERROR_HANDLER: u64 = 1 << 2;
pub(crate) const ERROR_MODE_NONE: c_uint = 0;
pub(crate) const ERROR_MODE_PEER: c_uint = 1;

/// Called by the library when an endpoint has failed.
pub(crate) type ErrorHandler = extern "C" fn(argument: Handle, endpoint: Handle, status: RawStatus);

/// `ucp_ep_params_t`.
#[repr(C)]
pub(crate) struct EndpointParams {
    pub(crate) mask: u64,
    pub(crate) address: *const c_void,
    pub(crate) error_mode: c_uint,
    pub(crate) error_handler: Option<ErrorHandler>,
    pub(crate) error_argument: Handle,
    pub(crate) rest: [u64; 8],
}

pub(crate) const MAP_ADDRESS: u64 = 1;
pub(crate) const MAP_LENGTH: u64 = 1 << 1;
pub(crate) const MAP_PROTECTION: u64 = 1 << 3;
pub(crate) const LOCAL_READ: c_uint = 1;
pub(crate) const LOCAL_WRITE: c_uint = 1 << 1;
pub(crate) const REMOTE_READ: c_uint = 1 << 8;

/// `ucp_mem_map_params_t`.
#[repr(C)]
pub(crate) struct MapParams {
    pub(crate) mask: u64,
    pub(crate) address: *mut c_void,
    pub(crate) length: usize,
    pub(crate) flags: c_uint,
    pub(crate) protection: c_uint,
    pub(crate) rest: [u64; 2],
}

pub(crate) const OP_CALLBACK: u32 = 1 << 1;
pub(crate) const OP_USER_DATA: u32 = 1 << 2;
pub(crate) const OP_FLAGS: u32 = 1 << 4;
pub(crate) const OP_MEMORY: u32 = 1 << 8;
/// More requests follow, so the library may collect them.
pub(crate) const OP_MULTI_SEND: u32 = 1 << 19;
/// Of `ucp_ep_close_nbx`: does not wait for the peer. All requests end at once.
pub(crate) const CLOSE_FORCE: u32 = 1;

/// Called by the library when a request has ended.
pub(crate) type Completed = extern "C" fn(request: Handle, status: RawStatus, user_data: Handle);

/// `ucp_request_param_t`.
#[repr(C)]
pub(crate) struct RequestParams {
    pub(crate) mask: u32,
    pub(crate) flags: u32,
    pub(crate) request: Handle,
    pub(crate) completed: Option<Completed>,
    pub(crate) datatype: u64,
    pub(crate) user_data: Handle,
    pub(crate) reply_buffer: Handle,
    pub(crate) memory_type: c_uint,
    pub(crate) received: Handle,
    pub(crate) memory: Handle,
    pub(crate) rest: [u64; 4],
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
            /// Functions of these names in the library must have the signatures of UCX.
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
    ucp_get_version(*mut c_uint, *mut c_uint, *mut c_uint) -> ();
    ucp_config_read(*const c_char, *const c_char, *mut Handle) -> RawStatus;
    ucp_config_modify(Handle, *const c_char, *const c_char) -> RawStatus;
    ucp_config_release(Handle) -> ();
    ucp_init_version(c_uint, c_uint, *const Params, Handle, *mut Handle) -> RawStatus;
    ucp_cleanup(Handle) -> ();
    ucp_worker_create(Handle, *const WorkerParams, *mut Handle) -> RawStatus;
    ucp_worker_destroy(Handle) -> ();
    ucp_worker_get_address(Handle, *mut Handle, *mut usize) -> RawStatus;
    ucp_worker_release_address(Handle, Handle) -> ();
    ucp_worker_progress(Handle) -> c_uint;
    ucp_worker_get_efd(Handle, *mut c_int) -> RawStatus;
    ucp_worker_arm(Handle) -> RawStatus;
    ucp_ep_create(Handle, *const EndpointParams, *mut Handle) -> RawStatus;
    ucp_ep_close_nbx(Handle, *const RequestParams) -> Handle;
    ucp_mem_map(Handle, *const MapParams, *mut Handle) -> RawStatus;
    ucp_mem_unmap(Handle, Handle) -> RawStatus;
    ucp_rkey_pack(Handle, Handle, *mut Handle, *mut usize) -> RawStatus;
    ucp_rkey_buffer_release(Handle) -> ();
    ucp_ep_rkey_unpack(Handle, *const c_void, *mut Handle) -> RawStatus;
    ucp_rkey_destroy(Handle) -> ();
    ucp_get_nbx(Handle, *mut c_void, usize, u64, Handle, *const RequestParams) -> Handle;
    ucp_request_check_status(Handle) -> RawStatus;
    ucp_request_free(Handle) -> ();
}
