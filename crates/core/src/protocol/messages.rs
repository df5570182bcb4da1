//! The messages of the protocol. Their fields are declared in the order of their bytes.
//!
//! They are separate from the engine's types, which can change without a change of the protocol. `convert`
//! converts between the two, and checks the values with `validate`. Names, ids and sides have the same type in both. A
//! change of the position, type or width of a field requires a new [`VERSION`](super::VERSION).

use std::ops::Range;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::bounded::{BoundedBytes, MAX_TEXT, at_most, name, outcome, text};
use super::plan_codec::WirePlan;
use crate::model::{AddressLocation, CacheId, KvLayout, Name};
use crate::plan::Side;

/// Maximum number of cache bytes that follow a [`Request::Write`] without a [`Reply::Ready`].
///
/// Together with a short request, they fit into the smallest window that Linux opens. So a process that was
/// stopped and continues finds, after these bytes, that the caller has closed the connection
/// (`tests/test_peer_faults.py`).
pub const MAX_AHEAD: u64 = 48 << 10;

/// Maximum number of addresses in one [`Request::Locate`]: 8 MiB in memory.
pub const MAX_ADDRS: usize = 1 << 20;
/// Maximum number of runs in one [`WireLocation`]: 24 MiB. Caches that need more are moved over sockets.
pub const MAX_RUNS: usize = 1 << 20;
/// Maximum number of row ranges, in all tensors together, that a failure reports as arrived.
pub const MAX_ARRIVED: usize = 1 << 16;
/// Maximum number of ranges of rows of a grant: 16 MiB.
pub const MAX_RANGES: usize = 1 << 20;
/// Maximum number of pairs in one [`Request::Checksums`], and of checksums in its reply: 512 KiB.
pub const MAX_CHECKSUMS: usize = 1 << 16;
/// Maximum number of bytes, in all tensors together, that one request asks to hash. One pair may have more.
pub const MAX_HASHED: u64 = 1 << 28;
/// Maximum number of addresses at which one side listens for the streams of a link.
pub const MAX_ADDRESSES: usize = 16;
/// Maximum number of bytes of a reply without a long list: an error with the rows that have arrived, or checksums.
pub const SHORT_REPLY: usize = 2 << 20;
const _: () = assert!((5 + 10 + 10) * MAX_ARRIVED + MAX_TEXT + 64 <= SHORT_REPLY);
/// Maximum number of bytes of one notification.
pub const MAX_NOTIFICATION: usize = 64 << 10;
/// Maximum number of notifications in one request.
pub const MAX_BATCH: usize = 1024;

/// The bytes of one notification.
pub type Payload = BoundedBytes<MAX_NOTIFICATION>;

/// First frame of a handshake, from the dialing side: its identity and the purpose of the stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub purpose: Purpose,
    pub from: Party,
    /// The cluster that it wants to reach, if it knows the id.
    pub asked: Option<u64>,
    /// Identifies the host. Equal on both sides if they share a host, even in different namespaces.
    pub host: String,
    /// Random bytes that make the proofs of this handshake unique.
    pub nonce: [u8; 16],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Party {
    pub cluster: u64,
    /// Random number from the time when its engine was opened. It changes with a restart.
    pub instance: u64,
    /// Whether it is in remote-accessible mode, so that peers may read and write its caches one-sidedly.
    pub remote_accessible: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// The control stream of a link.
    Link {
        /// Identifies the link; drawn by the dialing side.
        link: u64,
        comm: Option<Comm>,
        /// Whether the dialing side asks for the name of the local socket. The accepting side then answers
        /// with it and ends the stream, if both are on one host and it has such a socket.
        probe_local: bool,
        /// Whether an existing link of either side is enough (`ensure_link`).
        ensure: bool,
    },
    /// A further stream of a link, for calls.
    Call {
        link: u64,
        /// Whether the accepting side will be the caller.
        reverse: bool,
        /// Whether the dialing side offers a ring after the welcome. Only over a stream that carries descriptors.
        rings: bool,
    },
    /// Asks, at the local socket, for the secret that authenticates TCP streams between processes of the same
    /// user.
    Meet,
    /// Tells the dialing side of a communicator that this member has joined, so that it dials at once.
    Announce { comm: Comm },
}

/// Offer of rings. The dialing side sends it after the welcome of a call stream within one host, with the descriptor of its
/// rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingOffer;

/// Answer of the accepting side to [`RingOffer`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RingAnswer {
    /// Further frames and payload go through the rings. The answer carries the descriptor of the accepting side's rings.
    Used,
    /// Frames and payload stay on the socket.
    Refused {
        #[serde(deserialize_with = "text")]
        reason: String,
    },
}

/// A communicator as its rank table describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comm {
    pub name: String,
    pub members: Vec<(u64, u32)>,
    /// What the table itself states about the member that listens. It distinguishes two deployments with
    /// equal names and ids.
    pub listener: String,
}

/// Second frame, from the accepting side.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// Random bytes that make the proofs of this handshake unique.
    pub nonce: [u8; 16],
}

/// Third frame, from the dialing side: the proof that it knows the key of the handshake, which is the token
/// or the secret of [`Purpose::Meet`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// HMAC-SHA256, with the key of the handshake, of `dialer`, the hello and the challenge.
    pub mac: [u8; 32],
}

/// Fourth frame, from the accepting side: its identity, and the proof that it knows the key of the handshake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    pub from: Party,
    /// HMAC-SHA256, with the key of the handshake, of `acceptor`, the hello, the challenge and this message
    /// with zeros in this field.
    pub mac: [u8; 32],
    /// Abstract name of its local socket, if the dialing side is on the same host and asked for it.
    pub local: Option<String>,
    /// In reply to [`Purpose::Meet`]: the key of handshakes over TCP, which is only given to processes of the
    /// same user.
    pub secret: Option<[u8; 32]>,
}

/// Offer of memory that the peer may map. Its descriptors are sent with the frame, in the order of the
/// fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// Whether the descriptor of the generations follows.
    pub generations: bool,
    /// Sizes in bytes of the host and device pools whose descriptors follow.
    pub pools: [Option<u64>; 2],
    /// Address and bytes of the secret by which a reader verifies that it reads the right process.
    pub probe: Option<(u64, [u8; 16])>,
}

/// Result of an [`Attach`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Whether the pools were mapped, or the reason why not.
    #[serde(deserialize_with = "outcome")]
    pub pools: Result<(), String>,
    /// Whether the memory of the process can be read, or the reason why not.
    #[serde(deserialize_with = "outcome")]
    pub process: Result<(), String>,
}

/// Messages on the control stream after the handshake.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ControlMessage {
    /// Asks for a [`Pong`](ControlMessage::Pong), as a heartbeat.
    Ping,
    Pong,
    Bye {
        #[serde(deserialize_with = "text")]
        reason: String,
        /// Whether the sender unlinked it, so that the peer must not try to restore it.
        unlinked: bool,
    },
    /// Asks the peer to dial one more call stream, on which the sender will be the caller.
    Dial,
    /// Reports how many notifications of the peer have arrived over this link, and how many of those the program has
    /// polled, with their bytes. The numbers count from the beginning of the link.
    Polled {
        arrived: (u64, u64),
        polled: (u64, u64),
    },
}

/// A request of a caller on a call stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timed<T> {
    /// The time in milliseconds until the caller's deadline.
    pub limit_ms: u64,
    /// A [`Request`], or a reference to one.
    pub request: T,
}

/// A cache that a request uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedCache {
    /// The name by which the caller finds the cache, or the grant under which the caller reads it.
    pub name: Name,
    /// Its id when it was described.
    pub id: CacheId,
}

/// What a caller asks for. No request writes under a grant. `range` is the range of bytes of the plan that the request moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Asks what a cache is and where its memory is.
    Describe { name: Name },
    /// Asks for bytes of a cache. If the name is a grant or their checksum is asked for, [`Reply::Checksums`] or
    /// [`Reply::Failed`] follows the bytes, with one checksum if it is asked for and none otherwise.
    Read {
        cache: NamedCache,
        /// The generation of the entry when it was described, if the name is a grant; otherwise `None`. If it has changed, the
        /// reply is [`Reply::Stale`], because the key that the caller has beside the grant may name another cache by now.
        generation: Option<u64>,
        plan: WirePlan,
        range: Range<u64>,
        /// Whether the checksum of the bytes is asked for.
        summed: bool,
    },
    /// Sends bytes to be written into a cache.
    Write {
        cache: NamedCache,
        plan: WirePlan,
        range: Range<u64>,
        /// Whether the bytes follow at once; they are at most [`MAX_AHEAD`](super::MAX_AHEAD). Otherwise,
        /// the caller waits for a [`Reply::Ready`].
        ahead: bool,
        /// A number that no other write of the link in progress has, if further bytes of the plan follow in
        /// [`WritePart`](Request::WritePart)s.
        shared: Option<u64>,
    },
    /// Asks the peer to read bytes from the caller's memory into a cache.
    Fetch {
        cache: NamedCache,
        /// Plan whose source is the caller's memory and whose destination is the cache.
        plan: WirePlan,
        source: WireLocation,
        num_tensors: u32,
        tensor_bytes: u64,
    },
    /// Reports the end of a pull or push: the owner releases the key of a pull, or notes that the caller is done with a grant,
    /// and then delivers a notification. If the first fails, the notification is not delivered; if there is no room for the
    /// notification, nothing happens.
    Finish { used_key: Option<WireUsedKey>, message: Option<Payload> },
    /// Ends the link.
    Unlink,
    /// Asks for a reply, to find out whether the peer is alive.
    Ping,
    /// Asks in which caches addresses lie.
    Locate {
        #[serde(deserialize_with = "at_most::<MAX_ADDRS, _, _>")]
        addrs: Vec<u64>,
    },
    /// Delivers notifications, in the order in which they were sent.
    Notify {
        #[serde(deserialize_with = "batch")]
        messages: Vec<Payload>,
    },
    /// Asks for the checksums of the blocks of a plan, as they are now: one for each pair of each template.
    Checksums {
        cache: NamedCache,
        /// A plan of the pairs that are asked for.
        plan: WirePlan,
        /// Which side of the plan the cache is.
        side: Side,
    },
    /// Sends further bytes of the plan of a shared write, on another stream. The caller sends it after the
    /// [`Reply::Ready`] to the [`Write`](Request::Write).
    WritePart { write: u64, range: Range<u64> },
    /// Asks which cache has this name.
    Find {
        #[serde(deserialize_with = "name")]
        name: String,
    },
}

impl Request {
    /// Returns the maximum number of bytes of the body of a reply. A number takes up to 10 bytes, one of 32 bits up to 5.
    pub fn longest_reply(&self) -> usize {
        const DESCRIPTION: usize = 25 * MAX_RUNS;
        let list = match self {
            Request::Describe { name: Name::Grant(_) } => DESCRIPTION + 20 * MAX_RANGES,
            Request::Describe { .. } => DESCRIPTION,
            Request::Locate { addrs } => 25 * addrs.len(),
            _ => 0,
        };
        SHORT_REPLY + list
    }

    /// Returns whether the peer writes into a cache for it.
    pub fn writes(&self) -> bool {
        matches!(self, Request::Write { .. } | Request::WritePart { .. } | Request::Fetch { .. })
    }
}

/// The tensors of a cache that a caller has pulled under a name. Of a grant, only the name counts: the caller is done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireUsedKey {
    pub cache: NamedCache,
    pub first: u32,
    pub count: u32,
}

/// Reply to a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Reply to [`Request::Describe`].
    Described(WireCache),
    /// The bytes of a read follow, or those of a write may be sent.
    Ready {
        bytes: u64,
    },
    Done {
        bytes: u64,
    },
    /// The cache has changed since it was described.
    Stale,
    /// The peer cannot read the source.
    Unreachable {
        #[serde(deserialize_with = "text")]
        reason: String,
    },
    Failed {
        /// Number of the error kind: its position in [`ErrorKind::ALL`](crate::error::ErrorKind::ALL).
        kind: u8,
        #[serde(deserialize_with = "text")]
        message: String,
        /// Rows of the destination that are complete despite the failure: the tensor, the first row of a range, and the row after
        /// its last. The ranges of a tensor follow one another.
        #[serde(deserialize_with = "at_most::<MAX_ARRIVED, _, _>")]
        arrived: Vec<(u32, u64, u64)>,
    },
    /// Reply to [`Request::Locate`]: one location for each address.
    Located(#[serde(deserialize_with = "at_most::<MAX_ADDRS, _, _>")] Vec<AddressLocation>),
    /// Reply to [`Request::Checksums`]: one checksum for each pair, bound to this generation of the entry. It also follows the
    /// bytes of a [`Request::Read`].
    Checksums {
        generation: u64,
        #[serde(deserialize_with = "at_most::<MAX_CHECKSUMS, _, _>")]
        sums: Vec<u64>,
    },
    /// Reply to [`Request::Find`].
    Found {
        cache: CacheId,
    },
}

/// The index of an entry of the owner's cache table, with its generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryVersion {
    pub index: u32,
    pub generation: u64,
}

/// A remote cache as its owner describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireCache {
    pub at: EntryVersion,
    pub cache: CacheId,
    pub row: u32,
    pub num_tensors: u32,
    /// Number of rows, that is batch slots or blocks, in one tensor.
    pub rows: u64,
    pub row_bytes: u64,
    /// Bytes from the start of one row to the start of the next.
    pub row_stride: u64,
    pub blocks: bool,
    /// Number of the placement in the public API.
    pub placement: u8,
    /// Whether the memory was allocated from a pool of the owner.
    pub allocated: bool,
    pub accessible: bool,
    pub location: WireLocation,
    /// What the rows mean, if the owner described it.
    pub layout: Option<WireLayout>,
    /// The ranges of rows that a grant lends, if it is described by that name; otherwise empty.
    #[serde(deserialize_with = "at_most::<MAX_RANGES, _, _>")]
    pub granted: Vec<(u64, u64)>,
}

/// The KV layout of a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireLayout {
    /// Number of the element type in the public API.
    pub data_type: u8,
    pub layout: KvLayout,
}

/// Location of the tensors of a cache, for a peer on the same host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WireLocation {
    /// In a pool that was offered in [`Attach`].
    Pool {
        /// 0 for the host pool, 1 for the device pool.
        pool: u8,
        #[serde(deserialize_with = "at_most::<MAX_RUNS, _, _>")]
        runs: Vec<Run>,
    },
    /// In the memory of the owner's process.
    Process {
        #[serde(deserialize_with = "at_most::<MAX_RUNS, _, _>")]
        runs: Vec<Run>,
    },
    /// Not readable by a peer.
    Hidden,
}

/// `count` numbers at a constant distance: `start`, `start + step`, and so on, modulo 2^64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub start: u64,
    /// Distance from one number to the next, modulo 2^64.
    pub step: u64,
    pub count: u32,
}

fn batch<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Payload>, D::Error> {
    let batch = at_most::<MAX_BATCH, _, D>(from)?;
    if batch.is_empty() { Err(D::Error::invalid_length(0, &"a notification")) } else { Ok(batch) }
}
