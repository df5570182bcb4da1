//! The window of the notifications of one link: how many are on their way or wait to be polled, in both directions.
//!
//! The sender counts what the peer holds: a message occupies the window from the moment at which it is accepted until
//! the peer's program has polled it, which the peer reports on the control stream. So a full queue of the peer refuses a
//! call here, before anything is sent. The receiver has a bound of its own, for peers that do not count.

use std::collections::VecDeque;

use crate::error::{Error, ErrorKind, Result};
use crate::protocol::Payload;
use crate::sync::{Condvar, Mutex};

/// What may be on its way to a peer or wait there to be polled.
pub(super) const WINDOW: Load = Load { messages: 1024, bytes: 4 << 20 };
/// What is kept of a peer. It is more than the window, because the peer learns late of what was polled.
pub(super) const MAX_HELD: Load = Load { messages: 2 * WINDOW.messages, bytes: 2 * WINDOW.bytes };
/// Bytes that a queued notification takes beside its message.
pub(super) const NOTIFICATION_BYTES: u64 = 256;
/// Bytes that the notifications of one request take in the queue of the peer, unless a single one takes more.
const BATCH_BYTES: u64 = 64 << 10;

/// The notifications of one link.
#[derive(Debug, Default)]
pub(super) struct Notifications {
    pub(super) sent: Mutex<SentMessages>,
    /// Notified when the peer has confirmed messages, and when the link breaks.
    pub(super) confirmed: Condvar,
    pub(super) received: Mutex<ReceivedMessages>,
}

/// A number of messages, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) messages: u64,
    pub(super) bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct SentMessages {
    pub(super) waiting: VecDeque<Payload>,
    /// Whether a worker sends what waits.
    pub(super) sending: bool,
    /// Why the worker cannot send now, although the link stands: this process lacks descriptors or memory.
    pub(super) shortage: Option<Error>,
    /// Number of messages of `notify` that were accepted, and that the peer has confirmed.
    pub(super) accepted: u64,
    pub(super) acknowledged: u64,
    /// What was accepted or reserved, and is not confirmed.
    pub(super) under_way: Load,
    /// What the peer has confirmed since the beginning of the link.
    pub(super) confirmed: Load,
    /// What has arrived at the peer, as it reports. It may be ahead of `confirmed`, or behind.
    pub(super) reported: Load,
    /// What the program of the peer has polled of that.
    pub(super) polled: Load,
}

#[derive(Debug, Default)]
pub(super) struct ReceivedMessages {
    pub(super) arrived: Load,
    pub(super) polled: Load,
    /// The part of `polled` that was reported to the peer.
    known_to_peer: Load,
    /// Whether the program has got the event that the link has ended.
    pub(super) ended: bool,
}

impl ReceivedMessages {
    /// Returns whether a report is due: after each eighth of the window. So a window has at most eight
    /// reports on the control stream, whose messages must never fill it.
    pub(super) fn report_due(&mut self) -> bool {
        let unreported = self.polled.minus(self.known_to_peer);
        let due = unreported.messages >= WINDOW.messages / 8 || unreported.bytes >= WINDOW.bytes / 8;
        if due {
            self.known_to_peer = self.polled;
        }
        due
    }
}

impl Load {
    pub(super) fn one(message: &[u8]) -> Load {
        Load { messages: 1, bytes: message.len() as u64 }
    }

    pub(super) fn of(messages: &[Payload]) -> Load {
        messages.iter().fold(Load::default(), |load, message| load.plus(Load::one(&message.0)))
    }

    pub(super) fn plus(self, more: Load) -> Load {
        Load {
            messages: self.messages.saturating_add(more.messages),
            bytes: self.bytes.saturating_add(more.bytes),
        }
    }

    pub(super) fn minus(self, less: Load) -> Load {
        Load {
            messages: self.messages.saturating_sub(less.messages),
            bytes: self.bytes.saturating_sub(less.bytes),
        }
    }

    pub(super) fn max(self, other: Load) -> Load {
        Load { messages: self.messages.max(other.messages), bytes: self.bytes.max(other.bytes) }
    }

    pub(super) fn exceeds(self, limit: Load) -> bool {
        self.messages > limit.messages || self.bytes > limit.bytes
    }
}

impl SentMessages {
    /// Whether the peer has not confirmed all of the first `last` messages that were accepted. Messages that were taken back need
    /// no confirmation.
    pub(super) fn awaits(&self, last: u64) -> bool {
        self.acknowledged < last.min(self.accepted)
    }

    pub(super) fn reserve(&mut self, message: &[u8]) -> Result<()> {
        if let Some(shortage) = &self.shortage {
            return Err(shortage.clone());
        }
        let held = self.under_way.plus(self.confirmed.max(self.reported).minus(self.polled));
        if held.plus(Load::one(message)).exceeds(WINDOW) {
            let text = "the program of the peer has not taken the messages that it has got";
            return Err(Error::new(ErrorKind::Busy, text)
                .with("messages", held.messages)
                .with("bytes", held.bytes)
                .with("limit", format_args!("{} messages, {} bytes", WINDOW.messages, WINDOW.bytes)));
        }
        self.under_way = self.under_way.plus(Load::one(message));
        Ok(())
    }
}

impl Notifications {
    /// Returns the notifications of the next request, at most `most`, or `None` if none waits. The caller sends them in that order.
    pub(super) fn next_batch(&self, most: usize) -> Option<Vec<Payload>> {
        let mut sent = self.sent.lock();
        let (mut count, mut bytes) = (0, 0);
        for message in sent.waiting.iter().take(most) {
            bytes += message.0.len() as u64 + NOTIFICATION_BYTES;
            if count > 0 && bytes > BATCH_BYTES {
                break;
            }
            count += 1;
        }
        if count == 0 {
            sent.sending = false;
            return None;
        }
        Some(sent.waiting.drain(..count).collect())
    }

    /// Wakes who waits for the peer to confirm messages, because the link has broken.
    pub(super) fn wake(&self) {
        drop(self.sent.lock());
        self.confirmed.notify_all();
    }

    /// Number of messages of `notify` that were accepted and that the peer has not confirmed.
    pub(super) fn unacknowledged(&self) -> u64 {
        let sent = self.sent.lock();
        sent.accepted - sent.acknowledged
    }

    /// Lets no further message in, because the program gets the event that the link has ended.
    pub(super) fn end(&self) {
        self.received.lock().ended = true;
    }

    /// Puts a batch that the peer has refused back in front of those that wait.
    pub(super) fn put_back(&self, batch: Vec<Payload>) {
        let mut sent = self.sent.lock();
        for message in batch.into_iter().rev() {
            sent.waiting.push_front(message);
        }
    }

    /// Notes what the peer reports of its queue: messages and bytes that have arrived, and that were polled. Numbers that
    /// make no sense harm only the peer.
    pub(super) fn note_polled(&self, arrived: (u64, u64), polled: (u64, u64)) {
        let load = |(messages, bytes)| Load { messages, bytes };
        let mut sent = self.sent.lock();
        sent.reported = sent.reported.max(load(arrived));
        sent.polled = sent.polled.max(load(polled));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::BoundedBytes;

    fn waiting(lengths: impl IntoIterator<Item = usize>) -> Notifications {
        let notifications = Notifications::default();
        notifications
            .sent
            .lock()
            .waiting
            .extend(lengths.into_iter().map(|length| BoundedBytes(vec![0; length])));
        notifications
    }

    /// The peer charges each message of a request with more than its length, and takes all or none. So a request stays below the
    /// memory that is reserved for a link.
    #[test]
    fn short_messages_count_with_what_they_take_at_the_peer() {
        let short = waiting([1; 1000]);
        let batch = short.next_batch(1000).unwrap();
        assert_eq!(batch.len() as u64, BATCH_BYTES / (1 + NOTIFICATION_BYTES));
        short.put_back(batch);
        assert_eq!(short.next_batch(1).unwrap().len(), 1);
        assert_eq!(waiting([128 << 10, 1]).next_batch(2).unwrap().len(), 1);
        assert!(waiting([]).next_batch(1).is_none());
    }

    #[test]
    fn messages_that_were_taken_back_are_not_awaited() {
        let mut sent = SentMessages { accepted: 2, acknowledged: 1, ..SentMessages::default() };
        let last = sent.accepted;
        assert!(sent.awaits(last));
        sent.accepted -= 1;
        assert!(!sent.awaits(last));
    }
}
