//! Byte strings, lists and texts of a peer. Their length is checked before memory is allocated for it.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::allocation::{MESSAGE, append, no_memory};
use crate::fallible;
use crate::model::is_name;

/// Maximum number of bytes that are kept of each text from a peer.
pub(super) const MAX_TEXT: usize = 16 << 10;

/// At most `MAX` bytes, in a list or a shared list. `Debug` shows only their number, because a key lets its owner read.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct BoundedBytes<const MAX: usize, L = Vec<u8>>(pub L);

impl<const MAX: usize, L: Deref<Target: AsRef<[u8]>>> Deref for BoundedBytes<MAX, L> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl<const MAX: usize, L: Deref<Target: AsRef<[u8]>>> fmt::Debug for BoundedBytes<MAX, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({} bytes)", self.len())
    }
}

impl<const MAX: usize, L: Deref<Target: AsRef<[u8]>>> Serialize for BoundedBytes<MAX, L> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_bytes(self)
    }
}

impl<'de, const MAX: usize, L: From<Vec<u8>>> Deserialize<'de> for BoundedBytes<MAX, L> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let bytes = <&[u8]>::deserialize(from)?;
        if bytes.len() > MAX {
            return Err(D::Error::invalid_length(bytes.len(), &"fewer bytes"));
        }
        fallible::copied(MESSAGE, bytes).map(|list| BoundedBytes(list.into())).map_err(no_memory)
    }
}

/// Reads a list of at most `MAX` items.
pub(super) fn at_most<'de, const MAX: usize, T: Deserialize<'de>, D: Deserializer<'de>>(
    from: D,
) -> Result<Vec<T>, D::Error> {
    from.deserialize_seq(AtMost::<T, MAX>(PhantomData))
}

struct AtMost<T, const MAX: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for AtMost<T, MAX> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
        let mut list = Vec::new();
        while let Some(next) = seq.next_element()? {
            if list.len() == MAX {
                return Err(A::Error::invalid_length(list.len() + 1, &self));
            }
            append(&mut list, next)?;
        }
        Ok(list)
    }
}

pub(super) fn text<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    Text::deserialize(from).map(|text| text.0)
}

/// Reads the name of an engine or a cache.
pub(super) fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = <&str>::deserialize(from)?;
    if is_name(text) { Ok(text.to_owned()) } else { Err(D::Error::custom("not a name")) }
}

pub(super) fn outcome<'de, D: Deserializer<'de>>(from: D) -> Result<Result<(), String>, D::Error> {
    let outcome = Result::<(), Text>::deserialize(from)?;
    Ok(outcome.map_err(|text| text.0))
}

/// The first [`MAX_TEXT`] bytes of a text, cut at a character boundary.
struct Text(String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = <&str>::deserialize(from)?;
        let most = text.len().min(MAX_TEXT);
        let end = (0..=most).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        Ok(Text(text[..end].to_owned()))
    }
}
