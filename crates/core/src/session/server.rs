//! The threads that answer peers: a few threads that all links share, and that wait for all call streams
//! together.
//!
//! An idle stream costs one descriptor and no thread. When a request arrives, the kernel wakes one thread.
//! While it answers, another thread waits. The number of threads exceeds the largest number that were at work at once by at most
//! one, however late the kernel runs them. A thread that has had no work for 10 s ends, unless all others are at work.
//! The kernel wakes the thread that began to wait last, so that those which are not needed grow old.
//! `call_slots` limits how many threads answer one peer at a time.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use rustix::event::EventfdFlags;

use super::answers::{Answers, ReceivedRequest, StreamState};
use super::call_slots::{CallSlot, Slots};
use super::handshake::HANDSHAKE_TIME;
use super::limits::Connections;
use super::link::Link;
use super::poller::{Poller, Watching, next_number};
use super::refusals::{Reason, Refusal, Refusals};
use super::registry::Registry;
use crate::budget::Budget;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::EventFd;
use crate::model::Deadline;
use crate::net::{POLL_TIME, Stream};
use crate::protocol::ControlMessage;
use crate::sync::{Mutex, OnDrop, guarded};
use crate::threads::Threads;

/// Maximum number of handshake steps in progress at a time.
const MAX_STEPS: usize = 8;
/// How long a thread that is not needed is kept after its last work.
const IDLE_EXIT: Duration = Duration::from_secs(10);
/// Poller numbers of the event descriptors. Streams have higher numbers.
const WORK: u64 = 0;
const CLOSED: u64 = 1;

/// The threads that answer peers, and their work.
pub(super) struct Server {
    poller: Poller,
    /// Signalled once for each piece of work.
    work: EventFd,
    /// Signalled when the engine closes, and never cleared.
    closed: EventFd,
    state: Mutex<State>,
    answers: Answers,
    registry: Arc<Registry>,
    refusals: Arc<Refusals>,
    threads: Arc<Threads>,
    budget: Arc<Budget>,
    limits: Connections,
}

#[derive(Default)]
struct State {
    jobs: Jobs,
    /// Number of threads, including those that are starting.
    threads: usize,
    /// Number of threads that are at work.
    busy: usize,
    /// Number of threads that perform a handshake step.
    working: usize,
    is_closed: bool,
}

/// Everything that waits for a thread, or for a request. Dropped without the lock.
#[derive(Default)]
struct Jobs {
    /// The streams on which peers may send requests, by poller number.
    calls: HashMap<u64, CallStream>,
    /// The slots in which jobs run, and the jobs that wait for one, by the number of the link.
    slots: Slots<u64, ServerJob>,
    /// Jobs that have a slot and wait for a thread.
    ready: VecDeque<(ServerJob, CallSlot)>,
    /// Handshake steps that wait for a thread.
    work: VecDeque<HandshakeStep>,
    /// Links that have ended and are to be dropped.
    ended: Vec<Arc<Link>>,
}

/// A handshake step that may take long.
type HandshakeStep = Box<dyn FnOnce() + Send>;

#[derive(Clone)]
struct CallStream {
    link: Arc<Link>,
    stream: Arc<Stream>,
}

/// A job for the peer of one link.
enum ServerJob {
    /// Answer the requests on the stream with this number, beginning with the one that was read already, if there is one.
    Answer(u64, CallStream, Option<Box<ReceivedRequest>>),
    /// Open a stream on which the peer may send requests.
    Dial(Arc<Link>),
}

impl ServerJob {
    fn link(&self) -> &Arc<Link> {
        match self {
            ServerJob::Answer(_, call, _) => &call.link,
            ServerJob::Dial(link) => link,
        }
    }
}

impl Server {
    pub(super) fn new(
        answers: Answers,
        registry: Arc<Registry>,
        refusals: Arc<Refusals>,
        threads: Arc<Threads>,
        limits: Connections,
    ) -> Result<Server> {
        let (poller, event) = (Poller::new()?, |flags| EventFd::new("an eventfd", flags));
        let (work, closed) = (event(EventfdFlags::SEMAPHORE)?, event(EventfdFlags::empty())?);
        poller.add("the descriptor that wakes a thread", &work, WORK, Watching::Always)?;
        poller.add("the descriptor that ends the threads", &closed, CLOSED, Watching::Always)?;
        let (state, budget) = (Mutex::default(), Budget::new(limits.incoming));
        Ok(Server { poller, work, closed, state, answers, registry, refusals, threads, budget, limits })
    }

    /// Returns the budget for the memory of all peers.
    pub(super) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Admits one more stream on which the peer of `link` sends requests, or refuses it. If it succeeds,
    /// [`watch`](Self::watch) must follow.
    pub(super) fn admit(&self, link: &Arc<Link>, stream: &Arc<Stream>) -> Result<(), Refusal> {
        let full = |error| Refusal::new(Reason::Full, error);
        if self.state.lock().jobs.calls.len() >= self.limits.calls
            && link.served.count(|_| true) >= Connections::OF_EACH
        {
            let error = Error::new(
                ErrorKind::NotLinked,
                "there are too many call streams; a higher limit of open files (ulimit -n) makes room for more",
            );
            return Err(full(error.with("limit", self.limits.calls)));
        }
        link.served.add(stream, || link.alive()).map_err(|error| full(link.named(error)))
    }

    /// Answers the requests on `stream`, which `link` knows, until the stream ends.
    pub(super) fn watch(self: &Arc<Self>, link: &Arc<Link>, stream: &Arc<Stream>) -> Result<()> {
        stream.demand_pace(self.answers.silence());
        let (number, call) = (next_number(), CallStream { link: link.clone(), stream: stream.clone() });
        self.state.lock().jobs.calls.insert(number, call);
        // A request may have arrived already. If the link has ended meanwhile, its streams are closed, and
        // the poller reports that too.
        let watched = self.poller.add("a call stream", &**stream, number, watching(stream));
        watched.and_then(|()| self.ensure_idle_thread()).inspect_err(|_| {
            self.state.lock().jobs.calls.remove(&number);
            self.poller.remove(&**stream);
            link.served.remove(stream);
        })
    }

    /// Has a thread open a stream on which the peer of `link` may send requests.
    pub(super) fn dial(self: &Arc<Self>, link: &Arc<Link>) {
        let mut state = self.state.lock();
        let job = ServerJob::Dial(link.clone());
        let Some(job) = state.jobs.slots.enter(link.number, job, false) else { return };
        state.jobs.ready.push_back(job);
        drop(state);
        self.work.signal();
        if let Err(error) = self.ensure_idle_thread() {
            tracing::error!(target: "llm_datadist::links", "cannot start a thread that opens a call stream: {error}");
        }
    }

    /// Has a thread perform a handshake step. Returns `Err` with `System` if no thread can be started for it.
    pub(super) fn work(self: &Arc<Self>, step: HandshakeStep) -> Result<()> {
        self.state.lock().jobs.work.push_back(step);
        self.work.signal();
        self.ensure_idle_thread()
    }

    /// Has a thread drop a link that has ended: unmapping the memory of a peer may take long.
    pub(super) fn release(self: &Arc<Self>, link: Arc<Link>) {
        self.state.lock().jobs.ended.push(link);
        self.work.signal();
        // If no thread can be started, the link is dropped with the next piece of work.
        let _ = self.ensure_idle_thread();
    }

    /// Closes all streams and ends the threads that wait.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.is_closed = true;
        let taken = std::mem::take(&mut state.jobs);
        drop(state);
        self.closed.signal();
        for call in taken.calls.into_values() {
            self.poller.remove(&*call.stream);
            call.stream.close();
        }
    }

    /// Ensures that not all threads are at work. Returns `Err` with `System` if none can be started.
    fn ensure_idle_thread(self: &Arc<Self>) -> Result<()> {
        let mut state = self.state.lock();
        if state.threads > state.busy || state.is_closed {
            return Ok(());
        }
        // Counted before the thread runs, so that only one is started.
        state.threads += 1;
        drop(state);
        let server = self.clone();
        let begun =
            self.threads.spawn("llm-serve", move || match guarded("waiting for requests", || server.run()) {
                Some(ended) => ended.unwrap_or_else(|error| server.fail(&error)),
                None => server.state.lock().threads -= 1,
            });
        begun.map_err(|error| {
            self.state.lock().threads -= 1;
            Error::no_thread("the thread llm-serve", error)
        })
    }

    /// Counts this thread as busy until the result is dropped, and has another one wait.
    fn work_begins(self: &Arc<Self>) -> impl Drop {
        self.state.lock().busy += 1;
        let at_work = OnDrop(|| self.state.lock().busy -= 1);
        if let Err(error) = self.ensure_idle_thread() {
            // Logged as a refusal, which limits it to one line per second.
            self.refusals.log("further peers", &error.into());
        }
        at_work
    }

    /// The body of a thread: waits for requests and work as long as the thread is needed, and then takes it
    /// off the count. Returns `Err` if no thread can wait.
    fn run(self: &Arc<Self>) -> Result<()> {
        // When this thread ends; `None` for a thread that must stay.
        let (mut ready, mut until) = (Vec::with_capacity(1), Some(Instant::now() + IDLE_EXIT));
        loop {
            ready.clear();
            let limit = until.map(|until| until.saturating_duration_since(Instant::now()));
            let waited = self.poller.wait(&mut ready, 1, limit);
            let expired = until.is_some_and(|until| until <= Instant::now());
            let mut state = self.state.lock();
            // One thread always stays to wait.
            if state.is_closed
                || waited.is_err()
                || (ready.is_empty() && expired && state.threads > state.busy + 1)
            {
                state.threads -= 1;
                return if state.is_closed { Ok(()) } else { waited };
            }
            let Some(&number) = ready.first() else {
                until = until.filter(|_| !expired);
                continue;
            };
            drop(state);
            let worked = match number {
                WORK => self.take_work(),
                number => self.on_readable(number),
            };
            // A wake-up without work restarts nothing. Otherwise a thread could be kept by the work of the others.
            until = if worked {
                Some(Instant::now() + IDLE_EXIT)
            } else {
                until.or_else(|| Some(Instant::now()))
            };
        }
    }

    /// Ends all links with the reason, because no thread can wait for their requests. The control thread notices their end. The next
    /// link starts another thread, which tries again. If several threads fail at the same time, each that ended a link or a
    /// handshake logs the error.
    fn fail(&self, error: &Error) {
        let reason = format!("this engine cannot wait for requests: {error}");
        let mut links = self.registry.all().unwrap_or_default();
        links.retain(|link| link.mark_broken(reason.clone()));
        let taken = std::mem::take(&mut self.state.lock().jobs);
        if !links.is_empty() || !taken.work.is_empty() {
            tracing::error!(target: "llm_datadist::links", "no request can be answered, so all links end: {error}");
        }
        for link in links {
            let _ = link.send_control(&ControlMessage::Bye { reason: reason.clone(), unlinked: false });
            link.break_off(reason.clone());
        }
        for step in taken.work {
            guarded("performing a step of a handshake", step);
        }
        for call in taken.calls.into_values() {
            self.poller.remove(&*call.stream);
            call.stream.close();
        }
    }

    /// Performs pieces of work until none is left, or enough threads do so. Returns `false` if there was none.
    fn take_work(self: &Arc<Self>) -> bool {
        self.work.clear();
        let mut worked = false;
        loop {
            let mut state = self.state.lock();
            if let Some((job, slot)) = state.jobs.ready.pop_front() {
                drop(state);
                self.run_jobs(job, slot);
                worked = true;
                continue;
            }
            let next = if state.working < MAX_STEPS { state.jobs.work.pop_front() } else { None };
            let Some(step) = next else {
                let ended = std::mem::take(&mut state.jobs.ended);
                drop(state);
                if !ended.is_empty() {
                    let _at_work = self.work_begins();
                    worked = true;
                    guarded("dropping links that have ended", || drop(ended));
                }
                return worked;
            };
            state.working += 1;
            drop(state);
            let at_work = self.work_begins();
            guarded("performing a step of a handshake", step);
            worked = true;
            drop(at_work);
            self.state.lock().working -= 1;
        }
    }

    /// Answers the requests on the stream `number`, which is readable, or queues it until a slot is free. Returns `false` if the stream has
    /// ended, or nothing has arrived.
    fn on_readable(self: &Arc<Self>, number: u64) -> bool {
        let Some(call) = self.state.lock().jobs.calls.get(&number).cloned() else { return false };
        if !call.stream.wake_up() {
            self.wait_again(number, &call);
            return false;
        }
        let (link, may_be_part) = (call.link.number, call.link.served.writes.any());
        let job = ServerJob::Answer(number, call, None);
        let entered = self.state.lock().jobs.slots.enter(link, job, may_be_part);
        if let Some((job, slot)) = entered {
            self.run_jobs(job, slot);
        }
        true
    }

    /// Runs `job`, and then the jobs that inherit its slot. A job that needs another slot exchanges it.
    fn run_jobs(self: &Arc<Self>, job: ServerJob, slot: CallSlot) {
        let _at_work = self.work_begins();
        let mut next = Some((job, slot));
        while let Some((job, slot)) = next {
            let link = job.link().number;
            let unfinished = self.run_job(job, slot);
            let slots = &mut self.state.lock().jobs.slots;
            next = match unfinished {
                Some(job) => slots.exchange(link, job),
                None => slots.leave(link, slot),
            };
        }
    }

    /// Runs `job`. Returns the job if it read a request that must not be answered in this slot.
    fn run_job(self: &Arc<Self>, job: ServerJob, slot: CallSlot) -> Option<ServerJob> {
        match job {
            ServerJob::Answer(number, call, received) => {
                match guarded("answering a peer", || self.take_call(&call, slot, received)) {
                    Some(StreamState::Open) => self.wait_again(number, &call),
                    Some(StreamState::Ended) | None => self.end_call(number, &call),
                    Some(StreamState::Unanswered(request)) => {
                        request.trim();
                        return Some(ServerJob::Answer(number, call, Some(Box::new(request))));
                    }
                }
            }
            ServerJob::Dial(link) => {
                guarded("opening a stream to a peer", || self.take_dial(&link));
            }
        }
        None
    }

    /// Answers the requests on one stream until none follows at once, or until one needs another slot. The first one may have been
    /// `received` already.
    fn take_call(
        &self,
        call: &CallStream,
        slot: CallSlot,
        mut received: Option<Box<ReceivedRequest>>,
    ) -> StreamState {
        let CallStream { link, stream } = call;
        let replied = Cell::new(None);
        loop {
            stream.restart_pace();
            match self.serve(call, slot, received.take().map(|boxed| *boxed), &replied) {
                StreamState::Open => {}
                state => return state,
            }
            // Stop if another job waits for this slot, or if no request follows at once. The next request of
            // the same call often arrives within microseconds.
            if self.state.lock().jobs.slots.wanted(link.number, slot) || !stream.readable_within(POLL_TIME) {
                return StreamState::Open;
            }
        }
    }

    /// Has the poller report the stream when the next request arrives.
    fn wait_again(&self, number: u64, call: &CallStream) {
        if self.poller.rearm(&*call.stream, number, watching(&call.stream)).is_err() {
            self.end_call(number, call);
        }
    }

    fn end_call(&self, number: u64, CallStream { link, stream }: &CallStream) {
        self.poller.remove(&**stream);
        self.state.lock().jobs.calls.remove(&number);
        stream.close();
        link.served.remove(stream);
    }

    /// Answers `received`, or the next request on the stream if there is none. A request that is read in a slot for parts, and may wait for
    /// rows, stays unanswered. `replied` is when this thread replied to the previous request, if it did.
    fn serve(
        &self,
        CallStream { link, stream }: &CallStream,
        slot: CallSlot,
        received: Option<ReceivedRequest>,
        replied: &Cell<Option<Instant>>,
    ) -> StreamState {
        let gone = Cell::new(false);
        let unlinked = || gone.set(self.registry.remove(link, "the peer unlinked"));
        let read = received.map_or_else(
            || self.answers.receive(link, stream),
            |request| Ok(StreamState::Unanswered(request)),
        );
        let answered = read.and_then(|state| match state {
            StreamState::Unanswered(request) if slot != CallSlot::Parts || !request.waits_for_rows() => {
                self.answers.answer(link, stream, request, &unlinked, replied)
            }
            state => Ok(state),
        });
        let state = answered.unwrap_or_else(|error| {
            // Logged only while the link is alive: the reason why a link broke is logged elsewhere.
            if link.alive() {
                tracing::info!(target: "llm_datadist::links", "a call of {} ended early: {error}", link.peer);
            }
            StreamState::Ended
        });
        if gone.get() {
            stream.close();
            self.registry.drop_link(link, "the peer unlinked");
            return StreamState::Ended;
        }
        state
    }

    fn take_dial(self: &Arc<Self>, link: &Arc<Link>) {
        let opening = OnDrop(|| link.served.opened());
        let Some(dialer) = link.calls.dialer().filter(|_| link.alive()) else { return };
        let deadline = Deadline::after(HANDSHAKE_TIME).named("the handshake limit");
        let at =
            dialer.addresses.choose(|ip| link.served.count(|stream| stream.about.listened_at == Some(ip)));
        let mut opened = link.open_call_stream(dialer, at, true, deadline);
        if at.is_some() && opened.is_err() {
            opened = link.open_call_stream(dialer, None, true, deadline);
        }
        let opened = opened.map(Arc::new);
        drop(opening);
        let served = opened.and_then(|stream| {
            self.admit(link, &stream).map_err(|refusal| refusal.error)?;
            self.watch(link, &stream)
        });
        if let Err(error) = served {
            tracing::warn!(target: "llm_datadist::links", "cannot open a call stream for {}: {error}", link.peer);
        }
    }
}

/// Returns how the poller watches `stream`. If a request is already in the ring, the poller reports the stream at once.
fn watching(stream: &Stream) -> Watching {
    if stream.fall_asleep() { Watching::Once } else { Watching::Soon }
}
