//! The arguments of `allocate` and `register` that describe a cache.

use std::ops::RangeInclusive;

use crate::engine::DataDist;
use crate::error::{Error, Result, ensure};
use crate::model::{CacheDesc, DataType, Geometry, KvLayout, Placement};

/// A described cache.
#[derive(Clone, Debug)]
pub struct CacheForm {
    desc: CacheDesc,
    /// Divides the number of tensors.
    tensors_per_layer: u32,
    /// Whether the tensors of an allocated cache follow each other without gaps.
    pub contiguous: bool,
}

impl CacheForm {
    /// The numbers of blocks that a cache may have.
    pub const BLOCKS: RangeInclusive<u64> = 1..=u32::MAX as u64;
    /// The numbers of tensors that a cache may have.
    pub const TENSORS: RangeInclusive<u64> = 1..=Geometry::MAX_TENSORS as u64;

    /// Describes a cache with a layout.
    pub fn laid_out(
        layout: &KvLayout,
        data_type: DataType,
        blocks: u64,
        placement: Placement,
    ) -> Result<Self> {
        layout.check_ranges()?;
        within("blocks", blocks, Self::BLOCKS)?;
        let desc = CacheDesc {
            num_tensors: tensor_count(layout.num_tensors()),
            shape: layout.shape(blocks),
            data_type,
            placement,
            row_stride: None,
            kv_layout: Some(Box::new(layout.clone())),
        };
        Ok(CacheForm { desc, tensors_per_layer: layout.tensors_per_layer(), contiguous: false })
    }

    /// Describes a cache without a layout. `shape` is that of one block of one tensor. Without `tensors_per_layer`, each tensor is
    /// a layer.
    pub fn plain(
        tensors: u64,
        blocks: u64,
        shape: &[i64],
        data_type: DataType,
        placement: Placement,
        tensors_per_layer: Option<u32>,
    ) -> Result<Self> {
        within("tensors", tensors, Self::TENSORS)?;
        within("blocks", blocks, Self::BLOCKS)?;
        let most = Geometry::MAX_RANK - 1;
        ensure(shape.len() <= most, || {
            Error::argument("len(shape)", shape.len(), format_args!("at most {most}"))
        })?;
        if let Some((at, dim)) = shape.iter().enumerate().find(|(_, dim)| **dim < 1) {
            return Err(Error::argument(&format!("shape[{at}]"), dim, "at least 1"));
        }
        let num_tensors = tensor_count(tensors);
        let shape = [&[blocks.cast_signed()], shape].concat();
        let tensors_per_layer = tensors_per_layer.unwrap_or(1);
        ensure(tensors_per_layer > 0 && num_tensors.is_multiple_of(tensors_per_layer), || {
            let required = format!("a divisor of {num_tensors}, the number of tensors");
            Error::argument("tensors_per_layer", tensors_per_layer, required)
        })?;
        let desc = CacheDesc { num_tensors, shape, data_type, placement, row_stride: None, kv_layout: None };
        Ok(CacheForm { desc, tensors_per_layer, contiguous: false })
    }

    /// Returns the description for memory that is registered.
    pub fn desc(&self) -> &CacheDesc {
        &self.desc
    }

    /// Returns the number of tensors in one layer, and of tokens in one block if there is a layout.
    pub(super) fn layers(&self) -> (u32, Option<u32>) {
        (self.tensors_per_layer, self.desc.kv_layout.as_ref().map(|layout| layout.tokens_per_block))
    }

    /// Checks that `engine` has a pool for the cache.
    pub(super) fn check_pool(&self, engine: &DataDist) -> Result<()> {
        let placement = self.desc.placement;
        let option = match placement {
            Placement::Device => "pool",
            Placement::Host => "host_pool",
        };
        ensure(engine.has_pool(placement), || {
            let required = format!("that of a pool of this engine; open it with the option {option}");
            Error::argument("pool", format_args!("'{placement}'"), required)
        })
    }

    /// Sets the bytes from one block to the next in each tensor.
    pub fn with_stride(mut self, stride: u64) -> Result<Self> {
        let (row_bytes, element) = (self.row_bytes(), self.desc.data_type.bytes());
        ensure(stride >= row_bytes && stride.is_multiple_of(element), || {
            let required = format!(
                "at least {row_bytes}, the bytes of a block, and a multiple of the {element} of an element"
            );
            Error::argument("stride", stride, required)
        })?;
        self.desc.row_stride = Some(stride);
        Ok(self)
    }

    /// Checks that there are as many tensors as the layout has, if there is one.
    pub fn check_count(&self, tensors: usize) -> Result<()> {
        let needed = self.desc.num_tensors;
        ensure(tensors as u64 == u64::from(needed), || {
            Error::argument(
                "tensors",
                format_args!("{tensors} tensors"),
                format!("{needed}, as layout has layers"),
            )
        })
    }

    /// Checks that every tensor ends below 2^64. The engine refuses tensors that are too large anywhere.
    pub fn check_addresses(&self, addresses: &[u64]) -> Result<()> {
        let row_bytes = self.row_bytes();
        let gaps =
            self.desc.row_stride.unwrap_or(row_bytes).saturating_mul(self.desc.shape[0].unsigned_abs() - 1);
        let bytes = gaps.saturating_add(row_bytes).min(i64::MAX.cast_unsigned());
        let beyond = |(_, address): &(usize, &u64)| address.checked_add(bytes).is_none();
        match addresses.iter().enumerate().find(beyond) {
            None => Ok(()),
            Some((at, address)) => {
                let required = format!("low enough for {bytes} bytes below 2^64");
                Err(Error::argument(&format!("tensors[{at}]"), address, required))
            }
        }
    }

    /// Returns the bytes of one block in one tensor, without gaps. The engine refuses sizes that do not fit 64 bits.
    pub fn row_bytes(&self) -> u64 {
        let dims = self.desc.shape[1..].iter();
        dims.fold(self.desc.data_type.bytes(), |bytes, dim| bytes.saturating_mul(dim.unsigned_abs()))
    }
}

fn within(name: &str, count: u64, range: RangeInclusive<u64>) -> Result<()> {
    ensure(range.contains(&count), || {
        Error::argument(name, count, format_args!("{} to {}", range.start(), range.end()))
    })
}

/// Returns the memory that a program calls `pool`.
pub fn pool_named(word: &str) -> Result<Placement> {
    let found = Placement::ALL.into_iter().find(|placement| placement.to_string() == word);
    found.ok_or_else(|| Error::argument("pool", format_args!("{word:?}"), "\"device\" or \"host\""))
}

/// Returns a number of tensors. One that is too large stays too large.
fn tensor_count(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
