//! The events of one engine, until the program polls for them.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock, Weak};

use rustix::event::EventfdFlags;

use super::link_ends::{CallsOfPeers, HeldEnd, ReportsEnds};
use super::notification::{LinkEnd, Notification, NotificationSource, PeerInfo};
use super::transfer::{Reports, Transfer};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::grants::{Grant, GrantObserver};
use crate::memory::EventFd;
use crate::model::GrantEnd;
use crate::sync::Mutex;

/// Name of the list in out-of-memory errors.
const EVENTS: &str = "the events of an engine";

/// What is kept of news about links. Beyond that, the oldest ends of links are dropped, then the oldest new links: a peer that
/// is restarted again and again is a new peer of a native engine each time.
const MAX_NEWS: usize = 4096;
/// Number of taken outcomes that are never worth removing.
const MIN_TAKEN: usize = 64;

/// Something that happened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A transfer has ended.
    Completed(Arc<Transfer>),
    /// A peer has sent a message.
    Notification(Box<Notification>),
    /// A link was made.
    LinkUp(Box<PeerInfo>),
    /// A link has ended.
    LinkDown(Box<LinkEnd>),
    /// A grant of this engine has ended.
    GrantEnded(Arc<Grant>, GrantEnd),
}

/// The events of one engine that were not polled yet, and the number of its transfers.
#[derive(Debug)]
pub struct EventQueue {
    /// Maximum number of transfers that run or whose outcome nobody has taken.
    limit: usize,
    /// Unset until there are calls.
    calls: OnceLock<Weak<dyn CallsOfPeers>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// In the order in which they happened. Outcomes among them may have been taken since.
    events: VecDeque<Event>,
    /// The ends of links that wait for the ends of calls, each with its number.
    held: Vec<(u64, LinkEnd)>,
    last_held: u64,
    /// Number of entries of `events` that were not taken.
    untaken: usize,
    /// Number of transfers that run or were not taken.
    open: usize,
    /// Number of messages of peers in `events`. The budget for peers bounds their memory.
    messages: usize,
    /// Number of news about links in `events`.
    news: usize,
    /// Number of ends of grants in `events`.
    grant_ends: usize,
    /// Readable while `untaken` is above 0. `None` until somebody asks for it.
    readable: Option<Arc<EventFd>>,
    /// Whether the ends of transfers are no events ([`EventQueue::drop_outcomes`]).
    drops_outcomes: bool,
    /// Whether the program polls or is known to, so that news about links and grants are kept.
    polled: bool,
    closed: bool,
}

impl EventQueue {
    /// Creates a queue for at most `limit` transfers at a time.
    pub fn new(limit: usize) -> Self {
        EventQueue { limit, calls: OnceLock::new(), state: Mutex::default() }
    }

    /// Sets who knows the calls that run.
    pub(crate) fn set_calls(&self, calls: Weak<dyn CallsOfPeers>) {
        // An engine sets it once.
        let _ = self.calls.set(calls);
    }

    /// Has news about links and grants kept from now on, and not only once the program polls.
    pub(crate) fn keep_news(&self) {
        self.state.lock().polled = true;
    }

    /// Lets the ends of transfers be no events from now on: the program takes each outcome from its handle. A transfer that has
    /// ended does not count as open then.
    pub fn drop_outcomes(&self) {
        self.state.lock().drops_outcomes = true;
    }

    /// Creates the record of a transfer that starts now. Returns `Err(Busy)` if the queue has no room for it,
    /// `Err(OutOfMemory)` if its list cannot grow, and `Err(Closed)` once it is closed.
    pub(crate) fn start(self: &Arc<Self>) -> Result<Arc<Transfer>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        if state.open >= self.limit {
            let text = "too many transfers run or wait for their outcome to be taken";
            let error = Error::new(ErrorKind::Busy, text).with("open_transfers", state.open);
            return Err(error.with("limit", self.limit));
        }
        state.open += 1;
        if let Err(error) = state.make_room(0) {
            state.open -= 1;
            return Err(error);
        }
        drop(state);
        Ok(Transfer::new(Some(self.clone())))
    }

    /// Queues the messages of a peer, all or none, after `first` has succeeded. There is room for them when it is called.
    pub(crate) fn notify(
        &self,
        messages: impl ExactSizeIterator<Item = Notification>,
        first: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        state.make_room(messages.len())?;
        first()?;
        for message in messages {
            state.messages += 1;
            state.push(Event::Notification(Box::new(message)));
        }
        Ok(())
    }

    /// Queues that a link was made, if the program polls.
    pub(crate) fn link_up(&self, peer: PeerInfo) {
        let mut state = self.state.lock();
        // The link that ended comes first, even if calls that used it have not ended.
        while let Some(at) = state.held.iter().position(|(_, end)| end.peer.cluster == peer.cluster) {
            let (_, end) = state.held.remove(at);
            state.push_end(end);
        }
        state.push_news(Event::LinkUp(Box::new(peer)));
    }

    /// Queues that a link has ended, if the program polls: after the ends of the calls that used it, but not later than
    /// [`MAX_HELD`](super::link_ends::MAX_HELD).
    pub(crate) fn link_down(self: &Arc<Self>, end: LinkEnd) {
        let (cluster, calls) = (end.peer.cluster, self.calls.get().and_then(Weak::upgrade));
        let mut state = self.state.lock();
        let Some(calls) = calls.filter(|_| state.held.try_reserve(1).is_ok()) else {
            return state.push_end(end);
        };
        state.last_held += 1;
        let number = state.last_held;
        state.held.push((number, end));
        drop(state);
        let queue: Weak<Self> = Arc::downgrade(self);
        calls.hold(cluster, &Arc::new(HeldEnd { queue, number }));
    }

    /// Returns at most `most` events, and removes them. Never waits. Returns `Err(Closed)` once the queue is closed.
    pub fn poll(&self, most: usize) -> Result<Vec<Event>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        state.polled = true;
        if state.untaken == 0 {
            return Ok(Vec::new());
        }
        let count = most.min(state.untaken);
        let mut events = fallible::with_capacity(EVENTS, count)?;
        while events.len() < count {
            let Some(event) = state.events.pop_front() else { break };
            if !state.note_popped(&event) {
                continue;
            }
            state.untaken -= 1;
            events.push(event);
        }
        state.silence_if_empty();
        drop(state);
        tell_sources(&mut events);
        Ok(events)
    }

    /// Puts events back that [`poll`](Self::poll) has returned and that could not be delivered.
    pub fn put_back(&self, events: impl DoubleEndedIterator<Item = Event> + ExactSizeIterator) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        // Other events may use their room by now. If there is no memory for more room, the list grows without a check.
        let _ = state.make_room(events.len());
        for event in events.rev() {
            match &event {
                Event::Completed(transfer) => {
                    transfer.untake();
                    state.open += 1;
                }
                Event::Notification(_) => state.messages += 1,
                Event::LinkUp(_) | Event::LinkDown(_) => state.news += 1,
                Event::GrantEnded(..) => state.grant_ends += 1,
            }
            state.drop_taken();
            state.events.push_front(event);
            state.untaken += 1;
        }
        if state.untaken > 0 {
            state.signal();
        }
    }

    /// Returns the descriptor that is readable while [`poll`](Self::poll) has something to return. The caller must not
    /// read from it. It is always the same one, until the queue is closed.
    pub fn descriptor(&self) -> Result<Arc<EventFd>> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        state.polled = true;
        if let Some(readable) = &state.readable {
            return Ok(readable.clone());
        }
        let readable = Arc::new(EventFd::new("an event descriptor", EventfdFlags::empty())?);
        if state.untaken > 0 {
            readable.signal();
        }
        state.readable = Some(readable.clone());
        Ok(readable)
    }

    /// Returns the number of transfers that run or whose outcome nobody has taken.
    pub fn open_transfers(&self) -> usize {
        self.state.lock().open
    }

    /// Drops all events and closes the descriptor, after a last signal for those who wait on a copy of it.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.signal();
        let dropped =
            (std::mem::take(&mut state.events), std::mem::take(&mut state.held), state.readable.take());
        drop(state);
        drop(dropped);
    }
}

impl Reports for EventQueue {
    fn give_back(&self) {
        self.state.lock().open -= 1;
    }

    fn ended(&self, transfer: &Arc<Transfer>) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        if state.drops_outcomes && transfer.take() {
            state.open -= 1;
            return;
        }
        state.push(Event::Completed(transfer.clone()));
    }

    fn taken(&self) {
        let mut state = self.state.lock();
        if !state.closed {
            state.untaken -= 1;
            state.open -= 1;
            state.silence_if_empty();
        }
    }
}

impl ReportsEnds for EventQueue {
    fn report_end(&self, number: u64) {
        let mut state = self.state.lock();
        if let Some(at) = state.held.iter().position(|(known, _)| *known == number) {
            let (_, end) = state.held.remove(at);
            state.push_end(end);
        }
    }
}

impl GrantObserver for EventQueue {
    fn grant_ended(&self, grant: &Arc<Grant>, why: GrantEnd) {
        let mut state = self.state.lock();
        if state.polled && !state.closed && state.make_room(1).is_ok() {
            state.grant_ends += 1;
            state.push(Event::GrantEnded(grant.clone(), why));
        }
    }

    fn unpolled(&self) -> usize {
        self.state.lock().grant_ends
    }
}

impl State {
    /// Makes room for `more` events beside the outcomes of all transfers that run, so that the end of a transfer needs no
    /// memory (`the_end_of_a_transfer_needs_no_memory`). There is at least an eighth more room than needed, so that the list
    /// rarely moves.
    fn make_room(&mut self, more: usize) -> Result<()> {
        let needed = self.open + self.messages + self.news + self.grant_ends + more;
        if self.events.capacity() > needed + needed / 8 + 2 {
            return Ok(());
        }
        let capacity = needed + needed / 4 + 3;
        let room = self.events.try_reserve_exact(capacity.saturating_sub(self.events.len()));
        room.map_err(|_| fallible::out_of_memory(EVENTS, capacity * size_of::<Event>()))
    }

    /// Removes the outcomes that were taken, if they are most of the list, or if there is no other room for one more event.
    fn drop_taken(&mut self) {
        let len = self.events.len();
        if len == self.events.capacity() || len > 2 * self.untaken + MIN_TAKEN {
            self.events.retain(|event| !matches!(event, Event::Completed(ended) if ended.is_taken()));
        }
    }

    /// Counts an event that leaves the queue. Returns `false` if it is an outcome that was taken before.
    fn note_popped(&mut self, event: &Event) -> bool {
        match event {
            Event::Completed(transfer) => {
                let first = transfer.take();
                self.open -= usize::from(first);
                return first;
            }
            Event::Notification(_) => self.messages -= 1,
            Event::LinkUp(_) | Event::LinkDown(_) => self.news -= 1,
            Event::GrantEnded(..) => self.grant_ends -= 1,
        }
        true
    }

    fn push(&mut self, event: Event) {
        self.drop_taken();
        self.events.push_back(event);
        self.untaken += 1;
        if self.untaken == 1 {
            self.signal();
        }
    }

    /// Queues that a link has ended. If the end of an earlier link to the same incarnation was not polled yet, this event stands
    /// for both, and has the sum of the messages.
    fn push_end(&mut self, mut end: LinkEnd) {
        let of =
            |peer: &PeerInfo| (peer.cluster, peer.incarnation) == (end.peer.cluster, end.peer.incarnation);
        let before = self.forget(|event| matches!(event, Event::LinkDown(before) if of(&before.peer)));
        if let Some(Event::LinkDown(before)) = before {
            // The link in between, which was made later than the one that is still in the queue.
            let last = self.events.iter().rposition(|event| matches!(event, Event::LinkUp(peer) if of(peer)));
            self.take_news(last);
            end.unacknowledged += before.unacknowledged;
        }
        self.push_news(Event::LinkDown(Box::new(end)));
    }

    /// Queues news about a link. They are dropped if nobody polls, or if there is no memory for them.
    fn push_news(&mut self, event: Event) {
        if self.polled && !self.closed && self.make_room(1).is_ok() {
            if self.news >= MAX_NEWS {
                self.forget_oldest_news();
            }
            self.news += 1;
            self.push(event);
        }
        self.silence_if_empty();
    }

    /// Removes the oldest news that no longer matter: the end of a link, and that it was made. Without one, removes the oldest
    /// news that a link was made.
    fn forget_oldest_news(&mut self) {
        let ended = self.forget(|event| matches!(event, Event::LinkDown(_)));
        let of = match &ended {
            Some(Event::LinkDown(end)) => Some((end.peer.cluster, end.peer.incarnation)),
            _ => None,
        };
        let matters = |peer: &PeerInfo| of.is_none_or(|of| of == (peer.cluster, peer.incarnation));
        self.forget(|event| matches!(event, Event::LinkUp(peer) if matters(peer)));
    }

    /// Removes the first of the news for which `is` holds, and returns it.
    fn forget(&mut self, is: impl Fn(&Event) -> bool) -> Option<Event> {
        self.take_news(self.events.iter().position(is))
    }

    fn take_news(&mut self, at: Option<usize>) -> Option<Event> {
        let event = self.events.remove(at?)?;
        self.untaken -= 1;
        self.news -= 1;
        Some(event)
    }

    fn signal(&self) {
        self.readable.iter().for_each(|readable| readable.signal());
    }

    fn silence_if_empty(&self) {
        if self.untaken == 0 {
            self.readable.iter().for_each(|readable| readable.clear());
        }
    }
}

/// Tells the links of polled notifications, each once, how many were polled.
fn tell_sources(events: &mut [Event]) {
    let mut polled: Vec<(Arc<dyn NotificationSource>, u64, u64)> = Vec::new();
    for event in events {
        let Event::Notification(notification) = event else { continue };
        let bytes = notification.payload.len() as u64;
        let Some(source) = notification.note_polled() else { continue };
        match polled.iter_mut().find(|(known, _, _)| Arc::ptr_eq(known, &source)) {
            Some((_, messages, all)) => (*messages, *all) = (*messages + 1, *all + bytes),
            None => polled.push((source, 1, bytes)),
        }
    }
    for (source, messages, bytes) in polled {
        source.polled(messages, bytes);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;
    use crate::model::ClusterId;

    impl EventQueue {
        fn capacity(&self) -> usize {
            self.state.lock().events.capacity()
        }
    }

    fn numbers(events: &[Event]) -> Vec<u64> {
        let number = |event: &Event| match event {
            Event::Completed(transfer) => Some(transfer.number()),
            _ => None,
        };
        events.iter().filter_map(number).collect()
    }

    /// Random operations, compared with a list. The end of a transfer never makes the queue grow, however many outcomes were taken.
    #[test]
    fn the_end_of_a_transfer_needs_no_memory() {
        let queue = Arc::new(EventQueue::new(2000));
        let (mut running, mut ended) = (Vec::new(), Vec::<Arc<Transfer>>::new());
        let (mut random, mut most, mut peak) = (1u64, 0, 0);
        for step in 0..200_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (choice, which) = (random >> 59, (random >> 20) as usize);
            // Many transfers run at times, few at others.
            let limit = [1000, 20, 300][step / 10_000 % 3];
            match choice {
                0..10 if running.len() < limit => running.push(queue.start().unwrap()),
                10..14 if !running.is_empty() => {
                    let transfer: Arc<Transfer> = running.swap_remove(which % running.len());
                    let capacity = queue.capacity();
                    transfer.finish(Ok(0));
                    assert_eq!(queue.capacity(), capacity);
                    ended.push(transfer);
                }
                20..29 if !ended.is_empty() => {
                    assert!(ended.remove(which % ended.len()).outcome().is_some());
                }
                29 => {
                    let polled = queue.poll(which % 50).unwrap();
                    let expected: Vec<_> = ended.drain(..polled.len()).map(|one| one.number()).collect();
                    assert_eq!(numbers(&polled), expected);
                }
                30 => {
                    let polled = queue.poll(which % 50).unwrap();
                    let expected: Vec<_> = ended[..polled.len()].iter().map(|one| one.number()).collect();
                    assert_eq!(numbers(&polled), expected);
                    queue.put_back(polled.into_iter());
                }
                _ => {}
            }
            assert_eq!(queue.open_transfers(), running.len() + ended.len());
            peak = peak.max(queue.open_transfers());
            most = most.max(queue.capacity());
            let state = queue.state.lock();
            assert!(state.events.len() <= 2 * state.untaken + MIN_TAKEN + 1, "taken outcomes are kept");
            drop(state);
        }
        assert!(peak > 900 && most <= peak + peak / 4 + 3, "{most} places for {peak} transfers");
        // The events refer to the queue.
        queue.close();
    }

    /// Each restart of a peer of a native engine is another peer.
    #[test]
    fn news_of_many_restarts_are_bounded_and_keep_the_living() {
        let peer = |cluster| PeerInfo {
            cluster: ClusterId(cluster),
            incarnation: cluster,
            name: Arc::default(),
            address: String::new(),
            transport: "tcp",
            metadata: Arc::default(),
        };
        let restarts = |queue: Arc<EventQueue>| {
            queue.link_up(peer(1));
            for cluster in 2..10_002 {
                queue.link_up(peer(cluster));
                queue.link_down(LinkEnd { peer: peer(cluster), reason: "dead".into(), unacknowledged: 1 });
            }
            let most = queue.state.lock().events.len();
            (most, queue.poll(usize::MAX).unwrap())
        };
        let kept = Arc::new(EventQueue::new(1));
        kept.keep_news();
        let (most, events) = restarts(kept);
        assert!(most <= MAX_NEWS && events.len() > MAX_NEWS - 3, "{most}, {}", events.len());
        assert!(matches!(&events[0], Event::LinkUp(peer) if peer.cluster.0 == 1));
        let pairs = events[1..].chunks(2).map(|pair| match pair {
            [Event::LinkUp(peer), Event::LinkDown(end)] if *peer.as_ref() == end.peer => peer.cluster.0,
            other => panic!("{other:?}"),
        });
        let first = 10_002 - (events.len() as u64 - 1) / 2;
        assert!(pairs.eq(first..10_002), "the latest, in order");
        assert_eq!(restarts(Arc::new(EventQueue::new(1))).1.len(), 0, "the program does not poll");
    }

    /// Closing the queue makes copies of its descriptor readable, so that waiting programs learn of the end.
    #[test]
    fn closing_wakes_those_who_wait_on_a_copy_of_the_descriptor() {
        let queue = EventQueue::new(1);
        let copy = queue.descriptor().unwrap().as_fd().try_clone_to_owned().unwrap();
        let readable = || {
            let mut waiting = [PollFd::new(&copy, PollFlags::IN)];
            rustix::event::poll(&mut waiting, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
        };
        assert!(!readable());
        queue.close();
        assert!(readable());
    }
}
