//! The messages, field by field in the order of their bytes.
//!
//! They are structs of their own, so that a word can change without changing the protocol; `convert` leads from one to
//! the other. A field that changes place, type or width is a new [`VERSION`](super::VERSION). Not for: what the numbers
//! mean together (`convert`, `check`).

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::plan_codec::WirePlan;
use crate::fallible;

/// Most facts of a failure that are read.
pub const MAX_FACTS: usize = 64;
/// Most addresses of one [`Request::Locate`]: one takes a byte on the wire and many more in memory.
pub const MAX_ADDRS: usize = 1 << 20;
/// Most runs of one [`Location`]: 24 MiB. Tensors that lie in more places than that are moved through sockets.
pub const MAX_RUNS: usize = 1 << 20;
/// Most ranges of rows, in all tensors together, that a failure says have arrived.
pub const MAX_ARRIVED: usize = 1 << 16;
/// Bytes of a peer's text that are kept: more than anybody reads.
const MAX_TEXT: usize = 16 << 10;

/// First frame of a greeting, from the side that dialled: who it is and what the stream is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// What the stream is for.
    pub purpose: Purpose,
    /// Who dials.
    pub from: Party,
    /// The cluster it wants to reach, if it knows.
    pub asked: Option<u64>,
    /// Names the machine: equal on both sides if they share it, whatever namespaces they live in.
    pub host: String,
    /// Makes the proofs of this greeting differ from all others.
    pub nonce: [u8; 16],
}

/// Who greets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Party {
    /// Its cluster.
    pub cluster: u64,
    /// Drawn when its engine was opened, so that a restart is noticed.
    pub instance: u64,
    /// Whether its caches may be read and written without asking.
    pub remote_accessible: bool,
}

/// What a stream is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// The control stream of a link.
    Link {
        /// Names the link; drawn by the side that dials.
        link: u64,
        /// The communicator the link is part of, if any.
        comm: Option<Comm>,
        /// Only asks for the name of the local socket.
        probe_local: bool,
    },
    /// One more stream of a link, for calls.
    Call {
        /// Which link.
        link: u64,
        /// Whether the side that accepts will be the caller.
        reverse: bool,
    },
    /// Asks, at the local socket, for the secret by which TCP streams of this engine's own user are known.
    Meet,
    /// A member of a communicator has just been told of it: the other side, which dials, need not wait any longer.
    Knock {
        /// Which communicator, as the side that dials describes it.
        comm: Comm,
    },
}

/// A communicator as its rank table describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comm {
    /// Its name.
    pub name: String,
    /// Cluster and rank of each member.
    pub members: Vec<(u64, u32)>,
    /// What the table itself says of the member that listens: tells two deployments with equal names and ids apart.
    pub listener: String,
}

/// Second frame, from the side that accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// Makes the proofs of this greeting differ from all others.
    pub nonce: [u8; 16],
}

/// Third frame, from the side that dialled: that it knows the token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// HMAC-SHA256 with the token, over `dialer`, the hello and the challenge.
    pub mac: [u8; 32],
}

/// Fourth frame, from the side that accepted: that it knows the token as well, and who it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Who accepted.
    pub from: Party,
    /// HMAC-SHA256 with the token, over `acceptor`, the hello, the challenge and this message with zeros here.
    pub mac: [u8; 32],
    /// Abstract name of its local socket, if the dialler is on its machine.
    pub local: Option<String>,
    /// To [`Purpose::Meet`]: the key of greetings over TCP, which only processes of the same user get to know.
    pub secret: Option<[u8; 32]>,
}

/// What one side lets the other map; its descriptors travel with the frame, in the order of the fields.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// Whether the descriptor of the generations follows.
    pub generations: bool,
    /// Bytes of the regions of host and device whose descriptors follow.
    pub regions: [Option<u64>; 2],
    /// Address and bytes of the secret by which a reader finds that it reads the right process.
    pub probe: Option<(u64, [u8; 16])>,
}

/// What became of an [`Attach`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Whether the regions were mapped, or why not.
    #[serde(deserialize_with = "outcome")]
    pub mapped: Result<(), String>,
    /// Whether the process can be read, or why not.
    #[serde(deserialize_with = "outcome")]
    pub registered: Result<(), String>,
}

/// What the control stream carries after the greeting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Control {
    /// Are you there.
    Ping,
    /// I am.
    Pong,
    /// The link ends.
    Bye {
        /// Why.
        #[serde(deserialize_with = "text")]
        reason: String,
        /// Whether it was unlinked, and is not to be looked for again.
        unlinked: bool,
    },
    /// Dial one more call stream towards me, to be used by me.
    Dial,
}

/// What a caller asks on a call stream. `limit_ms` is what is left of the caller's deadline.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Where and what is that cache.
    Describe {
        /// By which name.
        name: WireName,
        /// What is left of the deadline.
        limit_ms: u64,
    },
    /// Send me these bytes of it.
    Read {
        /// By which name.
        name: WireName,
        /// The cache the name led to when it was described.
        cache: i64,
        /// Source: the cache; destination: the caller's.
        plan: WirePlan,
        /// First byte position of the plan.
        from: u64,
        /// End of the byte positions.
        to: u64,
        /// What is left of the deadline.
        limit_ms: u64,
    },
    /// Take these bytes into it.
    Write {
        /// By which name.
        name: WireName,
        /// The cache the name led to when it was described.
        cache: i64,
        /// Source: the caller's; destination: the cache.
        plan: WirePlan,
        /// First byte position of the plan.
        from: u64,
        /// End of the byte positions.
        to: u64,
        /// Whether the bytes follow at once, at most [`MOST_AHEAD`](super::MOST_AHEAD); else a [`Reply::Ready`] asks for
        /// them.
        ahead: bool,
        /// What is left of the deadline.
        limit_ms: u64,
    },
    /// Read these bytes out of my memory into it.
    Fetch {
        /// By which name.
        name: WireName,
        /// The cache the name led to when it was described.
        cache: i64,
        /// Source: the caller's memory; destination: the cache.
        plan: WirePlan,
        /// Where the caller's memory is.
        source: Location,
        /// Tensors of the source.
        num_tensors: u32,
        /// Bytes of each.
        tensor_bytes: u64,
        /// What is left of the deadline.
        limit_ms: u64,
    },
    /// The tensors of that name have been pulled.
    Consume {
        /// By which name.
        name: WireName,
        /// The cache the name led to when it was described.
        cache: i64,
        /// First tensor.
        first: u32,
        /// How many.
        count: u32,
        /// What is left of the deadline.
        limit_ms: u64,
    },
    /// The link ends.
    Unlink {
        /// What is left of the deadline.
        limit_ms: u64,
    },
    /// Are you there.
    Ping {
        /// What is left of the deadline.
        limit_ms: u64,
    },
    /// Which caches do these addresses lie in.
    Locate {
        /// The addresses.
        #[serde(deserialize_with = "addresses")]
        addrs: Vec<u64>,
        /// What is left of the deadline.
        limit_ms: u64,
    },
}

/// The answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To describe.
    Described(Record),
    /// The bytes follow, or may be sent.
    Ready {
        /// How many.
        bytes: u64,
    },
    /// It is done.
    Done {
        /// Bytes moved.
        bytes: u64,
    },
    /// The cache has changed since it was described.
    Stale,
    /// The source cannot be read from there.
    Unreachable {
        /// Why.
        #[serde(deserialize_with = "text")]
        reason: String,
    },
    /// It failed.
    Failed {
        /// Position of the kind in the closed list.
        kind: u8,
        /// What went wrong.
        #[serde(deserialize_with = "text")]
        message: String,
        /// Facts around it.
        #[serde(deserialize_with = "facts")]
        facts: Vec<(String, String)>,
        /// What of the destination is in place nevertheless.
        #[serde(deserialize_with = "arrived")]
        arrived: Vec<Arrived>,
    },
    /// To locate: one for each address.
    Located(#[serde(deserialize_with = "addresses")] Vec<Spot>),
}

/// Where an address lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spot {
    /// In this cache.
    pub cache: i64,
    /// In this tensor.
    pub tensor: u32,
    /// Bytes from its start.
    pub offset: u64,
}

/// Rows of one tensor of the destination that are whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Arrived {
    /// Which tensor.
    pub tensor: u32,
    /// From row to row, the second not included.
    pub rows: Vec<(u64, u64)>,
}

/// A place in the owner's table, and what was there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Which place.
    pub place: u32,
    /// Its generation when the cache was described.
    pub generation: u64,
}

/// A remote cache as its owner describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Where the owner finds it again.
    pub at: Place,
    /// Its id.
    pub cache: i64,
    /// The row that the name led to.
    pub row: u32,
    /// Tensors.
    pub num_tensors: u32,
    /// Batch slots or blocks of one tensor.
    pub rows: u64,
    /// Bytes of one row in one tensor.
    pub row_bytes: u64,
    /// Whether rows are blocks.
    pub blocks: bool,
    /// Public number of the placement.
    pub placement: u8,
    /// Whether a pool of the owner gave its memory.
    pub allocated: bool,
    /// Whether it may be read and written without asking.
    pub accessible: bool,
    /// Where its tensors are.
    pub location: Location,
}

/// Where the tensors of a cache are, for a peer on the same machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Location {
    /// In a region that was attached.
    Region {
        /// 0 host, 1 device.
        region: u8,
        /// Offsets of the tensors.
        #[serde(deserialize_with = "runs")]
        runs: Vec<Run>,
    },
    /// In the memory of the owner's process.
    Process {
        /// Addresses of the tensors.
        #[serde(deserialize_with = "runs")]
        runs: Vec<Run>,
    },
    /// Nowhere a peer could read.
    Hidden,
}

/// Numbers at a constant distance: `start`, `start + step`, … `count` of them, wrapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The first.
    pub start: u64,
    /// From one to the next, modulo 2^64.
    pub step: u64,
    /// How many.
    pub count: u32,
}

/// How a peer names a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WireName {
    /// By the request in a slot.
    Request {
        /// Model.
        model: u64,
        /// Request.
        id: u64,
    },
    /// By the prefix in a slot.
    Prefix {
        /// Model.
        model: u64,
        /// Prefix.
        id: u64,
    },
    /// The blocks cache of a model.
    Blocks {
        /// Model.
        model: u64,
    },
    /// One row of a cache.
    Row {
        /// The cache.
        cache: i64,
        /// The row.
        row: u32,
    },
}

thread_local! {
    /// Bytes that a list of the message now being read could not get: postcard's errors carry nothing.
    static SHORT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Bytes that a list of the message just read could not get, if that is why it could not be read.
pub(super) fn short_of() -> Option<usize> {
    SHORT.take()
}

/// An empty fact takes two bytes on the wire and many more in memory.
fn facts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(String, String)>, D::Error> {
    let facts = from.deserialize_seq(AtMost::<(Text, Text), MAX_FACTS>(PhantomData))?;
    Ok(facts.into_iter().map(|(name, value)| (name.0, value.0)).collect())
}

fn addresses<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    from.deserialize_seq(AtMost::<T, MAX_ADDRS>(PhantomData))
}

fn runs<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Run>, D::Error> {
    from.deserialize_seq(AtMost::<Run, MAX_RUNS>(PhantomData))
}

fn arrived<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Arrived>, D::Error> {
    from.deserialize_seq(Stretches(&mut 0))
}

/// What arrived, at most [`MAX_ARRIVED`] tensors and ranges of rows in all: two bytes each on the wire. Counts them.
struct Stretches<'a>(&'a mut usize);

impl Stretches<'_> {
    fn push<T, E: serde::de::Error>(&mut self, list: &mut Vec<T>, item: T) -> Result<(), E> {
        *self.0 += 1;
        if *self.0 > MAX_ARRIVED {
            return Err(E::custom("too many ranges of rows"));
        }
        append(list, item)
    }
}

impl<'de> Visitor<'de> for Stretches<'_> {
    type Value = Vec<Arrived>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {MAX_ARRIVED} ranges of rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Vec<Arrived>, A::Error> {
        let mut list = Vec::new();
        while let Some(next) = seq.next_element_seed(OfTensor(Stretches(self.0)))? {
            self.push(&mut list, next)?;
        }
        Ok(list)
    }
}

/// What arrived of one tensor.
struct OfTensor<'a>(Stretches<'a>);

impl<'de> DeserializeSeed<'de> for OfTensor<'_> {
    type Value = Arrived;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Arrived, D::Error> {
        from.deserialize_tuple(2, self)
    }
}

impl<'de> Visitor<'de> for OfTensor<'_> {
    type Value = Arrived;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor and its rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Arrived, A::Error> {
        let missing = || serde::de::Error::invalid_length(0, &"a tensor and its rows");
        let tensor = seq.next_element()?.ok_or_else(missing)?;
        let rows = seq.next_element_seed(Rows(self.0))?.ok_or_else(missing)?;
        Ok(Arrived { tensor, rows })
    }
}

/// Its ranges of rows.
struct Rows<'a>(Stretches<'a>);

impl<'de> DeserializeSeed<'de> for Rows<'_> {
    type Value = Vec<(u64, u64)>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Rows<'_> {
    type Value = Vec<(u64, u64)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ranges of rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(next) = seq.next_element()? {
            self.0.push(&mut list, next)?;
        }
        Ok(list)
    }
}

/// Adds an item, or notes that there is no memory for it.
fn append<T, E: serde::de::Error>(list: &mut Vec<T>, item: T) -> Result<(), E> {
    if fallible::grow("", list, 1).is_err() {
        SHORT.set(Some(2 * list.len().max(1) * size_of::<T>()));
        return Err(E::custom("no memory"));
    }
    list.push(item);
    Ok(())
}

fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    Text::deserialize(from).map(|text| text.0)
}

fn outcome<'de, D: Deserializer<'de>>(from: D) -> Result<Result<(), String>, D::Error> {
    let outcome = Result::<(), Text>::deserialize(from)?;
    Ok(outcome.map_err(|text| text.0))
}

/// The first [`MAX_TEXT`] bytes of a text.
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_str(Cut)
    }
}

struct Cut;

impl Visitor<'_> for Cut {
    type Value = Text;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Text, E> {
        let most = text.len().min(MAX_TEXT);
        let end = (0..=most).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        Ok(Text(text[..end].to_owned()))
    }
}

/// A list of a bounded length.
struct AtMost<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for AtMost<T, MOST> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MOST}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(next) = seq.next_element()? {
            if list.len() == MOST {
                return Err(serde::de::Error::invalid_length(list.len() + 1, &self));
            }
            append(&mut list, next)?;
        }
        Ok(list)
    }
}
