//! The events that each thread has polled last.
//!
//! They own the messages and texts that the structures of C point to, so the program has nothing to free. A program that has
//! no memory to copy them puts them back.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use llm_datadist_core::{Error, ErrorKind, Event, EventQueue, Result};

/// The events of one poll.
#[derive(Default)]
struct PolledEvents {
    /// The queue that they come from. It keeps the address of the queue from being used again.
    queue: Weak<EventQueue>,
    events: Vec<Event>,
}

thread_local! {
    static LAST: RefCell<PolledEvents> = RefCell::default();
}

/// Keeps events until the next call in this thread. If the thread is about to end and cannot keep them, puts them back and
/// returns `Err`.
pub(crate) fn keep(queue: &Arc<EventQueue>, events: Vec<Event>) -> Result<()> {
    let mut given = Some(PolledEvents { queue: Arc::downgrade(queue), events });
    let before = LAST.try_with(|last| given.take().map(|polled| last.replace(polled)));
    // Dropped only now, when nothing is borrowed.
    drop(before);
    let Some(kept_by_nobody) = given else { return Ok(()) };
    queue.put_back(kept_by_nobody.events.into_iter());
    Err(Error::new(ErrorKind::Closed, "a thread that ends cannot poll"))
}

/// Puts the last `count` of the kept events back into `queue`. Returns `Err(InvalidArgument)` if they are fewer, or of another
/// queue.
pub(crate) fn put_back(queue: &Arc<EventQueue>, count: usize) -> Result<()> {
    let done = LAST.try_with(|last| {
        let mut last = last.borrow_mut();
        let known = std::ptr::eq(last.queue.as_ptr(), Arc::as_ptr(queue));
        let kept = if known { last.events.len() } else { 0 };
        let Some(first) = kept.checked_sub(count) else { return Err(too_many(count, kept)) };
        queue.put_back(last.events.drain(first..));
        Ok(())
    });
    done.unwrap_or_else(|_| Err(too_many(count, 0)))
}

fn too_many(count: usize, kept: usize) -> Error {
    let text = format!(
        "num_events={count} is out of range (0 to {kept}, which the last poll of this thread returned)"
    );
    Error::new(ErrorKind::InvalidArgument, text)
}
