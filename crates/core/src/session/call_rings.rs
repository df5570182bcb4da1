//! Puts the first call streams of a link within one host on rings in shared memory.
//!
//! After the welcome of such a stream, the dialing side offers its rings, and the accepting side answers with its own. If
//! either side cannot use rings, the stream keeps its socket, which then carries frames and payload.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use super::link::Link;
use super::message_io;
use super::stream_set::StreamSet;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{OwnRings, SharedRings};
use crate::model::Deadline;
use crate::net::{Address, ReceivedDescriptors, Stream};
use crate::protocol::{self, HANDSHAKE_LIMIT, RingAnswer, RingOffer};

/// Maximum number of call streams with rings of a link in each direction. Each costs memory, and only many simultaneous calls
/// need more streams.
pub(super) const RINGED: usize = 4;

/// How long calls keep to streams without rings after an attempt to get rings has failed.
const RETRY_TIME: Duration = Duration::from_secs(30);

/// The rings of the dialing side, before the peer has them.
pub(super) struct OfferedRings {
    rings: OwnRings,
    descriptor: OwnedFd,
}

impl OfferedRings {
    /// Creates rings for a stream to `address`, whose link has `ringed` streams with rings in the same direction. Returns
    /// `None` over TCP, or if the link has enough rings.
    pub(super) fn create(address: &Address, ringed: usize) -> Result<Option<OfferedRings>> {
        if matches!(address, Address::Tcp(_)) || ringed >= RINGED {
            return Ok(None);
        }
        let (rings, descriptor) = OwnRings::create()?;
        Ok(Some(OfferedRings { rings, descriptor }))
    }

    /// Offers the rings on `stream`, whose welcome has arrived. Afterwards the stream uses rings, unless the peer refuses
    /// them. Returns the peer's reason if it refuses, or `Err` if the stream is unusable.
    pub(super) fn exchange(self, stream: &Stream, deadline: Deadline) -> Result<Option<Error>> {
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
    /// Records that a stream got its rings, or why it did not.
    pub(super) fn note_rings(&self, refused: Option<&Error>) {
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
