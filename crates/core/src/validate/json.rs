//! Parses the JSON texts of options and rank tables, and limits how deeply they are nested.

use serde::de::Error;
use serde_json::Value;

/// Deepest nesting of objects and lists (contract §17). No option needs more than four levels.
const DEEPEST: usize = 64;

/// Parses `text`. Returns `Err` if it is not JSON or is nested too deeply.
pub(crate) fn json(text: &str) -> serde_json::Result<Value> {
    if deeper_than(text, DEEPEST) {
        return Err(Error::custom(format_args!("it is nested deeper than {DEEPEST} levels")));
    }
    serde_json::from_str(text)
}

/// Returns whether more than `levels` brackets are open at once. Brackets inside strings do not count.
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
