//! What engines send to each other, as messages of the native API, between the programs of two engines.
//!
//! A message begins with its kind, and most then have the number of the call that waits for the reply. Numbers are little-endian.

use crate::inbox::Notice;

/// The metadata of an engine of this kind, by which peers know that it answers. The number changes with the messages.
pub(crate) const METADATA: &[u8] = b"hixl 1";
/// Maximum number of addresses that one message asks for.
pub(crate) const MAX_ADDRESSES: usize = 2048;

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// The sender uses the link for connections that it has made.
    Own { id: u64 },
    /// The sender has no connection over the link any more.
    Release,
    /// Asks in which regions addresses lie.
    Locate { id: u64, addrs: Vec<u64> },
    /// A notification.
    Notify { id: u64, name: String, text: String },
    /// The sender no longer waits for the confirmation of a notification, which must not be delivered if it was not yet.
    Withdraw { id: u64 },
    /// A region of the sender has ended: the receiver must not know it any more.
    Ended { id: u64, number: u64 },
    /// Answers `Own`, `Notify` and `Ended`.
    Done { id: u64, accepted: bool },
    /// Answers `Locate`, with a region for each address, in order.
    Located { id: u64, regions: Vec<WireRegion> },
}

/// A region of the sender. Its number is that of its cache, and never used again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WireRegion {
    pub(crate) addr: u64,
    /// 0 if the address lies in no region.
    pub(crate) len: u64,
    pub(crate) number: u64,
}

impl Message {
    /// Returns the bytes of the message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let start = |bytes: &mut Vec<u8>, kind: u8, id: u64| {
            bytes.push(kind);
            bytes.extend(id.to_le_bytes());
        };
        match self {
            Message::Own { id } => start(&mut bytes, 1, *id),
            Message::Release => start(&mut bytes, 2, 0),
            Message::Locate { id, addrs } => {
                start(&mut bytes, 3, *id);
                bytes.extend(addrs.iter().flat_map(|addr| addr.to_le_bytes()));
            }
            Message::Notify { id, name, text } => {
                start(&mut bytes, 4, *id);
                bytes.extend((name.len() as u64).to_le_bytes());
                bytes.extend(name.as_bytes());
                bytes.extend(text.as_bytes());
            }
            Message::Withdraw { id } => start(&mut bytes, 5, *id),
            Message::Done { id, accepted } => {
                start(&mut bytes, 6, *id);
                bytes.push(u8::from(*accepted));
            }
            Message::Located { id, regions } => {
                start(&mut bytes, 7, *id);
                let words = regions.iter().flat_map(|region| [region.addr, region.len, region.number]);
                bytes.extend(words.flat_map(u64::to_le_bytes));
            }
            Message::Ended { id, number } => {
                start(&mut bytes, 8, *id);
                bytes.extend(number.to_le_bytes());
            }
        }
        bytes
    }

    /// Reads a message; `None` if it is not valid.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Message> {
        let (kind, rest) = bytes.split_first()?;
        let (id, rest) = word(rest)?;
        match kind {
            1 => rest.is_empty().then_some(Message::Own { id }),
            2 => rest.is_empty().then_some(Message::Release),
            3 => {
                let addrs = words(rest)?;
                (addrs.len() <= MAX_ADDRESSES).then_some(Message::Locate { id, addrs })
            }
            4 => {
                let (name_bytes, rest) = word(rest)?;
                let (name, text) = rest.split_at_checked(usize::try_from(name_bytes).ok()?)?;
                let read = |bytes: &[u8]| {
                    let text = str::from_utf8(bytes).ok().filter(|text| text.len() <= Notice::MAX_TEXT);
                    text.map(str::to_owned)
                };
                Some(Message::Notify { id, name: read(name)?, text: read(text)? })
            }
            5 => rest.is_empty().then_some(Message::Withdraw { id }),
            6 => match rest {
                [accepted @ 0..=1] => Some(Message::Done { id, accepted: *accepted == 1 }),
                _ => None,
            },
            7 => {
                let words = words(rest)?;
                let (triples, []) = words.as_chunks::<3>() else { return None };
                let regions =
                    triples.iter().map(|&[addr, len, number]| WireRegion { addr, len, number }).collect();
                Some(Message::Located { id, regions })
            }
            8 => match word(rest)? {
                (number, []) => Some(Message::Ended { id, number }),
                _ => None,
            },
            _ => None,
        }
    }
}

fn word(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (word, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*word), rest))
}

/// Reads numbers up to the end. The engine bounds the bytes of a message.
fn words(bytes: &[u8]) -> Option<Vec<u64>> {
    let (words, rest) = bytes.as_chunks();
    rest.is_empty().then(|| words.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

#[cfg(test)]
mod tests {
    use super::{Message, WireRegion};

    #[test]
    fn messages_are_read_as_they_were_written_and_in_no_other_form() {
        let region = WireRegion { addr: 1, len: u64::MAX, number: 3 };
        let messages = [
            Message::Own { id: 1 },
            Message::Release,
            Message::Locate { id: 2, addrs: vec![0, u64::MAX] },
            Message::Notify { id: 3, name: "ä".into(), text: String::new() },
            Message::Withdraw { id: 4 },
            Message::Done { id: 5, accepted: true },
            Message::Located { id: u64::MAX, regions: vec![region, WireRegion::default()] },
            Message::Ended { id: 6, number: 7 },
        ];
        for message in messages {
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes), Some(message.clone()));
            for end in 0..bytes.len() {
                assert_ne!(Message::decode(&bytes[..end]), Some(message.clone()));
            }
        }
        assert_eq!(Message::decode(&[]), None);
        assert_eq!(Message::decode(&[9; 9]), None);
        assert_eq!(Message::decode(&[6, 0, 0, 0, 0, 0, 0, 0, 0, 2]), None);
        let long = Message::Notify { id: 0, name: "x".repeat(1025), text: String::new() };
        assert_eq!(Message::decode(&long.encode()), None);
        let mut beyond = Message::Notify { id: 0, name: "x".into(), text: String::new() }.encode();
        beyond[9] = 2;
        assert_eq!(Message::decode(&beyond), None);
    }
}
