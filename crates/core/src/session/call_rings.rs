//! Puts the first call streams of a link within one host on rings in shared memory.
//!
//! After the welcome of such a stream, the dialing side offers its ring, and the accepting side answers with its own. If
//! either side cannot use rings, the stream keeps its socket, which carries the same messages.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::link::Link;
use super::message_io;
use super::peer_memory::memory_files;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{OwnRing, SharedRings};
use crate::model::Deadline;
use crate::net::{Address, Stream};
use crate::protocol::{self, HANDSHAKE_LIMIT, RingAnswer, RingOffer};

/// Maximum number of call streams with rings of one link, in each direction. Their memory is used once they are, so further
/// streams, which only many calls at a time need, have sockets.
const RINGED: usize = 4;

/// The ring of a dialing side that the peer does not have yet.
pub(super) struct OfferedRing {
    ring: OwnRing,
    descriptor: OwnedFd,
}

impl OfferedRing {
    /// Creates a ring for a stream to `address`, unless the stream is to have none. `serves` is whether this side will
    /// answer requests on it.
    pub(super) fn create(link: &Link, address: &Address, serves: bool) -> Option<OfferedRing> {
        if matches!(address, Address::Tcp(_)) || count(link, serves) >= RINGED {
            return None;
        }
        match OwnRing::create() {
            Ok((ring, descriptor)) => Some(OfferedRing { ring, descriptor }),
            Err(error) => {
                report(link, &error);
                None
            }
        }
    }

    /// Offers the ring on `stream`, whose welcome has arrived. Afterwards the stream uses rings, unless the peer refuses
    /// them. Returns `Err` if the stream is unusable.
    pub(super) fn exchange(self, link: &Link, stream: &Stream, deadline: Deadline) -> Result<()> {
        stream.send_with(&protocol::encode(&RingOffer)?, &[self.descriptor.as_fd()], deadline)?;
        let (answer, descriptors) = message_io::receive_message_with(stream, HANDSHAKE_LIMIT, deadline)?;
        stream.expect_descriptors(false);
        match answer {
            RingAnswer::Used => stream.use_rings(joined(self.ring, descriptors)?),
            RingAnswer::Refused { reason } => report(link, &Error::new(ErrorKind::System, reason)),
        }
        Ok(())
    }
}

/// Answers the offer of a dialing side, whose ring is among `descriptors`. Afterwards the stream uses rings, unless this
/// side has refused them. `serves` is whether this side will answer requests on it.
pub(super) fn take(link: &Link, stream: &Stream, descriptors: Vec<OwnedFd>, serves: bool) -> Result<()> {
    let made = || {
        if count(link, serves) >= RINGED {
            let text = "the link has enough call streams over shared memory";
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
            report(link, &error);
        }
    }
    Ok(())
}

fn joined(ring: OwnRing, descriptors: Vec<OwnedFd>) -> Result<SharedRings> {
    let files = memory_files(descriptors);
    let missing = || Error::new(ErrorKind::System, "the peer offered a ring without its descriptor");
    ring.join(files.first().ok_or_else(missing)?)
}

/// Returns the number of streams with rings on which this side answers requests, or else sends them.
pub(super) fn count(link: &Link, serves: bool) -> usize {
    let ringed = |stream: &&Arc<Stream>| stream.has_rings();
    if serves {
        return link.serving.lock().streams.iter().filter(ringed).count();
    }
    let streams = link.streams.lock();
    streams.idle.iter().map(|(stream, _)| stream).chain(&streams.busy).filter(ringed).count()
}

fn report(link: &Link, error: &Error) {
    let cluster = link.peer.cluster;
    tracing::debug!(target: "llm_datadist::links", "a call stream of cluster {cluster} uses its socket: {error}");
}
