//! What one side offers to be read by UCX. It is part of the last messages of the handshake of a link.

use std::fmt;
use std::ops::Deref;

use serde::de::Visitor;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::convert::printable;
use super::messages::text;
use crate::fallible;

/// Maximum number of bytes of an address or a key. Those of UCX have a few hundred bytes.
pub const MAX_OFFER_BYTES: usize = 4 << 10;
/// Longest encoding of an offer in bytes.
pub const OFFER_LIMIT: usize = 3 * (MAX_OFFER_BYTES + 64) + 256;

/// The pools that one side offers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricOffer {
    /// The version of UCX. Other versions may not understand each other.
    #[serde(deserialize_with = "text")]
    pub version: String,
    /// The address of the worker.
    pub address: OfferBytes,
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
    pub key: OfferBytes,
}

impl FabricOffer {
    /// Returns the version, fit for a message.
    pub fn shown_version(&self) -> String {
        printable(&self.version)
    }
}

/// At most [`MAX_OFFER_BYTES`] bytes. `Debug` does not show them, because a key lets its owner read.
#[derive(Clone, PartialEq, Eq)]
pub struct OfferBytes(Vec<u8>);

impl From<Vec<u8>> for OfferBytes {
    fn from(bytes: Vec<u8>) -> Self {
        OfferBytes(bytes)
    }
}

impl Deref for OfferBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for OfferBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({} bytes)", self.0.len())
    }
}

impl Serialize for OfferBytes {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for OfferBytes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct OfferVisitor;

        impl Visitor<'_> for OfferVisitor {
            type Value = OfferBytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_OFFER_BYTES} bytes")
            }

            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<OfferBytes, E> {
                if bytes.len() > MAX_OFFER_BYTES {
                    return Err(E::invalid_length(bytes.len(), &self));
                }
                let copy = fallible::copied("an offer of a peer", bytes);
                copy.map(OfferBytes).map_err(super::allocation::no_memory)
            }
        }

        from.deserialize_bytes(OfferVisitor)
    }
}
