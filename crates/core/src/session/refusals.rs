//! Connections that were refused: why, and one line for the log, at most one a second for each reason.
//!
//! The lines are errors, because the default level hides everything below, and an operator who sees no link needs to know
//! which setting would admit the peer. Not for: deciding whom to refuse (`greeting`, `accept`).

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind};

/// Why a connection was refused, as far as lines of the log are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// It is another user's, and there is no token.
    User,
    /// It comes from elsewhere, and there is no token.
    Stranger,
    /// Its token is another one, or it has none.
    Token,
    /// It looks for another cluster.
    Cluster,
    /// Only one of the two lets peers reach its caches.
    Mode,
    /// It speaks another protocol, or another version.
    Protocol,
    /// It did not finish its greeting in time, or had to make room for another.
    Late,
    /// There are too many links, streams or connections.
    Full,
    /// Anything else.
    Other,
}

impl Reason {
    const COUNT: usize = Reason::Other as usize + 1;
}

/// A connection that is refused.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) reason: Reason,
    pub(super) error: Error,
}

impl Refusal {
    pub(super) fn new(reason: Reason, error: Error) -> Refusal {
        Refusal { reason, error }
    }

    /// Whether it happens between peers that are entitled to link: a stream for a link that has just ended, or a member of a
    /// communicator that came before this one.
    fn is_usual(&self) -> bool {
        self.reason == Reason::Other && matches!(self.error.kind(), ErrorKind::NotLinked | ErrorKind::Closed)
    }

    /// What the peer sent cannot be read.
    pub(super) fn unreadable(error: Error) -> Refusal {
        Refusal::new(Reason::Protocol, error)
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal::new(Reason::Other, error)
    }
}

/// How often the same reason is logged.
const INTERVAL: Duration = Duration::from_secs(1);

/// What was logged last of each reason.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    last: Mutex<[Option<Last>; Reason::COUNT]>,
}

#[derive(Debug)]
struct Last {
    when: Instant,
    /// Refusals since that were not logged, and the line of the latest.
    more: u64,
    line: String,
}

impl Refusals {
    /// Logs that `who` was refused; where the same reason was logged within the last second, counts it for
    /// [`flush`](Self::flush).
    pub(super) fn log(&self, who: &str, refusal: &Refusal) {
        if refusal.is_usual() {
            tracing::info!(target: "llm_datadist::links", "refused a connection from {who}: {}", refusal.error);
            return;
        }
        let line = format!("refused a connection from {who}: {}", refusal.error);
        if let Some(line) = self.turn(refusal.reason, line, Instant::now()) {
            say(&line);
        }
    }

    /// Logs what was counted, a second after the last line of its reason; says when to come again.
    pub(super) fn flush(&self, now: Instant) -> Option<Duration> {
        let (lines, next) = self.due(now);
        for line in &lines {
            say(line);
        }
        next
    }

    /// The line for `reason` if one is due at `now`; else it is counted.
    fn turn(&self, reason: Reason, line: String, now: Instant) -> Option<String> {
        let mut all = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let last = &mut all[reason as usize];
        match last {
            Some(last) if last.more > 0 || now.saturating_duration_since(last.when) < INTERVAL => {
                (last.more, last.line) = (last.more + 1, line);
                None
            }
            _ => {
                *last = Some(Last { when: now, more: 0, line: String::new() });
                Some(line)
            }
        }
    }

    /// The lines of what was counted and is due, and how long until the next is.
    fn due(&self, now: Instant) -> (Vec<String>, Option<Duration>) {
        let mut all = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut lines, mut next) = (Vec::new(), None::<Duration>);
        for last in all.iter_mut().flatten().filter(|last| last.more > 0) {
            let left = INTERVAL.saturating_sub(now.saturating_duration_since(last.when));
            if left.is_zero() {
                let also = if last.more > 1 {
                    format!(" (and {} more like it)", last.more - 1)
                } else {
                    String::new()
                };
                lines.push(std::mem::take(&mut last.line) + &also);
                (last.when, last.more) = (now, 0);
            } else {
                next = Some(next.map_or(left, |next| next.min(left)));
            }
        }
        (lines, next)
    }
}

fn say(line: &str) {
    tracing::error!(target: "llm_datadist::links", "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_reason_is_logged_once_a_second_with_a_count() {
        let (refusals, start) = (Refusals::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        let turn = |reason, line: &str, millis| refusals.turn(reason, line.into(), at(millis)).is_some();
        assert!(turn(Reason::Token, "one", 0));
        assert!(!turn(Reason::Token, "two", 1) && !turn(Reason::Token, "three", 999));
        assert!(turn(Reason::User, "other", 2), "another reason has lines of its own");
        assert_eq!(refusals.due(at(999)), (vec![], Some(Duration::from_millis(1))));
        let counted = "three (and 1 more like it)".to_owned();
        assert_eq!(refusals.due(at(1000)), (vec![counted], None));
        assert!(!turn(Reason::Token, "four", 1999), "a second has not passed since the line with the count");
        assert_eq!(refusals.due(at(2000)), (vec!["four".into()], None));
        assert!(turn(Reason::Token, "five", 3000));
    }
}
