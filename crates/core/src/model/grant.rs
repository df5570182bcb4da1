//! Grants: which one, the token that names it, and why it ended.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{ClusterId, named_enum};
use crate::error::{Error, Result};

/// The first bytes of every token, with the version of its format.
const MAGIC: [u8; 4] = *b"LDG\x01";

/// Names a grant at its owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GrantId {
    /// Its entry among the grants of the owner. Another grant takes the entry after its end.
    pub slot: u32,
    /// The generation of the entry while the grant lasts.
    pub generation: u64,
    /// Bytes that only the owner can compute, so that nobody can guess the id of a grant. `Debug` never shows them.
    pub secret: [u8; 16],
}

/// What the owner of a grant gives to readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GrantToken {
    /// The owner.
    pub cluster: ClusterId,
    /// The incarnation of the owner: a restarted owner has another one.
    pub incarnation: u64,
    /// The grant.
    pub grant: GrantId,
}

/// A grant that a pull uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantUse {
    /// The token of the grant.
    pub token: GrantToken,
    /// Whether this is the last pull under the grant, so that its owner may end it.
    pub done: bool,
}

named_enum! {
    /// Why a grant has ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum GrantEnd {
        /// Its time has passed.
        Expired = "expired",
        /// The owner revoked it.
        Revoked = "revoked",
        /// The number of readers that it was made for have reported that they are done.
        Done = "done",
        /// Its cache was released.
        Released = "released",
    }
}

impl fmt::Debug for GrantId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GrantId { slot, generation, .. } = self;
        f.debug_struct("GrantId").field("slot", slot).field("generation", generation).finish_non_exhaustive()
    }
}

impl GrantToken {
    /// Number of bytes of a token.
    pub const BYTES: usize = 48;

    /// Returns the bytes that travel to readers.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let GrantToken { cluster, incarnation, grant } = self;
        let (cluster, incarnation) = (cluster.0.to_le_bytes(), incarnation.to_le_bytes());
        let (slot, generation) = (grant.slot.to_le_bytes(), grant.generation.to_le_bytes());
        let mut bytes = [0; Self::BYTES];
        bytes.copy_from_slice(
            &[&MAGIC, &cluster[..], &incarnation, &slot, &generation, &grant.secret].concat(),
        );
        bytes
    }

    /// Reads a token. Returns `Err(InvalidArgument)` for bytes that no engine has made, which it calls `argument`.
    pub fn from_bytes(argument: &str, bytes: &[u8]) -> Result<GrantToken> {
        let Some(mut rest) = bytes.strip_prefix(&MAGIC).filter(|_| bytes.len() == Self::BYTES) else {
            let text = format!(
                "{argument}= is not a token of a grant: pass the {} bytes of Grant.token",
                Self::BYTES
            );
            return Err(Error::invalid(text).of_argument(argument).with("bytes", bytes.len()));
        };
        Ok(GrantToken {
            cluster: ClusterId(u64::from_le_bytes(take(&mut rest))),
            incarnation: u64::from_le_bytes(take(&mut rest)),
            grant: GrantId {
                slot: u32::from_le_bytes(take(&mut rest)),
                generation: u64::from_le_bytes(take(&mut rest)),
                secret: take(&mut rest),
            },
        })
    }
}

/// Takes the next bytes of a token, whose length was checked.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (taken, left) = rest.split_first_chunk().map_or(([0; N], &[][..]), |(taken, left)| (*taken, left));
    *rest = left;
    taken
}
