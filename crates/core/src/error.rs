//! What went wrong, as a value: one closed list of kinds, one message, and the facts around it.
//!
//! Not for: numbers that users compare (`status`) or Python classes (the binding).

use std::error::Error as StdError;
use std::fmt;

/// Shorthand used by every fallible function of the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The closed list of reasons. A new kind does not compile until `status` gives it a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// An argument has the right type and width but no meaning here: outside its range, or against a rule.
    InvalidArgument,
    /// No cache, or no key, of that name.
    CacheNotFound,
    /// A memory pool cannot serve the request, or the system gave no memory for one.
    OutOfMemory,
    /// The deadline of the call passed.
    Timeout,
    /// The engine was closed before the call.
    Closed,
    /// The process forked after the engine was opened; its memory belongs to the parent.
    Forked,
    /// The call needs an option that was not given.
    NotEnabled,
    /// There is no live link to that cluster: never made, unlinked, or broken; the message says which.
    NotLinked,
    /// The link is there already.
    AlreadyLinked,
    /// A link could not be made.
    LinkFailed,
    /// The peer could not be told that the link ends; this side has dropped it.
    UnlinkFailed,
    /// Links remain that the call cannot work with.
    LinksExist,
    /// The caller was interrupted while it waited (Ctrl-C).
    Interrupted,
    /// The system refused something the engine needed; the source says what.
    System,
    /// The caller cancelled it.
    Cancelled,
    /// A key that should name a new cache names another one already.
    KeyTaken,
    /// The two caches of a copy have unlike numbers of tensors.
    UnlikeTensors,
}

impl ErrorKind {
    /// Every kind, for tables and for the test that each has a code, a cause and a line in the documentation.
    pub const ALL: [ErrorKind; 17] = [
        ErrorKind::InvalidArgument,
        ErrorKind::CacheNotFound,
        ErrorKind::OutOfMemory,
        ErrorKind::Timeout,
        ErrorKind::Closed,
        ErrorKind::Forked,
        ErrorKind::NotEnabled,
        ErrorKind::NotLinked,
        ErrorKind::AlreadyLinked,
        ErrorKind::LinkFailed,
        ErrorKind::UnlinkFailed,
        ErrorKind::LinksExist,
        ErrorKind::Interrupted,
        ErrorKind::System,
        ErrorKind::Cancelled,
        ErrorKind::KeyTaken,
        ErrorKind::UnlikeTensors,
    ];
}

/// An error: kind, message, named facts, and what caused it.
///
/// One word wide, so `Result<u32>` stays small on the paths that succeed.
///
/// ```
/// use llm_datadist_core::{Error, ErrorKind};
/// let error = Error::new(ErrorKind::OutOfMemory, "the device pool is exhausted")
///     .with("asked_bytes", 4096)
///     .with("free_bytes", 0);
/// assert_eq!(error.to_string(), "the device pool is exhausted (asked_bytes=4096, free_bytes=0)");
/// ```
pub struct Error(Box<Report>);

/// What a transfer that failed had put in place: tensors of the destination, and in each the rows that are whole.
pub type Arrived = Vec<(u32, Vec<std::ops::Range<u64>>)>;

struct Report {
    kind: ErrorKind,
    message: String,
    context: Vec<(&'static str, String)>,
    arrived: Arrived,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of `kind` that says `message`.
    #[cold]
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error(Box::new(Report {
            kind,
            message: message.into(),
            context: Vec::new(),
            arrived: Vec::new(),
            source: None,
        }))
    }

    /// The error for an argument without meaning: its name, what was given, and what is allowed.
    #[cold]
    #[must_use]
    pub fn argument(name: &str, value: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        Error::new(ErrorKind::InvalidArgument, format!("{name} = {value} is not allowed: {allowed}"))
    }

    /// The same error with one more named fact; one that it carries already is not said twice.
    #[must_use]
    pub fn with(mut self, name: &'static str, value: impl fmt::Display) -> Self {
        let fact = (name, value.to_string());
        if !self.0.context.contains(&fact) {
            self.0.context.push(fact);
        }
        self
    }

    /// The same error with the one that caused it.
    #[must_use]
    pub fn because(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.0.source = Some(Box::new(source));
        self
    }

    /// The same error with what of the destination is in place nevertheless.
    #[must_use]
    pub fn with_arrived(mut self, arrived: Arrived) -> Self {
        self.0.arrived = arrived;
        self
    }

    /// The same error once more, for another who is to be told; what caused it only in words.
    #[must_use]
    pub(crate) fn again(&self) -> Self {
        let Report { kind, message, context, arrived, source } = &*self.0;
        let message = match source {
            Some(source) => format!("{message}: {source}"),
            None => message.clone(),
        };
        let (context, arrived) = (context.clone(), arrived.clone());
        Error(Box::new(Report { kind: *kind, message, context, arrived, source: None }))
    }

    /// What of the destination a failed transfer put in place; empty if it is nothing, or the error is of no transfer.
    #[must_use]
    pub fn arrived(&self) -> &[(u32, Vec<std::ops::Range<u64>>)] {
        &self.0.arrived
    }

    /// Which of the closed list it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The value of a named fact, if the error carries it.
    #[must_use]
    pub fn fact(&self, name: &str) -> Option<&str> {
        self.0.context.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        for (i, (name, value)) in self.0.context.iter().enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { " (" } else { ", " })?;
        }
        if !self.0.context.is_empty() {
            f.write_str(")")?;
        }
        if let Some(source) = &self.0.source {
            write!(f, ": {source}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}
