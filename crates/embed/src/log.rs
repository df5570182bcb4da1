//! Renders the engine's `tracing` events as lines, for programs without a `tracing` subscriber of their own.
//!
//! The engine emits events with the targets `llm_datadist::*`. A Rust program can install any subscriber to
//! receive them. The Python and C bindings install a [`Sink`] instead.

use std::fmt::{self, Write};
use std::sync::Arc;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, Subscriber, set_global_default};
use tracing::{Event, Metadata};

pub use tracing::Level;

/// Bytes after which a line is cut off.
const MAX_LINE: usize = 4096;

/// One event as a line of text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Severity of the event.
    pub level: Level,
    /// Part of the engine that emitted the event, for example `llm_datadist::links`.
    pub target: &'static str,
    /// Source file of the event; empty if it is not known.
    pub file: &'static str,
    /// Line number in that file, or 0.
    pub line: u32,
    /// The name of the engine in brackets, if it is known, the message, and `name=value` for each field. Control characters are escaped, because parts of the
    /// text may come from a peer (`tests/integration/log.rs`).
    pub text: String,
}

/// Receiver of lines.
pub trait Sink: Send + Sync + 'static {
    /// Returns whether lines of `level` are wanted. Called for every event, so the answer may change at any
    /// time.
    fn wants(&self, level: Level) -> bool;

    /// Takes a line. Called on the thread of the event, which may be any thread of the engine.
    fn take(&self, line: Line);
}

/// Returns the name of the engine for which the calling thread works.
type EngineName = fn() -> Option<Arc<str>>;

/// Sends all further events of this process to `sink`. `engine` returns the name of the engine for which the thread of an event
/// works. Returns `false` if a subscriber is already installed.
pub fn install(sink: impl Sink, engine: EngineName) -> bool {
    set_global_default(Lines(sink, engine)).is_ok()
}

/// Renders an event of `engine` as a line.
fn line(event: &Event<'_>, engine: Option<Arc<str>>) -> Line {
    let metadata = event.metadata();
    let mut fields = FieldText::default();
    event.record(&mut fields);
    let engine = engine.map_or_else(String::new, |name| format!("[{name}] "));
    let file = metadata.file().unwrap_or_default();
    Line {
        level: *metadata.level(),
        target: metadata.target(),
        file: file.rsplit('/').next().unwrap_or(file),
        line: metadata.line().unwrap_or_default(),
        text: clean(&(engine + &fields.message + &fields.fields)),
    }
}

struct Lines<S>(S, EngineName);

impl<S: Sink> Subscriber for Lines<S> {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && self.0.wants(*metadata.level())
    }

    fn event(&self, event: &Event<'_>) {
        self.0.take(line(event, (self.1)()));
    }

    // The engine has no spans.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message of an event, and its fields as text.
#[derive(Default)]
struct FieldText {
    message: String,
    fields: String,
}

impl FieldText {
    // Writing to a string cannot fail.
    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        let _ = match field.name() {
            "message" => self.message.write_fmt(value),
            name => write!(self.fields, ", {name}={value}"),
        };
    }
}

impl Visit for FieldText {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format_args!("{value:?}"));
    }
}

/// Escapes the control characters of `text`, and cuts it off if it is too long.
fn clean(text: &str) -> String {
    let mut clean = String::with_capacity(text.len().min(MAX_LINE));
    for character in text.chars() {
        if clean.len() >= MAX_LINE {
            clean.push('…');
            break;
        }
        if character.is_control() {
            clean.extend(character.escape_default());
        } else {
            clean.push(character);
        }
    }
    clean
}
