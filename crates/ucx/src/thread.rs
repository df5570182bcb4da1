//! The thread of a fabric. It makes all calls of the library, and sleeps while there is nothing to do.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::endpoints::{Closing, Endpoint};
use crate::error::Error;
use crate::fabric::{Options, Order, ReadOrder, SharedCounts};
use crate::library::Library;
use crate::mapping::MappedMemory;
use crate::reads::ActiveRead;
use crate::worker::{Context, Worker};

/// How often a caller checks whether to give up.
pub(crate) const ASK: Duration = Duration::from_millis(100);
/// How long the thread polls for the end of requests before it sleeps.
const POLL: Duration = Duration::from_micros(50);
/// How long the requests of a closed endpoint may take to end. After that, the worker is destroyed.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// How long idle endpoints may take to close before their worker is destroyed.
const RENEW_LIMIT: Duration = Duration::from_millis(100);
/// How often the thread looks at endpoints that are being closed.
const CLOSE_LOOK: Duration = Duration::from_millis(1);

/// Runs the fabric until it is closed. Sends whether it could be opened.
pub(crate) fn run(
    library: &Library,
    options: Options,
    orders: &Receiver<Order>,
    wake: &OwnedFd,
    counts: Arc<SharedCounts>,
    started: &SyncSender<Result<(), Error>>,
) {
    match State::open(library, options, counts) {
        Ok(state) => {
            let _ = started.send(Ok(()));
            state.run(orders, wake);
        }
        Err(error) => {
            let _ = started.send(Err(error));
        }
    }
}

/// The endpoints of one peer.
#[derive(Default)]
struct KnownPeer {
    idle: Vec<Endpoint>,
    /// Number of reads that have an endpoint.
    used: usize,
    /// Whether its handle was dropped.
    forgotten: bool,
}

/// Everything that the thread owns. Fields are dropped in this order, also if the thread panics: the library calls back for
/// requests of reads until their worker is destroyed, and no caller returns before that.
struct State {
    /// Reads peers. It is replaced after many forced closes; `None` if that failed.
    reading: Option<Worker>,
    /// Serves reads of peers, which have its address.
    serving: Worker,
    reads: Vec<ActiveRead>,
    peers: HashMap<u64, KnownPeer>,
    closing: Vec<Closing>,
    memory: Vec<(u64, MappedMemory)>,
    context: Context,
    address: Vec<u8>,
    options: Options,
    counts: Arc<SharedCounts>,
    /// Forced closes since the worker that reads was created.
    forced: u64,
    last_mapping: u64,
}

impl State {
    fn open(library: &Library, options: Options, counts: Arc<SharedCounts>) -> Result<State, Error> {
        let context = Context::open(library, &options.settings)?;
        let (reading, serving) = (Worker::create(&context)?, Worker::create(&context)?);
        let address = serving.address()?;
        Ok(State {
            reading: Some(reading),
            serving,
            reads: Vec::new(),
            peers: HashMap::new(),
            closing: Vec::new(),
            memory: Vec::new(),
            context,
            address,
            options,
            counts,
            forced: 0,
            last_mapping: 0,
        })
    }

    fn run(mut self, orders: &Receiver<Order>, wake: &OwnedFd) {
        let mut idle_since = Instant::now();
        while self.take_orders(orders) {
            if self.step() {
                idle_since = Instant::now();
            } else if self.reads.is_empty() || idle_since.elapsed() > POLL {
                self.sleep(wake);
            } else {
                std::hint::spin_loop();
            }
        }
        self.close();
    }

    /// Carries out the orders that wait. Returns `false` at the end of the fabric.
    fn take_orders(&mut self, orders: &Receiver<Order>) -> bool {
        loop {
            match orders.try_recv() {
                Ok(order) => {
                    if !self.obey(order) {
                        return false;
                    }
                }
                Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    /// Carries out an order. Returns `false` for the last one.
    fn obey(&mut self, order: Order) -> bool {
        match order {
            Order::Map { start, len, reply } => {
                let _ = reply.send(self.map(start, len));
            }
            Order::Unmap { id, reply } => {
                self.memory.retain(|(mapped, _)| *mapped != id);
                let _ = reply.send(());
            }
            Order::Address { reply } => {
                let _ = reply.send(self.address.clone());
            }
            Order::Read { read, reply } => self.begin(read, reply),
            Order::GiveUp { read, cause } => {
                let found = self.reads.iter_mut().find(|active| active.order.number == read);
                if let Some(active) = found {
                    active.give_up(cause);
                }
            }
            Order::Forget { peer } => {
                let idle = self.peers.get_mut(&peer).map(|known| {
                    known.forgotten = true;
                    std::mem::take(&mut known.idle)
                });
                idle.into_iter().flatten().for_each(|endpoint| self.close_endpoint(endpoint));
                self.forget_unused(peer);
            }
            Order::Close => return false,
        }
        true
    }

    fn map(&mut self, start: u64, len: u64) -> Result<(u64, Vec<u8>), Error> {
        let memory = MappedMemory::map(&self.context, start, len)?;
        let key = memory.key()?;
        self.last_mapping += 1;
        self.memory.push((self.last_mapping, memory));
        Ok((self.last_mapping, key))
    }

    fn begin(&mut self, read: ReadOrder, reply: SyncSender<Result<(), Error>>) {
        if read.pieces.iter().all(|piece| piece.len == 0) {
            let _ = reply.send(Ok(()));
            return;
        }
        self.reads.push(ActiveRead::new(&self.context.api, read, reply, self.counts.clone()));
    }

    /// Does what can be done now. Returns whether there was anything.
    fn step(&mut self) -> bool {
        let mut busy = self.reading.as_ref().is_some_and(Worker::progress);
        busy |= self.serving.progress();
        if self.reads.is_empty() && self.closing.is_empty() {
            return busy;
        }
        let now = Instant::now();
        let drains = self.forced >= self.options.renew_after;
        // Each read has its share, so that none waits for the requests of a peer that does not respond.
        let share = (self.options.window / self.reads.len().max(1)).max(1);
        for at in 0..self.reads.len() {
            self.reads[at].check_deadline(now);
            if self.reads[at].waits() && !drains {
                self.assign(at);
            }
            let read = &mut self.reads[at];
            let room = share.saturating_sub(read.outstanding());
            busy |= room > 0 && read.post(&self.context.api, &self.memory, room);
        }
        busy |= self.end_reads();
        self.closing.retain_mut(|closing| !closing.ended());
        if self.reads.iter().filter_map(ActiveRead::ending_since).any(|since| since + CLOSE_LIMIT < now) {
            tracing::warn!(
                target: "llm_datadist::links",
                "reads by UCX have not ended {} s after their endpoints were closed; the worker is replaced",
                CLOSE_LIMIT.as_secs()
            );
            self.renew();
            busy = true;
        } else if drains && self.reads.iter().all(ActiveRead::waits) {
            self.renew();
            // The reads that waited for this can begin now.
            busy = true;
        }
        busy
    }

    /// Takes the reads that have ended off the list. Returns whether there was one.
    fn end_reads(&mut self) -> bool {
        let (mut at, before) = (0, self.reads.len());
        while at < self.reads.len() {
            if !self.reads[at].end() {
                at += 1;
                continue;
            }
            let read = self.reads.swap_remove(at);
            let (peer, used) = (read.order.peer, read.uses_endpoint());
            let endpoint = read.into_endpoint();
            self.forced += u64::from(used && endpoint.is_none());
            let mut unwanted = endpoint;
            if let Some(known) = self.peers.get_mut(&peer) {
                known.used -= usize::from(used);
                if !known.forgotten {
                    known.idle.extend(unwanted.take());
                }
            }
            if let Some(endpoint) = unwanted {
                self.close_endpoint(endpoint);
            }
            self.forget_unused(peer);
        }
        self.reads.len() < before
    }

    fn forget_unused(&mut self, peer: u64) {
        if self.peers.get(&peer).is_some_and(|known| known.forgotten && known.used == 0) {
            self.peers.remove(&peer);
        }
    }

    /// Begins to close an endpoint that no read uses.
    fn close_endpoint(&mut self, endpoint: Endpoint) {
        self.forced += 1;
        self.closing.push(endpoint.close());
    }

    /// Gives a read an endpoint of its peer, unless all are in use.
    fn assign(&mut self, at: usize) {
        let (peer, address) = (self.reads[at].order.peer, self.reads[at].order.address.clone());
        while let Some(idle) = self.peers.get_mut(&peer).and_then(|known| known.idle.pop()) {
            if idle.check().is_ok() {
                return self.begin_read(at, peer, idle);
            }
            // The peer has gone, or was restarted.
            self.close_endpoint(idle);
        }
        if self.peers.get(&peer).is_some_and(|known| known.used >= self.options.endpoints) {
            return;
        }
        let worker = match self.reading.take() {
            Some(worker) => Ok(worker),
            None => Worker::create(&self.context),
        };
        match worker.and_then(|worker| {
            Endpoint::connect(self.reading.insert(worker), &address, self.options.peer_failures)
        }) {
            Ok(endpoint) => self.begin_read(at, peer, endpoint),
            Err(error) => self.reads[at].give_up(error),
        }
    }

    fn begin_read(&mut self, at: usize, peer: u64, endpoint: Endpoint) {
        self.peers.entry(peer).or_default().used += 1;
        self.reads[at].begin(endpoint);
    }

    /// Destroys the worker that reads, and creates another one. Reads that have an endpoint fail.
    fn renew(&mut self) {
        for known in self.peers.values_mut() {
            self.closing.extend(known.idle.drain(..).map(Endpoint::close));
        }
        let limit = Instant::now() + RENEW_LIMIT;
        while self.closing.iter_mut().any(|closing| !closing.ended()) && Instant::now() < limit {
            self.reading.iter().for_each(|worker| {
                worker.progress();
            });
            self.serving.progress();
        }
        self.reading = None;
        // Nothing of the old worker touches memory any more, so its reads may end.
        self.closing.clear();
        self.forced = 0;
        self.counts.renewals.fetch_add(1, Ordering::Relaxed);
        self.reads.iter_mut().filter(|read| !read.waits()).for_each(ActiveRead::abandon);
        match Worker::create(&self.context) {
            Ok(worker) => self.reading = Some(worker),
            // The next read tries again, and fails with the reason.
            Err(error) => {
                tracing::warn!(target: "llm_datadist::links", "the worker of UCX cannot be replaced: {error}");
            }
        }
    }

    /// Sleeps until something happens at a worker, an order arrives, or a read must be looked at.
    fn sleep(&mut self, wake: &OwnedFd) {
        for worker in self.reading.iter().chain([&self.serving]) {
            match worker.arm() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::warn!(target: "llm_datadist::links", "cannot wait for events of UCX: {error}");
                    std::thread::sleep(CLOSE_LOOK);
                    return;
                }
            }
        }
        let ending = !self.closing.is_empty() || self.reads.iter().any(|read| read.ending_since().is_some());
        let running = self.reads.iter().filter(|read| read.ending_since().is_none());
        let deadline = running.filter_map(|read| read.order.deadline).min();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let limit = if ending { Some(left.unwrap_or(CLOSE_LOOK).min(CLOSE_LOOK)) } else { left };
        let limit =
            limit.map(|limit| Timespec::try_from(limit).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 }));
        let workers = self.reading.iter().chain([&self.serving]);
        let mut watched: Vec<PollFd<'_>> = workers.map(|worker| PollFd::new(worker, PollFlags::IN)).collect();
        watched.push(PollFd::new(wake, PollFlags::IN));
        let _ = poll(&mut watched, limit.as_ref());
        let _ = rustix::io::read(wake, &mut [0u8; 8]);
    }

    /// Ends everything. Reads in progress fail.
    fn close(mut self) {
        for read in &mut self.reads {
            read.give_up(Error::Closed);
        }
        let idle = self.peers.values_mut().flat_map(|known| known.idle.drain(..));
        self.closing.extend(idle.map(Endpoint::close));
        let limit = Instant::now() + CLOSE_LIMIT;
        while !(self.reads.is_empty() && self.closing.is_empty()) && Instant::now() < limit {
            self.step();
        }
        // Nothing touches memory after that, so what is left may end.
        self.reading = None;
        self.reads.iter_mut().for_each(ActiveRead::abandon);
    }
}
