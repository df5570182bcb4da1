//! The call streams of one link: one for each call under way, and a few kept for the next.
//!
//! A call takes a stream for itself, asks, and gives the stream back; a stream whose call ended in the middle is closed,
//! so that no answer can ever be taken for another call's. Not for: what calls ask (`remote`), or the streams on which the
//! peer calls (`link`).

use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use super::dial::Dialer;
use super::link::Link;
use super::stream_pool::{Calls, MOST_CALLS};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::net::Stream;
use crate::protocol::Control;

/// Streams that are kept for the next calls.
const KEPT_STREAMS: usize = 32;
/// Streams that are kept however long nobody calls.
const IDLE_STREAMS: usize = 2;
/// How long further ones are kept.
const IDLE_TIME: Duration = Duration::from_secs(30);

/// A stream that one call has for itself.
#[derive(Debug)]
pub(crate) struct Lease<'a> {
    link: &'a Link,
    stream: Arc<Stream>,
    /// Whether request and reply were complete, so that the next call may use the stream.
    pub(crate) whole: bool,
}

impl Link {
    /// A stream for one call: one that is idle, or a new one. Waits for its turn until `deadline`.
    pub(crate) fn lease(&self, deadline: Deadline) -> Result<Lease<'_>> {
        let mut calls = self.locked();
        calls.waiting += 1;
        let (mut calls, turn) = self.queue(calls, deadline);
        calls.waiting -= 1;
        drop(calls);
        match turn? {
            Turn::Idle(stream) => Ok(Lease { link: self, stream, whole: false }),
            Turn::Dial(dialer) => self.dial(dialer, deadline),
        }
    }

    fn queue<'a>(&'a self, mut calls: Locked<'a>, deadline: Deadline) -> (Locked<'a>, Result<Turn<'a>>) {
        loop {
            if let Err(error) = self.check() {
                return (calls, Err(error));
            }
            if let Some((stream, _)) = calls.idle.pop() {
                calls.busy.push(stream.clone());
                return (calls, Ok(Turn::Idle(stream)));
            }
            if calls.busy.len() + calls.opening + calls.asked < MOST_CALLS {
                if let Some(dialer) = &self.dialer {
                    calls.opening += 1;
                    return (calls, Ok(Turn::Dial(dialer)));
                }
                if calls.asked < calls.waiting {
                    calls.asked += 1;
                    drop(calls);
                    // Loses the message rather than wait for a peer that does not read.
                    let told = self.tell(&Control::Dial);
                    calls = self.locked();
                    if let Err(error) = told {
                        calls.asked = calls.asked.saturating_sub(1);
                        return (calls, Err(self.named(error)));
                    }
                    continue;
                }
            }
            drop(self.changed.wait_timeout(calls, deadline.nap()));
            let late = deadline.waiting("waiting for a stream to the peer");
            calls = self.locked();
            // A stream that came at the last moment is taken; an interruption is told only once, and kept.
            if let Err(error) = late
                && (calls.idle.is_empty() || error.kind() == ErrorKind::Interrupted)
            {
                // The stream that was asked for may never come: the next call asks again.
                calls.asked = calls.asked.saturating_sub(1);
                return (calls, Err(self.named(error)));
            }
        }
    }

    fn dial(&self, dialer: &Dialer, deadline: Deadline) -> Result<Lease<'_>> {
        let opened = self.open_call_stream(dialer, false, deadline).map(Arc::new);
        let mut calls = self.locked();
        calls.opening -= 1;
        if let Ok(stream) = &opened {
            calls.busy.push(stream.clone());
        }
        drop(calls);
        let opened = opened.inspect_err(|_| self.changed.notify_all());
        let stream = opened.map_err(|error| self.why_or(out_of_reach(error)))?;
        let lease = Lease { link: self, stream, whole: false };
        self.check()?;
        Ok(lease)
    }

    /// A stream on which the peer, who opened it, lets this side call.
    pub(super) fn lend(&self, stream: &Arc<Stream>) {
        let mut calls = self.locked();
        // More than were asked for are no use, and no peer of this version opens them.
        let asked = calls.asked > 0;
        calls.asked = calls.asked.saturating_sub(1);
        let welcome = asked && self.alive() && calls.idle.len() + calls.busy.len() < MOST_CALLS;
        if welcome {
            calls.idle.push((stream.clone(), Instant::now()));
        }
        drop(calls);
        if !welcome {
            stream.close();
        }
        self.changed.notify_all();
    }

    /// Ends the streams that nobody has called on for long, but for a few.
    pub(super) fn trim(&self) {
        let mut calls = self.locked();
        let spare = calls.idle.len().saturating_sub(IDLE_STREAMS);
        // The one used last is taken first, so those at the front have waited longest.
        let old = calls.idle[..spare].iter().take_while(|(_, since)| since.elapsed() > IDLE_TIME).count();
        let old: Vec<_> = calls.idle.drain(..old).collect();
        drop(calls);
        for (stream, _) in old {
            stream.close();
        }
    }
}

impl Lease<'_> {
    /// The stream.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let mut calls = self.link.locked();
        calls.busy.retain(|stream| !Arc::ptr_eq(stream, &self.stream));
        let kept = self.whole && self.link.alive() && calls.idle.len() < KEPT_STREAMS;
        if kept {
            calls.idle.push((self.stream.clone(), Instant::now()));
        }
        drop(calls);
        if !kept {
            self.stream.close();
        }
        // All: who waits may be a call, or an unlink that waits for something else.
        self.link.changed.notify_all();
    }
}

type Locked<'a> = MutexGuard<'a, Calls>;

/// What a call gets when its turn comes: a stream, or leave to open one.
enum Turn<'a> {
    Idle(Arc<Stream>),
    Dial(&'a Dialer),
}

/// To the caller, a peer that can no longer be dialled is one that is not linked (`calls_to_a_peer_that_has_gone`).
#[cold]
fn out_of_reach(error: Error) -> Error {
    match error.kind() {
        ErrorKind::LinkFailed => {
            Error::new(ErrorKind::NotLinked, "the peer cannot be reached any more").because(error)
        }
        _ => error,
    }
}
