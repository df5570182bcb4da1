//! Sets of descriptors that one or more threads wait for together.
//!
//! A descriptor must be removed before it is closed. A forked process may hold a copy open, and a descriptor
//! that was closed here without being removed would wake the thread forever
//! (`what_was_removed_wakes_nobody_though_a_copy_is_held_open`).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::{above_standard_streams, uncreated};

/// How often a descriptor is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watching {
    /// As long as it is readable.
    Always,
    /// Once, to one thread, until [`Poller::rearm`] is called.
    Once,
    /// Once, and at once: the socket is almost always writable. For a stream whose ring already holds a request.
    Soon,
}

impl Watching {
    fn flags(self) -> EventFlags {
        match self {
            Watching::Always => EventFlags::IN | EventFlags::RDHUP,
            Watching::Once => EventFlags::IN | EventFlags::RDHUP | EventFlags::ONESHOT,
            Watching::Soon => EventFlags::OUT | EventFlags::IN | EventFlags::RDHUP | EventFlags::ONESHOT,
        }
    }
}

/// A set of descriptors, each with a number that the caller chooses.
#[derive(Debug)]
pub struct Poller(OwnedFd);

impl Poller {
    /// Creates an empty set.
    pub fn new() -> Result<Poller> {
        let made = epoll::create(CreateFlags::CLOEXEC).and_then(above_standard_streams).map(Poller);
        made.map_err(|errno| uncreated("an epoll descriptor", errno))
    }

    /// Adds `descriptor`, and reports `number` when it is readable. `what` names it in the error.
    pub fn add(&self, what: &str, descriptor: impl AsFd, number: u64, watching: Watching) -> Result<()> {
        let added = epoll::add(&self.0, descriptor, EventData::new_u64(number), watching.flags());
        added.map_err(|errno| system(&format!("epoll does not accept {what}"), errno))
    }

    /// Watches a descriptor again that was added with [`Once`](Watching::Once) or [`Soon`](Watching::Soon), in the way of
    /// `watching`.
    pub fn rearm(&self, descriptor: impl AsFd, number: u64, watching: Watching) -> rustix::io::Result<()> {
        epoll::modify(&self.0, descriptor, EventData::new_u64(number), watching.flags())
    }

    /// Removes a descriptor.
    pub fn remove(&self, descriptor: impl AsFd) {
        // Fails only if the descriptor was not added.
        let _ = epoll::delete(&self.0, descriptor);
    }

    /// Waits at most `limit`, and appends the numbers of at most `most` readable descriptors to `ready`.
    pub fn wait(&self, ready: &mut Vec<u64>, most: usize, limit: Option<Duration>) -> Result<()> {
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; MAX_EVENTS];
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match epoll::wait(&self.0, &mut events[..most.min(MAX_EVENTS)], limit.as_ref()) {
            Ok(count) => ready.extend(events[..count].iter().map(|event| event.data.u64())),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(system("epoll_wait failed", errno)),
        }
        Ok(())
    }
}

/// Returns a number that no other descriptor or link of this process has. Lower numbers are for descriptors that each set has once.
pub(super) fn next_number() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(7);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// Maximum number of descriptors reported by one wait.
const MAX_EVENTS: usize = 64;

fn system(text: &str, errno: Errno) -> Error {
    Error::new(ErrorKind::System, text).errno(errno)
}

#[cfg(test)]
mod tests {
    use rustix::event::EventfdFlags;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::memory::EventFd;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn ready(poller: &Poller) -> Vec<u64> {
        let mut ready = Vec::new();
        poller.wait(&mut ready, MAX_EVENTS, Some(Duration::ZERO)).unwrap();
        ready.sort_unstable();
        ready
    }

    #[test]
    fn only_what_is_readable_is_reported() {
        let (poller, event) =
            (Poller::new().unwrap(), EventFd::new("a test", EventfdFlags::empty()).unwrap());
        let ((one, _quiet), (other, peer)) = (pair(), pair());
        poller.add("a test", &event, 0, Watching::Always).unwrap();
        poller.add("a test", &one, 1, Watching::Always).unwrap();
        poller.add("a test", &other, 2, Watching::Once).unwrap();
        assert!(ready(&poller).is_empty());
        rustix::io::write(&peer, b"x").unwrap();
        assert_eq!(ready(&poller), [2]);
        assert!(ready(&poller).is_empty(), "once is once, though nothing was taken");
        poller.rearm(&other, 2, Watching::Once).unwrap();
        event.signal();
        event.signal();
        assert_eq!(ready(&poller), [0, 2]);
        event.clear();
        assert!(ready(&poller).is_empty());
    }

    #[test]
    fn a_semaphore_is_cleared_once_for_each_signal() {
        let (poller, event) =
            (Poller::new().unwrap(), EventFd::new("a test", EventfdFlags::SEMAPHORE).unwrap());
        poller.add("a test", &event, 7, Watching::Always).unwrap();
        event.signal();
        event.signal();
        event.clear();
        assert_eq!(ready(&poller), [7]);
        event.clear();
        assert!(ready(&poller).is_empty());
    }

    #[test]
    fn what_was_removed_wakes_nobody_though_a_copy_is_held_open() {
        let poller = Poller::new().unwrap();
        let (one, peer) = pair();
        poller.add("a test", &one, 1, Watching::Always).unwrap();
        // As a forked process would hold it.
        let copy = rustix::io::dup(&one).unwrap();
        rustix::io::write(&peer, b"x").unwrap();
        assert_eq!(ready(&poller), [1]);
        poller.remove(&one);
        drop(one);
        assert!(ready(&poller).is_empty());
        drop(copy);
    }
}
