//! The agents that read peers. Each read has its own agent. The agent is kept for the next read of that peer if all requests
//! have ended and no memory was unmapped meanwhile.

use std::collections::HashMap;
use std::ffi::CString;
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use llm_datadist_fabric::{Error, Piece};

use crate::agent::Agent;
use crate::limits::{ASK, Limits};
use crate::read::covering;

/// Memory that the fabric has mapped.
#[derive(Clone, Debug)]
pub(crate) struct Mapped {
    pub(crate) id: u64,
    pub(crate) range: Range<u64>,
}

/// An agent that reads one peer.
#[derive(Debug)]
pub(crate) struct Reader {
    pub(crate) agent: Agent,
    /// The name of the peer's agent.
    pub(crate) peer: CString,
    /// Memory that the fabric had mapped when the read began.
    mapped: Vec<Mapped>,
    /// Ids of the mapped memory that this agent has registered.
    registered: Vec<u64>,
    /// How often memory was unmapped before the read began.
    unmapped: u64,
    /// Whether requests of it may be unfinished.
    posted: bool,
}

impl Reader {
    pub(crate) fn new(agent: Agent, peer: CString) -> Self {
        let (mapped, registered) = (Vec::new(), Vec::new());
        Reader { agent, peer, mapped, registered, unmapped: 0, posted: false }
    }

    /// Registers the mapped memory that contains destinations. Returns the destinations elsewhere.
    pub(crate) fn register_mapped(&mut self, pieces: &[Piece]) -> Result<Vec<Range<u64>>, Error> {
        let holder = |piece: &Piece| {
            let end = piece.local.checked_add(piece.len)?;
            self.mapped.iter().find(|mapped| mapped.range.start <= piece.local && end <= mapped.range.end)
        };
        for mapped in pieces.iter().filter_map(holder) {
            if !self.registered.contains(&mapped.id) {
                // The registration ends with the agent.
                self.agent.register(std::slice::from_ref(&mapped.range))?;
                self.registered.push(mapped.id);
            }
        }
        covering(pieces.iter().filter(|piece| piece.len > 0 && holder(piece).is_none()).copied())
    }

    pub(crate) fn has_posted(&mut self) {
        self.posted = true;
    }

    pub(crate) fn has_ended(&mut self) {
        self.posted = false;
    }

    /// Whether no request is unfinished, so that the agent may be used again.
    pub(crate) fn is_clean(&self) -> bool {
        !self.posted
    }
}

/// The agents of all peers.
#[derive(Debug)]
pub(crate) struct Readers {
    state: Mutex<State>,
    /// Signalled when a read has ended.
    freed: Condvar,
    /// Maximum number of reads of one peer at the same time.
    most: usize,
}

#[derive(Debug, Default)]
struct State {
    peers: HashMap<u64, PeerReaders>,
    mapped: Vec<Mapped>,
    unmapped: u64,
    closed: bool,
}

#[derive(Debug, Default)]
struct PeerReaders {
    idle: Vec<Reader>,
    used: usize,
}

impl Readers {
    pub(crate) fn new(most: usize) -> Self {
        Readers { state: Mutex::default(), freed: Condvar::new(), most: most.max(1) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a read an agent of its peer: an idle one, or one that `connect` creates. Waits while all are in use.
    pub(crate) fn take(
        &self,
        peer: u64,
        limits: &Limits<'_>,
        connect: impl FnOnce() -> Result<Reader, Error>,
    ) -> Result<Taken<'_>, Error> {
        let mut state = loop {
            // Without the lock: this may run handlers of signals, which may call the engine.
            limits.check()?;
            let mut state = self.lock();
            if state.closed {
                return Err(Error::Closed);
            }
            let readers = state.peers.entry(peer).or_default();
            if readers.used < self.most {
                break state;
            }
            drop(self.freed.wait_timeout(state, limits.left(ASK)));
        };
        let (mapped, unmapped) = (state.mapped.clone(), state.unmapped);
        let readers = state.peers.entry(peer).or_default();
        readers.used += 1;
        let idle = readers.idle.pop();
        drop(state);
        let mut taken = Taken { readers: self, peer, reader: idle };
        let reader = match taken.reader.take() {
            Some(reader) => reader,
            None => connect()?,
        };
        taken.reader = Some(Reader { mapped, unmapped, ..reader });
        Ok(taken)
    }

    /// Adds memory that reads may register.
    pub(crate) fn add(&self, mapped: Mapped) {
        self.lock().mapped.push(mapped);
    }

    /// Removes memory, and destroys the idle agents, which may have registered it. Agents in use are destroyed when their
    /// reads end.
    pub(crate) fn remove(&self, id: u64) {
        let mut state = self.lock();
        state.mapped.retain(|mapped| mapped.id != id);
        state.unmapped += 1;
        let idle = state.take_idle();
        drop(state);
        drop(idle);
    }

    /// Destroys the idle agents of a peer, which no read uses.
    pub(crate) fn forget(&self, peer: u64) {
        let forgotten = self.lock().peers.remove(&peer);
        drop(forgotten);
    }

    /// Destroys the idle agents, and has further reads fail.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let idle = state.take_idle();
        drop(state);
        drop(idle);
        self.freed.notify_all();
    }
}

impl State {
    fn take_idle(&mut self) -> Vec<Reader> {
        self.peers.values_mut().flat_map(|readers| readers.idle.drain(..)).collect()
    }
}

/// The agent of a read. Drop, also during a panic, destroys it.
pub(crate) struct Taken<'a> {
    readers: &'a Readers,
    peer: u64,
    reader: Option<Reader>,
}

impl Taken<'_> {
    pub(crate) fn reader(&mut self) -> Option<&mut Reader> {
        self.reader.as_mut()
    }

    /// Keeps the agent for the next read, if memory that it may have registered is still mapped.
    pub(crate) fn keep(mut self) {
        let mut state = self.readers.lock();
        let (closed, unmapped) = (state.closed, state.unmapped);
        let useful = self.reader.as_ref().is_some_and(|reader| !closed && reader.unmapped == unmapped);
        if let Some(readers) = state.peers.get_mut(&self.peer).filter(|_| useful) {
            readers.idle.extend(self.reader.take());
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        drop(self.reader.take());
        if let Some(readers) = self.readers.lock().peers.get_mut(&self.peer) {
            readers.used -= 1;
        }
        self.readers.freed.notify_all();
    }
}
