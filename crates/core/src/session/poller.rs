//! Sets of descriptors that one or more threads wait for together.
//!
//! A descriptor must be removed before it is closed. A forked process may hold a copy open, and a descriptor
//! that was closed here without being removed would wake the thread forever
//! (`what_was_removed_wakes_nobody_though_a_copy_is_held_open`).

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use rustix::io::Errno;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::{above_standard_streams, new_eventfd, shortage};

/// How often a descriptor is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watching {
    /// As long as it is readable.
    Always,
    /// Once, to one thread, until [`Poller::again`] is called.
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
pub(super) struct Poller(OwnedFd);

impl Poller {
    pub(super) fn new() -> Result<Poller> {
        let made = epoll::create(CreateFlags::CLOEXEC).and_then(above_standard_streams).map(Poller);
        made.map_err(|errno| uncreated("an epoll descriptor", errno))
    }

    /// Adds `descriptor`, and reports `number` when it is readable. `what` names it in the error.
    pub(super) fn add(
        &self,
        what: &str,
        descriptor: impl AsFd,
        number: u64,
        watching: Watching,
    ) -> Result<()> {
        let added = epoll::add(&self.0, descriptor, EventData::new_u64(number), watching.flags());
        added.map_err(|errno| system(&format!("epoll does not accept {what}"), errno))
    }

    /// Watches a descriptor again that was added with [`Once`](Watching::Once) or [`Soon`](Watching::Soon), in the way of
    /// `watching`.
    pub(super) fn again(
        &self,
        descriptor: impl AsFd,
        number: u64,
        watching: Watching,
    ) -> rustix::io::Result<()> {
        epoll::modify(&self.0, descriptor, EventData::new_u64(number), watching.flags())
    }

    /// Removes a descriptor.
    pub(super) fn remove(&self, descriptor: impl AsFd) {
        // Fails only if the descriptor was not added.
        let _ = epoll::delete(&self.0, descriptor);
    }

    /// Waits at most `limit`, and appends the numbers of at most `most` readable descriptors to `ready`.
    pub(super) fn wait(&self, ready: &mut Vec<u64>, most: usize, limit: Option<Duration>) -> Result<()> {
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; MOST];
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match epoll::wait(&self.0, &mut events[..most.min(MOST)], limit.as_ref()) {
            Ok(count) => ready.extend(events[..count].iter().map(|event| event.data.u64())),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(system("epoll_wait failed", errno)),
        }
        Ok(())
    }
}

/// Maximum number of descriptors reported by one wait.
const MOST: usize = 64;

/// Wakes a thread that waits in a [`Poller`].
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    /// Creates a bell that wakes one thread for each ring.
    pub(super) fn counting() -> Result<Bell> {
        Bell::make(EventfdFlags::SEMAPHORE)
    }

    /// Creates a bell that stays readable until it is silenced.
    pub(super) fn new() -> Result<Bell> {
        Bell::make(EventfdFlags::empty())
    }

    fn make(flags: EventfdFlags) -> Result<Bell> {
        new_eventfd(flags).map(Bell).map_err(|errno| uncreated("an eventfd", errno))
    }

    pub(super) fn ring(&self) {
        // The write fails if the counter is full; then the bell is ringing already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes back one ring of a counting bell, or all rings of another bell.
    pub(super) fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn uncreated(what: &str, errno: Errno) -> Error {
    shortage(what, errno).unwrap_or_else(|| system(&format!("cannot create {what}"), errno))
}

fn system(text: &str, errno: Errno) -> Error {
    Error::new(ErrorKind::System, text).errno(errno)
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn ready(poller: &Poller) -> Vec<u64> {
        let mut ready = Vec::new();
        poller.wait(&mut ready, MOST, Some(Duration::ZERO)).unwrap();
        ready.sort_unstable();
        ready
    }

    #[test]
    fn only_what_is_readable_is_reported() {
        let (poller, bell) = (Poller::new().unwrap(), Bell::new().unwrap());
        let ((one, _quiet), (other, peer)) = (pair(), pair());
        poller.add("a test", &bell, 0, Watching::Always).unwrap();
        poller.add("a test", &one, 1, Watching::Always).unwrap();
        poller.add("a test", &other, 2, Watching::Once).unwrap();
        assert!(ready(&poller).is_empty());
        rustix::io::write(&peer, b"x").unwrap();
        assert_eq!(ready(&poller), [2]);
        assert!(ready(&poller).is_empty(), "once is once, though nothing was taken");
        poller.again(&other, 2, Watching::Once).unwrap();
        bell.ring();
        bell.ring();
        assert_eq!(ready(&poller), [0, 2]);
        bell.silence();
        assert!(ready(&poller).is_empty());
    }

    #[test]
    fn counting_bell_is_silenced_once_for_each_ring() {
        let (poller, bell) = (Poller::new().unwrap(), Bell::counting().unwrap());
        poller.add("a test", &bell, 7, Watching::Always).unwrap();
        bell.ring();
        bell.ring();
        bell.silence();
        assert_eq!(ready(&poller), [7]);
        bell.silence();
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
