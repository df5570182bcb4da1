//! Pulls and pushes of any bytes of caches of one block, by their offsets there.

use std::sync::Arc;
use std::time::Duration;

use super::cache_names::{OwnCache, PeerCache};
use super::engine::Engine;
use crate::engine::{CallExtras, DataDist, GroupMember};
use crate::error::{Error, Result, ensure};
use crate::events::Transfer;
use crate::fallible;
use crate::model::{Verify, Words};
use crate::plan::{Piece, Side};
use crate::validate::{Layers, Rows};

/// Bytes that move between a cache of this engine and one of a peer. Both have one block and one tensor.
#[derive(Clone, Debug)]
pub struct BytesOfPair {
    /// The cache of this engine.
    pub own: Arc<OwnCache>,
    /// The cache of the peer.
    pub of_peer: Arc<PeerCache>,
    /// The offsets of the bytes in the source and in the destination, at least one piece. If two of them write the same byte, the
    /// later one counts.
    pub pieces: Vec<Piece>,
}

impl Engine {
    /// Starts to read bytes of peers into caches of this engine, otherwise as [`pull`](Self::pull) does. All `parts` succeed or
    /// fail together. One part has at most 65,536 runs of bytes that do not follow each other.
    pub fn pull_bytes(&self, parts: Vec<BytesOfPair>, limit: Option<Duration>) -> Result<Arc<Transfer>> {
        self.run(|engine| self.move_bytes(engine, Side::Destination, parts, limit))
    }

    /// Starts to write bytes of this engine into caches of peers, otherwise as [`push`](Self::push) and
    /// [`pull_bytes`](Self::pull_bytes) do.
    pub fn push_bytes(&self, parts: Vec<BytesOfPair>, limit: Option<Duration>) -> Result<Arc<Transfer>> {
        self.run(|engine| self.move_bytes(engine, Side::Source, parts, limit))
    }

    fn move_bytes(
        &self,
        engine: &DataDist,
        local_side: Side,
        mut parts: Vec<BytesOfPair>,
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let ours =
            |part: &BytesOfPair| part.own.engine == *self.name() && part.of_peer.engine == *self.name();
        ensure(parts.iter().all(ours), || {
            Error::argument("parts", "another engine's", "caches that this engine knows")
        })?;
        let extras = CallExtras { verify: Some(Verify::Off), words: Words::NATIVE, ..CallExtras::default() };
        let member = |BytesOfPair { own, of_peer, pieces }: BytesOfPair| GroupMember {
            remote: of_peer.remote_name(),
            local: own.end(),
            rows: Rows::Bytes { pieces },
            layers: Layers { src: None, dst: None, tensors_per_layer: 1 },
            grant: None,
        };
        match (parts.pop(), parts.is_empty()) {
            (Some(only), true) => {
                let GroupMember { remote, local, rows, layers, .. } = member(only);
                engine.transfer(local_side, remote, &local, (rows, layers), extras).within(limit).start()
            }
            (last, _) => {
                parts.extend(last);
                let members = parts.into_iter().map(|part| Ok(member(part)));
                let members = fallible::try_collect("the parts of a call", members)?;
                engine.transfer_group(local_side, members, false, extras, limit)
            }
        }
    }
}
