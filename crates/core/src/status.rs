//! The status codes that users compare, and the mapping from [`ErrorKind`] to them.
//!
//! The mapping is an exhaustive match, and all numbers and names are in one table. The text of an error,
//! which states its cause, is in `error`.

use crate::error::ErrorKind;

/// Base of the engine's own code numbers.
const BASE: i64 = 0x5010_B000;

macro_rules! status_codes {
    ($($(#[$doc:meta])* $variant:ident = $value:expr, $name:literal;)*) => {
        /// A status code of the public API (contract §3.1).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum StatusCode { $($(#[$doc])* $variant,)* }

        impl StatusCode {
            /// All codes, in the order of the contract.
            pub const ALL: &'static [StatusCode] = &[$(StatusCode::$variant,)*];

            /// Returns the number that users compare.
            pub const fn value(self) -> i64 {
                match self { $(StatusCode::$variant => $value,)* }
            }

            /// Returns the public name, `LLM_…`.
            pub const fn name(self) -> &'static str {
                match self { $(StatusCode::$variant => $name,)* }
            }
        }
    };
}

status_codes! {
    /// The call succeeded.
    Success = 0, "LLM_SUCCESS";
    /// A failure that has no other code.
    Failed = 0xFFFF_FFFF, "LLM_FAILED";
    /// A timeout in `KvCacheManager` mode.
    WaitProcessTimeout = BASE + 0x01, "LLM_WAIT_PROCESS_TIMEOUT";
    /// The owner has no such cache or key.
    KvCacheNotExist = BASE + 0x02, "LLM_KV_CACHE_NOT_EXIST";
    /// The request already exists.
    RepeatRequest = BASE + 0x03, "LLM_REPEAT_REQUEST";
    /// The request has already ended.
    RequestAlreadyCompleted = BASE + 0x04, "LLM_REQUEST_ALREADY_COMPLETED";
    /// An argument is invalid.
    ParamInvalid = BASE + 0x05, "LLM_PARAM_INVALID";
    /// The engine was finalized.
    EngineFinalized = BASE + 0x06, "LLM_ENGINE_FINALIZED";
    /// There is no link to that cluster.
    NotYetLink = BASE + 0x07, "LLM_NOT_YET_LINK";
    /// The link exists already.
    AlreadyLink = BASE + 0x08, "LLM_ALREADY_LINK";
    /// A link could not be made.
    LinkFailed = BASE + 0x09, "LLM_LINK_FAILED";
    /// A link could not be ended in an orderly way.
    UnlinkFailed = BASE + 0x0A, "LLM_UNLINK_FAILED";
    /// The peer could not be notified of an unlink.
    NotifyPromptUnlinkFailed = BASE + 0x0B, "LLM_NOTIFY_PROMPT_UNLINK_FAILED";
    /// Too many clusters in one call.
    ClusterNumExceedLimit = BASE + 0x0C, "LLM_CLUSTER_NUM_EXCEED_LIMIT";
    /// Another link or unlink call is running.
    ProcessingLink = BASE + 0x0D, "LLM_PROCESSING_LINK";
    /// The device pool is full.
    DeviceOutOfMemory = BASE + 0x0E, "LLM_DEVICE_OUT_OF_MEMORY";
    /// The prefix already exists.
    PrefixAlreadyExist = BASE + 0x0F, "LLM_PREFIX_ALREADY_EXIST";
    /// The prefix does not exist.
    PrefixNotExist = BASE + 0x10, "LLM_PREFIX_NOT_EXIST";
    /// The sequence is longer than allowed.
    SeqLenOverLimit = BASE + 0x11, "LLM_SEQ_LENOVERLIMIT";
    /// There is no free block.
    NoFreeBlock = BASE + 0x12, "LLM_NO_FREE_BLOCK";
    /// There is no memory for blocks.
    BlocksOutOfMemory = BASE + 0x13, "LLM_BLOCKS_OUT_OF_MEMORY";
    /// The call is not possible while links exist.
    ExistLink = BASE + 0x18, "LLM_EXIST_LINK";
    /// An option that the call needs is not set.
    FeatureNotEnabled = BASE + 0x19, "LLM_FEATURE_NOT_ENABLED";
    /// The deadline of the call passed.
    Timeout = BASE + 0x1A, "LLM_TIMEOUT";
    /// A conflicting call uses the link.
    LinkBusy = BASE + 0x1B, "LLM_LINK_BUSY";
    /// A memory pool is full, or the system has no memory.
    OutOfMemory = BASE + 0x1C, "LLM_OUT_OF_MEMORY";
    /// A grant has ended. The original does not have this code; its number is outside the ranges of the original.
    GrantEnded = 0x4C44_0001, "LLM_GRANT_ENDED";
    /// Moved bytes differ from those of the source. The original does not have this code either.
    VerifyFailed = 0x4C44_0002, "LLM_VERIFY_FAILED";
    /// Device memory fault (reserved).
    DeviceMemError = 507_053, "LLM_DEVICE_MEM_ERROR";
    /// Possible memory fault at the peer.
    SuspectRemoteError = 507_057, "LLM_SUSPECT_REMOTE_ERROR";
    /// Unknown error.
    UnknownError = -1, "LLM_UNKNOWN_ERROR";
}

impl From<ErrorKind> for StatusCode {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument | ErrorKind::KeyTaken | ErrorKind::TensorCountMismatch => {
                StatusCode::ParamInvalid
            }
            ErrorKind::CacheNotFound => StatusCode::KvCacheNotExist,
            ErrorKind::OutOfMemory => StatusCode::OutOfMemory,
            ErrorKind::Timeout => StatusCode::Timeout,
            ErrorKind::Closed => StatusCode::EngineFinalized,
            ErrorKind::NotEnabled => StatusCode::FeatureNotEnabled,
            ErrorKind::NotLinked => StatusCode::NotYetLink,
            ErrorKind::AlreadyLinked => StatusCode::AlreadyLink,
            ErrorKind::LinkFailed => StatusCode::LinkFailed,
            ErrorKind::UnlinkFailed => StatusCode::UnlinkFailed,
            ErrorKind::LinksExist => StatusCode::ExistLink,
            ErrorKind::Busy => StatusCode::LinkBusy,
            ErrorKind::GrantEnded => StatusCode::GrantEnded,
            ErrorKind::VerifyFailed => StatusCode::VerifyFailed,
            ErrorKind::Forked | ErrorKind::Interrupted | ErrorKind::Cancelled | ErrorKind::System => {
                StatusCode::Failed
            }
        }
    }
}

impl StatusCode {
    /// Returns the code in `KvCacheManager` mode, in which some failures have codes of their own
    /// (contract §9.2, §9.3, §17.14).
    pub fn of_kv_cache_manager(kind: ErrorKind) -> StatusCode {
        match kind {
            ErrorKind::Timeout => StatusCode::WaitProcessTimeout,
            ErrorKind::OutOfMemory => StatusCode::DeviceOutOfMemory,
            ErrorKind::UnlinkFailed => StatusCode::NotifyPromptUnlinkFailed,
            ErrorKind::TensorCountMismatch => StatusCode::Failed,
            kind => StatusCode::from(kind),
        }
    }

    /// Returns the code for a failure of `Initialize` of the C++ class: `OutOfMemory` if there is no memory
    /// for the pool itself (contract, C++ §1).
    pub fn of_cpp_open(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::OutOfMemory => StatusCode::OutOfMemory,
            kind => StatusCode::of_cpp(kind),
        }
    }

    /// Returns the code for a failure of the C++ class (contract, C++ §1, §7). `OutOfMemory` always concerns
    /// the device pool there, the only memory of the class, and a call on an engine that is not open has no
    /// code of its own.
    pub fn of_cpp(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::OutOfMemory => StatusCode::DeviceOutOfMemory,
            ErrorKind::Closed => StatusCode::Failed,
            kind => StatusCode::from(kind),
        }
    }
}
