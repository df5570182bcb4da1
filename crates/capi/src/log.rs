//! Sends the engine's log lines to the callback of the program, or errors to standard error.
//!
//! Errors are shown by default, because the one line about a refused connection names the setting that would
//! admit the peer. The C callback itself is in `abi::log`.

use std::cell::Cell;
use std::io::Write;
use std::sync::{Once, PoisonError, RwLock};

use llm_datadist_core::bindings::engine_of_thread;
use llm_datadist_core::{Error, ErrorKind, Result};
use llm_datadist_embed::{Level, Line, Sink, install_log};

/// A function of the program. It is called with a level, a target and a text.
pub(crate) type Callback = Box<dyn Fn(i32, &str, &str) + Send + Sync>;

/// A callback, and the least severe level that it receives.
pub(crate) struct Recipient {
    pub(crate) callback: Callback,
    pub(crate) max_level: i32,
}

/// Returns the cell of the recipient in this process.
type RecipientCell = fn() -> &'static RwLock<Option<Recipient>>;

thread_local! {
    /// Whether this thread is inside the callback.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The numbers of the levels in C.
const LEVELS: [(i32, Level); 4] = [(1, Level::ERROR), (2, Level::WARN), (3, Level::INFO), (4, Level::DEBUG)];

/// Sends the engine's lines to the recipient at `cell` from now on.
pub(crate) fn install(cell: RecipientCell) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        install_log(ToProgram { cell, shows_errors: shows_errors() }, engine_of_thread);
    });
}

/// Whether errors go to standard error while there is no callback.
fn shows_errors() -> bool {
    std::env::var_os("LLM_DATADIST_LOG").is_none_or(|value| value != "off")
}

/// Replaces the recipient at `cell`. Afterwards the old callback is not running and is never called again.
pub(crate) fn set(cell: RecipientCell, recipient: Option<Recipient>) -> Result<()> {
    let refused = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
    if INSIDE.get() {
        return refused("the log callback cannot be replaced from inside the callback".into());
    }
    if let Some(level) = recipient.as_ref().map(|to| to.max_level).filter(|level| !(1..=4).contains(level)) {
        return refused(format!("max_level={level} is out of range (1 to 4)"));
    }
    install(cell);
    let before = {
        let mut current = cell().write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *current, recipient)
    };
    drop(before);
    Ok(())
}

struct ToProgram {
    cell: RecipientCell,
    /// Whether errors are shown while there is no callback.
    shows_errors: bool,
}

impl Sink for ToProgram {
    fn wants(&self, level: Level) -> bool {
        level <= Level::DEBUG && !INSIDE.get()
    }

    fn take(&self, line: Line) {
        let level = LEVELS.iter().find(|&&(_, known)| known == line.level).map_or(4, |&(number, _)| number);
        let recipient = (self.cell)().read().unwrap_or_else(PoisonError::into_inner);
        match recipient.as_ref() {
            Some(recipient) if level <= recipient.max_level => {
                INSIDE.set(true);
                (recipient.callback)(level, line.target, &line.text);
                INSIDE.set(false);
            }
            None if self.shows_errors && line.level == Level::ERROR => show(&line),
            _ => {}
        }
    }
}

/// Writes `line` to standard error with one call, so that lines of several threads do not mix. A closed standard
/// error is not a failure.
fn show(line: &Line) {
    let text = format!("[ERROR] {}: {}\n", line.target, line.text);
    let _ = std::io::stderr().write_all(text.as_bytes());
}
