//! The options of the C++ class (contract, C++ §2 and §4).

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde_json::Value;

use super::lookup::check_number;
use super::names::nearest;
use super::table::OPTIONS;
use super::texts::config_from_texts;
use crate::config::{Config, PoolConfig, Role, Share};
use crate::error::{Error, ErrorKind, Result};
use crate::model::ClusterId;
use crate::validate::{clipped, decimal, json, one_of, socket_address};

const DEVICE_ID: &str = "llm.DeviceId";
const LISTEN: &str = "llm.ListenIpInfo";
const BUFFERS: &str = "llm.BufPoolCfg";
const SWITCH: &str = "llm.EnableSwitchRole";
const ONE_SIDED: &str = "llm.EnableRemoteCacheAccessible";
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

/// Returns every option that the engine reads, or that the original knows and the engine ignores. Besides, every name that
/// starts with `ge.` is one of the original.
fn names() -> impl Iterator<Item = &'static str> {
    let keys = OPTIONS.iter().map(|row| row.key).filter(|key| !key.is_empty() && !key.starts_with("ge."));
    keys.chain([DEVICE_ID])
}

/// Logs one line for each unknown option, which is ignored, with the nearest valid name. Values are never logged, because they may
/// be secret.
fn report_unknown(given: &BTreeMap<String, String>) {
    for name in given.keys().filter(|name| !name.starts_with("ge.") && !names().any(|known| known == **name))
    {
        let shown = clipped(name);
        let advice = match nearest(name, names()) {
            Some(valid) => format!("did you mean {valid:?}?"),
            None => "docs/options.md lists every option".into(),
        };
        tracing::error!(target: "llm_datadist::options", "unknown option {shown:?} is ignored; {advice}");
    }
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
    let mut config = config_from_texts(role, cluster, &resolved)?;
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
        check_number("device_id", number).map_err(|_| refused()).map(|()| number)
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
    let listen = text.map(|text| socket_address(LISTEN, text)).transpose()?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Every option that the readers name has its row in the table.
    #[test]
    fn names_of_all_options_are_known() {
        let mut count = 0;
        for text in [include_str!("texts.rs"), include_str!("cpp.rs")] {
            let text = text.split("#[cfg(test)]").next().unwrap_or_default();
            for literal in text.split('"').filter(|text| text.starts_with("llm.") && !text.contains(' ')) {
                assert!(names().any(|name| name == literal), "{literal} is missing");
                count += 1;
            }
        }
        assert!(count > 10);
        assert_eq!(names().count(), 44);
    }

    #[test]
    fn nearest_name_is_at_most_two_edits_away() {
        let nearest = |name| nearest(name, names());
        assert_eq!(nearest("llm.LinkStream"), Some("llm.LinkStreams"));
        assert_eq!(nearest("LLM.linkstreamss"), Some("llm.LinkStreams"));
        assert_eq!(nearest("llm.LinkXYZ"), None);
        assert_eq!(nearest(""), None);
    }
}
