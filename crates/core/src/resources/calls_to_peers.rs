//! Counts the calls of this engine to each peer, from before they hold rows until they end.
//!
//! While there is one, requests of that peer pass calls that only wait here. Otherwise two engines could wait for each
//! other: a call to the peer holds rows for which a local call waits, and the peer's request, for which the peer's
//! own call waits, would wait behind that one (`push_pull_and_copy_do_not_deadlock`).

use std::sync::Arc;

use hashbrown::HashMap;

use crate::error::{Error, ErrorKind, Result};
use crate::model::ClusterId;
use crate::sync::Mutex;

/// The number of calls to each peer.
#[derive(Clone, Debug, Default)]
pub struct CallsToPeers(Arc<Mutex<HashMap<ClusterId, usize>>>);

/// A call to a peer; it ends on drop.
#[derive(Debug)]
pub struct CallToPeer {
    calls: CallsToPeers,
    peer: ClusterId,
}

impl CallsToPeers {
    /// Counts a call to `peer`.
    pub fn begin(&self, peer: ClusterId) -> Result<CallToPeer> {
        let mut calls = self.0.lock();
        let room = calls.try_reserve(1);
        room.map_err(|_| Error::new(ErrorKind::OutOfMemory, "no memory for the list of calls to peers"))?;
        *calls.entry(peer).or_default() += 1;
        drop(calls);
        Ok(CallToPeer { calls: self.clone(), peer })
    }

    /// Whether a call to `peer` has begun and not ended.
    pub fn any(&self, peer: ClusterId) -> bool {
        self.0.lock().contains_key(&peer)
    }
}

impl Drop for CallToPeer {
    fn drop(&mut self) {
        let mut calls = self.calls.0.lock();
        if let Some(count) = calls.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                calls.remove(&self.peer);
            }
        }
    }
}
