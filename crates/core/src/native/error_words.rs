//! How the native API tells errors apart.

use crate::error::{Error, ErrorKind};

macro_rules! classes {
    ($($(#[$doc:meta])* $class:ident,)*) => {
        /// The class of an error, which says what a program does about it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorClass { $($(#[$doc])* $class,)* }

        impl ErrorClass {
            /// Returns the name of the class in Python.
            pub const fn name(self) -> &'static str {
                match self { $(ErrorClass::$class => stringify!($class),)* }
            }
        }
    };
}

classes! {
    /// A value that is not allowed, or rows that do not fit the other cache.
    InvalidArgument,
    /// The cache was freed, or the peer has none of this name.
    NotFound,
    /// There is no room in a pool, or no memory.
    OutOfMemory,
    /// The time limit has passed.
    Timeout,
    /// There is no link, or it has ended, or it was not made.
    PeerLost,
    /// Too many transfers, grants or messages.
    Busy,
    /// The grant has ended.
    GrantEnded,
    /// Bytes that have moved differ from their source.
    VerifyFailed,
    /// The engine was closed.
    Closed,
    /// The program cancelled the transfer.
    Cancelled,
    /// Every other failure.
    Error,
}

/// What the native API calls the kind of an error.
#[derive(Clone, Copy, Debug)]
pub struct ErrorWords<'a>(pub &'a Error);

impl<'a> ErrorWords<'a> {
    /// Returns the class.
    pub fn class(self) -> ErrorClass {
        self.class_and_code().0
    }

    /// Returns the word by which programs tell kinds of one class apart.
    pub fn code(self) -> &'static str {
        self.class_and_code().1
    }

    fn class_and_code(self) -> (ErrorClass, &'static str) {
        match self.0.kind() {
            ErrorKind::InvalidArgument => (ErrorClass::InvalidArgument, "invalid_argument"),
            ErrorKind::KeyTaken => (ErrorClass::InvalidArgument, "name_taken"),
            ErrorKind::TensorCountMismatch => (ErrorClass::InvalidArgument, "tensor_count"),
            ErrorKind::CacheNotFound => (ErrorClass::NotFound, "not_found"),
            ErrorKind::OutOfMemory => (ErrorClass::OutOfMemory, "out_of_memory"),
            ErrorKind::Timeout => (ErrorClass::Timeout, "timeout"),
            ErrorKind::NotLinked => (ErrorClass::PeerLost, "not_linked"),
            ErrorKind::LinkFailed => (ErrorClass::PeerLost, "link_failed"),
            ErrorKind::UnlinkFailed => (ErrorClass::PeerLost, "unlink_failed"),
            ErrorKind::Closed => (ErrorClass::Closed, "closed"),
            ErrorKind::Forked => (ErrorClass::Closed, "forked"),
            ErrorKind::Cancelled => (ErrorClass::Cancelled, "cancelled"),
            ErrorKind::Busy => (ErrorClass::Busy, "busy"),
            ErrorKind::GrantEnded => (ErrorClass::GrantEnded, "grant_ended"),
            ErrorKind::VerifyFailed => (ErrorClass::VerifyFailed, "verify_failed"),
            ErrorKind::NotEnabled => (ErrorClass::Error, "not_enabled"),
            ErrorKind::AlreadyLinked | ErrorKind::LinksExist | ErrorKind::Interrupted | ErrorKind::System => {
                (ErrorClass::Error, "failed")
            }
        }
    }

    /// Returns the argument that the error is about. The key of a cache is its name.
    pub fn argument(self) -> Option<&'a str> {
        if self.0.kind() == ErrorKind::KeyTaken { Some("name") } else { self.0.argument_name() }
    }
}
