//! The interface of a fabric: what other threads may ask of its thread.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;
use crate::library::{Library, Version};
use crate::thread;

/// How a fabric works.
#[derive(Clone, Debug)]
pub struct Options {
    /// Settings of UCX, by their names without the prefix `UCX_`, for example `("TLS", "rc,sm")`.
    pub settings: Vec<(String, String)>,
    /// Maximum number of requests in flight.
    pub window: usize,
    /// Maximum number of endpoints of one peer, and so of reads of it at the same time. Further reads wait.
    pub endpoints: usize,
    /// The worker that reads is replaced after this many reads that were given up: a forced close may leak a descriptor.
    pub renew_after: u64,
    /// Whether UCX reports that a peer has failed. Without it, a read from a peer that has died may never end. Turn it off only
    /// to measure over the shared memory of UCX, which cannot report failures.
    pub peer_failures: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { settings: Vec::new(), window: 1024, endpoints: 8, renew_after: 100, peer_failures: true }
    }
}

/// One piece of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The address of the destination in this process.
    pub local: u64,
    /// The address of the source in the process of the peer.
    pub remote: u64,
    /// Number of bytes.
    pub len: u64,
}

/// What a fabric has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads that succeeded.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Reads that failed or were given up.
    pub failures: u64,
    /// Connections that were closed by force to end a read.
    pub forced_closes: u64,
    /// Workers that were replaced, after 100 forced closes or because requests did not end.
    pub renewals: u64,
}

#[derive(Debug, Default)]
pub(crate) struct SharedCounts {
    pub(crate) reads: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) forced_closes: AtomicU64,
    pub(crate) renewals: AtomicU64,
}

/// What the thread of a fabric is asked to do.
pub(crate) enum Order {
    Map {
        start: u64,
        len: u64,
        reply: SyncSender<Result<(u64, Vec<u8>), Error>>,
    },
    Unmap {
        id: u64,
        reply: SyncSender<()>,
    },
    Read {
        read: ReadOrder,
        reply: SyncSender<Result<(), Error>>,
    },
    /// Gives up the read with this number.
    GiveUp {
        read: u64,
        cause: Error,
    },
    Forget {
        peer: u64,
    },
    Address {
        reply: SyncSender<Vec<u8>>,
    },
    Close,
}

/// A read, as its thread gets it.
pub(crate) struct ReadOrder {
    pub(crate) number: u64,
    pub(crate) peer: u64,
    pub(crate) address: Arc<Vec<u8>>,
    pub(crate) key: Arc<Vec<u8>>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) deadline: Option<Instant>,
}

/// The queue of orders, and the descriptor that wakes the thread.
#[derive(Debug)]
pub(crate) struct Orders {
    sender: Mutex<Sender<Order>>,
    wake: OwnedFd,
    numbers: AtomicU64,
}

impl Orders {
    fn give(&self, order: Order) -> Result<(), Error> {
        let sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        sender.send(order).map_err(|_| Error::Closed)?;
        drop(sender);
        self.wake();
        Ok(())
    }

    fn wake(&self) {
        // Fails only if the counter is full, which wakes the thread as well.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Gives an order, and waits for its reply.
    fn ask<T>(&self, order: impl FnOnce(SyncSender<T>) -> Order) -> Result<T, Error> {
        let (reply, replied) = sync_channel(1);
        self.give(order(reply))?;
        replied.recv().map_err(|_| Error::Closed)
    }
}

/// UCX in this process: a context, two workers (one reads, the other serves peers), and their thread.
#[derive(Debug)]
pub struct Fabric {
    orders: Arc<Orders>,
    counts: Arc<SharedCounts>,
    version: Version,
    thread: Option<JoinHandle<()>>,
}

impl Fabric {
    /// Opens a context and its workers, and starts their thread.
    ///
    /// Returns `Err` if UCX refuses a setting, or has no transport for the settings.
    pub fn open(library: &Library, options: Options) -> Result<Fabric, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::System(format!("cannot open an eventfd: {errno}")))?;
        // A copy never has the number of a standard stream.
        let wake = wake
            .try_clone()
            .map_err(|error| Error::System(format!("cannot duplicate an eventfd: {error}")))?;
        let heard = wake.try_clone();
        let heard = heard.map_err(|error| Error::System(format!("cannot duplicate an eventfd: {error}")))?;
        let (sender, orders) = channel();
        let counts = Arc::new(SharedCounts::default());
        let (started, is_started) = sync_channel(1);
        let (library_there, counted) = (library.clone(), counts.clone());
        let run = move || thread::run(&library_there, options, &orders, &heard, counted, &started);
        let thread = std::thread::Builder::new().name("llm-fabric".into()).spawn(run);
        let thread = thread.map_err(|error| Error::System(format!("cannot start a thread: {error}")))?;
        let opened = is_started.recv().map_err(|_| Error::Closed).and_then(|opened| opened);
        if let Err(error) = opened {
            let _ = thread.join();
            return Err(error);
        }
        let orders = Arc::new(Orders { sender: Mutex::new(sender), wake, numbers: AtomicU64::new(1) });
        Ok(Fabric { orders, counts, version: library.version(), thread: Some(thread) })
    }

    /// Returns the version of the library.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Returns the address of the worker that serves peers. It never changes.
    pub fn address(&self) -> Result<Vec<u8>, Error> {
        self.orders.ask(|reply| Order::Address { reply })
    }

    /// Maps memory of this process, so that peers with its key and the address of the fabric can read it.
    ///
    /// # Safety
    ///
    /// The memory must stay mapped until the value is dropped, and may be read by others at any time.
    pub unsafe fn map(&self, start: u64, len: u64) -> Result<Mapping, Error> {
        let (id, key) = self.orders.ask(|reply| Order::Map { start, len, reply })??;
        Ok(Mapping { orders: self.orders.clone(), id, key: Arc::new(key) })
    }

    /// Returns a peer with the fabric of this address. Nothing is connected until it is read.
    pub fn peer(&self, address: Vec<u8>) -> Peer {
        let (orders, id) = (self.orders.clone(), self.orders.next_number());
        Peer { orders, id, address: Arc::new(address) }
    }

    /// Returns what the fabric has done.
    pub fn counts(&self) -> Counts {
        let SharedCounts { reads, bytes, failures, forced_closes, renewals } = &*self.counts;
        let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
        Counts {
            reads: load(reads),
            bytes: load(bytes),
            failures: load(failures),
            forced_closes: load(forced_closes),
            renewals: load(renewals),
        }
    }
}

impl Drop for Fabric {
    /// Ends all reads, which fail, and the thread.
    fn drop(&mut self) {
        let _ = self.orders.give(Order::Close);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Mapped memory. Drop unmaps it, and waits for that.
#[derive(Debug)]
pub struct Mapping {
    orders: Arc<Orders>,
    id: u64,
    key: Arc<Vec<u8>>,
}

impl Mapping {
    /// Returns the key with which peers read the memory. Any process that has the key and the address of the fabric can
    /// read it.
    pub fn key(&self) -> &Arc<Vec<u8>> {
        &self.key
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let _ = self.orders.ask(|reply| Order::Unmap { id: self.id, reply });
    }
}

/// A peer that can be read. Drop closes its endpoints.
#[derive(Debug)]
pub struct Peer {
    orders: Arc<Orders>,
    id: u64,
    address: Arc<Vec<u8>>,
}

impl Peer {
    /// Reads `pieces` with `key`, and returns when all bytes are in place.
    ///
    /// `cancelled` is called about every 100 ms. When it returns `true`, the read ends with [`Error::Cancelled`]. Whatever the
    /// result, nothing of the read touches memory after the return.
    ///
    /// # Safety
    ///
    /// The destinations must be memory of this process that is writable until the return.
    pub unsafe fn read(
        &self,
        key: &Arc<Vec<u8>>,
        pieces: Vec<Piece>,
        deadline: Option<Instant>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        let (reply, replied) = sync_channel(1);
        let number = self.orders.next_number();
        let (address, key) = (self.address.clone(), key.clone());
        let read = ReadOrder { number, peer: self.id, address, key, pieces, deadline };
        self.orders.give(Order::Read { read, reply })?;
        self.outcome(&replied, number, cancelled)
    }

    fn outcome(
        &self,
        replied: &Receiver<Result<(), Error>>,
        number: u64,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        use std::sync::mpsc::RecvTimeoutError;
        let mut running =
            RunningRead { orders: &self.orders, replied, number, given_up: false, ended: false };
        loop {
            match replied.recv_timeout(thread::ASK) {
                Err(RecvTimeoutError::Timeout) => {
                    if !running.given_up && cancelled() {
                        running.give_up();
                    }
                }
                ended => {
                    running.ended = true;
                    return ended.unwrap_or(Err(Error::Closed));
                }
            }
        }
    }
}

/// A read whose caller waits. Drop, also during a panic, gives it up and waits for its end.
struct RunningRead<'a> {
    orders: &'a Orders,
    replied: &'a Receiver<Result<(), Error>>,
    number: u64,
    given_up: bool,
    ended: bool,
}

impl RunningRead<'_> {
    fn give_up(&mut self) {
        self.given_up = true;
        let _ = self.orders.give(Order::GiveUp { read: self.number, cause: Error::Cancelled });
    }
}

impl Drop for RunningRead<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.give_up();
            let _ = self.replied.recv();
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.orders.give(Order::Forget { peer: self.id });
    }
}
