//! What the stand-in knows: groups with their settings, agents, lists and requests.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

pub(crate) type Handle = *mut c_void;
/// Pieces of memory: addresses and lengths.
pub(crate) type Pieces = Vec<(u64, u64)>;

pub(crate) const IN_PROGRESS: i32 = 1;

/// Everything, under one lock. Handles are numbers.
#[derive(Default)]
pub(crate) struct Model {
    last: usize,
    pub(crate) groups: HashMap<String, HashMap<String, i64>>,
    pub(crate) agents: HashMap<usize, Agent>,
    pub(crate) params: HashMap<usize, HashMap<String, String>>,
    pub(crate) lists: HashMap<usize, Pieces>,
    /// Handles that are nothing but names: backends, and lists of kinds of memory.
    pub(crate) names: HashSet<usize>,
    pub(crate) requests: HashMap<usize, Request>,
}

#[derive(Default)]
pub(crate) struct Agent {
    pub(crate) name: String,
    pub(crate) group: String,
    pub(crate) has_backend: bool,
    pub(crate) registered: Pieces,
    pub(crate) peers: HashMap<String, Peer>,
    /// Requests that were released before they ended.
    pub(crate) released: Vec<Request>,
}

#[derive(Clone)]
pub(crate) struct Peer {
    pub(crate) pid: i32,
    pub(crate) registered: Pieces,
}

pub(crate) struct Request {
    pub(crate) agent: usize,
    pub(crate) pid: i32,
    /// Destinations, sources and lengths of the pieces that have not arrived, the last one first.
    pub(crate) rest: Vec<(u64, u64, u64)>,
    pub(crate) posted: bool,
    pub(crate) released: bool,
}

static MODEL: LazyLock<Mutex<Model>> = LazyLock::new(Mutex::default);

thread_local! {
    /// The statuses with which functions refuse the calls of this thread.
    pub(crate) static REFUSED_HERE: RefCell<HashMap<String, i32>> = RefCell::default();
}

pub(crate) fn model() -> MutexGuard<'static, Model> {
    MODEL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the status with which a function must refuse a call of this thread.
pub(crate) fn refusal(function: &str) -> Option<i32> {
    REFUSED_HERE.with_borrow(|refused| refused.get(function).copied())
}

impl Model {
    /// Returns a number that no handle has.
    pub(crate) fn next(&mut self) -> usize {
        self.last += 1;
        0x1000 + self.last * 16
    }

    /// Returns a setting of the group of an agent.
    pub(crate) fn setting(&self, agent: usize, name: &str) -> Option<i64> {
        self.groups.get(&self.agents.get(&agent)?.group)?.get(name).copied()
    }

    /// Returns the status with which a function must refuse a call with this agent.
    pub(crate) fn refusal(&self, agent: usize, function: &str) -> Option<i32> {
        let group = self.setting(agent, &format!("REFUSE_{function}")).filter(|status| *status != 0);
        refusal(function).or(group.map(|status| i32::try_from(status).unwrap_or(-1)))
    }

    /// Copies pieces of a request until it ends or the group of the agent stalls. Returns the status.
    pub(crate) fn advance(&mut self, agent: usize, request: &mut Request) -> i32 {
        while let Some(piece) = request.rest.pop() {
            let group = self.agents.get(&agent).map(|agent| agent.group.clone()).unwrap_or_default();
            let left = self.groups.get_mut(&group).and_then(|settings| settings.get_mut("STALL"));
            if let Some(left) = left {
                if *left <= 0 {
                    request.rest.push(piece);
                    return IN_PROGRESS;
                }
                *left -= 1;
            }
            if !copy(request.pid, piece) {
                return -2;
            }
        }
        0
    }
}

/// Copies a piece out of a process. Returns whether all bytes were readable.
pub(crate) fn copy(pid: i32, (to, from, len): (u64, u64, u64)) -> bool {
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    let vector = |at: u64| libc::iovec { iov_base: at as Handle, iov_len: len };
    let (local, remote) = (vector(to), vector(from));
    // SAFETY: the reader has promised that the destination is writable; the kernel checks both ranges.
    let got = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(got) == Ok(len)
}

/// Whether one of the registered ranges contains the piece.
pub(crate) fn covers(registered: &Pieces, (start, len): (u64, u64)) -> bool {
    registered
        .iter()
        .any(|(from, size)| start.checked_sub(*from).is_some_and(|skip| skip <= *size && len <= size - skip))
}
