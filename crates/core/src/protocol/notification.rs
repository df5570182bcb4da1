//! Notifications in messages.

use std::fmt;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::fallible;

/// Maximum number of bytes of one notification.
pub const MAX_NOTIFICATION: usize = 64 << 10;
/// Maximum number of notifications in one request.
pub const MAX_BATCH: usize = 1024;

/// The bytes of one notification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload(pub Vec<u8>);

/// Notifications in the order in which they were sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payloads(pub Vec<Payload>);

impl Serialize for Payload {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(&self.0)
    }
}

impl<'de> Deserialize<'de> for Payload {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Bytes;

        impl Visitor<'_> for Bytes {
            type Value = Payload;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_NOTIFICATION} bytes")
            }

            fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<Payload, E> {
                if bytes.len() > MAX_NOTIFICATION {
                    return Err(E::invalid_length(bytes.len(), &self));
                }
                fallible::copied("a notification", bytes).map(Payload).map_err(super::allocation::no_memory)
            }
        }

        from.deserialize_bytes(Bytes)
    }
}

impl Serialize for Payloads {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(to)
    }
}

impl<'de> Deserialize<'de> for Payloads {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Batch;

        impl<'de> Visitor<'de> for Batch {
            type Value = Payloads;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "1 to {MAX_BATCH} notifications")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Payloads, A::Error> {
                let mut all = Vec::new();
                while let Some(next) = seq.next_element()? {
                    if all.len() == MAX_BATCH {
                        return Err(A::Error::invalid_length(MAX_BATCH + 1, &self));
                    }
                    super::allocation::append(&mut all, next)?;
                }
                if all.is_empty() { Err(A::Error::invalid_length(0, &self)) } else { Ok(Payloads(all)) }
            }
        }

        from.deserialize_seq(Batch)
    }
}
