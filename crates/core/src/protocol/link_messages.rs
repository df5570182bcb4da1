//! The last messages of the handshake of a link: they carry the metadata of the two programs, and what each side offers
//! to be read by UCX.
//!
//! Each side sends them only after the other side has proved its identity.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::convert::printable;
use super::fabric_offer::{FabricOffer, OFFER_LIMIT};
use super::frame::CHECKSUM;
use super::messages::{MAX_ADDRESSES, listening_addresses, text};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;

/// Maximum number of bytes of the metadata of one side.
pub const MAX_METADATA: usize = 16 << 10;
/// Longest body, in bytes, of a frame with one of these messages.
pub const METADATA_LIMIT: usize = MAX_METADATA + 64 + OFFER_LIMIT + 24 * MAX_ADDRESSES + CHECKSUM;

/// What the program of one side tells the program of the other about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata(pub Arc<Vec<u8>>);

/// From the dialing side, after it has checked the proof of the peer and taken its memory: the peer may enter the link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confirm {
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
    pub metadata: Metadata,
    pub fabric: Option<FabricOffer>,
    /// Where it listens for the streams of this link.
    #[serde(deserialize_with = "listening_addresses")]
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

impl Serialize for Metadata {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct MetadataBytes;

        impl Visitor<'_> for MetadataBytes {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_METADATA} bytes")
            }

            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Metadata, E> {
                if bytes.len() > MAX_METADATA {
                    return Err(E::invalid_length(bytes.len(), &self));
                }
                let copy = fallible::copied("the metadata of a peer", bytes);
                let copy = copy.map_err(super::allocation::no_memory)?;
                Ok(Metadata(Arc::new(copy)))
            }
        }

        from.deserialize_bytes(MetadataBytes)
    }
}
