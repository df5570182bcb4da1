//! The layers and heads that a move copies.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, Result, ensure};
use crate::model::{KvGeometry, KvLayout};

/// Layers and heads of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPart {
    /// Range of layers.
    pub layers: Range<u32>,
    /// Range of key-value heads, in each of the layers.
    pub heads: Range<u32>,
}

impl KvPart {
    /// Returns all layers and heads that a cache holds.
    pub fn of(layout: &KvLayout) -> KvPart {
        KvPart { layers: layout.layers.clone(), heads: layout.heads.clone() }
    }

    /// Returns the layers and heads that both caches hold. `Err(InvalidArgument)` if there are none.
    pub fn common(src: &KvLayout, dst: &KvLayout) -> Result<KvPart> {
        let part =
            KvPart { layers: overlap(&src.layers, &dst.layers), heads: overlap(&src.heads, &dst.heads) };
        for (what, common, src, dst) in [
            ("layer", &part.layers, &src.layers, &dst.layers),
            ("key-value head", &part.heads, &src.heads, &dst.heads),
        ] {
            ensure(!common.is_empty(), || {
                Error::invalid(format!("source and destination have no {what} in common"))
                    .with("src", debug(src))
                    .with("dst", debug(dst))
            })?;
        }
        Ok(part)
    }

    /// Returns `Err(InvalidArgument)` unless the part is not empty and both caches hold all of it.
    pub(super) fn check_inside(&self, src: &KvLayout, dst: &KvLayout) -> Result<()> {
        let inside = |part: &Range<u32>, whole: &Range<u32>| {
            !part.is_empty() && whole.start <= part.start && part.end <= whole.end
        };
        for (name, part, src, dst) in [
            ("layers", &self.layers, &src.layers, &dst.layers),
            ("heads", &self.heads, &src.heads, &dst.heads),
        ] {
            ensure(inside(part, src) && inside(part, dst), || {
                Error::argument(name, debug(part), "a range that source and destination hold")
                    .with("src", debug(src))
                    .with("dst", debug(dst))
            })?;
        }
        Ok(())
    }
}

/// Returns `Err(InvalidArgument)` if the two caches have tokens of different models or element types.
pub fn check_same_model(src: &KvGeometry, dst: &KvGeometry) -> Result<()> {
    let (src_layout, dst_layout) = (src.layout(), dst.layout());
    for (name, equal) in [
        ("model", src_layout.model == dst_layout.model),
        ("data_type", src.data_type() == dst.data_type()),
        ("kv", src_layout.vectors() == dst_layout.vectors()),
        ("head_dim", src_layout.head_dim == dst_layout.head_dim),
        ("total_heads", src_layout.total_heads == dst_layout.total_heads),
    ] {
        ensure(equal, || differ(name, src, dst))?;
    }
    Ok(())
}

pub(super) fn overlap(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Returns the error for an argument that must fit the other side.
pub(super) fn differ(name: &str, src: impl fmt::Display, dst: impl fmt::Display) -> Error {
    Error::invalid(format!("the KV layouts of source and destination do not fit: {name} differs"))
        .with("src", src)
        .with("dst", dst)
}

fn debug(range: &Range<u32>) -> String {
    format!("{range:?}")
}
