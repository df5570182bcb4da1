//! The log of the C library: errors go to standard error until a program has a callback of its own.
//!
//! A process has one log, so each case runs this binary again. `tests/cpp/log.cpp` covers levels and threads.

use std::ffi::{CStr, c_char, c_void};
use std::process::Command;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::Mutex;

use crate::abi::*;

static LINES: Mutex<Vec<(i32, String, String)>> = Mutex::new(Vec::new());

unsafe extern "C" fn keep(level: i32, target: *const c_char, text: *const c_char, user_data: *mut c_void) {
    assert_eq!(user_data as usize, 42);
    // SAFETY: the library passes texts that end in a null byte.
    let [target, text] =
        [target, text].map(|text| unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned());
    LINES.lock().unwrap().push((level, target, text));
}

fn log_lines() {
    tracing::error!(target: "llm_datadist::links", peer = 7, "refused");
    tracing::warn!(target: "llm_datadist::links", "a warning");
    tracing::info!(target: "llm_datadist::links", "a line with a \0 in it");
}

#[test]
fn errors_go_to_standard_error_unless_a_variable_or_a_callback_takes_them() {
    let error = "[ERROR] llm_datadist::links: refused, peer=7\n";
    for (case, value, expected) in [
        ("case_without_a_callback", None, error),
        ("case_without_a_callback", Some(""), error),
        ("case_without_a_callback", Some("off"), ""),
        ("case_with_a_callback", None, error),
        ("case_with_a_callback", Some("off"), ""),
    ] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &format!("tests::log::{case}"), "--ignored", "--nocapture"]);
        command.env_remove("LLM_DATADIST_LOG").envs(value.map(|value| ("LLM_DATADIST_LOG", value)));
        let done = command.output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success() && out.contains("1 passed"), "{out}{err}");
        assert_eq!(err, expected, "{case}, {value:?}");
    }
}

#[test]
#[ignore = "one case of the test above, in a process of its own"]
fn case_without_a_callback() {
    assert_ne!(llm_datadist_new(1, 1), 0);
    log_lines();
}

/// Sets a callback for warnings, then one for everything, and removes it: only the last error goes to standard error.
#[test]
#[ignore = "one case of the test above, in a process of its own"]
fn case_with_a_callback() {
    for (callback, level) in [(Some(keep as _), LLM_DATADIST_LOG_WARNING), (Some(keep as _), 4), (None, 0)] {
        let user_data = if callback.is_some() { without_provenance_mut(42) } else { null_mut() };
        // SAFETY: the callback needs nothing but its arguments.
        assert_eq!(unsafe { llm_datadist_set_log_callback(callback, user_data, level) }, 0);
        log_lines();
    }
    let line = |level, text: &str| (level, "llm_datadist::links".to_owned(), text.to_owned());
    let (error, warning) = (line(1, "refused, peer=7"), line(2, "a warning"));
    let info = line(3, "a line with a \\0 in it");
    let expected = [error.clone(), warning.clone(), error, warning, info];
    let mut lines = LINES.lock().unwrap().clone();
    for (_, _, text) in &mut lines {
        *text = text.replace("\\u{0}", "\\0");
    }
    assert_eq!(lines, expected);
}
