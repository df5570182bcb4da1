//! Checks what exists only in the C++ class: its options, its structures and its lists of blocks
//! (contract, C++ §2 to §4).
//!
//! The other modules of `validate` have the rules that the class shares with the Python calls.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use serde_json::Value;

use super::json::json;
use super::options;
use super::values::{self, clipped, decimal, one_of};
use crate::config::{Config, PoolConfig, Role, Share};
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::fallible;
use crate::model::{CacheDesc, CacheLayout, ClusterId, DataType, Geometry, Placement, tensor_bytes};

const DEVICE_ID: &str = "llm.DeviceId";
const LISTEN: &str = "llm.ListenIpInfo";
const BUFFERS: &str = "llm.BufPoolCfg";
const SWITCH: &str = "llm.EnableSwitchRole";
const ONE_SIDED: &str = "llm.EnableRemoteCacheAccessible";
/// Every option that the engine reads, or that the original knows and the engine ignores. Besides, every name that starts with `ge.`
/// is one of the original.
const NAMES: [&str; 45] = [
    "env.HCCL_CONNECT_TIMEOUT",
    "llm.BufPoolCfg",
    "llm.ClusterInfo",
    "llm.CopyKernel",
    "llm.CopyWorkers",
    "llm.DeviceId",
    "llm.EnableCacheManager",
    "llm.EnableRemoteCacheAccessible",
    "llm.EnableSwitchRole",
    "llm.GlobalResourceConfig",
    "llm.HostMemPoolConfig",
    "llm.HugePages",
    "llm.LinkAcceptRemote",
    "llm.LinkAddresses",
    "llm.LinkHeartbeat",
    "llm.LinkPinLimit",
    "llm.LinkRemoteMemory",
    "llm.LinkRetryCount",
    "llm.LinkSilence",
    "llm.LinkStreams",
    "llm.LinkToken",
    "llm.LinkTokenFile",
    "llm.LinkTotalTime",
    "llm.LinkTransport",
    "llm.ListenIp",
    "llm.ListenIpInfo",
    "llm.ListenPort",
    "llm.LocalCommRes",
    "llm.MaxTransfers",
    "llm.MemPoolConfig",
    "llm.MemoryUtilization",
    "llm.OutputMaxSize",
    "llm.RankHosts",
    "llm.RankPort",
    "llm.RdmaServiceLevel",
    "llm.RdmaTrafficClass",
    "llm.Role",
    "llm.SwapInPath",
    "llm.SyncKvCacheWaitTime",
    "llm.TransferBackend",
    "llm.TransferPollUs",
    "llm.UcxLibrary",
    "llm.Verify",
    "llm.deployResPath",
    "llm.listenIpInfo",
];
/// Maximum number of edits between an unknown name and the valid one that is meant.
const MAX_EDITS: usize = 2;
/// `total_size` must be a multiple of this number of bytes, and `blk_size` must not exceed it.
const STEP: u64 = 2 << 20;

/// The options of `Initialize`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Configuration with which the engine is opened.
    pub config: Config,
    /// Whether `SetRole` is allowed. `false` if `llm.EnableSwitchRole` is 0.
    pub may_switch: bool,
    /// Whether a link needs exactly one local address. `false` if `llm.LocalCommRes` is given.
    pub one_local: bool,
}

/// Returns the role with a public number.
pub fn role(number: i32) -> Result<Role> {
    let allowed = "kPrompt (1), kDecoder (2) or kMix (3)";
    Role::from_value(i64::from(number)).ok_or_else(|| Error::argument("role", number, allowed))
}

/// Logs one line for each unknown option, which is ignored, with the nearest valid name. Values are never logged, because they may
/// be secret.
fn report_unknown(given: &BTreeMap<String, String>) {
    for name in given.keys().filter(|name| !NAMES.contains(&name.as_str()) && !name.starts_with("ge.")) {
        let shown = clipped(name);
        let advice = match nearest(name) {
            Some(valid) => format!("did you mean {valid:?}?"),
            None => "docs/options.md lists every option".into(),
        };
        tracing::error!(target: "llm_datadist::options", "unknown option {shown:?} is ignored; {advice}");
    }
}

/// Returns the valid name that is nearest to `name` and at most [`MAX_EDITS`] away. The case of letters does not count.
fn nearest(name: &str) -> Option<&'static str> {
    let near = NAMES.iter().filter(|valid| valid.len().abs_diff(name.len()) <= MAX_EDITS);
    let name = name.to_ascii_lowercase();
    let edits = near.map(|valid| (edits(name.as_bytes(), valid.to_ascii_lowercase().as_bytes()), *valid));
    edits.min().filter(|(edits, _)| *edits <= MAX_EDITS).map(|(_, valid)| valid)
}

/// Returns the least number of bytes to insert, delete or replace.
fn edits(left: &[u8], right: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (at, byte) in left.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, other) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(byte != other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[right.len()]
}

/// Reads the options of `Initialize` (contract, C++ §2, §4). `Err(NotEnabled)` if `llm.DeviceId` names
/// several devices; `Err(InvalidArgument)` for any other option that breaks a rule. Unknown options are ignored and logged.
pub fn options(role: Role, cluster: ClusterId, given: &BTreeMap<String, String>) -> Result<Options> {
    report_unknown(given);
    let text = |key: &str| given.get(key).map(String::as_str);
    let filled = |key: &str| text(key).filter(|text| !text.is_empty());
    let mut resolved = given.clone();
    resolved.insert("ge.exec.deviceId".into(), device_id(text(DEVICE_ID))?);
    resolved.insert(ONE_SIDED.into(), "1".into());
    resolved.insert("llm.EnableCacheManager".into(), "1".into());
    let buffers = filled(BUFFERS).map(buffer_pool).transpose()?;
    let may_switch =
        text(SWITCH).map_or(Ok(true), |text| one_of(SWITCH, text, &[("0", false), ("1", true)]))?;
    let mut config = options::config(role, cluster, &resolved)?;
    if config.links.both_ways && config.links.listen.is_none() {
        return Err(Error::invalid(format!("llm.TransferBackend=hixl needs {LISTEN}")));
    }
    match buffers {
        _ if config.device_pool.is_some() => {}
        Some(bytes) => config.device_pool = Some(PoolConfig::about(bytes)),
        // Programs that use the class configure no pool, so the engine provides one, as in `KvCacheManager`
        // mode.
        None => config.device_share = Some(Share::DEFAULT),
    }
    Ok(Options { config, may_switch, one_local: filled("llm.LocalCommRes").is_none() })
}

/// Returns the device number of `llm.DeviceId`. A list of several devices is parsed but not supported:
/// `Err(NotEnabled)`.
fn device_id(text: Option<&str>) -> Result<String> {
    let Some(text) = text else {
        return Err(Error::invalid(format!("{DEVICE_ID} is missing")));
    };
    let number = |text: &str| {
        let refused = || {
            let allowed = "a device number, 0 to 2147483647";
            Error::argument(DEVICE_ID, format_args!("{:?}", clipped(text)), allowed)
        };
        let number: i64 = decimal(text).ok_or_else(refused)?;
        values::number("device_id", number).map_err(|_| refused()).map(|()| number)
    };
    let numbers: Vec<i64> = text.split(';').map(number).collect::<Result<_>>()?;
    if let [one] = numbers.as_slice() {
        return Ok(one.to_string());
    }
    let text = format!("{DEVICE_ID} names {} devices; one engine has one", numbers.len());
    Err(Error::new(ErrorKind::NotEnabled, text))
}

/// Returns the bytes of the device pool from `llm.BufPoolCfg`. The size classes are checked but not used,
/// because the pool serves every size from one region.
pub fn buffer_pool(text: &str) -> Result<u64> {
    let invalid = |reason: String| Error::invalid(format!("{BUFFERS}: {reason}")).with("text", clipped(text));
    let read: Value = json(text).map_err(|error| invalid("not JSON".into()).because(error))?;
    let Value::Object(fields) = read else { return Err(invalid("not a JSON object".into())) };
    let number = |fields: &serde_json::Map<String, Value>, name: &str| {
        let found = fields.get(name);
        match found.and_then(Value::as_u64) {
            Some(number @ 1..) => Ok(number),
            _ => Err(invalid(format!(
                "{name}={} must be a whole number of bytes above 0",
                found.map_or_else(|| "(missing)".into(), |value| clipped(&value.to_string()))
            ))),
        }
    };
    let pool = fields.contains_key("buf_pool_size").then(|| number(&fields, "buf_pool_size")).transpose()?;
    let classes = match fields.get("buf_cfg") {
        None => &[][..],
        Some(Value::Array(classes)) => classes,
        Some(_) => return Err(invalid("buf_cfg is not a list".into())),
    };
    let (mut sum, mut below) = (0_u64, 0);
    for class in classes {
        let Value::Object(class) = class else {
            return Err(invalid("an entry of buf_cfg is not an object".into()));
        };
        let [total, block, most] =
            [number(class, "total_size")?, number(class, "blk_size")?, number(class, "max_buf_size")?];
        let rules = [
            (
                total.is_multiple_of(STEP) && total.is_multiple_of(block),
                "total_size is a multiple of 2 MiB and of blk_size",
            ),
            (total < 4 << 30, "total_size is below 4 GiB"),
            (block.is_power_of_two() && block <= STEP, "blk_size is a power of two, at most 2 MiB"),
            (block <= most, "blk_size is at most max_buf_size"),
            (most < total, "max_buf_size is below total_size"),
            (most > below, "max_buf_size grows along the list"),
        ];
        if let Some((_, rule)) = rules.iter().find(|(holds, _)| !holds) {
            let values = format!("total_size {total}, blk_size {block}, max_buf_size {most}");
            return Err(invalid(format!("{values}: {rule}")));
        }
        (sum, below) = (sum.saturating_add(total), most);
    }
    match pool.unwrap_or(sum) {
        0 => Err(invalid("neither buf_pool_size nor buf_cfg".into())),
        bytes => Ok(bytes),
    }
}

/// Returns the address to listen on after `SetRole(to)`, for an engine that listens on `now`.
/// `Err(NotEnabled)` if the options do not allow `SetRole`, or if another address is given with
/// `llm.TransferBackend=hixl`; `Err(InvalidArgument)` for an invalid address, or for a prompt without one.
pub fn set_role(
    options: &Options,
    to: Role,
    given: &BTreeMap<String, String>,
    now: Option<SocketAddr>,
) -> Result<Option<SocketAddr>> {
    report_unknown(given);
    if !options.may_switch {
        return Err(Error::new(ErrorKind::NotEnabled, format!("SetRole needs {SWITCH}=1")));
    }
    let text = given.get(LISTEN).filter(|text| !text.is_empty());
    let listen = text.map(|text| values::socket_address(LISTEN, text)).transpose()?;
    if !options.config.links.both_ways {
        if to == Role::Prompt && listen.is_none() {
            return Err(Error::invalid(format!(
                "SetRole(kPrompt) needs {LISTEN}: decoders link to where a prompt listens"
            )));
        }
        return Ok(listen);
    }
    if listen.is_none() || listen == now || listen == options.config.links.listen {
        return Ok(now);
    }
    let text = format!("llm.TransferBackend=hixl does not allow another {LISTEN}");
    Err(Error::new(ErrorKind::NotEnabled, text)
        .with("asked", clipped(text_of(listen).as_str()))
        .with("now", text_of(now)))
}

fn text_of(address: Option<SocketAddr>) -> String {
    address.map_or_else(|| "none".into(), |address| address.to_string())
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
        tensors: Vec::new(),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Every option that the two modules read has its name in the list.
    #[test]
    fn names_of_all_options_are_known() {
        let mut count = 0;
        for text in [include_str!("options.rs"), include_str!("cpp.rs")] {
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            for literal in text.split('"').filter(|text| text.starts_with("llm.") && !text.contains(' ')) {
                assert!(NAMES.contains(&literal), "{literal} is missing");
                count += 1;
            }
        }
        assert!(count > NAMES.len());
    }

    #[test]
    fn nearest_name_is_at_most_two_edits_away() {
        assert_eq!(nearest("llm.LinkStream"), Some("llm.LinkStreams"));
        assert_eq!(nearest("LLM.linkstreamss"), Some("llm.LinkStreams"));
        assert_eq!(nearest("llm.LinkXYZ"), None);
        assert_eq!(nearest(""), None);
    }
}
