//! Puts the first call streams of a link within one host on rings in shared memory.
//!
//! After the welcome of such a stream, the dialing side offers its ring, and the accepting side answers with its own. If
//! either side cannot use rings, the stream keeps its socket, which carries the same messages.

use std::os::fd::{AsFd, OwnedFd};

use super::message_io;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{OwnRing, SharedRings};
use crate::model::{ClusterId, Deadline};
use crate::net::{Address, ReceivedDescriptors, Stream};
use crate::protocol::{self, HANDSHAKE_LIMIT, RingAnswer, RingOffer};

/// Maximum number of call streams with rings of a link in each direction. Each costs memory, and only many simultaneous calls
/// need more streams.
pub(super) const RINGED: usize = 4;

/// The ring of the dialing side, before the peer has it.
pub(super) struct OfferedRing {
    ring: OwnRing,
    descriptor: OwnedFd,
}

impl OfferedRing {
    /// Creates a ring for a stream to `address` of `cluster`, whose link has `ringed` streams with rings in the same
    /// direction. Returns `None` over TCP, if the link has enough rings, or if it fails.
    pub(super) fn create(cluster: ClusterId, address: &Address, ringed: usize) -> Option<OfferedRing> {
        if matches!(address, Address::Tcp(_)) || ringed >= RINGED {
            return None;
        }
        match OwnRing::create() {
            Ok((ring, descriptor)) => Some(OfferedRing { ring, descriptor }),
            Err(error) => {
                report(cluster, &error);
                None
            }
        }
    }

    /// Offers the ring on `stream`, whose welcome has arrived. Afterwards the stream uses rings, unless the peer refuses
    /// them. Returns `Err` if the stream is unusable.
    pub(super) fn exchange(self, cluster: ClusterId, stream: &Stream, deadline: Deadline) -> Result<()> {
        stream.send_with(&protocol::encode(&RingOffer)?, &[self.descriptor.as_fd()], deadline)?;
        let (answer, descriptors) = message_io::receive_message_with(stream, HANDSHAKE_LIMIT, deadline)?;
        stream.expect_descriptors(false);
        match answer {
            RingAnswer::Used => stream.use_rings(joined(self.ring, descriptors)?),
            RingAnswer::Refused { reason } => report(cluster, &Error::new(ErrorKind::System, reason)),
        }
        Ok(())
    }
}

/// Answers the offer of a dialing side, whose ring is among `descriptors`. Afterwards the stream uses rings, unless this
/// side has refused them. The link to `cluster` has `ringed` streams with rings in the same direction.
pub(super) fn take(
    cluster: ClusterId,
    stream: &Stream,
    descriptors: ReceivedDescriptors,
    ringed: usize,
) -> Result<()> {
    let made = || {
        if ringed >= RINGED {
            let text = "the link already has the maximum number of call streams with rings in this direction";
            return Err(Error::new(ErrorKind::System, text).with("limit", RINGED));
        }
        let (ring, descriptor) = OwnRing::create()?;
        Ok((joined(ring, descriptors)?, descriptor))
    };
    match made() {
        Ok((rings, descriptor)) => {
            stream.send_now(&protocol::encode(&RingAnswer::Used)?, &[descriptor.as_fd()])?;
            stream.use_rings(rings);
        }
        Err(error) => {
            stream.send_now(&protocol::encode(&RingAnswer::Refused { reason: error.to_string() })?, &[])?;
            report(cluster, &error);
        }
    }
    Ok(())
}

fn joined(ring: OwnRing, descriptors: ReceivedDescriptors) -> Result<SharedRings> {
    let files = descriptors.memory_files();
    let missing = || Error::new(ErrorKind::System, "the peer offered a ring without its descriptor");
    ring.join(files.first().ok_or_else(missing)?)
}

fn report(cluster: ClusterId, error: &Error) {
    tracing::debug!(target: "llm_datadist::links", "a call stream of cluster {cluster} uses its socket: {error}");
}
