//! The interface of a fabric.

use std::ffi::CString;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use llm_datadist_fabric as fabric;
use llm_datadist_fabric::{Counts, Error, Piece, Version};

use crate::agent::{Agent, Registration, Role};
use crate::library::Library;
use crate::limits::Limits;
use crate::read::read;
use crate::readers::{Mapped, Reader, Readers};

/// How a fabric works.
#[derive(Clone, Debug)]
pub struct Options {
    /// Settings of UCX, by their names without the prefix `UCX_`, for example `("TLS", "ib")`. NIXL separates them by commas,
    /// so neither a name nor a value may contain one. Environment variables take precedence.
    pub settings: Vec<(String, String)>,
    /// Maximum number of reads of one peer at the same time, each with an agent. Further reads wait.
    pub readers: usize,
    /// How long a read that is given up waits for its requests in flight. After that, its agent is destroyed.
    pub drain: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options { settings: Vec::new(), readers: 4, drain: Duration::from_millis(20) }
    }
}

/// NIXL in this process: an agent that serves peers, and those that read them.
#[derive(Debug)]
pub struct Fabric {
    shared: Arc<Shared>,
}

struct Shared {
    library: Library,
    settings: CString,
    /// `None` after the fabric was dropped.
    serving: Mutex<Option<Agent>>,
    readers: Readers,
    drain: Duration,
    closed: AtomicBool,
    /// The number of the next mapping or peer.
    last: AtomicU64,
    reads: AtomicU64,
    bytes: AtomicU64,
    failures: AtomicU64,
    forced_closes: AtomicU64,
}

impl Fabric {
    /// Creates the agent that serves peers.
    ///
    /// Returns `Err` if NIXL has no transport for the settings. It writes the cause to the standard error output.
    pub fn open(library: &Library, options: &Options) -> Result<Fabric, Error> {
        let settings = joined(&options.settings)?;
        let serving = Mutex::new(Some(Agent::create(&library.api, Role::Serving, &settings)?));
        let shared = Shared {
            library: library.clone(),
            settings,
            serving,
            readers: Readers::new(options.readers),
            drain: options.drain,
            closed: AtomicBool::new(false),
            last: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            forced_closes: AtomicU64::new(0),
        };
        Ok(Fabric { shared: Arc::new(shared) })
    }
}

impl fabric::Fabric for Fabric {
    fn version(&self) -> Version {
        self.shared.library.version()
    }

    /// Returns the address of the agent that serves peers, and the keys of all memory that is mapped now.
    fn address(&self) -> Result<Vec<u8>, Error> {
        self.shared.serving().as_ref().ok_or(Error::Closed)?.address()
    }

    unsafe fn map(&self, start: u64, len: u64) -> Result<Box<dyn fabric::Mapping>, Error> {
        let (shared, range) = (self.shared.clone(), start..start.saturating_add(len));
        let registered =
            shared.serving().as_ref().ok_or(Error::Closed)?.register(std::slice::from_ref(&range))?;
        let id = shared.next_number();
        shared.readers.add(Mapped { id, range });
        Ok(Box::new(Mapping { shared, id, registration: Mutex::new(registered) }))
    }

    fn peer(&self, address: Vec<u8>) -> Box<dyn fabric::Peer> {
        Box::new(Peer { shared: self.shared.clone(), id: self.shared.next_number(), address })
    }

    fn counts(&self) -> Counts {
        let load = |number: &AtomicU64| number.load(Ordering::Relaxed);
        Counts {
            reads: load(&self.shared.reads),
            bytes: load(&self.shared.bytes),
            failures: load(&self.shared.failures),
            forced_closes: load(&self.shared.forced_closes),
            renewals: 0,
        }
    }
}

impl Drop for Fabric {
    /// Has reads in progress fail soon, and ends the agent that serves peers.
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Relaxed);
        self.shared.readers.close();
        let serving = self.shared.serving().take();
        drop(serving);
    }
}

impl Shared {
    fn serving(&self) -> MutexGuard<'_, Option<Agent>> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_number(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed)
    }

    fn count(&self, outcome: &Result<(), Error>, pieces: &[Piece]) {
        if outcome.is_ok() {
            self.reads.fetch_add(1, Ordering::Relaxed);
            self.bytes.fetch_add(pieces.iter().map(|piece| piece.len).sum(), Ordering::Relaxed);
        } else {
            self.failures.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("library", &self.library).finish_non_exhaustive()
    }
}

/// Mapped memory. The address of the fabric has its key.
struct Mapping {
    shared: Arc<Shared>,
    id: u64,
    registration: Mutex<Registration>,
}

impl fabric::Mapping for Mapping {
    fn key(&self) -> &Arc<Vec<u8>> {
        static EMPTY: LazyLock<Arc<Vec<u8>>> = LazyLock::new(Arc::default);
        &EMPTY
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.shared.readers.remove(self.id);
        let registration = self.registration.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Without the agent, nothing is registered.
        let ended = self.shared.serving().as_ref().map(|serving| serving.deregister(registration));
        if let Some(Err(error)) = ended {
            tracing::warn!(target: "llm_datadist::links", "NIXL could not deregister a pool; peers may still read it: {error}");
        }
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mapping({})", self.id)
    }
}

/// A peer that can be read. Drop destroys its agents.
#[derive(Debug)]
struct Peer {
    shared: Arc<Shared>,
    id: u64,
    address: Vec<u8>,
}

impl fabric::Peer for Peer {
    unsafe fn read(
        &self,
        _key: &Arc<Vec<u8>>,
        pieces: Vec<Piece>,
        deadline: Option<Instant>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), Error> {
        if pieces.iter().all(|piece| piece.len == 0) {
            return Ok(());
        }
        let outcome = self.try_read(&pieces, &Limits::new(deadline, cancelled, &self.shared.closed));
        self.shared.count(&outcome, &pieces);
        outcome
    }
}

impl Peer {
    /// Reads `pieces`, whose destinations the caller of `read` has promised. An agent that may have unfinished requests is
    /// destroyed before the return.
    fn try_read(&self, pieces: &[Piece], limits: &Limits<'_>) -> Result<(), Error> {
        let mut taken = self.shared.readers.take(self.id, limits, || self.connect())?;
        let Some(reader) = taken.reader() else { return Err(Error::Closed) };
        let outcome = read(reader, pieces, limits, self.shared.drain);
        if reader.is_clean() {
            taken.keep();
        } else {
            self.shared.forced_closes.fetch_add(outcome.is_err().into(), Ordering::Relaxed);
            drop(taken);
        }
        outcome
    }

    fn connect(&self) -> Result<Reader, Error> {
        let agent = Agent::create(&self.shared.library.api, Role::Reading, &self.shared.settings)?;
        let name = agent.load(&self.address)?;
        Ok(Reader::new(agent, name))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.shared.readers.forget(self.id);
    }
}

/// Returns settings as one text, as NIXL takes them.
fn joined(settings: &[(String, String)]) -> Result<CString, Error> {
    let mut text = String::new();
    for (name, value) in settings {
        let refused = |why: &str| {
            Err(Error::Library(format!("NIXL cannot be used: the setting {name}={value} contains {why}")))
        };
        if name.contains(['=', ',']) || value.contains(',') {
            return refused("a comma, or an equals sign in its name");
        }
        if name.contains('\0') || value.contains('\0') {
            return refused("a zero byte");
        }
        let comma = if text.is_empty() { "" } else { "," };
        text.extend([comma, name, "=", value]);
    }
    CString::new(text).map_err(|error| Error::Library(format!("NIXL cannot be used: {error}")))
}
