//! Frames: a header of 8 bytes (`L`, `D`, version, kind, and the length in little endian) and a body.
//!
//! The body of a message is encoded by postcard, and ends with a checksum of the bytes before it. So no message that was
//! damaged on its way is acted on: a damaged request could name other rows, keys or tensors, and still be valid
//! (`damaged_requests_move_no_wrong_bytes_of_blocks`). The body of a refusal has its own layout, which no version may change. So two
//! incompatible versions can still report why they do not connect (`a_refusal_crosses_versions`).

use std::hash::Hasher;

use serde::Serialize;
use serde::de::DeserializeOwned;
use twox_hash::XxHash64;

use super::allocation::{record, short_of};
use super::convert::{kind_number, kind_of, local_kind, printable};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;

/// Version of the whole protocol except the header and the refusal.
pub const VERSION: u8 = 18;
pub const HEADER: usize = 8;
/// Number of bytes of the checksum that ends the body of a message: XXH64 with seed 0, in little endian.
pub const CHECKSUM: usize = 8;
/// Kind of a frame whose body is a message.
pub const MESSAGE: u8 = 1;
/// Kind of a frame whose body is a refusal; the same in every version.
pub const REFUSAL: u8 = 255;
/// Kind of a refusal from a peer of another version. Exists in this process only, not in frames.
pub const REFUSAL_OF_ANOTHER_VERSION: u8 = 254;
/// Longest body, in bytes, of a frame from a peer that is not yet authenticated.
pub const HANDSHAKE_LIMIT: usize = 4 << 10;
/// Longest body of any frame, in bytes.
pub const MESSAGE_LIMIT: usize = 64 << 20;

const MAGIC: [u8; 2] = *b"LD";
/// Initial capacity of a frame, so that short messages need one allocation.
const FIRST_BYTES: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// [`MESSAGE`], [`REFUSAL`] or [`REFUSAL_OF_ANOTHER_VERSION`].
    pub kind: u8,
    pub length: usize,
}

impl Header {
    /// Reads a header. `Err(LinkFailed)` if it does not begin with the magic bytes or has another version and
    /// is not a refusal; `Err(NotLinked)` if its kind is unknown or its body longer than `limit` bytes.
    pub fn parse(bytes: [u8; HEADER], limit: usize) -> Result<Header> {
        let [first, second, version, kind, length @ ..] = bytes;
        if [first, second] != MAGIC {
            return Err(Error::new(ErrorKind::LinkFailed, "not an llm_datadist endpoint of any version"));
        }
        if version != VERSION && kind != REFUSAL {
            let text =
                format!("the peer uses protocol version {version}, this process uses version {VERSION}");
            return Err(Error::new(ErrorKind::LinkFailed, text).permanent());
        }
        if kind != MESSAGE && kind != REFUSAL {
            return Err(Error::new(
                ErrorKind::NotLinked,
                format!("the peer sent a frame of unknown kind {kind}"),
            ));
        }
        let bytes = u32::from_le_bytes(length);
        match usize::try_from(bytes) {
            Ok(length) if length <= limit => {
                let kind = if version == VERSION { kind } else { REFUSAL_OF_ANOTHER_VERSION };
                Ok(Header { kind, length })
            }
            _ => {
                let text = "the peer sent a frame that is too long";
                Err(Error::new(ErrorKind::NotLinked, text).with("bytes", bytes).with("limit", limit))
            }
        }
    }

    fn write(self) -> Result<[u8; HEADER]> {
        let length = u32::try_from(self.length).ok().filter(|_| self.length <= MESSAGE_LIMIT);
        let Some(length) = length else {
            let error = Error::invalid("the request is too long to be sent in one message");
            return Err(error.with("bytes", self.length).with("limit", MESSAGE_LIMIT));
        };
        let [a, b, c, d] = length.to_le_bytes();
        Ok([MAGIC[0], MAGIC[1], VERSION, self.kind, a, b, c, d])
    }
}

/// Returns the frame of a message, header and body with checksum, ready to send. `Err(InvalidArgument)` if the body is
/// longer than [`MESSAGE_LIMIT`], `Err(OutOfMemory)` if the frame cannot be allocated.
pub fn encode<T: Serialize + ?Sized>(message: &T) -> Result<Vec<u8>> {
    let mut frame = Frame(Vec::new());
    frame.reserve(FIRST_BYTES).map_err(no_room)?;
    frame.0.extend([0; HEADER]);
    let mut frame = postcard::serialize_with_flavor(message, frame).map_err(no_room)?;
    fallible::grow("a message", &mut frame, CHECKSUM)?;
    let checksum = XxHash64::oneshot(0, &frame[HEADER..]);
    frame.extend_from_slice(&checksum.to_le_bytes());
    let header = Header { kind: MESSAGE, length: frame.len() - HEADER }.write()?;
    frame[..HEADER].copy_from_slice(&header);
    Ok(frame)
}

/// Returns the digest of a message: the checksum of its bytes. A message that was decoded has the digest of the one that
/// was encoded, so two sides that have understood a request in the same way have the same digest.
pub fn digest<T: Serialize + ?Sized>(message: &T) -> Result<u64> {
    postcard::serialize_with_flavor(message, Digest(XxHash64::with_seed(0))).map_err(no_room)
}

/// Hashes a message instead of storing it.
struct Digest(XxHash64);

impl postcard::ser_flavors::Flavor for Digest {
    type Output = u64;

    #[inline]
    fn try_extend(&mut self, data: &[u8]) -> postcard::Result<()> {
        self.0.write(data);
        Ok(())
    }

    #[inline]
    fn try_push(&mut self, data: u8) -> postcard::Result<()> {
        self.0.write(&[data]);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<u64> {
        Ok(self.0.finish())
    }
}

/// A frame that grows while it is written. Growing is fallible because messages have any length.
struct Frame(Vec<u8>);

impl Frame {
    #[inline]
    fn reserve(&mut self, more: usize) -> postcard::Result<()> {
        fallible::grow("a message to a peer", &mut self.0, more).map_err(|error| {
            record(error);
            postcard::Error::SerializeBufferFull
        })
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

/// Returns the error for a message that could not be encoded. The lists with their own serializer fail only
/// if they cannot allocate memory.
fn no_room(error: postcard::Error) -> Error {
    use postcard::Error::{SerdeSerCustom, SerializeBufferFull};
    match error {
        SerializeBufferFull | SerdeSerCustom => short_of()
            .unwrap_or_else(|| Error::new(ErrorKind::OutOfMemory, "no memory for a message to a peer")),
        other => Error::new(ErrorKind::System, "a message cannot be written as bytes").because(other),
    }
}

/// Decodes the message in a body. `Err(OutOfMemory)` if one of its lists could not be allocated,
/// `Err(NotLinked)` unless the body is exactly one such message and its checksum.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    match body.split_last_chunk() {
        Some((message, checksum)) if XxHash64::oneshot(0, message).to_le_bytes() == *checksum => {
            decode_message(message)
        }
        _ => {
            let text = "a message was damaged on its way and discarded: its checksum does not match; repeat the call, and \
                        check the network and the memory of both hosts";
            Err(Error::new(ErrorKind::NotLinked, text).with("bytes", body.len()))
        }
    }
}

/// Decodes a message without its checksum; otherwise as [`decode`].
pub fn decode_message<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    let unreadable = |why: &str| {
        let text = format!("the peer sent a message that cannot be read: {why}");
        Error::new(ErrorKind::NotLinked, text).with("bytes", body.len())
    };
    let (message, rest) = postcard::take_from_bytes(body).map_err(|error| match short_of() {
        Some(error) => error.with("bytes", body.len()),
        None => unreadable("not the expected message").because(error),
    })?;
    if rest.is_empty() { Ok(message) } else { Err(unreadable("extra bytes").with("unread", rest.len())) }
}

/// Decodes the message in a received frame. If the frame is a refusal, returns its error.
pub fn open<T: DeserializeOwned>(kind: u8, body: &[u8]) -> Result<T> {
    match kind {
        REFUSAL => Err(refused(body)),
        REFUSAL_OF_ANOTHER_VERSION => Err(refused(body).permanent()),
        _ => decode(body),
    }
}

/// Whether a frame of `kind` is a refusal.
pub fn is_refusal(kind: u8) -> bool {
    matches!(kind, REFUSAL | REFUSAL_OF_ANOTHER_VERSION)
}

/// Returns the frame of a refusal: the kind of `error` as a little-endian `u32`, then its text. The text is
/// cut so that the body has at most [`HANDSHAKE_LIMIT`] bytes.
pub fn refusal(error: &Error) -> Vec<u8> {
    let text = error.to_string();
    let most = text.len().min(HANDSHAKE_LIMIT - size_of::<u32>());
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

/// Returns the error in the body of a refusal. Never fails, because no report could be sent to the peer any
/// more.
pub fn refused(body: &[u8]) -> Error {
    let Some((number, text)) = body.split_first_chunk() else {
        return Error::new(ErrorKind::System, "the peer refused without a reason");
    };
    let kind = u8::try_from(u32::from_le_bytes(*number)).map_or(ErrorKind::System, kind_of);
    Error::new(local_kind(kind), format!("the peer refused: {}", printable(&String::from_utf8_lossy(text))))
}
