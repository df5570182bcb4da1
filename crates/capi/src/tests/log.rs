//! The log of the C library: errors go to standard error until a program has a callback of its own.
//!
//! Each case is a process of its own, this binary started again for one ignored test, because the log is one for a
//! process. Not for: levels and threads (`tests/cpp/log.cpp`).

use std::ffi::{CStr, c_char, c_void};
use std::process::Command;
use std::sync::Mutex;

use crate::abi::{LLM_DATADIST_LOG_WARNING, llm_datadist_new, llm_datadist_set_log_callback};

static LINES: Mutex<Vec<(i32, String, String)>> = Mutex::new(Vec::new());

unsafe extern "C" fn keep(level: i32, target: *const c_char, text: *const c_char, user_data: *mut c_void) {
    assert_eq!(user_data as usize, 42);
    let read = |text: *const c_char| {
        // SAFETY: the library hands over texts that end in a null byte.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
    };
    LINES.lock().unwrap().push((level, read(target), read(text)));
}

/// What the case writes to standard error.
fn stderr_of(case: &str, variable: Option<&str>) -> String {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("tests::log::{case}"), "--ignored", "--nocapture"]);
    command.env_remove("LLM_DATADIST_LOG");
    if let Some(value) = variable {
        command.env("LLM_DATADIST_LOG", value);
    }
    let done = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8(done.stderr).unwrap());
    assert!(done.status.success() && out.contains("1 passed"), "{out}{err}");
    err
}

fn some_lines() {
    tracing::error!(target: "llm_datadist::links", peer = 7, "refused");
    tracing::warn!(target: "llm_datadist::links", "a warning");
    tracing::info!(target: "llm_datadist::links", "a line with a \0 in it");
}

#[test]
fn errors_go_to_standard_error_unless_a_variable_turns_them_off() {
    let shown = "[ERROR] llm_datadist::links: refused, peer=7\n";
    assert_eq!(stderr_of("case_without_a_callback", None), shown);
    assert_eq!(stderr_of("case_without_a_callback", Some("")), shown);
    assert_eq!(stderr_of("case_without_a_callback", Some("off")), "");
}

#[test]
#[ignore = "one case of the test above, in a process of its own"]
fn case_without_a_callback() {
    assert_ne!(llm_datadist_new(1, 1), 0);
    some_lines();
}

#[test]
fn callback_replaces_standard_error_until_it_is_removed() {
    for variable in [None, Some("off")] {
        let shown = if variable.is_none() { "[ERROR] llm_datadist::links: refused, peer=7\n" } else { "" };
        assert_eq!(stderr_of("case_with_a_callback", variable), shown, "the last round has no callback");
    }
}

#[test]
#[ignore = "one case of the test above, in a process of its own"]
fn case_with_a_callback() {
    let user_data = std::ptr::without_provenance_mut(42);
    // SAFETY: the callback needs nothing but its arguments.
    let set = unsafe { llm_datadist_set_log_callback(Some(keep), user_data, LLM_DATADIST_LOG_WARNING) };
    assert_eq!(set, 0);
    some_lines();
    // SAFETY: as above.
    assert_eq!(unsafe { llm_datadist_set_log_callback(Some(keep), user_data, 4) }, 0);
    some_lines();
    // SAFETY: there is no callback.
    assert_eq!(unsafe { llm_datadist_set_log_callback(None, std::ptr::null_mut(), 0) }, 0);
    some_lines();
    let line = |level, text: &str| (level, "llm_datadist::links".to_owned(), text.to_owned());
    let (error, warning) = (line(1, "refused, peer=7"), line(2, "a warning"));
    let info = line(3, "a line with a \\0 in it");
    let expected = vec![error.clone(), warning.clone(), error, warning, info];
    let mut got = LINES.lock().unwrap().clone();
    for (_, _, text) in &mut got {
        *text = text.replace("\\u{0}", "\\0");
    }
    assert_eq!(got, expected);
}
