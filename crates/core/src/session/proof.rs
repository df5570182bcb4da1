//! Proofs that a process knows a key: an HMAC-SHA256 over a label for its side and what both sides have sent before.
//!
//! A proof over a random number of the other side can neither be reflected nor replayed.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::error::{Error, ErrorKind, Result};

/// A proof of one side.
pub struct KeyProof(Hmac<Sha256>);

impl KeyProof {
    /// Calculates the proof of the side `side` with `key`, over the parts one after the other.
    pub fn over(key: &[u8], side: &[u8], parts: &[&[u8]]) -> Result<KeyProof> {
        let mut mac = Hmac::<Sha256>::new_from_slice(key)
            .map_err(|_| Error::new(ErrorKind::System, "the token cannot be used as a key"))?;
        for part in [side, &[0]].iter().chain(parts) {
            mac.update(part);
        }
        Ok(KeyProof(mac))
    }

    /// Returns the bytes to send.
    pub fn bytes(self) -> [u8; 32] {
        self.0.finalize().into_bytes().into()
    }

    /// Returns whether the other side has sent this proof. Takes the same time for all proofs.
    pub fn is(self, given: &[u8; 32]) -> bool {
        self.0.verify_slice(given).is_ok()
    }
}
