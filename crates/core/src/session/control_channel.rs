//! The control stream of one link, and for how long its peer has been silent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::model::Deadline;
use crate::net::Stream;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The control stream of one link. The control thread reads it, and any thread may send. [`end`](Self::end) closes it.
#[derive(Debug)]
pub(super) struct ControlChannel {
    stream: Arc<Stream>,
    /// Guards sending. Held during socket I/O, which never waits: a short message is sent at once or not at all.
    sending: Mutex<()>,
    /// Number of answered pings.
    pongs: Mutex<u64>,
    /// Notified when the peer answers a ping, and when the link breaks.
    changed: Condvar,
    opened: Instant,
    /// Milliseconds between `opened` and the latest sign of life from the peer.
    last_sign_of_life: AtomicU64,
}

impl ControlChannel {
    pub(super) fn new(stream: Arc<Stream>) -> ControlChannel {
        ControlChannel {
            stream,
            sending: Mutex::default(),
            pongs: Mutex::default(),
            changed: Condvar::new(),
            opened: Instant::now(),
            last_sign_of_life: AtomicU64::new(0),
        }
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns the right to send, for which other threads wait until it is dropped.
    pub(super) fn lock(&self) -> MutexGuard<'_, ()> {
        self.sending.lock()
    }

    /// Records a sign of life.
    pub(super) fn note_sign_of_life(&self) {
        let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_sign_of_life.fetch_max(now, Ordering::Relaxed);
    }

    /// Returns the time since the latest sign of life.
    pub(super) fn silent(&self) -> Duration {
        let last = Duration::from_millis(self.last_sign_of_life.load(Ordering::Relaxed));
        self.opened.elapsed().saturating_sub(last)
    }

    /// Records the answer to a ping.
    pub(super) fn note_pong(&self) {
        *self.pongs.lock() += 1;
        self.changed.notify_all();
    }

    /// Returns the number of answered pings.
    pub(super) fn pongs(&self) -> u64 {
        *self.pongs.lock()
    }

    /// Waits while `goes_on` returns true for the number of answered pings, but not longer than `limit`. Returns that number.
    pub(super) fn wait_while(&self, limit: Deadline, goes_on: impl Fn(u64) -> bool) -> u64 {
        let mut pongs = self.pongs.lock();
        while goes_on(*pongs) && !limit.passed() {
            pongs = self.changed.wait_timeout(pongs, limit.left()).0;
        }
        *pongs
    }

    /// Closes the stream, because the link has broken, and wakes the threads that wait for that or for a pong.
    pub(super) fn end(&self) {
        self.stream.close();
        // Taking the lock ensures that a waiting thread either sees that the link has broken or receives the notification.
        drop(self.pongs.lock());
        self.changed.notify_all();
    }
}
