//! Forks, in processes where only the library has threads.

use std::os::unix::process::CommandExt;
use std::process::Command;

const ALONE: &str = "CAPI_TEST_ALONE";

/// Runs `body` in a process of its own, as a C program would: without the signal handler of Rust's runtime.
///
/// With the handler, each new thread takes a lock of the runtime. A child that is forked in that moment cannot start
/// threads. Programs in C and Python have no such handler. `test` is the full name of the test that calls this.
pub(super) fn alone(test: &str, body: impl FnOnce()) {
    if std::env::var_os(ALONE).is_some() {
        body();
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(ALONE, "");
    let ignore = || {
        for signal in [libc::SIGSEGV, libc::SIGBUS] {
            // SAFETY: this sets no handler. The runtime installs none where a signal is ignored.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        Ok(())
    };
    // SAFETY: `signal` may be called between fork and exec.
    unsafe { command.pre_exec(ignore) };
    let done = command.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && out.contains("1 passed"), "{out}{err}");
}

/// Runs `holds` in a forked child and checks that it returns true.
pub(super) fn in_a_child(holds: impl FnOnce() -> bool) {
    // SAFETY: the child only uses the library, which supports that, writes nothing and exits without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: this takes a number. The alarm ends a child that hangs, which fails the test.
        unsafe { libc::alarm(120) };
        // A panic must not return to the test runner, which the child has a copy of.
        let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(holds));
        let code = i32::from(!held.unwrap_or(false));
        // SAFETY: nothing of the parent needs to be unwound.
        unsafe { libc::_exit(code) };
    }
    let mut status = -1;
    // SAFETY: the child belongs to this test, and the status is a valid pointer.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}
