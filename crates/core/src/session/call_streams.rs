//! The stream that one call over a link has to itself: leasing it, and opening it as the dialing side.
//!
//! A call returns its stream afterwards. If a call ends early, its stream is closed, so that no reply can be mistaken for the
//! reply to another call.
//!
//! The first streams within one host are put on rings in shared memory. After the welcome of such a stream, the dialing side offers
//! its rings, and the accepting side answers with its own. If either side cannot use rings, the stream keeps its socket, which then
//! carries frames and payload.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::call_pool::{RINGED, StreamPermit};
use super::dial::Dialer;
use super::link::Link;
use super::message_io;
use super::peer_addresses::FurtherAddress;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{OwnRings, SharedRings};
use crate::model::Deadline;
use crate::net::{Address, Stream};
use crate::protocol::{self, ControlMessage, HANDSHAKE_LIMIT, Purpose, RingAnswer, RingOffer};

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
        let permit = self.acquire_permit(deadline, true)?;
        let at_main = matches!(permit, StreamPermit::Dial(_, None));
        let lease = self.lease_with(permit, deadline);
        let failed = lease.as_ref().is_err_and(|error| error.kind() != ErrorKind::Interrupted);
        if !failed || (at_main && !self.calls.has_idle()) {
            return lease;
        }
        // The streams that there are, or the main address, may still work.
        self.lease_with(self.acquire_permit(deadline, false)?, deadline)
    }

    /// Returns an idle stream with rings for one call, if there is one. Does not wait.
    pub(crate) fn lease_idle_rings(self: &Arc<Self>) -> Option<StreamLease> {
        self.calls.take_idle_ringed().map(|stream| self.leased(stream, true))
    }

    fn leased(self: &Arc<Self>, stream: Arc<Stream>, reusable: bool) -> StreamLease {
        StreamLease { link: self.clone(), stream, reusable }
    }

    fn acquire_permit(&self, deadline: Deadline, spread: bool) -> Result<StreamPermit<'_>> {
        let ask = || self.send_control(&ControlMessage::Dial);
        let permit = self.calls.take(|| self.alive(), ask, deadline, spread);
        // If there is none, the link has broken.
        let permit = permit.map_err(|error| self.named(error))?;
        permit.map_or_else(|| self.check().and(Err(Error::closed())), Ok)
    }

    fn lease_with(self: &Arc<Self>, permit: StreamPermit<'_>, deadline: Deadline) -> Result<StreamLease> {
        let (dialer, at) = match permit {
            StreamPermit::Idle(stream) => return Ok(self.leased(stream, false)),
            StreamPermit::Dial(dialer, at) => (dialer, at),
        };
        let opened = self.open_call_stream(dialer, at, false, deadline).map(Arc::new);
        self.calls.opened(dialer.addresses.ip_of(at), opened.as_ref().ok());
        // A dial that fails means that the peer is gone (`a_peer_that_no_longer_listens_cannot_be_called`), unless this
        // side has no resources to dial (`test_calls_without_free_descriptors_fail_and_the_link_stands`).
        let gone = |error: Error| match error.kind() {
            ErrorKind::LinkFailed if !error.is_shortage() => {
                Error::new(ErrorKind::NotLinked, "the peer cannot be reached any more").because(error)
            }
            _ => error,
        };
        let stream = opened.map_err(|error| self.break_reason_or(gone(error)))?;
        let lease = self.leased(stream, false);
        self.check()?;
        Ok(lease)
    }

    /// Opens another stream of this link with `dialer`, at a further address or at the main one. With `reverse` the peer will
    /// send requests on it. Returns `Err` with `NotLinked` if another process answers at the address of the peer.
    pub(super) fn open_call_stream(
        &self,
        dialer: &Dialer,
        at: Option<&FurtherAddress>,
        reverse: bool,
        deadline: Deadline,
    ) -> Result<Stream> {
        let Some(at) = at else { return self.dial_call_stream(dialer, reverse, deadline) };
        let (dialer, limit, hurried) = dialer.to(at, deadline);
        self.dial_call_stream(&dialer, reverse, limit).inspect_err(|error| {
            let blamed = match error.kind() {
                ErrorKind::Interrupted => false,
                ErrorKind::Timeout => !hurried,
                _ => !error.is_shortage(),
            };
            if blamed && self.alive() {
                at.note_failure(&self.peer, error);
            }
        })
    }

    /// Opens a stream, with rings if possible.
    fn dial_call_stream(&self, dialer: &Dialer, reverse: bool, deadline: Deadline) -> Result<Stream> {
        if matches!(dialer.address, Address::Tcp(_)) || self.ringed(reverse) >= RINGED {
            return self.dial_with(dialer, (reverse, false), deadline);
        }
        let failed = match OwnRings::create() {
            Err(error) => error,
            // The ring is closed if the stream cannot be opened, so another one may have its descriptor. A peer that cannot
            // receive the ring refuses with `System`.
            Ok(rings) => match self.dial_with(dialer, (reverse, true), deadline) {
                Err(error) if error.is_shortage() || error.kind() == ErrorKind::System => error,
                Err(error) => {
                    if error.kind() != ErrorKind::Interrupted {
                        self.note_rings(Some(&error));
                    }
                    return Err(error);
                }
                Ok(stream) => match offer_rings(rings, &stream, deadline) {
                    Ok(refused) => {
                        // A refusal of more streams than may have rings is no failure.
                        if stream.has_rings() || self.ringed(reverse) < RINGED {
                            self.note_rings(refused.as_ref());
                        }
                        return Ok(stream);
                    }
                    // One side could not receive or map the ring of the other one, for example because it has no free
                    // descriptor. So this stream is lost.
                    Err(error) => error,
                },
            },
        };
        if !self.alive() || failed.kind() == ErrorKind::Interrupted {
            return Err(failed);
        }
        self.note_rings(Some(&failed));
        if failed.kind() == ErrorKind::Timeout {
            return Err(failed);
        }
        self.dial_with(dialer, (reverse, false), deadline)
    }

    fn dial_with(
        &self,
        dialer: &Dialer,
        (reverse, rings): (bool, bool),
        deadline: Deadline,
    ) -> Result<Stream> {
        let dial = || {
            let purpose = Purpose::Call { link: self.id, reverse, rings };
            dialer.handshake(Some(self.peer.cluster), purpose, deadline)
        };
        // A listener that is full of unauthenticated connections drops the oldest one, which may be this one.
        // So retry once.
        let opened = match dial() {
            Err(error) if error.kind() == ErrorKind::NotLinked && self.alive() => dial(),
            opened => opened,
        };
        let (stream, welcome) = opened?;
        if welcome.from.instance == self.peer.incarnation {
            return Ok(stream);
        }
        let text = "another process answers at the address of the peer: it was restarted; link again";
        Err(Error::new(ErrorKind::NotLinked, text))
    }

    /// Records that a stream got its rings, or why it did not.
    fn note_rings(&self, refused: Option<&Error>) {
        if let Some(error) = refused {
            tracing::debug!(target: "llm_datadist::links", "a call stream of {} uses its socket: {error}", self.peer);
        }
        self.calls.note_rings(refused);
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
        self.link.calls.give_back(&self.stream, self.reusable);
    }
}

/// Offers the rings of the dialing side on `stream`, whose welcome has arrived. Afterwards the stream uses rings, unless the peer
/// refuses them. Returns the peer's reason if it refuses, or `Err` if the stream is unusable.
fn offer_rings(
    (rings, descriptor): (OwnRings, OwnedFd),
    stream: &Stream,
    deadline: Deadline,
) -> Result<Option<Error>> {
    stream.send_with(&protocol::encode(&RingOffer)?, &[descriptor.as_fd()], deadline)?;
    let (answer, descriptors) = message_io::receive_message_with(stream, HANDSHAKE_LIMIT, deadline)?;
    stream.refuse_descriptors()?;
    match answer {
        RingAnswer::Used => stream.use_rings(joined(rings, &descriptors)?),
        RingAnswer::Refused { reason } => return Ok(Some(Error::new(ErrorKind::System, reason))),
    }
    Ok(None)
}

/// Answers the offer of a dialing side, whose rings are among `descriptors`. Afterwards the stream uses rings, unless this
/// side has refused them. `link` has `ringed` streams with rings in the same direction.
pub(super) fn answer_ring_offer(
    link: &Link,
    stream: &Stream,
    descriptors: &[OwnedFd],
    ringed: usize,
) -> Result<()> {
    let refuse = |reason: String| -> Result<()> {
        stream.send_now(&protocol::encode(&RingAnswer::Refused { reason })?, &[])
    };
    if ringed >= RINGED {
        let text = "the link already has the maximum number of call streams with rings in this direction";
        return refuse(format!("{text}: {RINGED}"));
    }
    let made = || -> Result<_> {
        let (rings, descriptor) = OwnRings::create()?;
        Ok((joined(rings, descriptors)?, descriptor))
    };
    match made() {
        Ok((rings, descriptor)) => {
            stream.send_now(&protocol::encode(&RingAnswer::Used)?, &[descriptor.as_fd()])?;
            stream.use_rings(rings);
            link.note_rings(None);
        }
        Err(error) => {
            refuse(error.to_string())?;
            link.note_rings(Some(&error));
        }
    }
    Ok(())
}

fn joined(rings: OwnRings, descriptors: &[OwnedFd]) -> Result<SharedRings> {
    let missing = || Error::new(ErrorKind::System, "the peer offered rings without their descriptor");
    rings.join(descriptors.first().ok_or_else(missing)?)
}
