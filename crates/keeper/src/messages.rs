//! The messages between a client and the keeper. Each is one packet of a local socket, so none arrives in parts.

use llm_datadist_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::key::StoreKey;
use crate::roles::{ClientRole, Nonce};
use crate::stats::KeeperStats;

/// The version of the messages and of the shared memory. Another version is refused.
pub(crate) const VERSION: u32 = 3;
/// The number of no namespace.
pub(crate) const NO_NAMESPACE: u32 = u32::MAX;

/// What a client asks.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum KeeperRequest {
    /// The first message, with a descriptor of the memory from which the keeper copies values.
    Attach(AttachRequest),
    /// To copy a value for each key. They lie one after the other in the memory of the client, behind so many values. The last list has
    /// the checksum of each value, or nothing if the namespace has no checksums.
    Put(u32, Vec<StoreKey>, Vec<u64>),
    /// That these slots were read. There is no reply.
    Touch(Vec<u32>),
    /// To drop the values of these keys.
    Drop(Vec<StoreKey>),
    /// Not to replace the values of these keys for so many milliseconds.
    Lease(Vec<StoreKey>, u32),
    /// To end the leases of this client on these keys. There is no reply.
    Unlease(Vec<StoreKey>),
    /// What the keeper has counted.
    Stats,
    /// The first message of an observer, with the version that it speaks, and whether it reads values as well. It has no namespace and no
    /// memory.
    Observe(u32, bool),
    /// Which values the keeper has, in the order of their slots.
    List(ListRequest),
    /// Which namespaces the keeper knows, from this number on.
    Namespaces(u32),
    /// To drop a page of the values of the client's namespace, from this slot on.
    Clear(u32),
    /// Which values were stored and removed, from this change on; `None` for those from now on.
    Changes(Option<u64>),
    /// To end, because this client takes over.
    End,
    /// The first message of a client that has a token, with the version that it speaks, and a random number.
    Greet(u32, Nonce),
    /// The proof of that token. The client attaches or observes afterwards.
    Prove([u8; 32]),
    /// Reports that the value in this slot, with this generation, did not match its checksum. The keeper calculates the checksum, too,
    /// and drops the value if it differs. There is no reply.
    Corrupt(u32, u64),
}

impl KeeperRequest {
    /// Returns the role that a client needs for it. Requests without a reply need no more than [`ClientRole::Read`].
    pub(crate) fn needs(&self) -> ClientRole {
        use KeeperRequest::{
            Attach, Changes, Clear, Corrupt, Drop, End, Greet, Lease, List, Namespaces, Observe, Prove, Put,
            Stats, Touch, Unlease,
        };
        match self {
            Greet(..) | Prove(_) | Attach(_) | Observe(..) | Touch(_) | Lease(..) | Unlease(_) | Stats
            | Corrupt(..) => ClientRole::Read,
            Put(..) => ClientRole::Write,
            Drop(_) | Clear(_) | List(_) | Namespaces(_) | Changes(_) | End => ClientRole::Admin,
        }
    }
}

/// Where a page of values begins.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct ListRequest {
    /// The first slot.
    pub(crate) from: u32,
    /// The number of the namespace whose values are listed; `None` for all.
    pub(crate) namespace: Option<u32>,
    /// Values that were not used after this use are left out; 0 leaves out none.
    pub(crate) used_after: u64,
}

/// What a client says about itself.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AttachRequest {
    pub(crate) version: u32,
    /// The text that stands for everything that gives values their meaning.
    pub(crate) namespace: String,
    pub(crate) terms: ValueTerms,
}

/// What the values of a namespace have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ValueTerms {
    /// Bytes of each value.
    pub(crate) value: u64,
    /// Whether each value has a checksum.
    pub(crate) checksums: bool,
}

/// What the keeper answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum KeeperReply {
    /// The client is attached. The descriptors of the values, of the index and of the generations come with it, unless the client is
    /// an observer that reads no values. The namespace of an observer is [`NO_NAMESPACE`].
    Attached(SharedGeometry),
    /// The keeper refuses the client, and closes the connection.
    Refused(KeeperRefusal),
    /// What became of each value.
    Put(Vec<Stored>),
    /// How many keys had a value.
    Dropped(u32),
    /// For each key whether the client has a lease on it now.
    Leased(Vec<bool>),
    /// What the keeper has counted.
    Stats(KeeperStats),
    /// Values, and the slot from which the next page begins; `None` behind the last slot.
    Listed(Vec<ListedValue>, Option<u32>),
    /// Namespaces, and the number from which the next page begins; `None` behind the last one.
    Namespaces(Vec<ListedNamespace>, Option<u32>),
    /// How many values were dropped, and the slot from which the next page begins; `None` behind the last slot.
    Cleared(u32, Option<u32>),
    /// Changes, in their order.
    Changes(ChangePage),
    /// The keeper ends now, because the client takes over.
    Ending,
    /// The random number of the keeper.
    Challenge(Nonce),
    /// The role of the client, and the proof that the keeper has the same token.
    Proved(ClientRole, [u8; 32]),
    /// The client has the first role, and the request needs the second one. The connection goes on.
    Forbidden(ClientRole, ClientRole),
}

/// A page of changes.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChangePage {
    pub(crate) changes: Vec<ListedChange>,
    /// How many changes before those the keeper does not remember.
    pub(crate) missed: u64,
    /// The number of the change with which the next page begins.
    pub(crate) next: u64,
    /// Whether there is one.
    pub(crate) more: bool,
}

/// A value that was stored or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedChange {
    /// The number of its namespace.
    pub namespace: u32,
    /// Its key in the namespace.
    pub key: StoreKey,
    /// Whether it was stored; otherwise it was replaced or dropped.
    pub stored: bool,
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

/// A value that the keeper has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedValue {
    /// The number of its namespace.
    pub namespace: u32,
    /// Its key in the namespace.
    pub key: StoreKey,
    /// The slot that has its bytes.
    pub slot: u32,
    /// When it was used last: of two values, the one with the larger number was used later. Not a time.
    pub used: u64,
    /// Whether a lease holds it.
    pub leased: bool,
}

/// A namespace that the keeper knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedNamespace {
    /// The number by which values name it.
    pub number: u32,
    /// Its text.
    pub text: String,
    /// Bytes of each of its values.
    pub value: u64,
    /// Whether its values have checksums.
    pub checksums: bool,
    /// How many values it has.
    pub values: u32,
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

/// Returns the version that the first message of a client names, whatever follows it. `None` if the message does not begin as one.
/// All versions of these messages begin with the number of the request and the version.
pub(crate) fn version_of(first: &[u8]) -> Option<u32> {
    /// The numbers of [`KeeperRequest::Attach`], [`KeeperRequest::Observe`] and [`KeeperRequest::Greet`].
    const FIRST: [u32; 3] = [0, 7, 13];
    let ((request, version), _) = postcard::take_from_bytes::<(u32, u32)>(first).ok()?;
    FIRST.contains(&request).then_some(version)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sizes::{MAX_NAMESPACE, MESSAGE_BYTES, MESSAGE_KEYS, PAGE_NAMESPACES, PAGE_VALUES};

    #[test]
    fn the_longest_messages_fit() {
        let key = StoreKey::read(0, &[0xff; 28]).unwrap();
        let terms = ValueTerms { value: u64::MAX, checksums: true };
        let attach = AttachRequest { version: VERSION, namespace: "n".repeat(MAX_NAMESPACE), terms };
        let requests = [
            KeeperRequest::Attach(attach),
            KeeperRequest::Put(u32::MAX, vec![key; MESSAGE_KEYS], vec![u64::MAX; MESSAGE_KEYS]),
            KeeperRequest::Touch(vec![u32::MAX; MESSAGE_KEYS]),
            KeeperRequest::Drop(vec![key; MESSAGE_KEYS]),
            KeeperRequest::Lease(vec![key; MESSAGE_KEYS], u32::MAX),
            KeeperRequest::Unlease(vec![key; MESSAGE_KEYS]),
            KeeperRequest::Stats,
            KeeperRequest::Observe(VERSION, true),
            KeeperRequest::List(ListRequest {
                from: u32::MAX,
                namespace: Some(u32::MAX),
                used_after: u64::MAX,
            }),
            KeeperRequest::Namespaces(u32::MAX),
            KeeperRequest::Clear(u32::MAX),
            KeeperRequest::Changes(Some(u64::MAX)),
            KeeperRequest::End,
            KeeperRequest::Greet(VERSION, [0xff; 32]),
            KeeperRequest::Prove([0xff; 32]),
            KeeperRequest::Corrupt(u32::MAX, u64::MAX),
        ];
        for request in requests {
            let bytes = encoded(&request).unwrap();
            assert!(bytes.len() <= MESSAGE_BYTES, "{} bytes", bytes.len());
            assert_eq!(format!("{:?}", decoded::<KeeperRequest>(&bytes).unwrap()), format!("{request:?}"));
        }
        let value = ListedValue { namespace: u32::MAX, key, slot: u32::MAX, used: u64::MAX, leased: true };
        let namespace = ListedNamespace {
            number: u32::MAX,
            text: "n".repeat(MAX_NAMESPACE),
            value: u64::MAX,
            checksums: true,
            values: u32::MAX,
        };
        let change = ListedChange { namespace: u32::MAX, key, stored: true };
        let replies = [
            KeeperReply::Put(vec![Stored::Away; MESSAGE_KEYS]),
            KeeperReply::Leased(vec![true; MESSAGE_KEYS]),
            KeeperReply::Listed(vec![value; PAGE_VALUES], Some(u32::MAX)),
            KeeperReply::Namespaces(vec![namespace; PAGE_NAMESPACES], Some(u32::MAX)),
            KeeperReply::Changes(ChangePage {
                changes: vec![change; PAGE_VALUES],
                missed: u64::MAX,
                next: u64::MAX,
                more: true,
            }),
        ];
        for reply in replies {
            let bytes = encoded(&reply).unwrap();
            assert!(bytes.len() <= MESSAGE_BYTES, "{} bytes", bytes.len());
        }
    }

    #[test]
    fn first_messages_of_all_versions_name_their_version() {
        let terms = ValueTerms { value: 64, checksums: false };
        let attach = AttachRequest { version: VERSION, namespace: "n".into(), terms };
        for first in [
            KeeperRequest::Attach(attach),
            KeeperRequest::Observe(VERSION, true),
            KeeperRequest::Greet(VERSION, [7; 32]),
        ] {
            assert_eq!(version_of(&encoded(&first).unwrap()), Some(VERSION), "{first:?}");
        }
        // What version 2 sends.
        assert_eq!([&[0, 2, 1, b'n', 64][..], &[7, 2, 1]].map(version_of), [Some(2), Some(2)]);
        let later = [KeeperRequest::Stats, KeeperRequest::Clear(3), KeeperRequest::Prove([2; 32])];
        for other in later {
            assert_eq!(version_of(&encoded(&other).unwrap()), None, "{other:?}");
        }
    }

    #[test]
    fn bytes_that_are_no_message_are_refused() {
        for bytes in [&b""[..], b"\xff", b"\x01\xff\xff\xff\xff\x0f", b"\x06extra"] {
            assert!(decoded::<KeeperRequest>(bytes).is_err(), "{bytes:?}");
        }
    }
}
