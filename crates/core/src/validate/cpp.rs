//! Checks what exists only in the C++ class: its structures and its lists of blocks (contract, C++ §2
//! to §4).
//!
//! The other modules of `validate` have the rules that the class shares with the Python calls.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use super::values::clipped;
use crate::config::Role;
use crate::error::{Error, Result, ensure};
use crate::fallible;
use crate::model::{CacheDesc, CacheLayout, DataType, Geometry, Placement, tensor_bytes};

/// Returns the role with a public number.
pub fn role(number: i32) -> Result<Role> {
    let allowed = "kPrompt (1), kDecoder (2) or kMix (3)";
    Role::from_value(i64::from(number)).ok_or_else(|| Error::argument("role", number, allowed))
}

/// Returns the timeout of a link call, which must be above 0 milliseconds.
pub fn link_timeout(millis: i32) -> Result<Duration> {
    match u64::try_from(millis) {
        Ok(millis @ 1..) => Ok(Duration::from_millis(millis)),
        _ => Err(Error::argument("timeout_in_millis", millis, "a number of milliseconds above 0")),
    }
}

/// Checks that a link call names at least one cluster.
pub fn clusters(count: usize) -> Result<()> {
    ensure(count > 0, || Error::argument("clusters", "[]", "a list of at least one cluster"))
}

/// Returns the address of one end of a link. It must be IPv4; host names are not accepted.
pub fn ip_info(ip: &str, port: u16) -> Result<SocketAddr> {
    match ip.parse::<Ipv4Addr>() {
        Ok(ip) => Ok(SocketAddr::new(ip.into(), port)),
        Err(_) => Err(Error::argument("ip", format_args!("{:?}", clipped(ip)), "an IPv4 address")),
    }
}

/// Returns a descriptor from the fields of the C++ structure. Only the size of an element matters here. So a
/// type that the Python API does not have is read as a type of the same size.
pub fn desc(placement: u32, num_tensors: u32, data_type: i32, shape: &[i64]) -> Result<CacheDesc> {
    let placement = self::placement(placement)?;
    Ok(CacheDesc {
        num_tensors,
        shape: shape.to_vec(),
        data_type: element(data_type)?,
        placement,
        row_stride: None,
        kv_layout: None,
    })
}

fn placement(number: u32) -> Result<Placement> {
    let known = Placement::ALL.into_iter().find(|&known| known as u32 == number);
    known.ok_or_else(|| Error::argument("placement", number, "kHost (0) or kDevice (1)"))
}

fn element(number: i32) -> Result<DataType> {
    let alike = match number {
        // DT_QINT8, DT_QUINT8, DT_HIFLOAT8, DT_FLOAT8_E5M2, DT_FLOAT8_E4M3FN, DT_FLOAT8_E8M0
        18 | 21 | 34..=37 => DataType::Uint8,
        // DT_QINT16, DT_QUINT16
        19 | 22 => DataType::Uint16,
        // DT_QINT32, DT_COMPLEX32
        20 | 33 => DataType::Uint32,
        // DT_COMPLEX64
        16 => DataType::Uint64,
        // DT_COMPLEX128
        17 => DataType::String,
        number => {
            let allowed = "a type whose elements have whole bytes";
            let refused = || Error::argument("data_type", number, allowed);
            return DataType::from_value(i64::from(number)).ok_or_else(refused);
        }
    };
    Ok(alike)
}

/// Checks that `AllocateCache` is asked for device memory, and that `room` suffices for the addresses of all
/// tensors.
pub fn allocate(desc: &CacheDesc, room: usize) -> Result<()> {
    if desc.placement == Placement::Host {
        return Err(Error::argument("placement", "kHost", "kDevice; RegisterKvCache takes host memory"));
    }
    let tensors = Geometry::new(desc)?.num_tensors();
    ensure(room as u64 >= u64::from(tensors), || {
        Error::argument("num_addrs", room, format_args!("at least {tensors}, one for each tensor"))
    })
}

/// The fields of a C++ structure that names a cache by its id.
#[derive(Clone, Copy, Debug)]
pub struct Stated<'a> {
    /// Number of the placement. It has its default, device, if the structure has only an id.
    pub placement: u32,
    /// Addresses of the tensors. Empty if the structure has only an id.
    pub addrs: &'a [u64],
    /// Number of tensors. 0 if the structure has only an id.
    pub num_tensors: u32,
    /// Number of the element type.
    pub data_type: i32,
    /// Dimensions of each tensor.
    pub shape: &'a [i64],
}

/// Checks that a structure does not contradict the cache of this engine that it names: its placement and,
/// where given, its addresses and sizes must be those of the cache (`tests/test_cpp.py`).
pub fn stated(cache: CacheLayout, addrs: &[u64], given: Stated<'_>) -> Result<()> {
    if !given.addrs.is_empty() && given.addrs != addrs {
        return Err(Error::invalid(
            "tensor_addrs are not those of the cache of this cache_id; cache_id -1 copies by address",
        ));
    }
    let named = given.num_tensors == 0 && given.shape.is_empty();
    if !(named && given.placement == Placement::Device as u32 || given.placement == cache.placement as u32) {
        let text = "placement is not that of the cache of this cache_id; cache_id -1 copies by address";
        return Err(Error::invalid(text).with("given", given.placement).with("cache", cache.placement));
    }
    if named {
        return Ok(());
    }
    let bytes = tensor_bytes(given.shape, element(given.data_type)?)?;
    let rows = given.shape[0].unsigned_abs();
    let of = cache.geometry;
    if (given.num_tensors, rows, bytes) == (of.num_tensors(), of.rows(), of.tensor_bytes()) {
        return Ok(());
    }
    let text = "cache_desc is not that of the cache of this cache_id; cache_id -1 copies by address";
    let sizes = |tensors: u32, rows: u64, bytes: u64| format!("{tensors} x {rows} x {} bytes", bytes / rows);
    Err(Error::invalid(text)
        .with("given", sizes(given.num_tensors, rows, bytes))
        .with("cache", sizes(of.num_tensors(), of.rows(), of.tensor_bytes())))
}

/// Checks the placement in a structure that states where its memory is: the source of a push must be in
/// device memory.
pub fn pushed(number: u32) -> Result<()> {
    super::on_device("src_cache", placement(number)?)
}

/// Checks the arguments of `CopyKvCache` that do not depend on its caches, before a cache is looked up.
pub fn copied(src_placement: u32, size: i64) -> Result<()> {
    super::on_device("src_cache", placement(src_placement)?)?;
    super::copy_size(size)
}

/// Checks that a call with block lists names no slot.
pub fn no_slot(name: &str, batch_index: u32) -> Result<()> {
    ensure(batch_index == 0, || Error::argument(name, batch_index, "0 if blocks are given"))
}

/// Converts a list of block numbers to the signed numbers that the other checks take. The list must not be
/// empty.
pub fn blocks(name: &str, list: &[u64]) -> Result<Vec<i64>> {
    let block = |(at, &block): (usize, &u64)| {
        i64::try_from(block)
            .map_err(|_| Error::argument(&format!("{name}[{at}]"), block, "a block of the cache"))
    };
    let blocks = fallible::try_collect(crate::plan::REQUEST, list.iter().enumerate().map(block))?;
    super::not_empty(name, &blocks)?;
    Ok(blocks)
}

/// Returns the block pairs of `CopyKvBlocks`. Each list of destinations has one block for each source block.
pub fn block_lists(src: &[u64], lists: &[&[u64]]) -> Result<Vec<(i64, i64)>> {
    let src = blocks("src_blocks", src)?;
    if lists.is_empty() {
        return Err(Error::argument("dst_blocks_list", "[]", "a list of at least one list"));
    }
    let mut pairs = fallible::with_capacity(crate::plan::REQUEST, src.len().saturating_mul(lists.len()))?;
    for (at, list) in lists.iter().enumerate() {
        let name = format!("dst_blocks_list[{at}]");
        let dst = blocks(&name, list)?;
        super::equally_many(("src_blocks", src.len()), (&name, dst.len()))?;
        pairs.extend(src.iter().copied().zip(dst));
    }
    Ok(pairs)
}
