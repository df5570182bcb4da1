//! The bytes that two engines exchange: frames, the messages in them, and the conversion to and from the
//! engine's types.
//!
//! `tests/integration/protocol.rs` pins the bytes of every message. `net` has the sockets; `session` and
//! `transfer` act on the messages.

mod allocation;
mod bounded;
mod convert;
mod convert_cache;
mod frame;
mod link_messages;
mod messages;
mod plan_codec;

pub use bounded::BoundedBytes;
pub use frame::{HANDSHAKE_LIMIT, HEADER, Header, MESSAGE_LIMIT, digest, encode, is_refusal, open, refusal};
pub use link_messages::{
    Confirm, EnteredLink, FabricOffer, FabricPool, LinkAnswer, MAX_METADATA, MAX_OFFER_BYTES, METADATA_LIMIT,
};
pub use messages::{
    Attach, Attached, Challenge, Comm, ControlMessage, EntryVersion, Hello, MAX_ADDRESSES, MAX_ADDRS,
    MAX_AHEAD, MAX_BATCH, MAX_CHECKSUMS, MAX_HASHED, MAX_NOTIFICATION, MAX_RANGES, MAX_RUNS, NamedCache,
    Party, Payload, Proof, Purpose, Reply, Request, RingAnswer, RingOffer, Run, SHORT_REPLY, Timed, Welcome,
    WireCache, WireLayout, WireLocation, WireUsedKey,
};
pub use plan_codec::WirePlan;
#[cfg(feature = "testing")]
pub use {
    convert::{kind_number, kind_of},
    frame::{
        CHECKSUM, MESSAGE, REFUSAL, REFUSAL_OF_ANOTHER_VERSION, VERSION, decode, decode_message, refused,
    },
    messages::MAX_ARRIVED,
    plan_codec::WireTemplates,
};
