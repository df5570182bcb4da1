//! Status codes: the numbers users compare. One exhaustive match from [`ErrorKind`], one table of all names.
//!
//! Not for: texts. A code without a reason is what this project was started against.

use crate::error::ErrorKind;

/// First number of the engine's own codes.
const BASE: i64 = 0x5010_B000;

macro_rules! status_codes {
    ($($(#[$doc:meta])* $variant:ident = $value:expr, $name:literal;)*) => {
        /// A status code of the public API (contract §3.1).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum StatusCode { $($(#[$doc])* $variant,)* }

        impl StatusCode {
            /// Every code, in the order of the contract.
            pub const ALL: &'static [StatusCode] = &[$(StatusCode::$variant,)*];

            /// The number users compare.
            #[must_use]
            pub const fn value(self) -> i64 {
                match self { $(StatusCode::$variant => $value,)* }
            }

            /// The public name, `LLM_…`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(StatusCode::$variant => $name,)* }
            }
        }
    };
}

status_codes! {
    /// The call did what it was asked.
    Success = 0, "LLM_SUCCESS";
    /// A failure that no other code names.
    Failed = 0xFFFF_FFFF, "LLM_FAILED";
    /// A wait of the older mode ran out.
    WaitProcessTimeout = BASE + 0x01, "LLM_WAIT_PROCESS_TIMEOUT";
    /// No such cache or key at its owner.
    KvCacheNotExist = BASE + 0x02, "LLM_KV_CACHE_NOT_EXIST";
    /// The request is already there.
    RepeatRequest = BASE + 0x03, "LLM_REPEAT_REQUEST";
    /// The request has already ended.
    RequestAlreadyCompleted = BASE + 0x04, "LLM_REQUEST_ALREADY_COMPLETED";
    /// An argument has no meaning here.
    ParamInvalid = BASE + 0x05, "LLM_PARAM_INVALID";
    /// The engine was finalized.
    EngineFinalized = BASE + 0x06, "LLM_ENGINE_FINALIZED";
    /// No link to that cluster.
    NotYetLink = BASE + 0x07, "LLM_NOT_YET_LINK";
    /// The link exists.
    AlreadyLink = BASE + 0x08, "LLM_ALREADY_LINK";
    /// Linking failed on the network.
    LinkFailed = BASE + 0x09, "LLM_LINK_FAILED";
    /// Unlinking failed on the network.
    UnlinkFailed = BASE + 0x0A, "LLM_UNLINK_FAILED";
    /// The peer could not be told of the unlink.
    NotifyPromptUnlinkFailed = BASE + 0x0B, "LLM_NOTIFY_PROMPT_UNLINK_FAILED";
    /// Too many clusters in one call.
    ClusterNumExceedLimit = BASE + 0x0C, "LLM_CLUSTER_NUM_EXCEED_LIMIT";
    /// Another link or unlink is running.
    ProcessingLink = BASE + 0x0D, "LLM_PROCESSING_LINK";
    /// The device has no memory left.
    DeviceOutOfMemory = BASE + 0x0E, "LLM_DEVICE_OUT_OF_MEMORY";
    /// The prefix exists.
    PrefixAlreadyExist = BASE + 0x0F, "LLM_PREFIX_ALREADY_EXIST";
    /// The prefix does not exist.
    PrefixNotExist = BASE + 0x10, "LLM_PREFIX_NOT_EXIST";
    /// The sequence is longer than allowed.
    SeqLenOverLimit = BASE + 0x11, "LLM_SEQ_LENOVERLIMIT";
    /// No free block.
    NoFreeBlock = BASE + 0x12, "LLM_NO_FREE_BLOCK";
    /// No memory for blocks.
    BlocksOutOfMemory = BASE + 0x13, "LLM_BLOCKS_OUT_OF_MEMORY";
    /// Links remain.
    ExistLink = BASE + 0x18, "LLM_EXIST_LINK";
    /// A needed option was not given.
    FeatureNotEnabled = BASE + 0x19, "LLM_FEATURE_NOT_ENABLED";
    /// The deadline of the call passed.
    Timeout = BASE + 0x1A, "LLM_TIMEOUT";
    /// The link is in use by a call that excludes this one.
    LinkBusy = BASE + 0x1B, "LLM_LINK_BUSY";
    /// A memory pool cannot serve the request.
    OutOfMemory = BASE + 0x1C, "LLM_OUT_OF_MEMORY";
    /// Device memory fault (reserved).
    DeviceMemError = 507_053, "LLM_DEVICE_MEM_ERROR";
    /// Possible memory fault at the peer.
    SuspectRemoteError = 507_057, "LLM_SUSPECT_REMOTE_ERROR";
    /// Unknown.
    UnknownError = -1, "LLM_UNKNOWN_ERROR";
}

impl From<ErrorKind> for StatusCode {
    fn from(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::InvalidArgument | ErrorKind::KeyTaken | ErrorKind::UnlikeTensors => {
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
            ErrorKind::Forked | ErrorKind::Interrupted | ErrorKind::Cancelled | ErrorKind::System => {
                StatusCode::Failed
            }
        }
    }
}

impl StatusCode {
    /// The code of an engine without the cache manager, where some failures have one of their own (contract §9.2,
    /// §9.3, §17.14).
    #[must_use]
    pub fn of_first_generation(kind: ErrorKind) -> StatusCode {
        match kind {
            ErrorKind::Timeout => StatusCode::WaitProcessTimeout,
            ErrorKind::OutOfMemory => StatusCode::DeviceOutOfMemory,
            ErrorKind::UnlinkFailed => StatusCode::NotifyPromptUnlinkFailed,
            ErrorKind::UnlikeTensors => StatusCode::Failed,
            kind => StatusCode::from(kind),
        }
    }

    /// The code of the C++ class's `Initialize`, where the pool itself finds no memory (contract, C++ §1).
    #[must_use]
    pub fn of_cpp_open(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::OutOfMemory => StatusCode::OutOfMemory,
            kind => StatusCode::of_cpp(kind),
        }
    }

    /// The code that the C++ class gives (contract, C++ §1, §7): the device pool is its only memory, and an engine that is
    /// not open has no code of its own.
    #[must_use]
    pub fn of_cpp(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::OutOfMemory => StatusCode::DeviceOutOfMemory,
            ErrorKind::Closed => StatusCode::Failed,
            kind => StatusCode::from(kind),
        }
    }
}
