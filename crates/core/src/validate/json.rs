//! JSON texts of options and rank tables, with a bound on how deep they may be nested.
//!
//! Not for: what the values mean.

use serde::de::Error;
use serde_json::Value;

/// How deep objects and lists may be nested (contract §17). No option needs more than four levels.
const DEEPEST: usize = 64;

/// Reads `text`.
pub(super) fn json(text: &str) -> serde_json::Result<Value> {
    if deeper_than(text, DEEPEST) {
        return Err(Error::custom(format_args!("it is nested deeper than {DEEPEST} levels")));
    }
    serde_json::from_str(text)
}

/// Whether more than `levels` brackets are open at once, brackets inside of strings not counted.
fn deeper_than(text: &str, levels: usize) -> bool {
    let (mut depth, mut inside, mut escaped) = (0_usize, false, false);
    for byte in text.bytes() {
        match (inside, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => inside = !inside,
            (false, b'[' | b'{') => depth += 1,
            (false, b']' | b'}') => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > levels {
            return true;
        }
    }
    false
}
