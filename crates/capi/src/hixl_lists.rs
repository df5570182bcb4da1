//! The list that each thread has got last from a function of `hixl`. The library owns it, so the program has nothing to free.

use std::any::Any;
use std::cell::RefCell;

use llm_datadist_core::{Error, ErrorKind, Result};

thread_local! {
    static LAST: RefCell<Option<Box<dyn Any>>> = RefCell::default();
}

/// Returns `Err` if the thread is about to end, and so can keep no list. Called before a list is taken, which would be lost.
pub(crate) fn can_keep() -> Result<()> {
    let text = "a thread that ends cannot get what the library keeps for it";
    LAST.try_with(|_| ()).map_err(|_| Error::new(ErrorKind::System, text))
}

/// Keeps a list, and what it points to, until the next call in this thread.
pub(crate) fn keep<T: 'static>(list: T) {
    let before = LAST.try_with(|last| last.replace(Some(Box::new(list))));
    // Dropped only now, when nothing is borrowed.
    drop(before);
}
