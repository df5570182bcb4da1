//! The control thread of an engine: it accepts connections, reads control messages and sends heartbeats.
//!
//! It sleeps until one of its descriptors is readable or the next heartbeat is due, and never waits for a
//! peer. A part of a message is kept until the rest arrives, and a peer that does not read its control stream
//! loses its link (`test_peers_that_do_not_read_their_control_stream_are_dropped`). The threads of
//! `server` answer calls and perform handshake steps that may take long.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use hashbrown::{HashMap, HashSet};

use super::control_poller::{BELL, ControlPoller};
use super::limits::Connections;
use super::link::{HUNG_UP, Link};
use super::membership;
use super::pending::PendingStreams;
use super::poller::{Watching, next_number};
use super::shared::Shared;
use crate::error::{Error, ErrorKind, OptionName, Result};
use crate::memory::EventFd;
use crate::net::{self, Accepted, Address, Arrival, Inbox};
use crate::protocol::{self, ControlMessage, HANDSHAKE_LIMIT};
use crate::sync::guarded;

/// How long the thread pauses after epoll failed or a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of descriptors handled after one wait.
const MAX_EVENTS: usize = 64;

/// Starts the control thread unless it was started before.
pub(super) fn start(shared: &Arc<Shared>) -> Result<()> {
    shared.control.start(|control| {
        let (weak, watch) = (Arc::downgrade(shared), Watch::new(shared.limits, control.bell().clone()));
        let begun = shared.threads.spawn("llm-control", move || run(&control, &weak, watch));
        begun.map_err(|error| Error::no_thread("the thread llm-control", error))
    })
}

/// The body of the thread. It ends when the engine is closed or dropped.
fn run(control: &ControlPoller, weak: &Weak<Shared>, mut watch: Watch) {
    let mut ready = vec![BELL];
    while let Some(shared) = weak.upgrade() {
        for number in std::mem::take(&mut ready) {
            let goes_on = guarded("attending to links", || watch.handle(control, &shared, number));
            match goes_on {
                Some(true) => {}
                Some(false) => return watch.pending.close(&control.poller),
                None => {
                    guarded("giving up a link", || watch.give_up(control, &shared, number));
                }
            }
        }
        let limit = guarded("checking the timeouts of links", || watch.check_timeouts(control, &shared));
        let limit = limit.unwrap_or(Some(PAUSE));
        drop(shared);
        if control.poller.wait(&mut ready, MAX_EVENTS, limit).is_err() {
            std::thread::sleep(PAUSE);
            ready.push(BELL);
        }
    }
    watch.pending.close(&control.poller);
}

/// Accepts the connections that wait at the listener `number`.
fn accept(control: &ControlPoller, shared: &Arc<Shared>, watch: &mut Watch, number: u64) {
    for _ in 0..shared.limits.at_once() {
        if let Some(wait) = watch.pending.wait_for_room() {
            return watch.rest(control, wait);
        }
        // Under the lock that `leave` takes; accepting does not wait.
        let (accepted, local) = match control.listeners.lock().get(&number) {
            Some(listener) => {
                let local = matches!(listener.address(), Address::Unix(_));
                if local && net::is_crowded() {
                    watch.resting = Some(Instant::now() + PAUSE);
                    return control.poller.remove(listener.readiness());
                }
                (listener.accept(), local)
            }
            None => return,
        };
        match accepted {
            Ok(Accepted::Stream(stream)) => {
                let pending = (next_number(), local);
                watch.pending.enter(shared, &control.poller, pending, *stream);
            }
            Ok(Accepted::Nobody | Accepted::Closed) => return,
            // Without a free descriptor, drop another connection or pause the listeners. Otherwise the
            // waiting connection would wake the thread again at once.
            Ok(Accepted::NoRoom(_)) if watch.pending.make_room(shared, &control.poller) => {}
            Ok(Accepted::NoRoom(errno)) => {
                let error = Error::new(ErrorKind::System, "a connection could not be accepted");
                shared.refusals.log("the network", &error.because(std::io::Error::from(errno)).into());
                return watch.rest(control, PAUSE);
            }
            Err(error) => {
                shared.refusals.log("the network", &error.into());
                return watch.rest(control, PAUSE);
            }
        }
    }
}

/// The state that only the control thread uses.
struct Watch {
    pending: PendingStreams,
    /// The watched links, by their numbers.
    links: HashMap<u64, Watched>,
    beat: Instant,
    /// The time until which no connection is accepted, or none at the local socket.
    resting: Option<Instant>,
}

struct Watched {
    link: Arc<Link>,
    inbox: Inbox,
}

impl Watch {
    fn new(limits: Connections, bell: Arc<EventFd>) -> Watch {
        Watch {
            pending: PendingStreams::new(limits.pending, bell),
            links: HashMap::new(),
            beat: Instant::now(),
            resting: None,
        }
    }

    /// Handles the descriptor `number`, which the poller reported. Returns `false` if the engine closes.
    fn handle(&mut self, control: &ControlPoller, shared: &Arc<Shared>, number: u64) -> bool {
        match number {
            BELL => {
                // Cleared before the links are read, so that later changes signal again.
                control.bell().clear();
                let Some(links) = shared.registry.all() else { return false };
                self.change(control, shared, links);
                self.pending.take_back(shared, &control.poller);
            }
            number if self.pending.has(number) => self.pending.read(shared, &control.poller, number),
            number if self.links.contains_key(&number) => self.attend(control, shared, number),
            number => accept(control, shared, self, number),
        }
        true
    }

    /// Ends the link or the connection `number`, whose handling has panicked. Pauses the listeners, or the thread, if it is one of
    /// these that has panicked.
    fn give_up(&mut self, control: &ControlPoller, shared: &Arc<Shared>, number: u64) {
        if number == BELL {
            std::thread::sleep(PAUSE);
            return control.bell().signal();
        }
        if !self.links.contains_key(&number) && !self.pending.has(number) {
            return self.rest(control, PAUSE);
        }
        if let Some(Watched { link, .. }) = self.links.remove(&number) {
            control.poller.remove(link.control.stream());
            membership::link_died(
                shared,
                &link,
                "this engine panicked while it handled a message of the peer",
            );
            shared.server.release(link);
        }
        self.pending.give_up(shared, &control.poller, number);
    }

    /// Watches exactly the given links from now on.
    fn change(&mut self, control: &ControlPoller, shared: &Arc<Shared>, links: Vec<Arc<Link>>) {
        let kept: HashSet<u64> = links.iter().map(|link| link.number).collect();
        for (_, gone) in self.links.extract_if(|number, _| !kept.contains(number)) {
            control.poller.remove(gone.link.control.stream());
            shared.server.release(gone.link);
        }
        for link in links {
            if self.links.contains_key(&link.number) {
                continue;
            }
            let stream = link.control.stream();
            match control.poller.add("its control stream", stream, link.number, Watching::Always) {
                Ok(()) => drop(self.links.insert(link.number, Watched { link, inbox: Inbox::default() })),
                Err(error) => {
                    membership::link_died(shared, &link, error);
                    shared.server.release(link);
                }
            }
        }
    }

    /// Reads a message from the peer of one link, and handles the end of the link.
    fn attend(&mut self, control: &ControlPoller, shared: &Arc<Shared>, number: u64) {
        let Some(watched) = self.links.get_mut(&number) else { return };
        let link = watched.link.clone();
        match watched.read(shared) {
            Ok(None) => {}
            // A peer that unlinked (`true`) is not searched for again. An engine that was closed may be
            // started again.
            Ok(Some((goodbye, true))) => drop(shared.registry.lost(&link, goodbye)),
            Ok(Some((goodbye, false))) => membership::link_died(shared, &link, goodbye),
            Err(error) => membership::link_died(shared, &link, error),
        }
        if !link.alive() {
            self.links.remove(&number);
            control.poller.remove(link.control.stream());
            shared.server.release(link);
        }
    }

    /// Performs what is due, and returns how long to wait for the next event.
    fn check_timeouts(&mut self, control: &ControlPoller, shared: &Arc<Shared>) -> Option<Duration> {
        let config = &shared.resources.config.links;
        self.pending.expire(shared, &control.poller);
        if self.beat.elapsed() >= config.heartbeat {
            self.beat = Instant::now();
            let panics = |(&number, watched): (&u64, &Watched)| {
                guarded("checking a link", || check_silence(shared, &watched.link))
                    .is_none()
                    .then_some(number)
            };
            let panicked: Vec<u64> = self.links.iter().filter_map(panics).collect();
            for number in panicked {
                self.give_up(control, shared, number);
            }
        }
        // Without links, no heartbeat is due.
        let beat = config.heartbeat.saturating_sub(self.beat.elapsed());
        let beat = (!self.links.is_empty()).then_some(beat);
        let rest = self.resting.map(|until| until.saturating_duration_since(Instant::now()));
        if rest.is_some_and(|rest| rest.is_zero()) {
            self.wake(control);
        }
        let now = shared.refusals.flush(Instant::now());
        [beat, rest, now, self.pending.next_limit()].into_iter().flatten().min()
    }

    /// Pauses all listeners for `limit`.
    fn rest(&mut self, control: &ControlPoller, limit: Duration) {
        self.resting = Some(Instant::now() + limit);
        control.listeners.lock().values().for_each(|listener| control.poller.remove(listener.readiness()));
    }

    fn wake(&mut self, control: &ControlPoller) {
        self.resting = None;
        for (&number, listener) in &*control.listeners.lock() {
            // A listener that was added during the pause is watched already, so this may fail.
            let _ = control.poller.add("a listener", listener.readiness(), number, Watching::Always);
        }
    }
}

impl Watched {
    /// Reads one message if it is complete. If it is a goodbye, returns its reason and whether the peer
    /// unlinked.
    fn read(&mut self, shared: &Arc<Shared>) -> Result<Option<(String, bool)>> {
        let link = &self.link;
        let gone = || Error::new(ErrorKind::NotLinked, HUNG_UP);
        // Only one message at a time, so that a peer that sends many does not delay the others.
        let arrived = self.inbox.take(link.control.stream(), HANDSHAKE_LIMIT);
        let arrived = arrived.map_err(|error| if error.is_hang_up() { gone() } else { error })?;
        let (kind, body) = match arrived {
            Arrival::Frame((kind, body, _)) => (kind, body),
            Arrival::Partial => return Ok(None),
            Arrival::Ended => return Err(gone()),
        };
        link.control.note_sign_of_life();
        match protocol::open(kind, &body)? {
            ControlMessage::Ping => link.send_control(&ControlMessage::Pong)?,
            ControlMessage::Pong => link.control.note_pong(),
            ControlMessage::Dial => {
                if link.calls.dialer().is_some() && link.served.may_open() {
                    shared.server.dial(link);
                }
            }
            ControlMessage::Polled { arrived, polled } => link.notifications.note_polled(arrived, polled),
            ControlMessage::Bye { reason, unlinked } => return Ok(Some((reason, unlinked))),
        }
        Ok(None)
    }
}

/// Breaks a link that was silent for too long, pings the peer of one that was silent for half a heartbeat,
/// and closes streams that were idle for long.
fn check_silence(shared: &Arc<Shared>, link: &Arc<Link>) {
    let config = &shared.resources.config.links;
    link.calls.trim();
    link.served.writes.trim();
    let silent = link.control.silent();
    // A message may have arrived that is not read yet.
    if silent >= config.silence && !link.control.stream().readable_within(Duration::ZERO) {
        let text = format!(
            "no message from the peer for {} ms: its process is stopped, or the network is interrupted",
            silent.as_millis()
        );
        membership::link_died(
            shared,
            link,
            Error::new(ErrorKind::NotLinked, text).of_option(OptionName::SILENCE),
        );
    } else if silent >= config.heartbeat / 2
        && let Err(error) = link.send_control(&ControlMessage::Ping)
    {
        membership::link_died(shared, link, error);
    }
}
