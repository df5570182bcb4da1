//! The messages between a client and the keeper. Each is one packet of a local socket, so none arrives in parts.

use llm_datadist_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::key::StoreKey;
use crate::sizes::MESSAGE_BYTES;

/// The version of the messages and of the shared memory. Another version is refused.
pub(crate) const VERSION: u32 = 1;

/// What a client asks.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum KeeperRequest {
    /// The first message, with a descriptor of the memory from which the keeper copies values.
    Attach(AttachRequest),
    /// To copy a value for each key. They lie one after the other in the memory of the client.
    Put(Vec<StoreKey>),
    /// That these slots were read. There is no reply.
    Touch(Vec<u32>),
    /// To drop the values of these keys.
    Drop(Vec<StoreKey>),
    /// Not to replace the values of these keys for so many milliseconds.
    Lease(Vec<StoreKey>, u32),
    /// To end the leases of this client on these keys.
    Unlease(Vec<StoreKey>),
    /// What the keeper has counted.
    Stats,
}

/// What a client says about itself.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AttachRequest {
    pub(crate) version: u32,
    /// The text that stands for everything that gives values their meaning.
    pub(crate) namespace: String,
    /// Bytes of each value in the namespace.
    pub(crate) value: u64,
}

/// What the keeper answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum KeeperReply {
    /// The client is attached. The descriptors of the values, of the index and of the generations come with it.
    Attached(SharedGeometry),
    /// The keeper refuses the client, and closes the connection.
    Refused(KeeperRefusal),
    /// What became of each value.
    Put(Vec<Stored>),
    /// How many keys had a value.
    Dropped(u32),
    /// For each key whether the client has a lease on it now.
    Leased(Vec<bool>),
    /// The leases have ended.
    Unleased,
    /// What the keeper has counted.
    Stats(KeeperStats),
}

/// Why the keeper refuses a client.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeeperRefusal {
    pub(crate) kind: RefusalKind,
    /// The argument of the client that is refused, or nothing.
    pub(crate) argument: String,
    pub(crate) reason: String,
}

/// What has to change so that the keeper does not refuse it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RefusalKind {
    /// What the client has sent.
    Argument,
    /// The keeper has reached a limit, or its system refuses something.
    System,
}

/// The sizes of the shared memory.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SharedGeometry {
    /// The number of the client's namespace.
    pub(crate) namespace: u32,
    pub(crate) slots: u32,
    pub(crate) slot_bytes: u64,
}

/// What became of a value that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stored {
    /// The keeper has copied it.
    Stored,
    /// The keeper has a value of that key, which stays.
    Present,
    /// There is no place for its key in the index.
    NoRoom,
    /// The keeper is away, or did not answer in time.
    Away,
}

/// The counts of a keeper since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeeperStats {
    /// Slots in its memory.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Values that it has now.
    pub values: u32,
    /// Values that leases hold now.
    pub leased: u32,
    /// Clients that are attached now.
    pub clients: u32,
    /// Namespaces that it knows.
    pub namespaces: u32,
    /// Values that it has copied.
    pub stored: u64,
    /// Values of keys that had one.
    pub present: u64,
    /// Values without a place in the index.
    pub no_room: u64,
    /// Values that were overwritten because all slots were in use.
    pub evicted: u64,
    /// Values that clients dropped.
    pub dropped: u64,
    /// Connections that it has refused or closed because of what the client sent.
    pub refused: u64,
}

/// Returns the bytes of a message.
pub(crate) fn encoded(message: &impl Serialize) -> Result<Vec<u8>> {
    let failed = |error| Error::new(ErrorKind::System, "a message cannot be encoded").because(error);
    postcard::to_stdvec(message).map_err(failed)
}

/// Reads a message, all of `bytes`.
pub(crate) fn decoded<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
    let wrong =
        || Error::new(ErrorKind::System, "the other end sent no valid message").with("bytes", bytes.len());
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(wrong()),
        Err(error) => Err(wrong().because(error)),
    }
}

const _: () = assert!(MESSAGE_BYTES < 64 << 10, "a message fits the smallest queue of a socket");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sizes::{MAX_NAMESPACE, MESSAGE_KEYS};

    #[test]
    fn the_longest_messages_fit() {
        let key = StoreKey::read(0, &[0xff; 28]).unwrap();
        let attach =
            AttachRequest { version: VERSION, namespace: "n".repeat(MAX_NAMESPACE), value: u64::MAX };
        let requests = [
            KeeperRequest::Attach(attach),
            KeeperRequest::Put(vec![key; MESSAGE_KEYS]),
            KeeperRequest::Touch(vec![u32::MAX; MESSAGE_KEYS]),
            KeeperRequest::Drop(vec![key; MESSAGE_KEYS]),
            KeeperRequest::Lease(vec![key; MESSAGE_KEYS], u32::MAX),
            KeeperRequest::Unlease(vec![key; MESSAGE_KEYS]),
            KeeperRequest::Stats,
        ];
        for request in requests {
            let bytes = encoded(&request).unwrap();
            assert!(bytes.len() <= MESSAGE_BYTES, "{} bytes", bytes.len());
            assert_eq!(format!("{:?}", decoded::<KeeperRequest>(&bytes).unwrap()), format!("{request:?}"));
        }
        assert!(encoded(&KeeperReply::Put(vec![Stored::Away; MESSAGE_KEYS])).unwrap().len() <= MESSAGE_BYTES);
    }

    #[test]
    fn bytes_that_are_no_message_are_refused() {
        for bytes in [&b""[..], b"\xff", b"\x01\xff\xff\xff\xff\x0f", b"\x06extra"] {
            assert!(decoded::<KeeperRequest>(bytes).is_err(), "{bytes:?}");
        }
    }
}
