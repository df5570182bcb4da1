//! Keys of values: as clients give them, and as the index has them.

use llm_datadist_core::{Error, Result};
use serde::{Deserialize, Serialize};

/// Bytes of a key.
pub const KEY_BYTES: usize = 28;

/// The key of a value inside its namespace: a digest of everything that decides the bytes of the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StoreKey([u8; KEY_BYTES]);

impl StoreKey {
    /// Returns its bytes.
    pub fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }

    /// Reads the key at position `at` of a list. Returns `Err(InvalidArgument)` unless it has [`KEY_BYTES`] bytes.
    pub fn read(at: usize, bytes: &[u8]) -> Result<StoreKey> {
        let wrong = |_| {
            let value = format_args!("{} bytes", bytes.len());
            Error::argument(&format!("keys[{at}]"), value, format_args!("{KEY_BYTES} bytes"))
        };
        bytes.try_into().map(StoreKey).map_err(wrong)
    }
}

/// A key with the number of its namespace, as the index has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct IndexKey(pub(crate) [u64; 4]);

impl IndexKey {
    /// Returns the key of a namespace with this number.
    pub(crate) fn of(namespace: u32, key: &StoreKey) -> IndexKey {
        let mut bytes = [0; 32];
        let (head, tail) = bytes.split_at_mut(4);
        head.copy_from_slice(&namespace.to_le_bytes());
        tail.copy_from_slice(&key.0);
        let (words, _) = bytes.as_chunks::<8>();
        IndexKey(std::array::from_fn(|at| u64::from_le_bytes(words[at])))
    }

    /// Returns the number of the namespace.
    pub(crate) fn namespace(&self) -> u32 {
        u32::try_from(self.0[0] & u64::from(u32::MAX)).unwrap_or_default()
    }

    /// Returns the key in the namespace.
    pub(crate) fn key(&self) -> StoreKey {
        let mut key = [0; KEY_BYTES];
        let bytes = self.0.iter().flat_map(|word| word.to_le_bytes()).skip(4);
        key.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte);
        StoreKey(key)
    }

    /// Returns a number that is the same for equal keys. Each of its bits depends on all bits of the key.
    pub(crate) fn mixed(&self) -> u64 {
        /// Digits of the golden ratio, and of the square roots of 2 and 3.
        const ODD: [u64; 3] = [0x9E37_79B9_7F4A_7C15, 0x6A09_E667_F3BC_C909, 0xBB67_AE85_84CA_A73B];
        let [first, second, third, fourth] = self.0;
        let halves = folded(first ^ ODD[0], second ^ ODD[1]) ^ folded(third ^ ODD[1], fourth ^ ODD[2]);
        folded(halves, ODD[0])
    }
}

/// Returns both halves of a product of 128 bits in one number.
fn folded(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    let (low, high) = (product & u128::from(u64::MAX), product >> 64);
    u64::try_from(low ^ high).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn keys_that_differ_in_one_byte_spread_over_the_index() {
        for at in 0..28 {
            let mut bytes = [7; 28];
            let mut buckets = HashSet::new();
            for value in 0..=255 {
                bytes[at] = value;
                buckets.insert(IndexKey::of(3, &StoreKey::read(0, &bytes).unwrap()).mixed() & 0xfff);
            }
            assert!(buckets.len() > 230, "byte {at}: {} of 256 keys", buckets.len());
        }
    }

    #[test]
    fn a_key_keeps_its_namespace_and_all_of_its_bytes() {
        let bytes: Vec<u8> = (0..28).collect();
        let key = StoreKey::read(0, &bytes).unwrap();
        let whole = IndexKey::of(7, &key);
        assert_eq!(whole.0[0], 0x0302_0100_0000_0007);
        assert_eq!(whole.0[3], 0x1b1a_1918_1716_1514);
        assert_ne!(whole, IndexKey::of(8, &key));
        assert_eq!((whole.namespace(), whole.key()), (7, key));
        assert_eq!(key.bytes()[..], bytes);
        assert_ne!(whole.mixed(), IndexKey::of(8, &key).mixed());
        let wrong = StoreKey::read(3, &bytes[1..]).unwrap_err();
        assert_eq!(wrong.to_string(), "keys[3]=27 bytes must be 28 bytes");
    }
}
