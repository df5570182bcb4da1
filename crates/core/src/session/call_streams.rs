//! The streams on which this side calls a peer: one for each call in progress, and a few idle ones for later
//! calls.
//!
//! A call has its stream to itself and returns it afterwards. If a call ends early, its stream is closed, so
//! that no reply can be mistaken for the reply to another call.

use std::sync::Arc;
use std::time::Duration;

use super::dial::Dialer;
use super::link::Link;
use super::peer_addresses::FurtherAddress;
use super::stream_set::{MOST_CALLS, StreamSet};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::net::Stream;
use crate::protocol::ControlMessage;
use crate::sync::MutexGuard;

/// Maximum number of idle streams kept for later calls.
const KEPT_STREAMS: usize = 32;
/// Idle streams that are kept without a time limit.
const IDLE_STREAMS: usize = 2;
/// How long further idle streams are kept.
const IDLE_TIME: Duration = Duration::from_secs(30);

/// A stream that one call has to itself.
#[derive(Debug)]
pub(crate) struct StreamLease {
    link: Arc<Link>,
    stream: Arc<Stream>,
    /// Whether request and reply were complete, so that the next call may use the stream.
    pub(crate) reusable: bool,
}

impl Link {
    /// Returns a stream for one call, idle or new. Waits for its turn until `deadline`. Returns `Err` if the
    /// link has broken, the deadline passes or the caller is interrupted.
    pub(crate) fn lease(self: &Arc<Self>, deadline: Deadline) -> Result<StreamLease> {
        let (dialer, at) = match self.take_turn(deadline, true)? {
            StreamGrant::Dial(dialer, at) => (dialer, at),
            idle @ StreamGrant::Idle(_) => return self.begin_turn(idle, deadline),
        };
        let lease = self.dial((dialer, at), deadline);
        let failed = lease.as_ref().is_err_and(|error| error.kind() != ErrorKind::Interrupted);
        if !failed || (at.is_none() && self.streams.lock().idle.is_empty()) {
            return lease;
        }
        // The streams that there are, or the main address, may still work.
        let turn = self.take_turn(deadline, false)?;
        self.begin_turn(turn, deadline)
    }

    /// Returns an idle stream with rings for one call, if there is one. Does not wait.
    pub(crate) fn lease_idle_rings(self: &Arc<Self>) -> Option<StreamLease> {
        let mut streams = self.streams.lock();
        // Those with rings are at the end.
        let (stream, _) = streams.idle.pop_if(|(stream, _)| stream.has_rings())?;
        streams.busy.push(stream.clone());
        Some(StreamLease { link: self.clone(), stream, reusable: true })
    }

    fn begin_turn(self: &Arc<Self>, turn: StreamGrant<'_>, deadline: Deadline) -> Result<StreamLease> {
        match turn {
            StreamGrant::Idle(stream) => Ok(StreamLease { link: self.clone(), stream, reusable: false }),
            StreamGrant::Dial(dialer, at) => self.dial((dialer, at), deadline),
        }
    }

    /// Waits for a stream, or for the right to open one. Further addresses of the peer count only if `spread` is set.
    fn take_turn(&self, deadline: Deadline, spread: bool) -> Result<StreamGrant<'_>> {
        let mut streams = self.streams.lock();
        streams.waiting += 1;
        let (mut streams, turn) = self.queue(streams, deadline, spread);
        streams.waiting -= 1;
        drop(streams);
        turn
    }

    fn queue<'a>(
        &'a self,
        mut streams: Locked<'a>,
        deadline: Deadline,
        spread: bool,
    ) -> (Locked<'a>, Result<StreamGrant<'a>>) {
        let mut request = None;
        loop {
            if let Err(error) = self.check() {
                return (streams, Err(error));
            }
            let late = streams.forget_late_requests().unwrap_or(Duration::MAX);
            let room = streams.in_use() < MOST_CALLS;
            let idle = streams.next_idle();
            if let Some((at, stream)) = idle
                && !(room && spread && self.has_unused_address(&streams, &stream))
                && !(room && !stream.has_rings() && self.may_ring(&streams))
            {
                streams.idle.remove(at);
                streams.busy.push(stream.clone());
                return (streams, Ok(StreamGrant::Idle(stream)));
            }
            if room {
                if let Some(dialer) = &self.dialer {
                    let at = dialer.addresses.choose(|ip| streams.count_at(ip)).filter(|_| spread);
                    streams.opening.push(dialer.addresses.ip_of(at));
                    return (streams, Ok(StreamGrant::Dial(dialer, at)));
                }
                if let Some(made) = streams.ask() {
                    request = Some(made);
                    drop(streams);
                    // Never waits: if the peer does not read its control stream, the link breaks.
                    let sent = self.send_control(&ControlMessage::Dial);
                    streams = self.streams.lock();
                    if let Err(error) = sent {
                        streams.take_back(made);
                        return (streams, Err(self.named(error)));
                    }
                    continue;
                }
            }
            drop(self.changed.wait_timeout(streams, deadline.nap().min(late)));
            let passed = deadline.waiting("waiting for a stream to the peer");
            streams = self.streams.lock();
            // A stream that arrived at the last moment is still used. An interruption is returned in any
            // case, because it is reported only once.
            if let Err(error) = passed
                && (streams.idle.is_empty() || error.kind() == ErrorKind::Interrupted)
            {
                if let Some(made) = request {
                    streams.take_back(made);
                }
                return (streams, Err(self.named(error)));
            }
        }
    }

    /// Whether the idle `stream` leads to an address that calls are using, and the peer has one without streams.
    fn has_unused_address(&self, streams: &StreamSet, stream: &Stream) -> bool {
        let dialer = self.dialer.as_ref().filter(|_| streams.busy_at(stream.about.listened_at) > 0);
        dialer.is_some_and(|dialer| dialer.addresses.unused(|ip| streams.count_at(ip)).is_some())
    }

    /// Returns the number of addresses over which this side opens streams.
    pub(crate) fn addresses(&self) -> usize {
        self.dialer.as_ref().map_or(1, |dialer| dialer.addresses.count())
    }

    fn dial(
        self: &Arc<Self>,
        (dialer, at): (&Dialer, Option<&FurtherAddress>),
        deadline: Deadline,
    ) -> Result<StreamLease> {
        let opened = self.open_call_stream(dialer, at, false, deadline).map(Arc::new);
        let mut streams = self.streams.lock();
        let ip = dialer.addresses.ip_of(at);
        if let Some(opening) = streams.opening.iter().position(|opening| *opening == ip) {
            streams.opening.swap_remove(opening);
        }
        if let Ok(stream) = &opened {
            streams.note_address(stream);
            streams.busy.push(stream.clone());
        }
        drop(streams);
        let opened = opened.inspect_err(|_| self.changed.notify_all());
        // A dial that fails means that the peer is gone (`a_peer_that_no_longer_listens_cannot_be_called`), unless this
        // side has no resources to dial (`test_calls_without_free_descriptors_fail_and_the_link_stands`).
        let gone = |error: Error| match error.kind() {
            ErrorKind::LinkFailed if !error.is_shortage() => {
                Error::new(ErrorKind::NotLinked, "the peer cannot be reached any more").because(error)
            }
            _ => error,
        };
        let stream = opened.map_err(|error| self.break_reason_or(gone(error)))?;
        let lease = StreamLease { link: self.clone(), stream, reusable: false };
        self.check()?;
        Ok(lease)
    }

    /// Adds a stream that the peer has opened for calls of this side.
    pub(super) fn lend(&self, stream: &Arc<Stream>) {
        let mut streams = self.streams.lock();
        // Streams beyond the requested number are closed; peers of this version open none.
        let welcome =
            streams.fulfil_request() && self.alive() && streams.idle.len() + streams.busy.len() < MOST_CALLS;
        if welcome {
            streams.note_address(stream);
            streams.put_idle(stream.clone());
        }
        drop(streams);
        if !welcome {
            stream.close();
        }
        self.changed.notify_all();
    }

    /// Closes the streams that have been idle for long, except the few most recently used.
    pub(super) fn trim(&self) {
        let mut streams = self.streams.lock();
        let spare = streams.idle.len().saturating_sub(IDLE_STREAMS);
        // Streams without rings come first, those idle longest at the front. Calls take the last stream.
        let old = streams.idle[..spare].iter().take_while(|(_, since)| since.elapsed() > IDLE_TIME).count();
        let old: Vec<_> = streams.idle.drain(..old).collect();
        drop(streams);
        for (stream, _) in old {
            stream.close();
        }
    }
}

impl StreamLease {
    /// Returns the stream.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for StreamLease {
    fn drop(&mut self) {
        let mut streams = self.link.streams.lock();
        streams.busy.retain(|stream| !Arc::ptr_eq(stream, &self.stream));
        let kept = self.reusable && self.link.alive() && streams.idle.len() < KEPT_STREAMS;
        if kept {
            streams.put_idle(self.stream.clone());
        }
        let dubious = if self.reusable { Vec::new() } else { streams.leave_address(&self.stream) };
        drop(streams);
        if !kept {
            self.stream.close();
        }
        for stream in dubious {
            stream.close();
        }
        // Wake all threads: one that waits may be a call, or an unlink that waits for something else.
        self.link.changed.notify_all();
    }
}

type Locked<'a> = MutexGuard<'a, StreamSet>;

/// What a waiting call receives: an idle stream, or the right to open one.
enum StreamGrant<'a> {
    Idle(Arc<Stream>),
    /// At a further address of the peer, or at the main one.
    Dial(&'a Dialer, Option<&'a FurtherAddress>),
}
