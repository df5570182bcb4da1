//! The connection of a store to its keeper, and when to try to attach again.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::keeper::Mutex;
use llm_datadist_core::bindings::{remember_process, this_process};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};

use crate::attachment::Attachment;
use crate::connection::KeeperAccess;
use crate::messages::ValueTerms;
use crate::sizes;
use crate::socket;

/// How long a call waits for a keeper that has just come back, for each message that the keeper answers.
const ATTACH_WAIT: Duration = Duration::from_millis(50);
/// How long a store does not try again to attach: at first, and at most. The time doubles with each attempt. A keeper that was killed
/// is back soon if its holder lives.
const ATTACH_PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];

/// What a store is opened with.
#[derive(Clone, Debug, Default)]
pub struct StoreOptions {
    /// The path at which the keeper listens.
    pub socket: PathBuf,
    /// A text that stands for everything that gives values their meaning. Stores with other texts share nothing.
    pub namespace: String,
    /// Bytes of each value.
    pub value: u64,
    /// Whether each value has a checksum, which `get` compares. All stores of a namespace have the same.
    pub checksums: bool,
    /// The token of the store, and the keeper that it trusts.
    pub access: KeeperAccess,
}

/// The keeper of a store: the attachment while there is one, and when to try again.
#[derive(Debug)]
pub(crate) struct KeeperLink {
    process: u32,
    options: StoreOptions,
    state: Mutex<AttachState>,
    /// Locked by the call that tries to attach.
    attaching: Mutex<()>,
    /// How long it waits for the keeper.
    wait: Duration,
}

#[derive(Debug)]
struct AttachState {
    attached: Option<Arc<Attachment>>,
    /// How often it has attached.
    times: u64,
    /// Why the last attempt to attach failed, unless the keeper was away.
    refused: Option<String>,
    /// When it may try to attach.
    next_try: Instant,
    /// How long it does not try again after the next attempt.
    pause: Duration,
    closed: bool,
}

impl KeeperLink {
    /// Checks the options, and attaches to the keeper if there is one. A keeper that is away, or does not answer before `deadline`, is
    /// no error.
    pub(crate) fn open(options: StoreOptions, deadline: Deadline) -> Result<KeeperLink> {
        remember_process();
        sizes::check_value(options.value)?;
        sizes::check_namespace(&options.namespace)?;
        socket::address(&options.socket)?;
        let attached = match attach(&options, deadline) {
            Err(error) if is_away(&error) => None,
            attached => Some(Arc::new(attached?)),
        };
        let state = Mutex::new(AttachState {
            times: attached.is_some().into(),
            attached,
            refused: None,
            next_try: Instant::now() + ATTACH_PAUSES[0],
            pause: ATTACH_PAUSES[0],
            closed: false,
        });
        let wait = ATTACH_WAIT * options.access.round_trips();
        Ok(KeeperLink { process: this_process(), options, state, attaching: Mutex::new(()), wait })
    }

    /// Returns the bytes of each value.
    pub(crate) fn value(&self) -> u64 {
        self.options.value
    }

    /// Returns whether each value has a checksum.
    pub(crate) fn checksums(&self) -> bool {
        self.options.checksums
    }

    /// Returns the attachment if there is a keeper. Attaches again if its connection has ended: at once, and then after pauses that become
    /// longer. Only one call does; the others take the keeper for away, and do not wait.
    pub(crate) fn attachment(&self) -> Result<Option<Arc<Attachment>>> {
        self.check_process()?;
        if let Some(attachment) = self.known()? {
            return Ok(Some(attachment));
        }
        let Some(_attaching) = self.attaching.try_lock() else { return Ok(None) };
        {
            let state = self.state.lock();
            if state.next_try > Instant::now() {
                return Ok(state.attached.clone());
            }
        }
        let tried = attach(&self.options, Deadline::after(self.wait));
        let mut state = self.state.lock();
        let [first, longest] = ATTACH_PAUSES;
        state.next_try = Instant::now() + state.pause;
        state.pause = if tried.is_ok() { first } else { longest.min(2 * state.pause) };
        if state.closed {
            return Err(closed());
        }
        match tried {
            Ok(attachment) => (state.attached, state.refused) = (Some(Arc::new(attachment)), None),
            Err(error) if is_away(&error) => state.refused = None,
            Err(error) => state.refused = Some(error.to_string()),
        }
        state.times += u64::from(state.attached.is_some());
        Ok(state.attached.clone())
    }

    /// Returns whether a call would not attach: there is an attachment, or the next attempt comes later.
    pub(crate) fn answers_at_once(&self) -> bool {
        self.check_process().is_err() || {
            let state = self.state.lock();
            let alive = state.attached.as_ref().is_some_and(|attachment| attachment.connection.alive());
            state.closed || alive || (state.attached.is_none() && state.next_try > Instant::now())
        }
    }

    /// Returns the attachment, or `Err(NotLinked)` if the keeper is away.
    pub(crate) fn required(&self) -> Result<Arc<Attachment>> {
        self.attachment()?.ok_or_else(|| self.away())
    }

    /// Returns the error of a call that needs the keeper.
    pub(crate) fn away(&self) -> Error {
        Error::new(ErrorKind::NotLinked, "the keeper is away").with("socket", self.options.socket.display())
    }

    /// Returns how often it has attached, and why the last attempt failed, unless the keeper was away. Does not attach.
    pub(crate) fn history(&self) -> Result<(u64, Option<String>)> {
        self.check_open()?;
        let state = self.state.lock();
        Ok((state.times, state.refused.clone()))
    }

    /// Returns an error if the store was closed, or belongs to the parent of this process.
    pub(crate) fn check_open(&self) -> Result<()> {
        self.check_process()?;
        if self.state.lock().closed { Err(closed()) } else { Ok(()) }
    }

    /// Ends an attachment that must not be used any more.
    pub(crate) fn forget(&self, attachment: &Arc<Attachment>) {
        attachment.connection.end();
        let mut state = self.state.lock();
        if state.attached.as_ref().is_some_and(|attached| Arc::ptr_eq(attached, attachment)) {
            state.attached = None;
            state.next_try = Instant::now();
        }
    }

    /// Ends the connection. Later calls fail, and calls that wait for the keeper end at once. Closing again does nothing.
    pub(crate) fn close(&self) {
        if self.process == this_process() {
            let mut state = self.state.lock();
            state.closed = true;
            if let Some(attachment) = state.attached.take() {
                attachment.connection.end();
            }
        }
    }

    /// Lets the next call attach at once, and wait this long for the keeper.
    #[cfg(test)]
    pub(crate) fn wait_now(&mut self, wait: Duration) {
        self.wait = wait;
        self.state.lock().next_try = Instant::now();
    }

    /// Returns `Err(Forked)` in a child of the process that opened the store.
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.process == this_process() {
            return Ok(());
        }
        let text = "this process was forked after the store was opened; the store belongs to its parent";
        Err(Error::new(ErrorKind::Forked, text))
    }

    /// Returns the attachment if its connection has not ended. If it has, the next call that tries to attach may do so at once.
    fn known(&self) -> Result<Option<Arc<Attachment>>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(closed());
        }
        if state.attached.as_ref().is_some_and(|attachment| !attachment.connection.alive()) {
            state.attached = None;
            state.next_try = Instant::now();
        }
        Ok(state.attached.clone())
    }
}

/// A forked child leaks its copy: other values of the child may have the numbers of the descriptors.
impl Drop for KeeperLink {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        if self.process != this_process() {
            std::mem::forget(state.attached.take());
        }
    }
}

/// Returns the error of calls of a closed store.
pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the store was closed")
}

/// Returns whether an attempt to attach failed because there is no keeper, or none that answers.
fn is_away(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotLinked | ErrorKind::Timeout)
}

fn attach(options: &StoreOptions, deadline: Deadline) -> Result<Attachment> {
    let StoreOptions { socket, namespace, value, checksums, access } = options;
    let terms = ValueTerms { value: *value, checksums: *checksums };
    Attachment::open(socket, access, namespace, terms, deadline)
}
