//! One cache: its name, sizes, memory and pins.
//!
//! Not for: which keys lead to it (the table above).

use std::sync::Arc;

use super::row_pins::Pins;
use crate::memory::{Adopted, Tensors};
use crate::model::{CacheDesc, CacheId, CacheKind, DataType, Geometry, Placement};
use crate::validate::Side;

/// Who gave the memory of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A pool of the engine; returns there when the last reference goes.
    Allocated,
    /// The caller, through a register call; keys are an index only.
    Registered,
    /// The caller, without the table: a handle over host memory (`Cache.create_cpu_cache`).
    Loose,
}

/// Dimensions; the usual few need no memory of their own.
#[derive(Debug)]
enum Shape {
    Few(u8, [i64; FEW]),
    Many(Box<[i64]>),
}

/// Most dimensions that are kept with the cache.
const FEW: usize = 4;

impl Shape {
    fn of(dims: &[i64]) -> Self {
        match u8::try_from(dims.len()) {
            Ok(count) if dims.len() <= FEW => {
                let mut few = [0; FEW];
                few[..dims.len()].copy_from_slice(dims);
                Shape::Few(count, few)
            }
            _ => Shape::Many(dims.into()),
        }
    }
}

/// A group of equal tensors under one name.
#[derive(Debug)]
pub struct Cache {
    id: CacheId,
    origin: Origin,
    side: Side,
    shape: Shape,
    data_type: DataType,
    remote_accessible: bool,
    tensors: Arc<Tensors>,
    pub(super) pins: Pins,
}

impl Cache {
    /// A cache over the caller's memory that no table knows; its id is −1.
    #[must_use]
    pub fn loose(adopted: Adopted) -> Arc<Cache> {
        let (desc, side) = (adopted.desc().clone(), adopted.side());
        Arc::new(Cache::new(CacheId(-1), Origin::Loose, &desc, side, Tensors::adopted(adopted), false))
    }

    pub(super) fn new(
        id: CacheId,
        origin: Origin,
        desc: &CacheDesc,
        side: Side,
        tensors: Tensors,
        remote_accessible: bool,
    ) -> Self {
        Cache {
            id,
            origin,
            side,
            shape: Shape::of(&desc.shape),
            data_type: desc.data_type,
            remote_accessible,
            tensors: Arc::new(tensors),
            pins: Pins::default(),
        }
    }

    /// Its name; −1 for a loose one.
    #[must_use]
    pub fn id(&self) -> CacheId {
        self.id
    }

    /// Who gave the memory.
    #[must_use]
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Sizes, kind and placement.
    #[must_use]
    pub fn side(&self) -> Side {
        self.side
    }

    /// Sizes.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.side.geometry
    }

    /// How its rows are read.
    #[must_use]
    pub fn kind(&self) -> CacheKind {
        self.side.kind
    }

    /// Which pool it belongs to.
    #[must_use]
    pub fn placement(&self) -> Placement {
        self.side.placement
    }

    /// Dimensions of one tensor.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        match &self.shape {
            Shape::Few(count, dims) => &dims[..usize::from(*count)],
            Shape::Many(dims) => dims,
        }
    }

    /// Element type.
    #[must_use]
    pub fn data_type(&self) -> DataType {
        self.data_type
    }

    /// Whether peers may reach it.
    #[must_use]
    pub fn remote_accessible(&self) -> bool {
        self.remote_accessible
    }

    /// The address of every tensor.
    #[must_use]
    pub fn addrs(&self) -> &[u64] {
        self.tensors.addrs()
    }

    /// Its memory.
    #[must_use]
    pub fn tensors(&self) -> &Arc<Tensors> {
        &self.tensors
    }
}
