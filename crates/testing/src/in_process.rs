//! Connections within one process: listeners by name, and a pair of sockets for each connection.
//!
//! The streams are real sockets, as those of `unix`. Only dialing is different.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use llm_datadist_core::testing::error::Result;
use llm_datadist_core::testing::memory::peer_credentials;
use llm_datadist_core::testing::model::Deadline;
use llm_datadist_core::testing::net::{
    About, Accepted, Address, BACKLOG, Listener, Stream, Transport, unavailable, unreachable,
    unsupported_address,
};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Streams within one process. Clones share their listeners; a new value has none.
#[derive(Clone, Default)]
pub struct Local {
    listeners: Arc<Mutex<HashMap<String, Weak<Queue>>>>,
}

/// Connections that wait at one name.
struct Queue {
    arrived: Mutex<Connections>,
    /// Counts the waiting streams, so it is readable while there is one.
    waiting: OwnedFd,
}

#[derive(Default)]
struct Connections {
    streams: VecDeque<Stream>,
    closed: bool,
}

struct Queued {
    name: String,
    queue: Arc<Queue>,
}

impl Transport for Local {
    fn name(&self) -> &'static str {
        "local"
    }

    fn dial(&self, to: &Address, _: Deadline) -> Result<Stream> {
        let Address::Local(name) = to else { return Err(unsupported_address(self, to)) };
        let refused = |errno| unreachable(to, "connect to", errno);
        let queue = lock(&self.listeners).get(name).and_then(Weak::upgrade);
        let queue = queue.ok_or_else(|| refused(Errno::CONNREFUSED))?;
        let (local, remote) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(refused)?;
        let about = || About {
            transport: "local",
            listened_at: None,
            peer: to.to_string(),
            same_host: true,
            carries_descriptors: true,
            credentials: peer_credentials(local.as_fd()),
        };
        let remote = Stream::new(remote, about());
        let mut arrived = lock(&queue.arrived);
        if arrived.closed || arrived.streams.len() >= usize::from(BACKLOG) {
            return Err(refused(Errno::CONNREFUSED));
        }
        arrived.streams.push_back(remote);
        // Under the lock, so that the counter matches the queue. The write cannot fail, because the counter
        // is far from its maximum.
        let _ = rustix::io::write(&queue.waiting, &1u64.to_ne_bytes());
        drop(arrived);
        let about = about();
        Ok(Stream::new(local, about))
    }

    fn listen(&self, at: &Address) -> Result<Box<dyn Listener>> {
        let Address::Local(name) = at else { return Err(unsupported_address(self, at)) };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let waiting = eventfd(0, flags).map_err(|errno| unavailable(at, "listen at", errno))?;
        let queue = Arc::new(Queue { arrived: Mutex::default(), waiting });
        let mut listeners = lock(&self.listeners);
        listeners.retain(|_, known| known.upgrade().is_some_and(|queue| !lock(&queue.arrived).closed));
        if listeners.contains_key(name) {
            return Err(unavailable(at, "listen at", Errno::ADDRINUSE));
        }
        listeners.insert(name.clone(), Arc::downgrade(&queue));
        Ok(Box::new(Queued { name: name.clone(), queue }))
    }
}

impl Listener for Queued {
    fn accept(&self) -> Result<Accepted> {
        let mut arrived = lock(&self.queue.arrived);
        if arrived.closed {
            return Ok(Accepted::Closed);
        }
        let Some(stream) = arrived.streams.pop_front() else { return Ok(Accepted::Nobody) };
        let _ = rustix::io::read(&self.queue.waiting, &mut [0u8; 8]);
        drop(arrived);
        Ok(Accepted::Stream(Box::new(stream)))
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.queue.waiting.as_fd()
    }

    fn address(&self) -> Address {
        Address::Local(self.name.clone())
    }

    fn close(&self) {
        let mut arrived = lock(&self.queue.arrived);
        arrived.closed = true;
        // Peers that still wait to be accepted see the end of their streams.
        let left = std::mem::take(&mut arrived.streams);
        drop(arrived);
        drop(left);
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.close();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Local({:?})", lock(&self.listeners).keys())
    }
}

impl fmt::Debug for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queued({})", self.name)
    }
}
