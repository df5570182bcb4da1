//! Reads the options of `init` and of the C++ class, which are texts.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::str::FromStr;

use super::lookup::{STEPS, row, rows_of};
use super::resource_config::ResourceConfig;
use super::rules::mem_utilization;
use crate::config::{Config, LinkConfig, Mode, PoolConfig, Role, Share};
use crate::error::{Error, Result, ensure};
use crate::model::ClusterId;
use crate::validate::{clipped, decimal, fault_of_ip, ip_address, socket_address};

/// Reads the options of `init` (contract §5.1, §5.2). Unknown keys are ignored. `Err(InvalidArgument)` for an
/// invalid value.
pub fn config_from_texts(
    role: Role,
    cluster: ClusterId,
    options: &BTreeMap<String, String>,
) -> Result<Config> {
    let text = |key: &str| options.get(key).map(String::as_str);
    let mut config = Config::new(role, cluster);
    config.mode = Mode::KvCacheManager;
    for step in STEPS {
        before_step(step, &mut config, &text)?;
        // Rows without a key are those of the native API.
        for row in rows_of(step).filter(|row| !row.key.is_empty()) {
            // `rank_hosts` may be empty here, but not as an attribute of `LLMConfig`.
            if let Some(text) = text(row.key).filter(|text| !(row.name == "rank_hosts" && text.is_empty())) {
                row.read_text(&mut config, row.key, row.name, text)?;
            }
        }
    }
    Ok(config)
}

/// Applies the rules that need other code than the table, before the options of `step` are read.
fn before_step<'a>(step: u8, config: &mut Config, text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    match step {
        2 => kv_cache_manager(config, text),
        3 => one_device(text),
        4 => {
            widths(text)?;
            config.links.listen = listen(text)?;
            Ok(())
        }
        5 => connect_timeout(config, text),
        6 => resource_config(config, text),
        7 => one_token(text),
        8 => silence(&config.links),
        _ => Ok(()),
    }
}

/// Applies the options of `KvCacheManager` mode, in which there is a device pool even if no option asks for
/// one.
fn kv_cache_manager<'a>(config: &mut Config, text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    if config.mode == Mode::CacheManager {
        return Ok(());
    }
    let mut share = Share::DEFAULT;
    if let Some(given) = text("llm.MemoryUtilization") {
        let part: f64 = given.parse().unwrap_or(f64::NAN);
        mem_utilization(part)
            .map_err(|error| error.with("option", "llm.MemoryUtilization").with("text", clipped(given)))?;
        share = Share::of(part);
    }
    if config.device_pool.is_some() {
        return Ok(());
    }
    match text("ge.flowGraphMemMaxSize") {
        Some(given) => {
            let bytes = parsed("ge.flowGraphMemMaxSize", given, "a whole number of bytes below 2^64")?;
            config.device_pool = Some(PoolConfig::about(bytes));
        }
        None => config.device_share = Some(share),
    }
    Ok(())
}

fn one_device<'a>(text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    match text("ge.exec.deviceId").filter(|given| given.contains(';')) {
        None => Ok(()),
        Some(devices) => {
            let allowed = "one device number: an engine has one device, so set device_id to one number";
            Err(Error::argument("ge.exec.deviceId", format_args!("{:?}", clipped(devices)), allowed))
        }
    }
}

/// Checks the options of RDMA, which have no effect.
fn widths<'a>(text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    for key in ["llm.RdmaTrafficClass", "llm.RdmaServiceLevel"] {
        if let Some(value) = text(key) {
            let _: u32 = parsed(key, value, "a whole number of 32 bits")?;
        }
    }
    Ok(())
}

/// Returns the address to listen on: from `llm.ListenIp` and `llm.ListenPort`, into which the Python package
/// splits `llm.listenIpInfo`, else from `llm.listenIpInfo` or `llm.ListenIpInfo` itself. An error names the option
/// that the program gave.
fn listen<'a>(text: &impl Fn(&str) -> Option<&'a str>) -> Result<Option<SocketAddr>> {
    let given = |key: &str| text(key).filter(|value| !value.is_empty());
    match (given("llm.ListenIp"), given("llm.ListenPort")) {
        (None, None) => {
            let whole =
                ["llm.listenIpInfo", "llm.ListenIpInfo"].into_iter().find_map(|key| Some((key, given(key)?)));
            whole.map(|(key, value)| socket_address(key, value)).transpose()
        }
        (Some(ip), Some(port)) => {
            let refused = |key: &str, value: &str, allowed: &str| {
                let (key, value) =
                    given("llm.listenIpInfo").map_or((key, value), |whole| ("llm.listenIpInfo", whole));
                Error::argument(key, format_args!("{:?}", clipped(value)), allowed)
            };
            let at = ip_address(ip)
                .ok_or_else(|| refused("llm.ListenIp", ip, &format!("an IP address{}", fault_of_ip(ip))))?;
            let port = decimal(port).ok_or_else(|| refused("llm.ListenPort", port, "a port, 0 to 65535"))?;
            Ok(Some(SocketAddr::new(at, port)))
        }
        (Some(ip), None) => Err(Error::argument(
            "llm.ListenIp",
            format_args!("{:?}", clipped(ip)),
            "given together with llm.ListenPort",
        )),
        (None, Some(port)) => {
            let value = format!("{:?}", clipped(port));
            Err(Error::argument("llm.ListenPort", value, "given together with llm.ListenIp"))
        }
    }
}

/// Sets the time limit of a rank-table link from the environment variable, unless an option above 0 gives it (contract §5).
/// An empty variable counts as not set.
fn connect_timeout<'a>(config: &mut Config, text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    const VARIABLE: &str = "env.HCCL_CONNECT_TIMEOUT";
    let given = text("llm.LinkTotalTime").and_then(decimal::<u64>).is_some_and(|seconds| seconds > 0);
    match (row("link_total_time"), text(VARIABLE).filter(|text| !given && !text.is_empty())) {
        (Some(row), Some(seconds)) => row.read_text(config, VARIABLE, row.name, seconds),
        _ => Ok(()),
    }
}

/// Checks the settings of the backend `hixl`, which have no effect here. Without this backend they are not read.
fn resource_config<'a>(config: &Config, text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    const KEY: &str = "llm.GlobalResourceConfig";
    let given = text(KEY).filter(|_| config.links.both_ways);
    given.map_or(Ok(()), |given| ResourceConfig::read(KEY, given).map(drop))
}

/// Checks that at most one of the token and its file is given.
fn one_token<'a>(text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    ensure(text("llm.LinkToken").is_none() || text("llm.LinkTokenFile").is_none(), || {
        Error::invalid("llm.LinkToken and llm.LinkTokenFile are both given; give one of them")
    })
}

/// Checks that the silence limit is at least two heartbeats.
fn silence(links: &LinkConfig) -> Result<()> {
    ensure(links.silence >= 2 * links.heartbeat, || {
        let allowed = format!("at least two heartbeats, {}", 2 * links.heartbeat.as_millis());
        Error::argument("link_silence", links.silence.as_millis(), allowed)
    })
}

fn parsed<T: FromStr>(key: &str, text: &str, allowed: &str) -> Result<T> {
    decimal(text).ok_or_else(|| Error::argument(key, format_args!("{:?}", clipped(text)), allowed))
}
