//! Messages of peers, and news about links.

use std::fmt;
use std::sync::{Arc, Weak};

use crate::budget::BudgetShare;
use crate::error::Error;
use crate::model::ClusterId;

/// A message that a peer sent with `notify`.
#[derive(Clone, Debug)]
pub struct Notification {
    /// The engine that sent it, which may be gone by now.
    pub peer: Arc<PeerInfo>,
    /// What it sent.
    pub payload: Vec<u8>,
    /// Who wants to know that it was polled. `None` once it was.
    source: Option<Weak<dyn NotificationSource>>,
    /// The memory that it takes of the budget for peers. `None` once it was polled.
    share: Option<Arc<BudgetShare>>,
}

/// The link over which notifications arrive. It tells the peer how many of them were polled.
pub(crate) trait NotificationSource: Send + Sync + fmt::Debug {
    /// Notes that the program has polled notifications.
    fn polled(&self, messages: u64, bytes: u64);
}

/// The other end of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Its cluster id.
    pub cluster: ClusterId,
    /// A number that its engine has drawn when it was opened: a restarted peer has another one.
    pub incarnation: u64,
    /// The name of its engine; empty if it has none.
    pub name: Arc<str>,
    /// Its address.
    pub address: String,
    /// How bytes move: `shm`, `tcp` or `local`.
    pub transport: &'static str,
    /// The metadata of its program from the time when the link was made.
    pub metadata: Arc<Vec<u8>>,
}

impl PeerInfo {
    /// Returns `error` with what tells which engine this is.
    pub(crate) fn named(&self, error: Error) -> Error {
        let error = error.with("cluster", self.cluster).with("peer", &self.address);
        error.with_native("peer_name", &self.name).with_native("incarnation", self.incarnation)
    }
}

/// The name of the engine, or its address if it has none. That of an engine of the original's API has its cluster id.
impl fmt::Display for PeerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.is_empty() { write!(f, "the peer at {}", self.address) } else { f.write_str(&self.name) }
    }
}

/// The end of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkEnd {
    /// The peer.
    pub peer: PeerInfo,
    /// Why the link ended.
    pub reason: String,
    /// Number of notifications to the peer that it has not confirmed. It may have got the first of them.
    pub unacknowledged: u64,
}

impl Notification {
    pub(crate) fn new(
        peer: Arc<PeerInfo>,
        payload: Vec<u8>,
        source: Weak<dyn NotificationSource>,
        share: BudgetShare,
    ) -> Self {
        Notification { peer, payload, source: Some(source), share: Some(Arc::new(share)) }
    }

    /// Notes that the program has it, and so owns its memory. Returns who wants to know that, once.
    pub(super) fn note_polled(&mut self) -> Option<Arc<dyn NotificationSource>> {
        self.share = None;
        self.source.take()?.upgrade()
    }
}
