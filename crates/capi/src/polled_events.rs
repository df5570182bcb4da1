//! What the structures of C point to: the events, peers and counters that each thread has got last, and their texts.
//!
//! The library owns them, so the program has nothing to free.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::sync::Arc;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::{Error, ErrorKind, Event, EventQueue, PeerInfo, Result};

/// What the structures of one call point to.
#[derive(Default)]
pub(crate) struct PointedTo {
    /// The events of the call.
    pub(crate) events: Vec<Event>,
    /// The peers of the call.
    pub(crate) peers: Vec<PeerInfo>,
    texts: Vec<CString>,
}

impl PointedTo {
    /// Returns what points to nothing yet, with room for this many texts.
    pub(crate) fn with_room(texts: usize) -> Result<Self> {
        Ok(PointedTo {
            texts: fallible::with_capacity("the texts of events", texts)?,
            ..PointedTo::default()
        })
    }

    /// Returns a text as C sees it.
    pub(crate) fn text(&mut self, text: &str) -> *const c_char {
        self.texts.push(c_text(text));
        self.texts.last().map_or(c"".as_ptr(), |text| text.as_ptr())
    }
}

thread_local! {
    static LAST: RefCell<PointedTo> = RefCell::default();
    static STATS: RefCell<CString> = RefCell::default();
}

/// Keeps the counters of an engine until the next call in this thread, and returns them as C sees them.
pub(crate) fn keep_stats(json: &str) -> Result<*const c_char> {
    let kept = STATS.try_with(|last| {
        *last.borrow_mut() = c_text(json);
        last.borrow().as_ptr()
    });
    kept.map_err(|_| thread_ends())
}

/// Returns a text that ends in a null byte, and has no other.
pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

fn thread_ends() -> Error {
    Error::new(ErrorKind::System, "a thread that ends cannot get what the library keeps for it")
}

/// Keeps what a call points to until the next call in this thread. If the thread is about to end and cannot keep it, puts the events
/// back into `queue` and returns `Err`.
pub(crate) fn keep(queue: &Arc<EventQueue>, pointed_to: PointedTo) -> Result<()> {
    let mut given = Some(pointed_to);
    let before = LAST.try_with(|last| given.take().map(|given| last.replace(given)));
    // Dropped only now, when nothing is borrowed.
    drop(before);
    let Some(kept_by_nobody) = given else { return Ok(()) };
    queue.put_back(kept_by_nobody.events.into_iter());
    Err(thread_ends())
}
