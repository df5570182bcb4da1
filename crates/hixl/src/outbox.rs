//! Messages that no call waits for: answers to peers, and withdrawals. Those for which the window of a link has no room wait here, and
//! the service thread sends them later.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use llm_datadist_core::{ClusterId, Engine, Error, ErrorKind, Result};
use rustix::event::{EventfdFlags, eventfd};

use crate::sync::lock;

/// Maximum number of messages to one peer that wait: as many as the window of a link has. A peer that does not read gets no more, and
/// its calls end with their limits.
const MAX_MESSAGES: usize = 1024;
/// Maximum number of bytes of the messages to one peer that wait.
const MAX_BYTES: usize = 4 << 20;
/// Maximum number of bytes of all messages that wait.
const MAX_TOTAL_BYTES: usize = 64 << 20;

/// The messages that wait.
#[derive(Debug)]
pub(crate) struct Outbox {
    waiting: Mutex<Waiting>,
    /// Readable when a call has left a message here.
    pub(crate) left: OwnedFd,
}

/// The messages by peer, in order.
#[derive(Debug, Default)]
struct Waiting {
    by_peer: HashMap<ClusterId, Queue>,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Waiting {
    /// Adds a message, unless too many wait.
    fn add(&mut self, peer: ClusterId, message: Vec<u8>) {
        let queue = self.by_peer.entry(peer).or_default();
        let room = queue.messages.len() < MAX_MESSAGES
            && queue.bytes + message.len() <= MAX_BYTES
            && self.bytes + message.len() <= MAX_TOTAL_BYTES
            && queue.messages.try_reserve(1).is_ok();
        if room {
            queue.bytes += message.len();
            self.bytes += message.len();
            queue.messages.push_back(message);
        }
    }

    /// Sends the messages for which `send` finds room. It returns `false` if there is none.
    fn send(&mut self, mut send: impl FnMut(ClusterId, &[u8]) -> bool) {
        self.by_peer.retain(|peer, queue| {
            while let Some(message) = queue.messages.front()
                && send(*peer, message)
            {
                queue.bytes -= message.len();
                self.bytes -= message.len();
                queue.messages.pop_front();
            }
            !queue.messages.is_empty()
        });
    }
}

impl Outbox {
    pub(crate) fn new() -> Result<Self> {
        let failed =
            |error| Error::new(ErrorKind::System, "no descriptor for messages that wait").because(error);
        let left = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        Ok(Outbox { waiting: Mutex::default(), left })
    }

    /// Sends a message to a peer, now or later.
    pub(crate) fn send(&self, engine: &Engine, peer: ClusterId, message: Vec<u8>) {
        let mut waiting = lock(&self.waiting);
        if waiting.by_peer.contains_key(&peer) || !has_sent(engine, peer, &message) {
            waiting.add(peer, message);
            // Fails if it is readable already.
            let _ = rustix::io::write(&self.left, &1u64.to_ne_bytes());
        }
    }

    /// Returns whether messages to a peer wait.
    pub(crate) fn holds(&self, peer: ClusterId) -> bool {
        lock(&self.waiting).by_peer.contains_key(&peer)
    }

    /// Sends the messages for which there is room now. Returns whether others wait.
    pub(crate) fn flush(&self, engine: &Engine) -> bool {
        // Fails if it is not readable.
        let _ = rustix::io::read(&self.left, &mut [0; 8]);
        let mut waiting = lock(&self.waiting);
        waiting.send(|peer, message| has_sent(engine, peer, message));
        !waiting.by_peer.is_empty()
    }
}

/// Sends a message. Returns `false` if the window of the link has no room. A message for a link that has ended is dropped.
fn has_sent(engine: &Engine, peer: ClusterId, message: &[u8]) -> bool {
    !engine.send(peer, message.to_vec()).is_err_and(|error| error.kind() == ErrorKind::Busy)
}

#[cfg(test)]
mod tests {
    use llm_datadist_core::ClusterId;

    use super::{MAX_BYTES, MAX_MESSAGES, MAX_TOTAL_BYTES, Waiting};

    #[test]
    fn peer_that_does_not_read_delays_no_other() {
        let (mut waiting, slow, fast) = (Waiting::default(), ClusterId(1), ClusterId(2));
        for number in 0..10_000u32 {
            waiting.add(slow, vec![7]);
            if number < 1000 {
                waiting.add(fast, number.to_le_bytes().into());
            }
        }
        let (mut sent, mut attempts) = (Vec::new(), 0);
        waiting.send(|peer, message| {
            attempts += usize::from(peer == slow);
            if peer == fast {
                sent.push(u32::from_le_bytes(message.try_into().unwrap()));
            }
            peer == fast
        });
        assert_eq!(sent, (0..1000).collect::<Vec<_>>());
        assert_eq!((attempts, waiting.by_peer[&slow].messages.len()), (1, MAX_MESSAGES));
        waiting.send(|_, _| true);
        assert!(waiting.by_peer.is_empty());
        assert_eq!(waiting.bytes, 0);
    }

    #[test]
    fn bytes_are_bounded_for_each_peer_and_for_all() {
        let mut waiting = Waiting::default();
        for peer in 0..100 {
            for _ in 0..100 {
                waiting.add(ClusterId(peer), vec![0; 1 << 16]);
            }
            let bytes = waiting.by_peer.get(&ClusterId(peer)).map_or(0, |queue| queue.bytes);
            assert!(bytes <= MAX_BYTES);
        }
        assert_eq!(waiting.bytes, MAX_TOTAL_BYTES);
    }
}
