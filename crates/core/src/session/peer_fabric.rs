//! Memory of a peer that UCX reads: what both sides offer when a link is made.

use super::peer_memory::{NOTHING_SHARED, Readable};
use super::shared::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::fabric::{EngineFabric, PeerFabric};
use crate::net::Stream;
use crate::protocol::FabricOffer;

/// The reason why registered memory is not read by UCX.
pub(super) const POOLS_ONLY: &str = "UCX reads only pools, not registered memory or memory of a device";

impl Shared {
    /// Returns what the peer on `stream` may read by UCX. `None` if the stream carries descriptors, because the peer
    /// then maps the memory.
    pub(super) fn fabric_offer(&self, stream: &Stream) -> Option<FabricOffer> {
        let fabric = self.resources.fabric.as_ref().ok().filter(|_| !stream.carries_descriptors());
        fabric.map(EngineFabric::offer)
    }

    /// Takes the offer of the peer on `stream`, or returns the reason why UCX is not used. Returns `Err(LinkFailed)`
    /// with the reason if the configuration names UCX.
    pub(super) fn take_fabric(
        &self,
        stream: &Stream,
        offer: Option<&FabricOffer>,
    ) -> Result<Readable<PeerFabric>> {
        if stream.carries_descriptors() {
            return Ok(Err(NOTHING_SHARED.into()));
        }
        let taken = match (&self.resources.fabric, offer) {
            (Err(reason), _) => {
                Err(format!("{NOTHING_SHARED}, and this side does not use UCX: {reason}").into())
            }
            (Ok(_), None) => Err("the peer does not use UCX".into()),
            (Ok(fabric), Some(offer)) => fabric.take(offer).map_err(|error| error.to_string().into()),
        };
        match taken {
            Err(reason) => match &self.resources.fabric {
                Ok(fabric) if fabric.is_required() => {
                    let text = format!("llm.TransferBackend=ucx, but {reason}");
                    Err(Error::new(ErrorKind::LinkFailed, text).with("peer", stream.peer()))
                }
                _ => Ok(Err(reason)),
            },
            taken => Ok(taken),
        }
    }
}
