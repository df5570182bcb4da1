//! Refused connections: the reasons, and at most one log line per second for each reason.
//!
//! The lines have the level error, because the default level hides all others. An operator who sees no link
//! must learn which setting would admit the peer.

use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind};
use crate::sync::Mutex;

/// The reason for a refusal. The rate of log lines is limited for each reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// The peer runs as another user, and no token is set.
    User,
    /// No token is set, and the peer has not proved that it is a process of this user on this host.
    Unproven,
    /// The token of the peer is missing or different.
    Token,
    /// The peer wants to link to another cluster.
    Cluster,
    /// Only one of the two sides is in remote-accessible mode.
    Mode,
    /// The peer uses another protocol or another version.
    Protocol,
    /// The peer, which dialed, refuses this side.
    ByPeer,
    /// The handshake was not finished in time.
    Late,
    /// There are too many links, streams or unfinished connections.
    Full,
    /// Any other reason.
    Other,
}

impl Reason {
    const COUNT: usize = Reason::Other as usize + 1;
}

/// A refused connection: the reason and the error.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) reason: Reason,
    pub(super) error: Error,
}

impl Refusal {
    pub(super) fn new(reason: Reason, error: Error) -> Refusal {
        Refusal { reason, error }
    }

    /// Whether the refusal can occur between peers that are entitled to link: a stream for a link that has
    /// just ended, or a member of a communicator that this side has not entered yet.
    fn is_usual(&self) -> bool {
        self.reason == Reason::Other && matches!(self.error.kind(), ErrorKind::NotLinked | ErrorKind::Closed)
    }

    /// Creates the refusal for a message that cannot be decoded.
    pub(super) fn unreadable(error: Error) -> Refusal {
        Refusal::new(Reason::Protocol, error)
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Refusal::new(Reason::Other, error)
    }
}

/// The shortest interval between two log lines for the same reason.
const INTERVAL: Duration = Duration::from_secs(1);

/// The latest log line for each reason.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    last: Mutex<[Option<Last>; Reason::COUNT]>,
    /// Whether the engine is a native one.
    native: bool,
}

#[derive(Debug)]
struct Last {
    when: Instant,
    /// Refusals since then that were not logged, and the line of the latest of them.
    more: u64,
    line: String,
}

impl Refusals {
    /// Has logged nothing yet.
    pub(super) fn new(native: bool) -> Self {
        Refusals { native, ..Refusals::default() }
    }

    /// Logs that `who` was refused. If the same reason was logged within the last second, counts the refusal
    /// for [`flush`](Self::flush) instead.
    pub(super) fn log(&self, who: &str, refusal: &Refusal) {
        let error = refusal.error.for_engine(self.native);
        if refusal.is_usual() {
            tracing::info!(target: "llm_datadist::links", "refused a connection from {who}: {error}");
            return;
        }
        let line = match refusal.reason {
            Reason::ByPeer => format!("{who}, which dialed, does not link to this side: {error}"),
            _ => format!("refused a connection from {who}: {error}"),
        };
        if let Some(line) = self.admit(refusal.reason, line, Instant::now()) {
            say(&line);
        }
    }

    /// Logs the counted refusals that are due, one second after the latest line for the same reason. Returns
    /// when to call again.
    pub(super) fn flush(&self, now: Instant) -> Option<Duration> {
        let (lines, next) = self.due(now);
        for line in &lines {
            say(line);
        }
        next
    }

    /// Returns the line for `reason` if it may be logged at `now`. Otherwise counts it.
    fn admit(&self, reason: Reason, line: String, now: Instant) -> Option<String> {
        let mut all = self.last.lock();
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

    /// Returns the lines for counted refusals that are due, and the time until the next is due.
    fn due(&self, now: Instant) -> (Vec<String>, Option<Duration>) {
        let mut all = self.last.lock();
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
        let admit = |reason, line: &str, millis| refusals.admit(reason, line.into(), at(millis)).is_some();
        assert!(admit(Reason::Token, "one", 0));
        assert!(!admit(Reason::Token, "two", 1) && !admit(Reason::Token, "three", 999));
        assert!(admit(Reason::User, "other", 2), "another reason has lines of its own");
        assert_eq!(refusals.due(at(999)), (vec![], Some(Duration::from_millis(1))));
        let counted = "three (and 1 more like it)".to_owned();
        assert_eq!(refusals.due(at(1000)), (vec![counted], None));
        assert!(!admit(Reason::Token, "four", 1999), "a second has not passed since the line with the count");
        assert_eq!(refusals.due(at(2000)), (vec!["four".into()], None));
        assert!(admit(Reason::Token, "five", 3000));
    }
}
