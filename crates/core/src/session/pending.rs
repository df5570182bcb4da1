//! Connections that are not yet a link or a stream of a link: their limit in number and time.
//!
//! A stalled connection costs one descriptor for the time of a handshake, and no thread. When the limit is
//! reached, the oldest unauthenticated connection is dropped, so that silent connections keep no peer out
//! (`test_floods_of_stalled_connections_keep_nobody_out`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::accept::{Connection, LongStep, Next, Step};
use super::handshake::HANDSHAKE_TIME;
use super::poller::{Poller, Watching};
use super::refusals::{Reason, Refusal};
use super::shared::Shared;
use crate::error::{Error, ErrorKind};
use crate::memory::EventFd;
use crate::model::Deadline;
use crate::net::{Arrival, Inbox, Stream};
use crate::protocol;
use crate::sync::{Mutex, guarded};

/// How long a connection may take for its handshake before it may be dropped to make room for another.
const MIN_HANDSHAKE_TIME: Duration = Duration::from_millis(100);

/// The connections of one engine whose handshake is not finished.
pub(super) struct PendingStreams {
    most: usize,
    returned: Arc<Returned>,
    /// The connections by number, so that the oldest come first.
    all: BTreeMap<u64, PendingEntry>,
}

struct PendingEntry {
    connection: Connection,
    /// The message for which the control thread watches it, of which a part may have arrived. `None` while a thread performs a step.
    waits: Option<(Step, Inbox)>,
    /// A thread makes a link of it. So it must not be dropped any more, and the control thread watches it as that of the link.
    enters: bool,
}

impl PendingEntry {
    fn is_proven(&self) -> bool {
        self.waits.as_ref().is_none_or(|(step, _)| step.is_proven())
    }
}

/// The results of the steps that server threads have performed, by the number of the connection.
struct Returned {
    /// Wakes the control thread.
    bell: Arc<EventFd>,
    steps: Mutex<Vec<(u64, Result<Next, Refusal>)>>,
}

impl Returned {
    fn push(&self, number: u64, next: Result<Next, Refusal>) {
        self.steps.lock().push((number, next));
        self.bell.signal();
    }
}

impl PendingStreams {
    pub(super) fn new(most: usize, bell: Arc<EventFd>) -> PendingStreams {
        let returned = Arc::new(Returned { bell, steps: Mutex::default() });
        PendingStreams { most, returned, all: BTreeMap::new() }
    }

    pub(super) fn has(&self, number: u64) -> bool {
        self.all.contains_key(&number)
    }

    /// Returns the time until the oldest connection must be dropped.
    pub(super) fn next_limit(&self) -> Option<Duration> {
        self.all.values().find(|entry| !entry.enters).map(|entry| entry.connection.until.left())
    }

    /// Adds a connection. `local` says that it arrived at the local socket.
    pub(super) fn enter(
        &mut self,
        shared: &Shared,
        poller: &Poller,
        (number, local): (u64, bool),
        stream: Stream,
    ) {
        if self.all.len() >= self.most {
            self.make_room(shared, poller);
        }
        let stream = Arc::new(stream);
        let until = Deadline::after(HANDSHAKE_TIME).named("the handshake limit");
        if let Err(error) = poller.add("the connection", &*stream, number, Watching::Always) {
            return refuse(shared, &stream, &error.into());
        }
        let connection = Connection { stream, local, until };
        let waits = Some((Step::Hello, Inbox::default()));
        self.all.insert(number, PendingEntry { connection, waits, enters: false });
    }

    /// Returns how long to wait before the next connection is accepted, if the limit is reached and the
    /// connection to be dropped has had too little time for its handshake. Connections that arrive meanwhile
    /// wait in the queue of the listener.
    pub(super) fn wait_for_room(&self) -> Option<Duration> {
        if self.all.len() < self.most {
            return None;
        }
        let (_, entry) = self.victim()?;
        let age = HANDSHAKE_TIME.saturating_sub(entry.connection.until.left());
        MIN_HANDSHAKE_TIME.checked_sub(age).filter(|left| !left.is_zero())
    }

    /// Returns the connection to drop if room is needed: the oldest unauthenticated one. If more than half of
    /// the limit are authenticated and have not finished, it is the oldest of those.
    fn victim(&self) -> Option<(u64, &PendingEntry)> {
        let waiting = || self.all.iter().filter(|(_, entry)| !entry.enters);
        let proven = waiting().filter(|(_, entry)| entry.is_proven()).count();
        let first = |proven: bool| waiting().find(|(_, entry)| entry.is_proven() == proven);
        let stalled = if proven > self.most / 2 { first(true) } else { None };
        stalled.or_else(|| first(false)).or_else(|| first(true)).map(|(&number, entry)| (number, entry))
    }

    /// Drops one connection to make room. Returns `false` if there is none to drop.
    pub(super) fn make_room(&mut self, shared: &Shared, poller: &Poller) -> bool {
        let Some((number, _)) = self.victim() else { return false };
        let text = "too many connections have not finished their handshake; the oldest was dropped";
        let full = Error::new(ErrorKind::LinkFailed, text).with("limit", self.most);
        self.end(shared, poller, number, Some(&Refusal::new(Reason::Full, full)));
        true
    }

    /// Drops the connections whose deadline has passed.
    pub(super) fn expire(&mut self, shared: &Shared, poller: &Poller) {
        while let Some((&number, entry)) = self.all.iter().find(|(_, entry)| !entry.enters) {
            let until = entry.connection.until;
            if !until.passed() {
                return;
            }
            let late = until.error("waiting for the handshake of the peer");
            self.end(shared, poller, number, Some(&Refusal::new(Reason::Late, late)));
        }
    }

    /// Reads what has arrived on the connection `number`, and performs the next step.
    pub(super) fn read(&mut self, shared: &Arc<Shared>, poller: &Poller, number: u64) {
        let Some(PendingEntry { connection, waits, .. }) = self.all.get_mut(&number) else { return };
        let Some((step, inbox)) = waits else { return };
        let next = match inbox.take(&connection.stream, step.limit()) {
            Ok(Arrival::Partial) => return,
            // A connection that its peer closes was not refused; it may be the probe of a load balancer.
            Ok(Arrival::Ended) => return self.end(shared, poller, number, None),
            Ok(Arrival::Frame(frame)) => match waits.take() {
                Some((step, _)) => step.advance(shared, connection, frame),
                None => return,
            },
            // The peer has given up its attempt, or ended.
            Err(error) if error.is_hang_up() => {
                tracing::debug!(target: "llm_datadist::links", "a connection ended during its handshake: {error}");
                return self.end(shared, poller, number, None);
            }
            Err(error) => Err(Refusal::unreadable(error)),
        };
        self.apply(shared, poller, number, next, true);
    }

    /// Takes back the connections for which server threads have performed a step.
    pub(super) fn take_back(&mut self, shared: &Arc<Shared>, poller: &Poller) {
        loop {
            // One at a time, so that a panic loses no other.
            let Some((number, next)) = self.returned.steps.lock().pop() else { return };
            self.apply(shared, poller, number, next, false);
        }
    }

    /// Continues after a step of a connection, which the poller still has if it is `watched`.
    fn apply(
        &mut self,
        shared: &Arc<Shared>,
        poller: &Poller,
        number: u64,
        next: Result<Next, Refusal>,
        watched: bool,
    ) {
        let Some(PendingEntry { connection, waits, enters }) = self.all.get_mut(&number) else { return };
        let stream = &*connection.stream;
        // Data that arrives meanwhile waits in the socket.
        if watched && !matches!(next, Ok(Next::Wait(_))) {
            poller.remove(stream);
        }
        match next {
            Ok(Next::Wait(step)) => {
                let added = if watched {
                    Ok(())
                } else {
                    poller.add("the connection", stream, number, Watching::Always)
                };
                match added {
                    Ok(()) => *waits = Some((step, Inbox::default())),
                    Err(error) => self.end(shared, poller, number, Some(&error.into())),
                }
            }
            Ok(Next::Long(step)) => {
                *enters = matches!(step, LongStep::Enter(..));
                let connection = connection.clone();
                self.have_done(shared, number, connection, step);
            }
            Ok(Next::Done) => drop(self.all.remove(&number)),
            Err(refusal) => self.end(shared, poller, number, Some(&refusal)),
        }
    }

    /// Has a server thread perform `work`.
    fn have_done(&self, shared: &Arc<Shared>, number: u64, connection: Connection, work: LongStep) {
        let (weak, returned, stream) =
            (Arc::downgrade(shared), self.returned.clone(), connection.stream.clone());
        let step = Box::new(move || {
            if let Some(shared) = weak.upgrade() {
                let next = guarded("performing a step of a handshake", || work.run(&shared, &connection));
                let panicked = || Error::new(ErrorKind::System, "a step of the handshake panicked");
                returned.push(number, next.unwrap_or_else(|| Err(panicked().into())));
            }
        });
        if let Err(error) = shared.server.work(step) {
            tracing::error!(target: "llm_datadist::links", "dropped a connection: no thread could be started for its handshake: {error}");
            stream.close();
        }
    }

    /// Drops the connection `number`, if there is one, because its handling has panicked.
    pub(super) fn give_up(&mut self, shared: &Shared, poller: &Poller, number: u64) {
        let Some(entry) = self.all.get(&number) else { return };
        poller.remove(&*entry.connection.stream);
        let error = Error::new(ErrorKind::System, "the handling of the connection panicked");
        self.end(shared, poller, number, Some(&error.into()));
    }

    fn end(&mut self, shared: &Shared, poller: &Poller, number: u64, refusal: Option<&Refusal>) {
        let Some(PendingEntry { connection, waits, .. }) = self.all.remove(&number) else { return };
        if waits.is_some() {
            poller.remove(&*connection.stream);
        }
        match refusal {
            Some(refusal) => refuse(shared, &connection.stream, refusal),
            None => connection.stream.close(),
        }
    }

    /// Drops all connections when the engine closes. One that is becoming a link is left open: the link sends
    /// a goodbye before it ends.
    pub(super) fn close(&mut self, poller: &Poller) {
        for entry in std::mem::take(&mut self.all).into_values() {
            if entry.waits.is_some() {
                poller.remove(&*entry.connection.stream);
            }
            if !entry.enters {
                entry.connection.stream.close();
            }
        }
    }
}

/// Sends the reason of a refusal to the peer, logs it and closes the connection.
fn refuse(shared: &Shared, stream: &Stream, refusal: &Refusal) {
    shared.refusals.log(&stream.about.peer, refusal);
    // Fails if the peer is gone or has not read earlier messages.
    let _ = stream.send_now(&protocol::refusal(&refusal.error), &[]);
    stream.close();
}
