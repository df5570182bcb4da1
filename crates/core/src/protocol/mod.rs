//! What two engines say to each other, as bytes: frames, the messages in them, and how the words cross.
//!
//! A frame is a header of eight bytes (`L`, `D`, version, kind, length in little endian) and a body. The body of a
//! message is postcard; the body of a refusal has a layout of its own that no version may change, so that two versions
//! that share nothing else can still tell each other why they part (`a_refusal_crosses_versions`). The bytes of every
//! message are pinned by `tests/integration/wire.rs`. Not for: sockets (`transport`), or what a message makes a peer do
//! (`peer`, `links`).

mod convert;
mod messages;
mod plan_codec;

pub use convert::{kind_number, kind_of};
pub use messages::{
    Arrived, Attach, Attached, Challenge, Comm, Control, Hello, Location, MAX_ADDRS, MAX_ARRIVED, MAX_FACTS,
    MAX_RUNS, Party, Place, Proof, Purpose, Record, Reply, Request, Run, Spot, Welcome, WireName,
};
pub use plan_codec::{Pairs, Unusable, WirePlan, WireSpan, WireSteps};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind, Result};
use crate::fallible;

/// The version of everything but the header and the refusal.
pub const VERSION: u8 = 5;
/// Bytes of a header.
pub const HEADER: usize = 8;
/// Kind of a frame whose body is a message.
pub const MESSAGE: u8 = 1;
/// Kind of a frame whose body is a refusal; the same in every version.
pub const REFUSAL: u8 = 255;
/// Longest body of a frame from a peer that has not yet proved who it is.
pub const GREETING_LIMIT: usize = 4 << 10;
/// Longest body of any frame.
pub const MESSAGE_LIMIT: usize = 64 << 20;

/// Most bytes of a cache that follow a [`Request::Write`] unasked. With a short request they fit the least window that Linux
/// opens: a side that was stopped, and goes on, finds behind them that the caller has gone (`tests/test_peer_faults.py`).
pub const MOST_AHEAD: u64 = 48 << 10;

const MAGIC: [u8; 2] = *b"LD";

/// What stands before the body of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// [`MESSAGE`] or [`REFUSAL`].
    pub kind: u8,
    /// Bytes of the body.
    pub length: usize,
}

impl Header {
    /// Reads a header. `Err(LinkFailed)` if it is none of ours or, unless it announces a refusal, of another version;
    /// `Err(NotLinked)` if its kind is unknown or its body longer than `limit`.
    pub fn parse(bytes: &[u8; HEADER], limit: usize) -> Result<Header> {
        let [first, second, version, kind, length @ ..] = *bytes;
        if [first, second] != MAGIC {
            return Err(Error::new(ErrorKind::LinkFailed, "not an llm_datadist endpoint of any version"));
        }
        if version != VERSION && kind != REFUSAL {
            let text =
                format!("the peer speaks version {version} of the protocol, this side version {VERSION}");
            return Err(Error::new(ErrorKind::LinkFailed, text));
        }
        if kind != MESSAGE && kind != REFUSAL {
            return Err(Error::new(
                ErrorKind::NotLinked,
                format!("the peer sent a frame of unknown kind {kind}"),
            ));
        }
        let bytes = u32::from_le_bytes(length);
        match usize::try_from(bytes) {
            Ok(length) if length <= limit => Ok(Header { kind, length }),
            _ => {
                let text = "the peer sent a frame that is too long";
                Err(Error::new(ErrorKind::NotLinked, text).with("bytes", bytes).with("limit", limit))
            }
        }
    }

    fn write(self) -> Result<[u8; HEADER]> {
        let length = u32::try_from(self.length).ok().filter(|_| self.length <= MESSAGE_LIMIT);
        let Some(length) = length else {
            let error =
                Error::new(ErrorKind::InvalidArgument, "the request is too long to be sent in one message");
            return Err(error.with("bytes", self.length).with("limit", MESSAGE_LIMIT));
        };
        let [a, b, c, d] = length.to_le_bytes();
        Ok([MAGIC[0], MAGIC[1], VERSION, self.kind, a, b, c, d])
    }
}

/// The frame of a message: header and body, ready to send.
pub fn encode<T: Serialize + ?Sized>(message: &T) -> Result<Vec<u8>> {
    let mut frame = Frame(Vec::new());
    frame.reserve(HEADER).map_err(no_room)?;
    frame.0.extend([0; HEADER]);
    let mut frame = postcard::serialize_with_flavor(message, frame).map_err(no_room)?;
    let header = Header { kind: MESSAGE, length: frame.len() - HEADER }.write()?;
    frame[..HEADER].copy_from_slice(&header);
    Ok(frame)
}

/// A frame that grows as it is written, or fails to: what it carries has any length.
struct Frame(Vec<u8>);

impl Frame {
    #[inline]
    fn reserve(&mut self, more: usize) -> postcard::Result<()> {
        fallible::grow("a message", &mut self.0, more).map_err(|_| postcard::Error::SerializeBufferFull)
    }
}

impl postcard::ser_flavors::Flavor for Frame {
    type Output = Vec<u8>;

    #[inline]
    fn try_extend(&mut self, data: &[u8]) -> postcard::Result<()> {
        self.reserve(data.len())?;
        self.0.extend_from_slice(data);
        Ok(())
    }

    #[inline]
    fn try_push(&mut self, data: u8) -> postcard::Result<()> {
        self.reserve(1)?;
        self.0.push(data);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Vec<u8>> {
        Ok(self.0)
    }
}

/// The error of a message that could not be written. Lists that serialize themselves fail for want of memory only.
#[cold]
fn no_room(error: postcard::Error) -> Error {
    use postcard::Error::{SerdeSerCustom, SerializeBufferFull};
    match error {
        SerializeBufferFull | SerdeSerCustom => {
            Error::new(ErrorKind::OutOfMemory, "no memory for a message to a peer")
        }
        other => Error::new(ErrorKind::System, "a message cannot be written as bytes").because(other),
    }
}

/// The message in a body. `Err(OutOfMemory)` if there was no memory for one of its lists, `Err(NotLinked)` unless the body is
/// that message, all of it and nothing else.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    let unreadable = |why: &str| {
        let text = format!("the peer sent a message that cannot be read: {why}");
        Error::new(ErrorKind::NotLinked, text).with("bytes", body.len())
    };
    let (message, rest) = postcard::take_from_bytes(body).map_err(|error| match messages::short_of() {
        Some(bytes) => fallible::short("a message of a peer", bytes).with("bytes", body.len()),
        None => unreadable("not this message").because(error),
    })?;
    if rest.is_empty() { Ok(message) } else { Err(unreadable("more follows").with("unread", rest.len())) }
}

/// The message in a frame that was received, or the error of the refusal that came in its place.
pub fn open<T: DeserializeOwned>(kind: u8, body: &[u8]) -> Result<T> {
    if kind == REFUSAL { Err(refused(body)) } else { decode(body) }
}

/// The frame that refuses: the kind of `error` as a little-endian `u32`, then its text, cut to what a greeting may hold.
#[must_use]
pub fn refusal(error: &Error) -> Vec<u8> {
    let text = error.to_string();
    let most = text.len().min(GREETING_LIMIT - size_of::<u32>());
    let cut = (0..=most).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let body_bytes = u32::try_from(size_of::<u32>() + cut).unwrap_or(0);
    let mut frame = Vec::with_capacity(HEADER + size_of::<u32>() + cut);
    frame.extend(MAGIC);
    frame.extend([VERSION, REFUSAL]);
    frame.extend(body_bytes.to_le_bytes());
    frame.extend(u32::from(kind_number(error.kind())).to_le_bytes());
    frame.extend(&text.as_bytes()[..cut]);
    frame
}

/// The error in the body of a refusal, whoever wrote it; never fails, because there is nobody left to complain to.
#[must_use]
pub fn refused(body: &[u8]) -> Error {
    let Some((number, text)) = body.split_first_chunk() else {
        return Error::new(ErrorKind::System, "the peer refused without a reason");
    };
    let kind = u8::try_from(u32::from_le_bytes(*number)).map_or(ErrorKind::System, kind_of);
    Error::new(
        convert::told(kind),
        format!("the peer refused: {}", convert::printable(&String::from_utf8_lossy(text))),
    )
}
