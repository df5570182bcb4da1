//! Notifications over one link, in both directions.
//!
//! The sender counts what the peer holds: a message occupies the window from the moment at which it is accepted until
//! the peer's program has polled it, which the peer reports on the control stream. So a full queue of the peer refuses a
//! call here, before anything is sent. The receiver has a bound of its own, for peers that do not count.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::client::limit_ms;
use super::link::Link;
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::events::{EventQueue, Notification, NotificationSource};
use crate::fallible;
use crate::model::{Deadline, Name};
use crate::protocol::{Control, MAX_BATCH, MAX_NOTIFICATION, Payload, Payloads, Reply, Request};
use crate::sync::{Condvar, Mutex};

/// What may be on its way to a peer or wait there to be polled.
const WINDOW: Load = Load { messages: 1024, bytes: 4 << 20 };
/// What is kept of a peer. It is more than the window, because the peer learns late of what was polled.
const MOST_KEPT: Load = Load { messages: 2 * WINDOW.messages, bytes: 2 * WINDOW.bytes };
/// Bytes of one request with notifications, unless a single one has more.
const BATCH_BYTES: usize = 256 << 10;

/// The notifications of one link.
#[derive(Debug, Default)]
pub(super) struct Notifications {
    outbox: Mutex<Outbox>,
    /// Notified when the peer has confirmed messages, and when the link breaks.
    confirmed: Condvar,
    inbox: Mutex<Inbox>,
}

/// A number of messages, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Load {
    messages: u64,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Outbox {
    waiting: VecDeque<Payload>,
    /// Whether a lane sends what waits.
    sending: bool,
    /// Number of messages of `notify` that were accepted, and that the peer has confirmed.
    accepted: u64,
    acknowledged: u64,
    /// What was accepted or reserved, and is not confirmed.
    under_way: Load,
    /// What has arrived at the peer since the beginning of the link, as far as this side knows.
    arrived: Load,
    /// What the program of the peer has polled of that.
    polled: Load,
}

#[derive(Debug, Default)]
struct Inbox {
    arrived: Load,
    polled: Load,
}

impl Load {
    fn one(message: &[u8]) -> Load {
        Load { messages: 1, bytes: message.len() as u64 }
    }

    fn of(messages: &[Payload]) -> Load {
        messages.iter().fold(Load::default(), |load, message| load.plus(Load::one(&message.0)))
    }

    fn plus(self, more: Load) -> Load {
        Load { messages: self.messages + more.messages, bytes: self.bytes + more.bytes }
    }

    fn minus(self, less: Load) -> Load {
        Load {
            messages: self.messages.saturating_sub(less.messages),
            bytes: self.bytes.saturating_sub(less.bytes),
        }
    }

    fn max(self, other: Load) -> Load {
        Load { messages: self.messages.max(other.messages), bytes: self.bytes.max(other.bytes) }
    }

    fn exceeds(self, limit: Load) -> bool {
        self.messages > limit.messages || self.bytes > limit.bytes
    }
}

impl Outbox {
    fn reserve(&mut self, message: &[u8]) -> Result<()> {
        let held = self.under_way.plus(self.arrived.minus(self.polled));
        if held.plus(Load::one(message)).exceeds(WINDOW) {
            let text = "the peer has not polled the notifications that it has got";
            return Err(Error::new(ErrorKind::Busy, text)
                .with("messages", held.messages)
                .with("bytes", held.bytes)
                .with("limit", format_args!("{} messages, {} bytes", WINDOW.messages, WINDOW.bytes)));
        }
        self.under_way = self.under_way.plus(Load::one(message));
        Ok(())
    }
}

/// Checks the size of a notification.
pub(crate) fn check_notification(message: &[u8]) -> Result<()> {
    let allowed = format!("at most {MAX_NOTIFICATION} bytes");
    ensure(message.len() <= MAX_NOTIFICATION, || Error::argument("len(notify)", message.len(), allowed))
}

/// The place in the peer's queue of a notification that a call delivers at its end.
pub(crate) struct ReservedNotification {
    link: Arc<Link>,
    message: Vec<u8>,
}

impl ReservedNotification {
    /// Delivers the notification behind all that were accepted before, and has the peer release the key of a pull first, if
    /// one is given: its name, its cache and its tensors.
    pub(crate) fn deliver(self, key: Option<(Name, i64, u32, u32)>, deadline: Deadline) -> Result<()> {
        self.link.await_acknowledged(deadline)?;
        let limit_ms = limit_ms(deadline);
        let message = Payload(fallible::copied("a notification", &self.message)?);
        let request = match key {
            Some((name, cache, first, count)) => {
                Request::ConsumeAndNotify { name: name.into(), cache, first, count, message, limit_ms }
            }
            None => Request::Notify { messages: Payloads(vec![message]), limit_ms },
        };
        let delivered = self.link.done(&request, deadline);
        if delivered.is_ok() {
            let mut outbox = self.link.notifications.outbox.lock();
            outbox.arrived = outbox.arrived.plus(Load::one(&self.message));
        }
        delivered.map(drop).map_err(|error| match error.fact(super::client::REPORTED_BY) {
            Some(_) => error,
            None => error.with("notification", "may have been delivered"),
        })
    }
}

impl Drop for ReservedNotification {
    fn drop(&mut self) {
        let mut outbox = self.link.notifications.outbox.lock();
        outbox.under_way = outbox.under_way.minus(Load::one(&self.message));
    }
}

impl Link {
    /// Reserves the place of a notification in the queue of the peer. Returns `Err(Busy)` if that is full.
    pub(crate) fn reserve_notification(self: &Arc<Self>, message: &[u8]) -> Result<ReservedNotification> {
        let message = fallible::copied("a notification", message)?;
        self.notifications.outbox.lock().reserve(&message).map_err(|error| self.named(error))?;
        Ok(ReservedNotification { link: self.clone(), message })
    }

    /// Accepts a notification. Returns whether the caller must have [`send_notifications`](Self::send_notifications)
    /// called. Returns `Err(Busy)` if the queue of the peer is full, and `Err(NotLinked)` if the link has broken.
    pub(crate) fn accept_notification(&self, message: Vec<u8>) -> Result<bool> {
        let mut outbox = self.notifications.outbox.lock();
        self.check()?;
        let room = outbox.waiting.try_reserve(1);
        room.map_err(|_| fallible::out_of_memory("the notifications of a link", size_of::<Payload>()))?;
        outbox.reserve(&message).map_err(|error| self.named(error))?;
        outbox.accepted += 1;
        outbox.waiting.push_back(Payload(message));
        Ok(!std::mem::replace(&mut outbox.sending, true))
    }

    /// Sends the notifications that wait, until none does. Each request may take `limit`. If one fails, the link breaks:
    /// it is unknown what of it has arrived.
    pub(crate) fn send_notifications(&self, limit: Duration) {
        while let Some(batch) = self.notifications.next_batch() {
            let (count, load) = (batch.len() as u64, Load::of(&batch));
            let deadline = Deadline::after(limit).named("llm.LinkPinLimit");
            let request = Request::Notify { messages: Payloads(batch), limit_ms: limit_ms(deadline) };
            if let Err(error) = self.done(&request, deadline) {
                return self.break_off(format!("notifications could not be delivered: {error}"));
            }
            let mut outbox = self.notifications.outbox.lock();
            outbox.acknowledged += count;
            outbox.under_way = outbox.under_way.minus(load);
            outbox.arrived = outbox.arrived.plus(load);
            drop(outbox);
            self.notifications.confirmed.notify_all();
        }
    }

    /// Breaks the link, because no thread can send its notifications.
    pub(crate) fn give_up_notifications(&self, why: &Error) {
        self.break_off(format!("notifications could not be sent: {why}"));
    }

    /// Waits until the peer has confirmed all notifications that were accepted so far.
    fn await_acknowledged(&self, deadline: Deadline) -> Result<()> {
        let mut outbox = self.notifications.outbox.lock();
        let last = outbox.accepted;
        while outbox.acknowledged < last {
            self.check()?;
            drop(self.notifications.confirmed.wait_timeout(outbox, deadline.nap()));
            deadline.waiting("waiting for earlier notifications").map_err(|error| self.named(error))?;
            outbox = self.notifications.outbox.lock();
        }
        Ok(())
    }

    /// Wakes who waits for the peer to confirm notifications, because the link has broken.
    pub(super) fn wake_notifiers(&self) {
        drop(self.notifications.outbox.lock());
        self.notifications.confirmed.notify_all();
    }

    /// Number of notifications that were accepted and that the peer has not confirmed.
    pub(super) fn unacknowledged(&self) -> u64 {
        let outbox = self.notifications.outbox.lock();
        outbox.accepted - outbox.acknowledged
    }

    /// Notes what the peer reports of its queue. Numbers that go backwards or make no sense change nothing for others.
    pub(super) fn note_polled(&self, arrived: (u64, u64), polled: (u64, u64)) {
        let load = |(messages, bytes)| Load { messages, bytes };
        let mut outbox = self.notifications.outbox.lock();
        outbox.arrived = outbox.arrived.max(load(arrived));
        outbox.polled = outbox.polled.max(load(polled));
    }

    /// Queues notifications of the peer, all or none, after `first` has succeeded.
    pub(super) fn receive_notifications(
        self: &Arc<Self>,
        events: &EventQueue,
        messages: Vec<Payload>,
        first: impl FnOnce() -> Result<()>,
    ) -> Result<Reply> {
        let load = Load::of(&messages);
        let mut inbox = self.notifications.inbox.lock();
        let held = inbox.arrived.minus(inbox.polled).plus(load);
        if held.exceeds(MOST_KEPT) {
            let text = "too many notifications of this peer were not polled";
            return Err(Error::new(ErrorKind::Busy, text)
                .with("messages", held.messages)
                .with("bytes", held.bytes));
        }
        let source: Arc<dyn NotificationSource> = self.clone();
        let cluster = self.cluster();
        let new = messages.into_iter().map(|message| Notification::new(cluster, message.0, source.clone()));
        // Under the lock, so that messages of one link keep their order.
        events.notify(new, first)?;
        inbox.arrived = inbox.arrived.plus(load);
        Ok(Reply::Done { bytes: 0 })
    }
}

impl NotificationSource for Link {
    fn polled(&self, messages: u64, bytes: u64) {
        let mut inbox = self.notifications.inbox.lock();
        inbox.polled = inbox.polled.plus(Load { messages, bytes });
        let pair = |load: Load| (load.messages, load.bytes);
        let report = Control::Polled { arrived: pair(inbox.arrived), polled: pair(inbox.polled) };
        drop(inbox);
        if self.alive() {
            // If it fails, the link breaks, and nobody counts any more.
            let _ = self.send_control(&report);
        }
    }
}

impl Notifications {
    /// Returns the notifications of the next request, or `None` if none waits. The caller sends them in that order.
    fn next_batch(&self) -> Option<Vec<Payload>> {
        let mut outbox = self.outbox.lock();
        let (mut count, mut bytes) = (0, 0);
        for message in outbox.waiting.iter().take(MAX_BATCH) {
            bytes += message.0.len();
            if count > 0 && bytes > BATCH_BYTES {
                break;
            }
            count += 1;
        }
        if count == 0 {
            outbox.sending = false;
            return None;
        }
        Some(outbox.waiting.drain(..count).collect())
    }
}
