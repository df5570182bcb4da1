//! The error type of the crate: one closed list of kinds, a message, the argument that was wrong, named facts and a cause.
//!
//! `status` maps the kinds to the status codes that users compare. [`Error`] shows itself in the words of the native API, and
//! [`Error::original`] in those of the original's API. They differ in facts only.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use rustix::io::Errno;

/// Result type of every fallible function in the crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident,)*) => {
        /// The closed list of error kinds. A new kind does not compile until `status` gives it a code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum ErrorKind { $($(#[$doc])* $kind,)* }

        impl ErrorKind {
            /// All kinds, for tables and for the test that each has a code.
            pub const ALL: [ErrorKind; [$(stringify!($kind)),*].len()] = [$(ErrorKind::$kind,)*];
        }
    };
}

kinds! {
    /// An argument is out of range or breaks a rule, although its type and width are right.
    InvalidArgument,
    /// There is no cache or key with that name.
    CacheNotFound,
    /// A memory pool is full, or the system could not allocate memory.
    OutOfMemory,
    /// The deadline of the call passed.
    Timeout,
    /// The engine was closed before the call.
    Closed,
    /// The process forked after the engine was opened; the engine's memory belongs to the parent.
    Forked,
    /// The call needs an option that is not set.
    NotEnabled,
    /// There is no live link to that cluster: it was never made, was unlinked, or broke. The message states
    /// which.
    NotLinked,
    /// The link exists already.
    AlreadyLinked,
    /// A link could not be made.
    LinkFailed,
    /// The peer could not be notified that the link ends. This process has dropped the link.
    UnlinkFailed,
    /// The call is not possible while links exist.
    LinksExist,
    /// The caller was interrupted while it waited (Ctrl-C).
    Interrupted,
    /// The system refused something that the engine needed; the source of the error states what.
    System,
    /// The caller cancelled the operation.
    Cancelled,
    /// A key for a new cache already names another cache.
    KeyTaken,
    /// The two caches of a copy have different numbers of tensors.
    TensorCountMismatch,
    /// Too many asynchronous calls run, or too many of their outcomes were not taken.
    Busy,
    /// A grant has expired, was revoked or has ended otherwise.
    GrantEnded,
    /// Bytes that a call moved differ from those of the source.
    VerifyFailed,
}

/// An error: a kind, a message, named facts and a cause.
///
/// It is one word wide, so that `Result<u32>` stays small on paths that succeed.
///
/// ```
/// use llm_datadist_core::{Error, ErrorKind};
/// let error = Error::new(ErrorKind::OutOfMemory, "the device pool is exhausted")
///     .with("asked_bytes", 4096)
///     .with("free_bytes", 0);
/// assert_eq!(error.to_string(), "the device pool is exhausted (asked_bytes=4096, free_bytes=0)");
/// ```
#[derive(Clone)]
pub struct Error(Box<Report>);

/// The complete rows of one destination tensor that a failed transfer had written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrivedRows {
    /// Index of the destination tensor.
    pub tensor: u32,
    /// Ranges of its rows, ascending and disjoint.
    pub rows: Vec<std::ops::Range<u64>>,
}

#[derive(Clone)]
struct Report {
    kind: ErrorKind,
    message: String,
    argument: Option<Box<str>>,
    context: Vec<Fact>,
    arrived: Vec<ArrivedRows>,
    permanent: bool,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// A named fact.
#[derive(Clone, PartialEq, Eq)]
struct Fact {
    name: &'static str,
    value: String,
    /// The only API whose callers know what it means, if there is one.
    only: Option<Api>,
}

/// The APIs of an engine.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Api {
    Native,
    Original,
}

/// The facts that have a meaning in the original's API only: cluster ids.
const ORIGINAL_FACTS: [&str; 5] = ["cluster", "cluster_id", "peer_cluster", "answered_cluster", "linked"];

/// An option that can change what an error reports, as each API calls it.
#[derive(Clone, Copy, Debug)]
pub struct OptionName {
    /// The key among the texts of the original's API.
    pub original: &'static str,
    /// The name in the native API; empty if it has no such option.
    pub native: &'static str,
}

macro_rules! option_names {
    ($($name:ident: $original:literal, $native:literal;)*) => {
        impl OptionName {
            $(pub(crate) const $name: OptionName = OptionName { original: $original, native: $native };)*

            /// All of them, for the test that the table of options has each.
            #[cfg(test)]
            pub(crate) const ALL: &[OptionName] = &[$(OptionName::$name),*];
        }
    };
}

option_names! {
    ACCEPT_REMOTE: "llm.LinkAcceptRemote", "accept_remote";
    ADDRESSES: "llm.LinkAddresses", "addresses";
    BACKEND: "llm.TransferBackend", "backend";
    ONE_SIDED: "llm.EnableRemoteCacheAccessible", "";
    REMOTE_MEMORY: "llm.LinkRemoteMemory", "remote_memory";
    SILENCE: "llm.LinkSilence", "silence";
    SWAP_IN_PATH: "llm.SwapInPath", "swap_in_path";
    TOKEN: "llm.LinkToken", "token";
    TRANSPORT: "llm.LinkTransport", "transport";
    UCX_LIBRARY: "llm.UcxLibrary", "ucx_library";
}

/// System errors for a lack of descriptors or memory.
const SHORTAGES: [Errno; 5] = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::TOOMANYREFS];

impl Error {
    /// Returns an error of `kind` with the text `message`.
    #[cold]
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error(Box::new(Report {
            kind,
            message: message.into(),
            argument: None,
            context: Vec::new(),
            arrived: Vec::new(),
            permanent: false,
            source: None,
        }))
    }

    /// Returns the error of kind [`ErrorKind::InvalidArgument`] with the text `message`.
    #[cold]
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::InvalidArgument, message)
    }

    /// Returns the error for a call on an engine that was closed.
    #[cold]
    pub fn closed() -> Self {
        Error::new(ErrorKind::Closed, "the engine was closed; open another one")
    }

    /// Returns the error for an invalid argument: its name, its value and what it must be.
    #[cold]
    pub fn argument(name: &str, value: impl fmt::Display, required: impl fmt::Display) -> Self {
        Error::invalid(format!("{name}={value} must be {required}")).of_argument(name)
    }

    /// Returns the error for an argument outside its `range`, for example "1 to 256".
    #[cold]
    #[doc(hidden)]
    pub fn out_of_range(name: &str, value: impl fmt::Display, range: impl fmt::Display) -> Self {
        Error::invalid(format!("{name}={value} is out of range ({range})")).of_argument(name)
    }

    /// Sets the argument that the error is about, by its name in the text: `src_blocks`, an entry of it, `src_blocks[3]`, or
    /// its length, `len(src_blocks)`. A name of several words, such as `the remote cache`, is not that of an argument.
    #[must_use]
    pub fn of_argument(mut self, name: &str) -> Self {
        let list = name.strip_prefix("len(").and_then(|list| list.strip_suffix(')')).unwrap_or(name);
        let argument = list.split_once('[').map_or(list, |(list, _)| list);
        self.0.argument = (!argument.contains(' ')).then(|| argument.into());
        self
    }

    /// Adds a named fact. A fact that the error already has is not added twice.
    #[must_use]
    pub fn with(self, name: &'static str, value: impl fmt::Display) -> Self {
        let only = ORIGINAL_FACTS.contains(&name).then_some(Api::Original);
        self.with_fact(Fact { name, value: value.to_string(), only })
    }

    /// Adds a named fact that only callers of the native API need.
    #[must_use]
    pub(crate) fn with_native(self, name: &'static str, value: impl fmt::Display) -> Self {
        self.with_fact(Fact { name, value: value.to_string(), only: Some(Api::Native) })
    }

    /// Adds the option that can change what the error reports.
    #[must_use]
    pub(crate) fn of_option(mut self, option: OptionName) -> Self {
        for (value, api) in [(option.original, Api::Original), (option.native, Api::Native)] {
            let known = |fact: &&mut Fact| fact.name == "option" && fact.only == Some(api);
            match self.0.context.iter_mut().find(known) {
                _ if value.is_empty() => (),
                Some(fact) => fact.value = format!("{} or {value}", fact.value),
                None => self.0.context.push(Fact { name: "option", value: value.into(), only: Some(api) }),
            }
        }
        self
    }

    /// Replaces the value of the fact `name`, if the error has it.
    #[must_use]
    pub(crate) fn with_replaced(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.0
            .context
            .iter_mut()
            .filter(|fact| fact.name == name)
            .for_each(|fact| fact.value = value.to_string());
        self
    }

    fn with_fact(mut self, fact: Fact) -> Self {
        if !self.0.context.contains(&fact) {
            self.0.context.push(fact);
        }
        self
    }

    /// Adds to the text, before the facts.
    #[must_use]
    pub(crate) fn with_text(mut self, more: &str) -> Self {
        self.0.message += more;
        self
    }

    /// Sets the error that caused this one.
    #[must_use]
    pub fn because(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Adds the number of a system error, and sets it as the cause.
    #[doc(hidden)]
    #[must_use]
    pub fn errno(self, errno: Errno) -> Self {
        self.with("errno", errno.raw_os_error()).because(std::io::Error::from(errno))
    }

    /// Returns the error for a thread that the system did not start.
    #[cold]
    #[doc(hidden)]
    pub fn no_thread(thread: &str, error: std::io::Error) -> Self {
        let text = format!(
            "{thread} could not be started; end threads or raise their limit (ulimit -u, RLIMIT_NPROC, or pids.max of the \
             control group), and try again"
        );
        let errno = error.raw_os_error().unwrap_or(0);
        Error::new(ErrorKind::System, text).with("errno", errno).because(error)
    }

    /// Returns the number of the system error that the error reports itself. Its causes are left out.
    pub(crate) fn own_errno(&self) -> Option<Errno> {
        self.fact("errno")?.parse().ok().map(Errno::from_raw_os_error)
    }

    /// Returns the number of the system error (`errno`) that is the cause of the error, or of the last failed attempt. `None` if
    /// there is none.
    ///
    /// ```
    /// use llm_datadist_core::{Error, ErrorKind};
    /// let refused = std::io::Error::from_raw_os_error(111);
    /// let error = Error::new(ErrorKind::Timeout, "timeout passed while linking").because(refused);
    /// assert_eq!(error.raw_os_error(), Some(111));
    /// ```
    pub fn raw_os_error(&self) -> Option<i32> {
        let first: &(dyn StdError + 'static) = self;
        let mut causes = std::iter::successors(Some(first), |&error| error.source());
        causes.find_map(|cause| {
            let own = cause.downcast_ref().and_then(Error::own_errno).map(Errno::raw_os_error);
            own.or_else(|| cause.downcast_ref().and_then(std::io::Error::raw_os_error))
                .filter(|&errno| errno != 0)
        })
    }

    /// Whether this process or its host had no descriptor or memory for a socket. This says nothing about the peer.
    pub(crate) fn is_shortage(&self) -> bool {
        self.own_errno().is_some_and(|errno| SHORTAGES.contains(&errno))
    }

    /// Whether the peer has closed a connection, or its process has ended.
    pub(crate) fn is_hang_up(&self) -> bool {
        let cut = self.fact("bytes_before").is_some();
        self.kind() == ErrorKind::NotLinked
            && (cut || matches!(self.own_errno(), Some(Errno::CONNRESET | Errno::PIPE)))
    }

    /// Marks a failure to link that only another configuration of a side can change.
    #[must_use]
    pub(crate) fn permanent(mut self) -> Self {
        self.0.permanent = true;
        self
    }

    /// Whether the error was marked by [`permanent`](Self::permanent).
    pub(crate) fn is_permanent(&self) -> bool {
        self.0.permanent
    }

    /// Returns the same error with another kind.
    #[must_use]
    pub(crate) fn of_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// Sets the complete rows that the failed transfer had written.
    #[must_use]
    pub(crate) fn with_arrived(mut self, arrived: Vec<ArrivedRows>) -> Self {
        self.0.arrived = arrived;
        self
    }

    /// Returns `reported` with the facts and the arrived rows of this error, which it takes the place of.
    #[must_use]
    pub(crate) fn replaced_by(mut self, reported: Error) -> Error {
        let Report { kind, message, argument, context, source, .. } = *reported.0;
        (self.0.kind, self.0.message, self.0.argument, self.0.source) = (kind, message, argument, source);
        self.0.context.extend(context);
        self
    }

    /// Returns the complete rows that a failed transfer had written. Empty if there are none, or if the error
    /// is not from a transfer.
    pub fn arrived(&self) -> &[ArrivedRows] {
        &self.0.arrived
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns the text without the facts and the cause.
    pub fn reason(&self) -> &str {
        &self.0.message
    }

    /// Returns the named facts, in the order of the text.
    pub fn facts(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.facts_in(Api::Native)
    }

    fn facts_in(&self, api: Api) -> impl Iterator<Item = (&'static str, &str)> {
        let shown = self.0.context.iter().filter(move |fact| fact.only.is_none_or(|only| only == api));
        shown.map(|fact| (fact.name, fact.value.as_str()))
    }

    /// Returns the whole text for callers of the original's API.
    pub fn original(&self) -> impl fmt::Display {
        self.for_engine(false)
    }

    /// Returns the whole text for the log of an engine that the native API has opened, or the original's.
    pub(crate) fn for_engine(&self, native: bool) -> impl fmt::Display {
        fmt::from_fn(move |f| self.show(f, if native { Api::Native } else { Api::Original }))
    }

    fn show(&self, f: &mut fmt::Formatter<'_>, api: Api) -> fmt::Result {
        f.write_str(&self.0.message)?;
        let mut separator = " (";
        for (name, value) in self.facts_in(api) {
            write!(f, "{separator}{name}={value}")?;
            separator = ", ";
        }
        if separator == ", " {
            f.write_str(")")?;
        }
        match &self.0.source {
            Some(source) => match source.downcast_ref::<Error>() {
                Some(source) => f.write_str(": ").and_then(|()| source.show(f, api)),
                None => write!(f, ": {source}"),
            },
            None => Ok(()),
        }
    }

    /// Returns the name of the argument that the error is about. `None` if it is about several arguments or about none.
    pub fn argument_name(&self) -> Option<&str> {
        self.0.argument.as_deref()
    }

    /// Returns the value of a named fact, if the error has it.
    pub fn fact(&self, name: &str) -> Option<&str> {
        self.0.context.iter().find(|fact| fact.name == name).map(|fact| fact.value.as_str())
    }
}

/// Returns `Ok(())` if a rule holds, else its error.
pub(crate) fn ensure(holds: bool, error: impl FnOnce() -> Error) -> Result<()> {
    if holds { Ok(()) } else { Err(error()) }
}

impl PartialEq for Error {
    /// Returns whether both have the same kind and text.
    fn eq(&self, other: &Self) -> bool {
        self.kind() == other.kind() && self.to_string() == other.to_string()
    }
}

impl Eq for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.show(f, Api::Native)
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
