//! Descriptions of network cards, which are checked and have no effect.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde_json::Value;

use crate::address::MAX_TEXT;
use crate::status::{Outcome, Status};

/// Checks a description: a JSON object whose `version` is known, if it has one.
pub(crate) fn check(text: &str) -> Outcome<()> {
    let Ok(Value::Object(fields)) = serde_json::from_str(text) else { return Err(Status::ParamInvalid) };
    let known = |version: &Value| version.as_str().is_some_and(|text| ["1.0", "1.2", "1.3"].contains(&text));
    if fields.get("version").is_none_or(known) { Ok(()) } else { Err(Status::ParamInvalid) }
}

/// Reads a file with a description: a regular file of 1 byte to 1 MiB.
pub(crate) fn of_file(path: &str) -> Outcome<String> {
    let read = || -> std::io::Result<Option<String>> {
        // Opening a FIFO must not wait for a writer.
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(Path::new(path))?;
        if !file.metadata()?.is_file() {
            return Ok(None);
        }
        let mut text = String::new();
        file.take(MAX_TEXT as u64 + 1).read_to_string(&mut text)?;
        Ok(Some(text).filter(|text| !text.is_empty() && text.len() <= MAX_TEXT))
    };
    read().ok().flatten().ok_or(Status::ParamInvalid)
}
