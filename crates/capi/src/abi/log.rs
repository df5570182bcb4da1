//! The log callback of C. `crate::log` decides when it is called.

use std::ffi::{c_char, c_void};
use std::sync::RwLock;

use super::process;
use crate::failure::guarded;
use crate::log::{self, Recipient};
use crate::polled_events::c_text;

/// Level of errors, the most severe one.
pub const LLM_DATADIST_LOG_ERROR: i32 = 1;
/// Level of warnings: something is probably wrong.
pub const LLM_DATADIST_LOG_WARNING: i32 = 2;
/// Level of information: links that were made or ended.
pub const LLM_DATADIST_LOG_INFO: i32 = 3;
/// Level of details.
pub const LLM_DATADIST_LOG_DEBUG: i32 = 4;

/// Receives one line of the log: its level, the part of the engine that it comes from, its text, and `user_data`. The texts
/// end in a null byte and are valid during the call.
pub type LlmDatadistLogCallback = Option<
    unsafe extern "C" fn(level: i32, target: *const c_char, text: *const c_char, user_data: *mut c_void),
>;

/// A callback and its `user_data`.
struct CallerCallback {
    callback: unsafe extern "C" fn(i32, *const c_char, *const c_char, *mut c_void),
    user_data: *mut c_void,
}

// SAFETY: the pointer is only passed back, and the caller of `llm_datadist_set_log_callback` promised that the callback
// may use it on any thread.
unsafe impl Send for CallerCallback {}
// SAFETY: as above; the promise includes several threads at a time.
unsafe impl Sync for CallerCallback {}

impl CallerCallback {
    fn call(&self, level: i32, target: &str, text: &str) {
        let (target, text) = (c_text(target), c_text(text));
        // SAFETY: both texts end in a null byte and live until the call returns; the rest is the promise of
        // `llm_datadist_set_log_callback`.
        unsafe { (self.callback)(level, target.as_ptr(), text.as_ptr(), self.user_data) };
    }
}

/// Sends lines of `max_level` and more severe ones to `callback`. Null removes the callback. A process has one callback for
/// all objects.
///
/// The callback runs on the thread that caused the line, which may be a thread of the engine, and on several threads at a
/// time. It must return soon, must not throw an exception or jump out, and must not call this library: inside the callback,
/// log lines are dropped and this function fails. When this function returns, the old callback is not running and is never
/// called again, so its `user_data` may be freed. Therefore the caller must not hold a lock that the callback takes.
///
/// Without a callback, errors go to standard error, unless the environment variable `LLM_DATADIST_LOG` is `off` when the
/// first object is created. A forked child starts without a callback.
///
/// # Safety
/// `callback` may be called with `user_data` on any thread until it is replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn llm_datadist_set_log_callback(
    callback: LlmDatadistLogCallback,
    user_data: *mut c_void,
    max_level: i32,
) -> u32 {
    guarded(|| {
        let given = callback.map(|callback| CallerCallback { callback, user_data });
        let recipient = given.map(|given| Recipient {
            callback: Box::new(move |level, target, text| given.call(level, target, text)),
            max_level,
        });
        log::set(current, recipient)
    })
}

/// Returns the recipient of this process.
pub(super) fn current() -> &'static RwLock<Option<Recipient>> {
    &process::current().log
}
