//! Other processes for tests: this test binary again, with one ignored test.

use std::fmt::Display;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const ROLE: &str = "INTEGRATION_ROLE";
const REPORT: &str = "REPORT ";

/// Returns the role that the starting test gave to this process; `None` if no test started it.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Reports `text` to the process that started this one.
pub fn report(text: impl Display) {
    let mut out = std::io::stdout();
    // The test harness may have left its own line unfinished.
    writeln!(out, "\n{REPORT}{text}").unwrap();
}

/// The command for a process that runs `test` in `role`.
pub fn command(test: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).env(ROLE, role);
    command
}

/// Runs `test` in `role` to its end, and returns its reports.
pub fn run(test: &str, role: &str) -> Vec<String> {
    let output = command(test, role).output().unwrap();
    assert!(output.status.success(), "{test} as {role}: {output:?}");
    let printed = String::from_utf8_lossy(&output.stdout);
    printed.lines().filter_map(|line| line.strip_prefix(REPORT)).map(str::to_owned).collect()
}

/// A process that reports and reads lines until it is dropped, which kills it.
pub struct Process {
    child: Child,
    reports: Lines<BufReader<ChildStdout>>,
    input: ChildStdin,
}

impl Process {
    pub fn start(test: &str, role: &str) -> Process {
        let mut child = command(test, role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (out, input) = (child.stdout.take().unwrap(), child.stdin.take().unwrap());
        Process { child, reports: BufReader::new(out).lines(), input }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Returns the words of its next report.
    pub fn report(&mut self) -> Vec<String> {
        let report = self.reports.find_map(|line| Some(line.unwrap().strip_prefix(REPORT)?.to_owned()));
        report.expect("the process has ended").split_whitespace().map(str::to_owned).collect()
    }

    /// Sends it a line.
    pub fn send(&mut self, line: impl Display) {
        writeln!(self.input, "{line}").unwrap();
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
    }

    /// Waits for its end after [`Process::kill`].
    pub fn wait(&mut self) {
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        self.wait();
    }
}
