//! Notifications of peers that the program has not read.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use llm_datadist_core::ClusterId;

use crate::sync::lock;

/// Maximum number of unread notifications of one link.
const MAX_UNREAD: usize = 4096;
/// Maximum number of bytes of all unread notifications.
const MAX_BYTES: usize = 256 << 20;

/// A notification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Its name, of at most 1,024 bytes.
    pub name: String,
    /// Its text, of at most 1,024 bytes.
    pub text: String,
}

/// The unread notifications of an engine, in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Inbox(Mutex<Unread>);

#[derive(Debug, Default)]
struct Unread {
    /// With the sender, and the number by which it may withdraw the notification.
    notices: VecDeque<(ClusterId, u64, Notice)>,
    of_peer: HashMap<ClusterId, usize>,
    bytes: usize,
}

impl Notice {
    /// Maximum number of bytes of each text.
    pub const MAX_TEXT: usize = 1024;

    fn bytes(&self) -> usize {
        size_of::<(ClusterId, u64, Notice)>() + self.name.len() + self.text.len()
    }
}

impl Inbox {
    /// Adds a notification. Returns `false` if there is no room.
    pub(crate) fn add(&self, from: ClusterId, id: u64, notice: Notice) -> bool {
        let mut unread = lock(&self.0);
        let (count, bytes) = (unread.of_peer.get(&from).copied().unwrap_or(0), notice.bytes());
        let room =
            count < MAX_UNREAD && unread.bytes + bytes <= MAX_BYTES && unread.notices.try_reserve(1).is_ok();
        if room {
            unread.of_peer.insert(from, count + 1);
            unread.bytes += bytes;
            unread.notices.push_back((from, id, notice));
        }
        room
    }

    /// Removes a notification that its sender withdraws, unless the program has read it.
    pub(crate) fn withdraw(&self, from: ClusterId, id: u64) {
        let mut unread = lock(&self.0);
        let found = unread.notices.iter().rposition(|(peer, number, _)| (*peer, *number) == (from, id));
        if let Some((_, _, notice)) = found.and_then(|at| unread.notices.remove(at)) {
            unread.bytes -= notice.bytes();
            if let Entry::Occupied(mut count) = unread.of_peer.entry(from) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }

    /// Takes all notifications.
    pub(crate) fn take(&self) -> Vec<Notice> {
        let Unread { notices, .. } = std::mem::take(&mut *lock(&self.0));
        notices.into_iter().map(|(_, _, notice)| notice).collect()
    }
}

#[cfg(test)]
mod tests {
    use llm_datadist_core::ClusterId;

    use super::{Inbox, Notice};
    use crate::sync::lock;

    fn notice(text: &str) -> Notice {
        Notice { name: String::new(), text: text.into() }
    }

    #[test]
    fn each_link_has_room_for_4096() {
        let inbox = Inbox::default();
        let (a, b) = (ClusterId(1), ClusterId(2));
        for id in 0..4096 {
            assert!(inbox.add(a, id, notice(&id.to_string())));
        }
        assert!(!inbox.add(a, 4096, notice("")));
        assert!(inbox.add(b, 7, notice("b")));
        inbox.withdraw(a, 7);
        inbox.withdraw(a, 7);
        assert!(inbox.add(a, 4096, notice("4096")));
        let texts: Vec<_> = inbox.take().into_iter().map(|notice| notice.text).collect();
        let mut expected: Vec<_> = (0..4096).filter(|id| *id != 7).map(|id| id.to_string()).collect();
        expected.extend(["b".into(), "4096".into()]);
        assert_eq!(texts, expected);
        assert_eq!(inbox.take(), []);
        assert!(inbox.add(a, 1, notice("")));
        inbox.withdraw(a, 1);
        assert!(lock(&inbox.0).of_peer.is_empty());
    }
}
