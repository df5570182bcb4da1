//! Sends, receives and reports notifications. `notification_window` counts them.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::client::REPORTED_BY;
use super::link::{ANSWER_TIME, Link};
use super::notification_window::{Load, MAX_HELD, NOTIFICATION_BYTES};
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::events::{EventQueue, Notification, NotificationSource};
use crate::fallible;
use crate::model::Deadline;
use crate::protocol::{
    BoundedBytes, ControlMessage, MAX_BATCH, MAX_NOTIFICATION, Payload, Reply, Request, WireUsedKey,
};

/// How long a sender waits before it repeats what the peer has refused.
const RETRY: Duration = Duration::from_millis(20);

/// Checks the size of a notification that is given as `argument`.
pub(crate) fn check_notification(argument: &str, message: &[u8]) -> Result<()> {
    let (name, allowed) = (format!("len({argument})"), format!("at most {MAX_NOTIFICATION} bytes"));
    ensure(message.len() <= MAX_NOTIFICATION, || Error::argument(&name, message.len(), allowed))
}

/// A notification that a call delivers at its end, with room for it in the peer's queue.
pub(crate) struct ReservedNotification {
    link: Arc<Link>,
    message: Vec<u8>,
}

impl ReservedNotification {
    /// Waits until the peer has confirmed all notifications that were accepted before.
    pub(crate) fn wait_for_earlier(&self, deadline: Deadline) -> Result<()> {
        let link = &self.link;
        let mut sent = link.notifications.sent.lock();
        let last = sent.accepted;
        while sent.awaits(last) {
            link.check()?;
            drop(link.notifications.confirmed.wait_timeout(sent, deadline.wait_limit()));
            deadline.waiting("waiting for earlier messages").map_err(|error| link.named(error))?;
            sent = link.notifications.sent.lock();
        }
        Ok(())
    }

    /// Tells the peer that the call has ended, and which key or grant it has used up, and delivers the notification then.
    pub(crate) fn deliver(self, used_key: Option<WireUsedKey>, deadline: Deadline) -> Result<()> {
        let message = Some(BoundedBytes(fallible::copied("a message", &self.message)?));
        let delivered = self.link.done(&Request::Finish { used_key, message }, deadline);
        if delivered.is_ok() {
            let mut sent = self.link.notifications.sent.lock();
            sent.confirmed = sent.confirmed.plus(Load::one(&self.message));
        }
        delivered.map(drop).map_err(|error| match error.fact(REPORTED_BY) {
            Some(_) => error,
            None => error.with("message", "may have been delivered"),
        })
    }
}

impl Drop for ReservedNotification {
    fn drop(&mut self) {
        let mut sent = self.link.notifications.sent.lock();
        sent.under_way = sent.under_way.minus(Load::one(&self.message));
    }
}

impl Link {
    /// Reserves room for a notification in the queue of the peer. Returns `Err(Busy)` if that is full.
    pub(crate) fn reserve_notification(self: &Arc<Self>, message: &[u8]) -> Result<ReservedNotification> {
        let message = fallible::copied("a message", message)?;
        self.notifications.sent.lock().reserve(&message).map_err(|error| self.named(error))?;
        Ok(ReservedNotification { link: self.clone(), message })
    }

    /// Accepts a notification. Returns whether the caller must have [`send_notifications`](Self::send_notifications)
    /// called. Returns `Err(Busy)` if the queue of the peer is full, and `Err(NotLinked)` if the link has broken.
    pub(crate) fn accept_notification(&self, message: Vec<u8>) -> Result<bool> {
        let mut sent = self.notifications.sent.lock();
        self.check()?;
        let room = sent.waiting.try_reserve(1);
        room.map_err(|_| fallible::out_of_memory("the messages of a link", size_of::<Payload>()))?;
        sent.reserve(&message).map_err(|error| self.named(error))?;
        sent.accepted += 1;
        sent.waiting.push_back(BoundedBytes(message));
        Ok(!std::mem::replace(&mut sent.sending, true))
    }

    /// Sends the notifications that wait, until none does. Each request may take `limit`. What the peer refuses, because it
    /// has no memory, is sent again, one message at a time until one has arrived. While this process has no descriptor or memory for a stream, nothing is sent, and further
    /// notifications are refused. If it is unknown what has arrived, the link breaks.
    pub(crate) fn send_notifications(self: &Arc<Self>, limit: Duration) {
        let mut deadline = Deadline::after(limit).named("the pin limit");
        let mut most = MAX_BATCH;
        while let Some(batch) = self.notifications.next_batch(most) {
            let lease = match self.lease(deadline) {
                Err(error) if error.is_shortage() && self.alive() => {
                    self.notifications.put_back(batch);
                    self.wait_for_resources(error);
                    deadline = Deadline::after(limit).named("the pin limit");
                    continue;
                }
                lease => lease,
            };
            self.notifications.sent.lock().shortage = None;
            let (count, load) = (batch.len() as u64, Load::of(&batch));
            let request = Request::Notify { messages: batch };
            let delivered = lease.and_then(|lease| self.ask_over(lease, &request, deadline));
            let Request::Notify { messages: batch } = request else { return };
            match delivered {
                Ok(_) => {
                    most = MAX_BATCH;
                    deadline = Deadline::after(limit).named("the pin limit");
                }
                Err(error) if error.fact(REPORTED_BY).is_some() && !deadline.passed() && self.alive() => {
                    self.notifications.put_back(batch);
                    most = 1;
                    std::thread::sleep(RETRY);
                    continue;
                }
                Err(error) => {
                    // If the peer has ended, the control stream says so at once, and that is the reason.
                    if error.kind() == ErrorKind::NotLinked {
                        self.wait_until_broken(Deadline::after(ANSWER_TIME));
                    }
                    return self.break_off(format!("messages could not be delivered: {error}"));
                }
            }
            let mut sent = self.notifications.sent.lock();
            sent.acknowledged += count;
            sent.under_way = sent.under_way.minus(load);
            sent.confirmed = sent.confirmed.plus(load);
            drop(sent);
            self.notifications.confirmed.notify_all();
        }
    }

    /// Pauses the sending of notifications, which fails because of `shortage`.
    fn wait_for_resources(&self, shortage: Error) {
        let mut sent = self.notifications.sent.lock();
        let first = sent.shortage.is_none();
        if first {
            tracing::warn!(target: "llm_datadist::links", "messages for {} wait: {shortage}", self.peer);
        }
        sent.shortage = Some(shortage);
        drop(sent);
        std::thread::sleep(RETRY);
    }

    /// Takes back the only notification that waits, because no thread can send it. Returns `false` if there are others, which
    /// other calls have accepted; then the link breaks, because their messages are lost.
    pub(crate) fn take_back_notification(&self, why: &Error) -> bool {
        let mut sent = self.notifications.sent.lock();
        sent.sending = false;
        if let [message] = &*sent.waiting.make_contiguous() {
            let load = Load::one(&message.0);
            sent.waiting.clear();
            sent.accepted -= 1;
            sent.under_way = sent.under_way.minus(load);
            drop(sent);
            self.notifications.confirmed.notify_all();
            return true;
        }
        drop(sent);
        self.break_off(format!("messages could not be sent: {why}"));
        false
    }

    /// Queues notifications of the peer, all or none, after `first` has succeeded.
    pub(super) fn receive_notifications(
        self: &Arc<Self>,
        events: &EventQueue,
        messages: Vec<Payload>,
        first: impl FnOnce() -> Result<()>,
    ) -> Result<Reply> {
        let load = Load::of(&messages);
        let mut received = self.notifications.received.lock();
        if received.ended {
            return Err(Error::new(ErrorKind::NotLinked, "the link has ended"));
        }
        let held = received.arrived.minus(received.polled).plus(load);
        if held.exceeds(MAX_HELD) {
            let text = "too many messages of this peer were not taken";
            return Err(Error::new(ErrorKind::Busy, text)
                .with("messages", held.messages)
                .with("bytes", held.bytes));
        }
        let weak: Weak<Self> = Arc::downgrade(self);
        let source: Weak<dyn NotificationSource> = weak;
        let new = messages.into_iter().map(|BoundedBytes(message)| {
            let share = self.budget.notification(message.len() as u64 + NOTIFICATION_BYTES)?;
            Ok(Notification::new(self.peer.clone(), message, source.clone(), share))
        });
        let new = fallible::try_collect("messages", new).map_err(|refused| {
            let text = "too many messages of all peers were not taken; the program has to take its events";
            Error::new(ErrorKind::Busy, text)
                .with("bytes", load.bytes)
                .with("used_by_peer", refused.fact("used_by_peer").unwrap_or("0"))
                .with("used_by_all", refused.fact("used_by_all").unwrap_or("0"))
        })?;
        // Under the lock, so that messages of one link keep their order.
        events.notify(new.into_iter(), first)?;
        received.arrived = received.arrived.plus(load);
        Ok(Reply::Done { bytes: 0 })
    }
}

impl NotificationSource for Link {
    fn polled(&self, messages: u64, bytes: u64) {
        let mut received = self.notifications.received.lock();
        received.polled = received.polled.plus(Load { messages, bytes });
        let pair = |load: Load| (load.messages, load.bytes);
        let report =
            ControlMessage::Polled { arrived: pair(received.arrived), polled: pair(received.polled) };
        let due = received.report_due();
        drop(received);
        if due && self.alive() {
            // If it fails, the link breaks, and nobody counts any more.
            let _ = self.send_control(&report);
        }
    }
}
