//! The door between C and the engine: handles that cannot dangle, the catch of panics, the reason of the last failure.
//!
//! A handle is a number, never used again: one that was freed, or was never given, is refused. A forked child starts with
//! no handles, whatever its parent held. Not for: conversions, or any one operation.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use llm_datadist_core::bindings::cpp::Options;
use llm_datadist_core::{ClusterId, DataDist, Error, ErrorKind, Result, StatusCode};

/// One object of the class: its name, and its engine while it is initialised.
pub(crate) struct Door {
    /// Its name among its peers.
    pub(crate) cluster: ClusterId,
    /// The number of its role, right or wrong.
    role: AtomicI32,
    open: RwLock<Option<Arc<Open>>>,
    /// Held while an engine is opened, so that two threads open one.
    opening: Mutex<()>,
}

/// An open engine.
pub(crate) struct Open {
    /// The engine.
    pub(crate) engine: DataDist,
    /// What it was opened with.
    pub(crate) options: Options,
}

type Doors = RwLock<BTreeMap<u64, Arc<Door>>>;

/// How many times this process descends from one that had handles. A handle carries it, and each generation has handles
/// of its own: what a fork copied, locks that were held included, is left alone for ever
/// (`a_child_has_no_handles_of_its_parent_and_may_make_its_own`). After [`GENERATIONS`] forks within forks there is
/// nothing left that no ancestor used, and every call fails (`after_too_many_forks_every_call_fails`).
static GENERATION: AtomicUsize = AtomicUsize::new(0);
static DOORS: [Doors; GENERATIONS] = [const { RwLock::new(BTreeMap::new()) }; GENERATIONS];
/// How many generations have handles.
pub(crate) const GENERATIONS: usize = 64;
static LAST: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Why the last call of this thread that failed did.
    static REASON: RefCell<CString> = RefCell::default();
}

/// To be called in a forked child.
pub(crate) fn forked() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    llm_datadist_core::bindings::abandon_sockets();
}

/// Which generation of forked processes this one is.
pub(crate) fn generation() -> usize {
    GENERATION.load(Ordering::Relaxed)
}

fn doors() -> Result<&'static Doors> {
    DOORS.get(generation()).ok_or_else(|| {
        let text = format!(
            "the library serves {GENERATIONS} generations of forked processes, and this is a later one"
        );
        Error::new(ErrorKind::Forked, text)
    })
}

/// A new object, and its handle.
pub(crate) fn make(cluster: ClusterId, role: i32) -> Result<u64> {
    let doors = doors()?;
    let door = Door { cluster, role: role.into(), open: RwLock::default(), opening: Mutex::default() };
    let number = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    let handle = number * GENERATIONS as u64 + generation() as u64;
    doors.write().unwrap_or_else(PoisonError::into_inner).insert(handle, Arc::new(door));
    Ok(handle)
}

/// Ends an object, its engine included.
pub(crate) fn free(handle: u64) -> Result<()> {
    let door = doors()?.write().unwrap_or_else(PoisonError::into_inner).remove(&handle);
    door.map(drop).ok_or_else(|| unknown(handle))
}

/// The object of a handle.
pub(crate) fn door(handle: u64) -> Result<Arc<Door>> {
    let found = doors()?.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned();
    found.ok_or_else(|| unknown(handle))
}

#[cold]
fn unknown(handle: u64) -> Error {
    let text = if handle % GENERATIONS as u64 == generation() as u64 {
        "there is no such handle; it was freed, or never given"
    } else {
        "there is no such handle in this process; it was forked after the handle was made"
    };
    Error::new(ErrorKind::Closed, text).with("handle", handle)
}

impl Door {
    /// Opens the engine, unless it is open.
    pub(crate) fn open(&self, open: impl FnOnce() -> Result<Open>) -> Result<()> {
        let _turn = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if self.engine().is_ok() {
            return Ok(());
        }
        let opened = Arc::new(open()?);
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        Ok(())
    }

    /// Closes the engine: later calls fail, those under way end normally.
    pub(crate) fn close(&self) {
        let open = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        drop(open);
    }

    /// The number of its role, right or wrong: that of the next `Initialize`.
    pub(crate) fn role(&self) -> i32 {
        self.role.load(Ordering::Relaxed)
    }

    /// It has another role.
    pub(crate) fn set_role(&self, role: i32) {
        self.role.store(role, Ordering::Relaxed);
    }

    /// The engine, while it is open.
    pub(crate) fn engine(&self) -> Result<Arc<Open>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner).clone();
        open.ok_or_else(|| {
            Error::new(ErrorKind::Closed, "Initialize has not succeeded, or Finalize was called")
        })
    }
}

/// Runs `call` on the engine of `handle`.
pub(crate) fn enter<T>(handle: u64, call: impl FnOnce(&Open) -> Result<T>) -> Result<T> {
    call(&*door(handle)?.engine()?)
}

/// Runs `call`. No panic goes on from here: one becomes an error.
pub(crate) fn caught<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    // Unwind safe: what outlives a call is behind locks, which keep their data whole or are let go by drop, and nothing
    // that the call borrowed from here is looked at again.
    panic::catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|cause| {
        let text =
            cause.downcast_ref::<&str>().copied().or(cause.downcast_ref::<String>().map(String::as_str));
        let text = format!("the engine panicked: {}", text.unwrap_or("no reason given"));
        // What was thrown may panic once more as it drops.
        std::mem::forget(cause);
        Err(Error::new(ErrorKind::System, text))
    })
}

/// Runs `call` and gives its status. A panic becomes `LLM_FAILED`; the reason of a failure is kept for [`reason`]
/// (`crates/capi/src/tests`).
pub(crate) fn guarded(call: impl FnOnce() -> Result<()>) -> u32 {
    guarded_as(StatusCode::of_cpp, call)
}

/// As [`guarded`], with a status of its own for each kind of failure.
pub(crate) fn guarded_as(code: fn(ErrorKind) -> StatusCode, call: impl FnOnce() -> Result<()>) -> u32 {
    match caught(call) {
        Ok(()) => status(StatusCode::Success),
        Err(error) => {
            keep(&error.to_string());
            status(code(error.kind()))
        }
    }
}

/// The number that C compares.
pub(crate) fn status(code: StatusCode) -> u32 {
    u32::try_from(code.value()).unwrap_or(u32::MAX)
}

/// Keeps why a call failed.
pub(crate) fn keep(text: &str) {
    let text = CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default();
    // Fails only while the thread ends.
    let _ = REASON.try_with(|reason| reason.replace(text));
}

/// The reason of the last failure of this thread. It stays where it is until the next one.
pub(crate) fn reason() -> *const c_char {
    // Fails only while the thread ends.
    REASON.try_with(|reason| reason.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
