//! The checksum of a block: XXH3 of its bytes in the order of the plan, with a seed that binds it to the cache.
//!
//! Both sides of a transfer calculate it over their own memory. It finds bytes that changed by accident. It is not a
//! message authentication code: an attacker who can change the bytes can also change the checksum.

use std::hash::Hasher;

use twox_hash::xxhash3_64::{self, DEFAULT_SECRET_LENGTH, RawHasher, SecretBuffer};

use crate::error::{Error, ErrorKind, Result};
use crate::model::{CacheId, CacheKey, Name};

type Secret = SecretBuffer<[u8; DEFAULT_SECRET_LENGTH]>;

/// Calculates the checksums of blocks of one remote cache, as one name and one generation of its entry identify it, or of one value.
#[derive(Clone)]
pub struct Checksums(Secret);

/// The checksum of one block while its bytes are added.
pub struct BlockChecksum(RawHasher<[u8; DEFAULT_SECRET_LENGTH]>);

impl Checksums {
    /// Returns the checksums that are bound to the cache `cache` of the owner, to the name by which the caller finds
    /// it, to the generation of its entry in the owner's table, and to the digest of the request (`protocol::digest`): as
    /// the caller means it on one side, and as the owner has understood it on the other. So the checksums of two sides that
    /// disagree about rows, order, tensors or direction differ. 0 if there is no request.
    pub fn bound_to(name: Name, cache: CacheId, generation: u64, request: u64) -> Result<Checksums> {
        let (kind, first, second) = match name {
            Name::Key(CacheKey::Request { model, id }) => (0, model, id),
            Name::Key(CacheKey::Prefix { model, id }) => (1, model, id),
            Name::Key(CacheKey::Blocks { model }) => (2, model, 0),
            Name::Row { cache, row } => (3, cache.0.cast_unsigned(), u64::from(row)),
            Name::Grant(grant) => (4, u64::from(grant.slot), grant.generation),
        };
        let mut bytes = [0; 48];
        let words: [u64; 6] = [kind, first, second, cache.0.cast_unsigned(), generation, request];
        for (target, word) in bytes.chunks_exact_mut(8).zip(words) {
            target.copy_from_slice(&word.to_le_bytes());
        }
        Checksums::bound_to_bytes(&bytes)
    }

    /// Returns the checksums that are bound to `bytes`, such as the key of a value in a store.
    pub fn bound_to_bytes(bytes: &[u8]) -> Result<Checksums> {
        let seed = xxhash3_64::Hasher::oneshot(bytes);
        let secret = SecretBuffer::with_seed(seed, [0; DEFAULT_SECRET_LENGTH]);
        let refused = |_| Error::new(ErrorKind::System, "the secret of the checksums has the wrong length");
        secret.map(Checksums).map_err(refused)
    }

    /// Begins the checksum of one block.
    pub fn block(&self) -> BlockChecksum {
        BlockChecksum(RawHasher::new(self.0.clone()))
    }
}

impl BlockChecksum {
    /// Adds the next bytes in the order of the plan.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// Returns the checksum of all bytes that were added.
    pub fn value(&self) -> u64 {
        self.0.finish()
    }
}
