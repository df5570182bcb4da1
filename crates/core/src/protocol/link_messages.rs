//! The last messages of the handshake of a link: they carry the names of the two engines, the metadata of their programs,
//! and what each side offers to be read by UCX.
//!
//! Each side sends them only after the other side has proved its identity.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::bounded::{BoundedBytes, at_most, name, text};
use super::convert::printable;
use super::frame::CHECKSUM;
use super::messages::MAX_ADDRESSES;
use crate::error::{Error, ErrorKind, Result};
use crate::model::MAX_NAME;

/// Maximum number of bytes of the metadata of one side.
pub const MAX_METADATA: usize = 16 << 10;
/// Longest body, in bytes, of a frame with one of these messages.
pub const METADATA_LIMIT: usize = MAX_METADATA + MAX_NAME + 64 + OFFER_LIMIT + 24 * MAX_ADDRESSES + CHECKSUM;

/// What the program of one side tells the program of the other about itself. It is shared, because it is sent over every link.
pub type Metadata = BoundedBytes<MAX_METADATA, Arc<Vec<u8>>>;

/// Maximum number of bytes of an address or a key of UCX. They have a few hundred bytes.
pub const MAX_OFFER_BYTES: usize = 4 << 10;
/// Longest encoding of an offer in bytes.
const OFFER_LIMIT: usize = 3 * (MAX_OFFER_BYTES + 64) + 256;

/// What one side offers to be read by UCX.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricOffer {
    /// The version of UCX. Other versions may not understand each other.
    #[serde(deserialize_with = "text")]
    pub version: String,
    /// The address of the worker.
    pub address: BoundedBytes<MAX_OFFER_BYTES>,
    /// The host pool, and the device pool.
    pub pools: [Option<FabricPool>; 2],
}

/// One pool of an offer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricPool {
    /// The address of its first byte in the process of the owner.
    pub base: u64,
    /// Number of bytes.
    pub len: u64,
    /// The key with which it is read.
    pub key: BoundedBytes<MAX_OFFER_BYTES>,
}

impl FabricOffer {
    /// Returns the version, fit for a message.
    pub fn shown_version(&self) -> String {
        printable(&self.version)
    }
}

/// From the dialing side, after it has checked the proof of the peer and taken its memory: the peer may enter the link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confirm {
    /// The name of the engine; empty if it has none.
    #[serde(deserialize_with = "name")]
    pub name: String,
    pub metadata: Metadata,
    pub fabric: Option<FabricOffer>,
}

/// Answer of the accepting side to [`Confirm`]. The control stream begins after [`Entered`](LinkAnswer::Entered).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkAnswer {
    /// It has entered the link.
    Entered(EnteredLink),
    /// Only in answer to `ensure`: it has not entered the link, because there is another one, or will be. The dialing
    /// side uses that one, or tries again.
    Later {
        #[serde(deserialize_with = "text")]
        reason: String,
    },
}

/// What the accepting side tells the dialing side about itself.
#[derive(Clone, Default, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnteredLink {
    /// The name of the engine; empty if it has none.
    #[serde(deserialize_with = "name")]
    pub name: String,
    pub metadata: Metadata,
    pub fabric: Option<FabricOffer>,
    /// Where it listens for the streams of this link.
    #[serde(deserialize_with = "at_most::<MAX_ADDRESSES, _, _>")]
    pub addresses: Vec<SocketAddr>,
}

impl LinkAnswer {
    /// Returns what the peer that has entered the link tells about itself. Otherwise returns `Err` with
    /// `AlreadyLinked`.
    pub fn entered(self) -> Result<EnteredLink> {
        match self {
            LinkAnswer::Entered(entered) => Ok(entered),
            LinkAnswer::Later { reason } => {
                let text = format!("the peer keeps another link: {}", printable(&reason));
                Err(Error::new(ErrorKind::AlreadyLinked, text))
            }
        }
    }
}
