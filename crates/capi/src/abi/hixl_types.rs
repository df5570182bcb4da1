//! The structures of `hixl`. They will not grow, and have no reserved words.

use std::ffi::c_char;

/// A text, which need not end in a null byte and may have some.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistText {
    /// Its bytes. Null if there are none.
    pub bytes: *const c_char,
    /// Number of bytes.
    pub size: usize,
}

/// An option of `llm_datadist_hixl_initialize`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistHixlOption {
    /// Key.
    pub key: LlmDatadistText,
    /// Value.
    pub value: LlmDatadistText,
}

/// One operation of a transfer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistHixlOp {
    /// Address in this process.
    pub local_addr: u64,
    /// Address at the other engine.
    pub remote_addr: u64,
    /// Number of bytes.
    pub len: u64,
}

/// The state of an asynchronous connection.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistHixlConnection {
    /// The other engine.
    pub remote_engine: LlmDatadistText,
    /// Its state, a number of `hixl::AsyncConnectStatus`.
    pub state: u32,
}

/// The state of an asynchronous transfer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistHixlResult {
    /// The number of the request.
    pub request: u64,
    /// What the program has given with it.
    pub user_data: u64,
    /// Its state, a number of `hixl::TransferStatus`.
    pub state: u32,
}

/// A notification.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LlmDatadistHixlNotice {
    /// Its name.
    pub name: LlmDatadistText,
    /// Its text.
    pub message: LlmDatadistText,
}
