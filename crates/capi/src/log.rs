//! Where the engine's lines go: to the callback of the program, or errors to standard error.
//!
//! Silence would be a bad default for a library: a refused connection is one line, and the line says which setting would
//! admit the peer. Not for: pointers (`abi::log`).

use std::cell::Cell;
use std::io::Write;
use std::sync::{Once, PoisonError, RwLock};

use llm_datadist_core::{Error, ErrorKind, Level, Line, Result, Sink, install_log};

use crate::door::{GENERATIONS, generation};

/// What the program gave: called with a level, a target and a text.
pub(crate) type Callback = Box<dyn Fn(i32, &str, &str) + Send + Sync>;

/// A callback, and the least severe level that it wants.
struct Given {
    callback: Callback,
    most: i32,
}

/// One for each generation of forked processes: in a child, the lock of its parent may be held for ever.
static GIVEN: [RwLock<Option<Given>>; GENERATIONS] = [const { RwLock::new(None) }; GENERATIONS];

thread_local! {
    /// Whether this thread is inside of the callback.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The numbers that C has for levels.
const LEVELS: [(i32, Level); 4] = [(1, Level::ERROR), (2, Level::WARN), (3, Level::INFO), (4, Level::DEBUG)];

/// Sends the engine's lines here from now on.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        install_log(ToProgram { errors: shows_errors() });
    });
}

/// Whether errors go to standard error while there is no callback.
fn shows_errors() -> bool {
    std::env::var_os("LLM_DATADIST_LOG").is_none_or(|value| value != "off")
}

/// Replaces the callback; afterwards the old one is neither running nor called again.
pub(crate) fn set(callback: Option<Callback>, most: i32) -> Result<()> {
    let refused = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
    if INSIDE.get() {
        return refused("the log callback cannot be replaced from inside the callback".into());
    }
    if callback.is_some() && !(1..=4).contains(&most) {
        return refused(format!("max_level={most} is out of range (1 to 4)"));
    }
    let Some(given) = GIVEN.get(generation()) else {
        return refused("the process is the result of more than 64 forks within forks".into());
    };
    install();
    let given_now = callback.map(|callback| Given { callback, most });
    let before = {
        let mut given = given.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *given, given_now)
    };
    drop(before);
    Ok(())
}

struct ToProgram {
    /// Whether errors are shown while there is no callback.
    errors: bool,
}

impl Sink for ToProgram {
    fn wants(&self, level: Level) -> bool {
        level <= Level::DEBUG && !INSIDE.get()
    }

    fn take(&self, line: Line) {
        let level = LEVELS.iter().find(|&&(_, known)| known == line.level).map_or(4, |&(number, _)| number);
        let Some(given) = GIVEN.get(generation()) else { return };
        let given = given.read().unwrap_or_else(PoisonError::into_inner);
        match given.as_ref() {
            Some(given) if level <= given.most => {
                INSIDE.set(true);
                (given.callback)(level, line.target, &line.text);
                INSIDE.set(false);
            }
            None if self.errors && line.level == Level::ERROR => show(&line),
            _ => {}
        }
    }
}

/// One write for one line, so that lines of several threads do not mix. A closed standard error is not an error.
fn show(line: &Line) {
    let text = format!("[ERROR] {}: {}\n", line.target, line.text);
    let _ = std::io::stderr().write_all(text.as_bytes());
}
