//! Opens call streams of a link as the dialing side, and puts the first ones within one host on rings in shared memory.
//!
//! After the welcome of such a stream, the dialing side offers its rings, and the accepting side answers with its own. If
//! either side cannot use rings, the stream keeps its socket, which then carries frames and payload.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use super::dial::Dialer;
use super::link::Link;
use super::message_io;
use super::peer_addresses::FurtherAddress;
use super::stream_set::StreamSet;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{OwnRings, SharedRings};
use crate::model::Deadline;
use crate::net::{Address, ReceivedDescriptors, Stream};
use crate::protocol::{self, HANDSHAKE_LIMIT, Purpose, RingAnswer, RingOffer};

/// Maximum number of call streams with rings of a link in each direction. Each costs memory, and only many simultaneous calls
/// need more streams.
const RINGED: usize = 4;

/// How long calls keep to streams without rings after an attempt to get rings has failed.
const RETRY_TIME: Duration = Duration::from_secs(30);

/// The rings of the dialing side, before the peer has them.
struct OfferedRings {
    rings: OwnRings,
    descriptor: OwnedFd,
}

impl OfferedRings {
    /// Creates rings for a stream to `address`, whose link has `ringed` streams with rings in the same direction. Returns
    /// `None` over TCP, or if the link has enough rings.
    fn create(address: &Address, ringed: usize) -> Result<Option<OfferedRings>> {
        if matches!(address, Address::Tcp(_)) || ringed >= RINGED {
            return Ok(None);
        }
        let (rings, descriptor) = OwnRings::create()?;
        Ok(Some(OfferedRings { rings, descriptor }))
    }

    /// Offers the rings on `stream`, whose welcome has arrived. Afterwards the stream uses rings, unless the peer refuses
    /// them. Returns the peer's reason if it refuses, or `Err` if the stream is unusable.
    fn exchange(self, stream: &Stream, deadline: Deadline) -> Result<Option<Error>> {
        stream.send_with(&protocol::encode(&RingOffer)?, &[self.descriptor.as_fd()], deadline)?;
        let (answer, descriptors) = message_io::receive_message_with(stream, HANDSHAKE_LIMIT, deadline)?;
        stream.expect_descriptors(false);
        match answer {
            RingAnswer::Used => stream.use_rings(joined(self.rings, descriptors)?),
            RingAnswer::Refused { reason } => return Ok(Some(Error::new(ErrorKind::System, reason))),
        }
        Ok(None)
    }
}

/// Answers the offer of a dialing side, whose rings are among `descriptors`. Afterwards the stream uses rings, unless this
/// side has refused them. `link` has `ringed` streams with rings in the same direction.
pub(super) fn take(
    link: &Link,
    stream: &Stream,
    descriptors: ReceivedDescriptors,
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

impl Link {
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
                at.note_failure(self.peer.cluster, error);
            }
        })
    }

    /// Opens a stream, with rings if possible.
    fn dial_call_stream(&self, dialer: &Dialer, reverse: bool, deadline: Deadline) -> Result<Stream> {
        let ring = OfferedRings::create(&dialer.address, self.ringed(reverse)).transpose();
        let Some(ring) = ring else { return self.dial_with(dialer, (reverse, false), deadline) };
        let failed = match ring {
            Err(error) => error,
            // The ring is closed if the stream cannot be opened, so another one may have its descriptor.
            Ok(ring) => match self.dial_with(dialer, (reverse, true), deadline) {
                Err(error) if error.is_shortage() => error,
                Err(error) => {
                    if error.kind() != ErrorKind::Interrupted {
                        self.note_rings(Some(&error));
                    }
                    return Err(error);
                }
                Ok(stream) => match ring.exchange(&stream, deadline) {
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
        if welcome.from.instance == self.peer.instance {
            return Ok(stream);
        }
        let text = "another process answers at the address of the peer: it was restarted; link again";
        Err(Error::new(ErrorKind::NotLinked, text))
    }

    /// Records that a stream got its rings, or why it did not.
    fn note_rings(&self, refused: Option<&Error>) {
        if let Some(error) = refused {
            let cluster = self.peer.cluster;
            tracing::debug!(target: "llm_datadist::links", "a call stream of cluster {cluster} uses its socket: {error}");
        }
        *self.rings_refused.lock() = refused.map(|error| (Instant::now(), error.to_string()));
    }

    /// Whether another stream of `streams` may get rings: there are too few, and none was refused lately.
    pub(super) fn may_ring(&self, streams: &StreamSet) -> bool {
        let refused =
            || self.rings_refused.lock().as_ref().is_some_and(|(when, _)| when.elapsed() < RETRY_TIME);
        self.dials_locally() && streams.ringed() + streams.opening.len() < RINGED && !refused()
    }

    /// Whether this side opens call streams over a local socket.
    fn dials_locally(&self) -> bool {
        self.dialer.as_ref().is_some_and(|dialer| !matches!(dialer.address, Address::Tcp(_)))
    }
}

fn joined(rings: OwnRings, descriptors: ReceivedDescriptors) -> Result<SharedRings> {
    let files = descriptors.memory_files();
    let missing = || Error::new(ErrorKind::System, "the peer offered rings without their descriptor");
    rings.join(files.first().ok_or_else(missing)?)
}
