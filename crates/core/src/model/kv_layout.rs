//! The layout of the keys and values in a cache: which token, head and element each byte of a row belongs to.

use std::fmt;
use std::ops::Range;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::named_enum;
use crate::error::{Error, Result, ensure};

named_enum! {
    /// The order of the dimensions of a block, outermost first. Part of messages to peers, as all of a
    /// layout (`layout_bytes`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub enum TokenOrder {
        /// `[tokens, heads, head_dim]`.
        Nhd = "NHD",
        /// `[heads, tokens, head_dim]`.
        Hnd = "HND",
    }
}

named_enum! {
    /// Where the keys and the values of a layer are.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub enum KvPlanes {
        /// In two tensors: tensor `2·l` has the keys of the cache's `l`-th layer, and tensor `2·l + 1` its values.
        Separate = "separate",
        /// In one tensor: each row has the keys of its tokens, and then their values.
        KThenV = "k_then_v",
        /// In one tensor: each row has one latent vector for each token (MLA), the same in every rank.
        Latent = "latent",
        /// In one tensor: each row has one vector for each head of each token. What it holds is up to the program, for
        /// example a key followed by its value.
        Single = "single",
    }
}

/// What the rows of a cache mean: each row is a block of tokens. The values may be invalid;
/// [`KvGeometry::new`](super::kv_geometry::KvGeometry::new) checks them.
///
/// The heads and layers are those of the whole model, so that caches of several ranks can be compared.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvLayout {
    /// Number of tokens in a block.
    pub tokens_per_block: u32,
    /// The key-value heads that the cache holds.
    pub heads: Range<u32>,
    /// Number of key-value heads of the model.
    pub total_heads: u32,
    /// Number of elements of one head of one token.
    pub head_dim: u32,
    /// Order of tokens and heads in a block.
    pub order: TokenOrder,
    /// Where the keys and the values are.
    pub kv: KvPlanes,
    /// The layers of the model that the cache holds.
    pub layers: Range<u32>,
    /// Name or version of the model, as the program chooses it. Both sides of a transfer must have the same.
    #[serde(deserialize_with = "model")]
    pub model: String,
}

/// Maximum number of bytes in the name of a model.
const MAX_MODEL: usize = 256;

/// Reads the name of a model that a peer sent.
fn model<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let text = <&str>::deserialize(from)?;
    if text.len() <= MAX_MODEL {
        Ok(text.to_owned())
    } else {
        Err(D::Error::custom("a long name of a model"))
    }
}

impl KvLayout {
    /// Returns `Err` of kind `InvalidArgument` unless every range and count is valid by itself.
    pub fn check_ranges(&self) -> Result<()> {
        let KvLayout { heads, layers, .. } = self;
        for (name, value) in [
            ("block_tokens", self.tokens_per_block),
            ("total_heads", self.total_heads),
            ("head_dim", self.head_dim),
        ] {
            ensure(value > 0, || Error::argument(name, value, "above 0"))?;
        }
        ensure(!heads.is_empty() && heads.end <= self.total_heads, || {
            let required = format_args!("a range of at least one head inside 0..{}", self.total_heads);
            Error::argument("heads", format_args!("{heads:?}"), required)
        })?;
        ensure(self.kv != KvPlanes::Latent || self.total_heads == 1, || {
            Error::argument("total_heads", self.total_heads, "1 in a latent layout")
        })?;
        ensure(!layers.is_empty(), || {
            Error::argument("layers", format_args!("{layers:?}"), "a range of at least one layer")
        })?;
        ensure(self.model.len() <= MAX_MODEL, || {
            Error::argument("len(model)", self.model.len(), format_args!("at most {MAX_MODEL} bytes"))
        })
    }

    /// Returns the number of tensors that hold one layer.
    pub fn tensors_per_layer(&self) -> u32 {
        if self.kv == KvPlanes::Separate { 2 } else { 1 }
    }

    /// Returns the number of tensors of a cache.
    pub fn num_tensors(&self) -> u64 {
        u64::from(self.tensors_per_layer()) * self.layers.len() as u64
    }

    /// Returns the shape of one tensor of `blocks` blocks.
    pub fn shape(&self, blocks: u64) -> Vec<i64> {
        let KvLayout { tokens_per_block, heads, head_dim, order, kv, .. } = self;
        let heads = heads.end - heads.start;
        let mut shape = vec![i64::try_from(blocks).unwrap_or(i64::MAX)];
        shape.extend((*kv == KvPlanes::KThenV).then_some(2));
        let inner = match (kv, order) {
            (KvPlanes::Latent, _) => [Some(*tokens_per_block), None],
            (_, TokenOrder::Nhd) => [Some(*tokens_per_block), Some(heads)],
            (_, TokenOrder::Hnd) => [Some(heads), Some(*tokens_per_block)],
        };
        shape.extend(inner.into_iter().flatten().map(i64::from));
        shape.push(i64::from(*head_dim));
        shape
    }

    /// Returns the number of vectors that a head of a token has in one layer: 2 for a key and a value.
    pub fn vectors(&self) -> u32 {
        match self.kv {
            KvPlanes::Separate | KvPlanes::KThenV => 2,
            KvPlanes::Latent | KvPlanes::Single => 1,
        }
    }

    /// Returns the number of planes in one row: 2 if a row has keys and values.
    pub fn planes_per_row(&self) -> u32 {
        if self.kv == KvPlanes::KThenV { 2 } else { 1 }
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KvLayout { tokens_per_block, heads, total_heads, head_dim, order, kv, layers, model } = self;
        write!(f, "{tokens_per_block} tokens, heads {heads:?} of {total_heads}, head_dim {head_dim}, ")?;
        write!(f, "order {}, kv {}, layers {layers:?}", order.name(), kv.name())?;
        if model.is_empty() { Ok(()) } else { write!(f, ", model {model:?}") }
    }
}
