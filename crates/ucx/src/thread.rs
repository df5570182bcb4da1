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

/// Everything that the thread owns. Fields are dropped in this order.
struct State {
    reads: Vec<ActiveRead>,
    peers: HashMap<u64, KnownPeer>,
    closing: Vec<Closing>,
    memory: Vec<(u64, MappedMemory)>,
    /// Reads peers. It is replaced after many forced closes.
    reading: Worker,
    /// Serves reads of peers, which have its address.
    serving: Worker,
    context: Context,
    address: Vec<u8>,
    options: Options,
    counts: Arc<SharedCounts>,
    /// Forced closes since the worker was created.
    forced: u64,
    last_mapping: u64,
}

impl State {
    fn open(library: &Library, options: Options, counts: Arc<SharedCounts>) -> Result<State, Error> {
        let context = Context::open(library, &options.settings)?;
        let (reading, serving) = (Worker::create(&context)?, Worker::create(&context)?);
        let address = serving.address()?;
        Ok(State {
            reads: Vec::new(),
            peers: HashMap::new(),
            closing: Vec::new(),
            memory: Vec::new(),
            reading,
            serving,
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
            if self.turn() {
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
                Ok(Order::Close) | Err(TryRecvError::Disconnected) => return false,
                Ok(order) => self.obey(order),
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn obey(&mut self, order: Order) {
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
                if let Some(known) = self.peers.get_mut(&peer) {
                    known.forgotten = true;
                    self.closing.extend(known.idle.drain(..).map(Endpoint::close));
                }
                self.forget_unused(peer);
            }
            Order::Close => {}
        }
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
    fn turn(&mut self) -> bool {
        let mut busy = self.reading.progress();
        busy |= self.serving.progress();
        if self.reads.is_empty() && self.closing.is_empty() {
            return busy;
        }
        let now = Instant::now();
        let mut in_flight: usize = self.reads.iter().map(ActiveRead::outstanding).sum();
        for read in &mut self.reads {
            read.check_deadline(now);
            if read.waits() {
                let (peers, closing) = (&mut self.peers, &mut self.closing);
                assign(read, peers, closing, (&self.reading, self.options.endpoints));
            }
            let (before, room) = (read.outstanding(), self.options.window.saturating_sub(in_flight));
            busy |= room > 0 && read.post(&self.context.api, &self.memory, room);
            in_flight = (in_flight + read.outstanding()).saturating_sub(before);
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
        } else if self.forced >= self.options.renew_after && self.reads.is_empty() {
            self.renew();
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
            if let Some(known) = self.peers.get_mut(&peer) {
                known.used -= usize::from(used);
                match endpoint {
                    Some(endpoint) if !known.forgotten => known.idle.push(endpoint),
                    Some(endpoint) => self.closing.push(endpoint.close()),
                    None => {}
                }
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

    /// Replaces the worker that reads. Reads in progress fail.
    fn renew(&mut self) {
        let idle = self.peers.values_mut().flat_map(|known| known.idle.drain(..));
        self.closing.extend(idle.map(Endpoint::close));
        let limit = Instant::now() + CLOSE_LIMIT;
        while self.closing.iter_mut().any(|closing| !closing.ended()) && Instant::now() < limit {
            self.reading.progress();
        }
        match Worker::create(&self.context) {
            Ok(worker) => {
                // Nothing of the old worker touches memory any more, so its reads may end.
                drop(std::mem::replace(&mut self.reading, worker));
                self.closing.clear();
                self.forced = 0;
                self.counts.renewals.fetch_add(1, Ordering::Relaxed);
                self.reads.iter_mut().for_each(ActiveRead::abandon);
            }
            Err(error) => {
                tracing::warn!(target: "llm_datadist::links", "the worker of UCX cannot be replaced: {error}");
                self.forced = 0;
            }
        }
    }

    /// Sleeps until something happens at a worker, an order arrives, or a read must be looked at.
    fn sleep(&mut self, wake: &OwnedFd) {
        for worker in [&self.reading, &self.serving] {
            match worker.arm() {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::warn!(target: "llm_datadist::links", "{error}");
                    std::thread::sleep(CLOSE_LOOK);
                    return;
                }
            }
        }
        let ending = !self.closing.is_empty() || self.reads.iter().any(|read| read.ending_since().is_some());
        let deadline = self.reads.iter().filter_map(|read| read.order.deadline).min();
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let limit = if ending { Some(left.unwrap_or(CLOSE_LOOK).min(CLOSE_LOOK)) } else { left };
        let limit =
            limit.map(|limit| Timespec::try_from(limit).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 }));
        let mut watched = [
            PollFd::new(&self.reading, PollFlags::IN),
            PollFd::new(&self.serving, PollFlags::IN),
            PollFd::new(wake, PollFlags::IN),
        ];
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
            self.turn();
        }
        let State { mut reads, memory, reading, serving, context, .. } = self;
        drop(reading);
        reads.iter_mut().for_each(ActiveRead::abandon);
        drop((serving, memory, context));
    }
}

/// Gives a read an endpoint of its peer, unless all are in use.
fn assign(
    read: &mut ActiveRead,
    peers: &mut HashMap<u64, KnownPeer>,
    closing: &mut Vec<Closing>,
    (worker, most): (&Worker, usize),
) {
    let known = peers.entry(read.order.peer).or_default();
    while let Some(idle) = known.idle.pop() {
        if idle.check().is_ok() {
            known.used += 1;
            return read.begin(idle);
        }
        // The peer has gone, or was restarted.
        closing.push(idle.close());
    }
    if known.used >= most {
        return;
    }
    match Endpoint::connect(worker, &read.order.address) {
        Ok(endpoint) => {
            known.used += 1;
            read.begin(endpoint);
        }
        Err(error) => read.give_up(error),
    }
}
