//! The control thread of an engine: connections that arrive, control messages, heartbeats.
//!
//! It sleeps until one of its descriptors is readable or the next heartbeat is due, and waits for no peer: what has arrived
//! of a message is kept until the rest comes, and a peer that does not take what it is sent has lost its link
//! (`peer_that_does_not_read_its_control_stream_loses_only_its_own_link`). Not for: calls (`server`), or steps that may
//! take a while (`accept::Work`).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use super::Shared;
use super::limits::Connections;
use super::link::Link;
use super::pending::{Newcomers, Returned};
use super::poller::{Bell, Poller, Watching};
use crate::error::{Error, ErrorKind, Result};
use crate::net::{Accepted, Address, Arrival, Inbox, Listener};
use crate::protocol::{self, Control, GREETING_LIMIT};

/// How long the thread rests after the system refused to watch, or had no room for a connection.
const REST: Duration = Duration::from_millis(100);
/// Descriptors that are looked at in one go.
const AT_ONCE: usize = 64;
/// What names the bell among the descriptors, whose numbers are higher.
const BELL: u64 = 0;

/// What other threads share with the control thread.
pub(super) struct ControlThread {
    poller: Poller,
    /// Rung when links have changed, a step of a greeting was taken, or all is closed.
    bell: Bell,
    numbers: AtomicU64,
    listeners: Mutex<HashMap<u64, Arc<dyn Listener>>>,
    returned: Mutex<Vec<Returned>>,
    /// Whether the thread was started.
    started: Mutex<bool>,
}

impl ControlThread {
    pub(super) fn new() -> Result<ControlThread> {
        let (poller, bell) = (Poller::new()?, Bell::new()?);
        let watched = poller.add(&bell, BELL, Watching::Always);
        watched.map_err(|errno| unwatched("the descriptor that wakes it", errno))?;
        Ok(ControlThread {
            poller,
            bell,
            numbers: AtomicU64::new(BELL),
            listeners: Mutex::default(),
            returned: Mutex::default(),
            started: Mutex::default(),
        })
    }

    /// The set of links has changed.
    pub(super) fn ring(&self) {
        self.bell.ring();
    }

    /// Starts the thread, once.
    pub(super) fn start(&self, shared: &Arc<Shared>) -> Result<()> {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        if !*started {
            let (weak, control) = (Arc::downgrade(shared), shared.control.clone());
            let watch = Watch::new(shared.limits);
            shared.threads.spawn("llm-control", move || control.run(&weak, watch))?;
            *started = true;
        }
        Ok(())
    }

    /// Accepts at `listener` until it is [left](Self::leave).
    pub(super) fn listen(&self, listener: Arc<dyn Listener>) -> Result<u64> {
        let number = self.number();
        let watched = self.poller.add(listener.readiness(), number, Watching::Always);
        watched.map_err(|errno| unwatched("a listener", errno))?;
        self.listening().insert(number, listener);
        Ok(number)
    }

    /// Closes a listener: its address is free when this returns.
    pub(super) fn leave(&self, number: u64) {
        // The lock keeps the control thread from accepting, so that no copy is left anywhere.
        let Some(listener) = self.listening().remove(&number) else { return };
        self.poller.remove(listener.readiness());
        listener.close();
    }

    /// Takes back a connection whose step a thread of the server has taken.
    pub(super) fn give_back(&self, returned: Returned) {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner).push(returned);
        self.bell.ring();
    }

    fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The thread: until the engine is closed or gone.
    fn run(&self, weak: &Weak<Shared>, mut watch: Watch) {
        let mut ready = vec![BELL];
        while let Some(shared) = weak.upgrade() {
            for number in std::mem::take(&mut ready) {
                match number {
                    BELL => {
                        // Before looking, so that whatever changes from now on rings again.
                        self.bell.silence();
                        let Some(links) = shared.state.kept() else {
                            return watch.newcomers.close(&self.poller);
                        };
                        watch.change(self, &shared, links);
                        self.take_back(&shared, &mut watch);
                    }
                    number if watch.newcomers.has(number) => {
                        watch.newcomers.hear(&shared, &self.poller, number);
                    }
                    number if watch.links.contains_key(&number) => watch.attend(self, &shared, number),
                    number => self.accept(&shared, &mut watch, number),
                }
            }
            let limit = watch.keep_time(self, &shared);
            drop(shared);
            if self.poller.wait(&mut ready, AT_ONCE, limit).is_err() {
                std::thread::sleep(REST);
                ready.push(BELL);
            }
        }
        watch.newcomers.close(&self.poller);
    }

    fn take_back(&self, shared: &Arc<Shared>, watch: &mut Watch) {
        let returned = std::mem::take(&mut *self.returned.lock().unwrap_or_else(PoisonError::into_inner));
        for returned in returned {
            watch.newcomers.back(shared, &self.poller, returned);
        }
    }

    /// Accepts what waits at the listener of that number.
    fn accept(&self, shared: &Arc<Shared>, watch: &mut Watch, number: u64) {
        for _ in 0..shared.limits.at_once() {
            if let Some(wait) = watch.newcomers.wait_for_room() {
                return watch.rest(self, wait);
            }
            // Under the lock, which `leave` needs: accepting does not wait.
            let (accepted, local) = match self.listening().get(&number) {
                Some(listener) => (listener.accept(), matches!(listener.address(), Address::Unix(_))),
                None => return,
            };
            match accepted {
                Ok(Accepted::Stream(stream)) => {
                    let newcomer = (self.number(), local);
                    watch.newcomers.enter(shared, &self.poller, newcomer, *stream);
                }
                Ok(Accepted::Nobody | Accepted::Closed) => return,
                // Somebody has to go, or the listeners have to rest: the connection knocks again at once.
                Ok(Accepted::NoRoom(_)) if watch.newcomers.make_room(shared, &self.poller) => {}
                Ok(Accepted::NoRoom(errno)) => {
                    let error = Error::new(ErrorKind::System, "a connection could not be accepted");
                    shared.refusals.log("the network", &error.because(std::io::Error::from(errno)).into());
                    return watch.rest(self, REST);
                }
                Err(error) => {
                    shared.refusals.log("the network", &error.into());
                    return watch.rest(self, REST);
                }
            }
        }
    }

    fn listening(&self) -> MutexGuard<'_, HashMap<u64, Arc<dyn Listener>>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the control thread alone knows.
struct Watch {
    newcomers: Newcomers,
    links: HashMap<u64, Watched>,
    /// The number of each link that is watched.
    numbers: HashMap<usize, u64>,
    beat: Instant,
    /// Until when nothing is accepted.
    resting: Option<Instant>,
}

struct Watched {
    link: Arc<Link>,
    inbox: Inbox,
}

impl Watch {
    fn new(limits: Connections) -> Watch {
        Watch {
            newcomers: Newcomers::new(limits.newcomers),
            links: HashMap::new(),
            numbers: HashMap::new(),
            beat: Instant::now(),
            resting: None,
        }
    }

    /// Watches `links` from now on and no others.
    fn change(&mut self, control: &ControlThread, shared: &Arc<Shared>, links: Vec<Arc<Link>>) {
        let mut before = std::mem::take(&mut self.numbers);
        for link in links {
            if let Some(number) = before.remove(&name_of(&link)) {
                self.numbers.insert(name_of(&link), number);
                continue;
            }
            let number = control.number();
            match control.poller.add(link.control(), number, Watching::Always) {
                Ok(()) => {
                    self.numbers.insert(name_of(&link), number);
                    self.links.insert(number, Watched { link, inbox: Inbox::default() });
                }
                Err(errno) => {
                    shared.died(&link, &format!("epoll does not accept its control stream: {errno}"));
                    shared.server.release(shared, link);
                }
            }
        }
        for number in before.into_values() {
            if let Some(gone) = self.links.remove(&number) {
                control.poller.remove(gone.link.control());
                shared.server.release(shared, gone.link);
            }
        }
    }

    /// Takes what the peer of one link has said.
    fn attend(&mut self, control: &ControlThread, shared: &Arc<Shared>, number: u64) {
        let Some(watched) = self.links.get_mut(&number) else { return };
        let link = watched.link.clone();
        match watched.hear(shared) {
            Ok(None) => {}
            // Only who says so is not to be looked for again: an engine that ends may be started again.
            Ok(Some((goodbye, true))) => drop(shared.lost(&link, &goodbye)),
            Ok(Some((goodbye, false))) => shared.died(&link, &goodbye),
            Err(error) => shared.died(&link, &error.to_string()),
        }
        if !link.alive() {
            self.links.remove(&number);
            self.numbers.remove(&name_of(&link));
            control.poller.remove(link.control());
            shared.server.release(shared, link);
        }
    }

    /// Does what time asks for; says how long to wait for the next.
    fn keep_time(&mut self, control: &ControlThread, shared: &Arc<Shared>) -> Option<Duration> {
        let config = &shared.cluster.config.links;
        self.newcomers.expire(shared, &control.poller);
        if self.beat.elapsed() >= config.heartbeat {
            self.beat = Instant::now();
            self.links.values().for_each(|watched| look_after(shared, &watched.link));
        }
        // Without links there is nothing to beat for.
        let beat = config.heartbeat.saturating_sub(self.beat.elapsed());
        let beat = (!self.links.is_empty()).then_some(beat);
        let rest = self.resting.map(|until| until.saturating_duration_since(Instant::now()));
        if rest.is_some_and(|rest| rest.is_zero()) {
            self.wake(control);
        }
        let now = shared.refusals.flush(Instant::now());
        [beat, rest, now, self.newcomers.next_limit()].into_iter().flatten().min()
    }

    /// Accepts nothing for a while.
    fn rest(&mut self, control: &ControlThread, limit: Duration) {
        self.resting = Some(Instant::now() + limit);
        control.listening().values().for_each(|listener| control.poller.remove(listener.readiness()));
    }

    fn wake(&mut self, control: &ControlThread) {
        self.resting = None;
        for (&number, listener) in &*control.listening() {
            // One that has come meanwhile is watched already.
            let _ = control.poller.add(listener.readiness(), number, Watching::Always);
        }
    }
}

impl Watched {
    /// Takes the messages that are there; if one says goodbye, returns why, and whether the link was unlinked.
    fn hear(&mut self, shared: &Arc<Shared>) -> Result<Option<(String, bool)>> {
        let link = &self.link;
        let gone = || {
            Error::new(ErrorKind::NotLinked, "the peer closed the connection: it was unlinked there or ended")
        };
        // One at a time: who says much is heard again after the others.
        let (kind, body) = match self.inbox.take(link.control(), GREETING_LIMIT, false)? {
            Arrival::Frame((kind, body, _)) => (kind, body),
            Arrival::Partial => return Ok(None),
            Arrival::Ended => return Err(gone()),
        };
        link.hear();
        match protocol::open(kind, &body)? {
            Control::Ping => link.tell(&Control::Pong)?,
            Control::Pong => link.answered(),
            Control::Dial => {
                if link.dials() && link.may_open() {
                    shared.server.dial(shared, link);
                }
            }
            Control::Bye { reason, unlinked } => return Ok(Some((reason, unlinked))),
        }
        Ok(None)
    }
}

/// Breaks a link that has been silent for too long, asks one that is silent for a sign of life, and ends streams that
/// nobody has used for long.
fn look_after(shared: &Arc<Shared>, link: &Arc<Link>) {
    let config = &shared.cluster.config.links;
    link.trim();
    let silent = link.silent();
    // What it said may be there, and only unread as yet.
    if silent >= config.silence && !link.control().readable_within(Duration::ZERO) {
        let text = format!(
            "the peer gave no sign of life for {} ms (llm.LinkSilence): it is stopped, or the way to it is cut",
            silent.as_millis()
        );
        shared.died(link, &text);
    } else if silent >= config.heartbeat / 2
        && let Err(error) = link.tell(&Control::Ping)
    {
        shared.died(link, &error.to_string());
    }
}

/// Names a link while it is held.
fn name_of(link: &Arc<Link>) -> usize {
    Arc::as_ptr(link).addr()
}

#[cold]
fn unwatched(what: &str, errno: rustix::io::Errno) -> Error {
    Error::new(ErrorKind::System, format!("epoll does not accept {what}"))
        .with("errno", errno.raw_os_error())
        .because(std::io::Error::from(errno))
}
