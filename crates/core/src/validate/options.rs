//! Turns option texts into a [`Config`], so that `init` refuses every invalid option before it allocates or
//! opens anything.
//!
//! Rules about which options imply others in `LLMDataDist.init` are in the Python package; rules for single
//! values are in `values`.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use serde_json::Value;

use super::json::json;
use super::values::{self, clipped, decimal, ip_address, one_of};
use crate::config::{Config, LinkConfig, Mode, PoolConfig, Role, Share};
use crate::error::{Error, Result};
use crate::model::ClusterId;

/// Maximum size of a host pool in bytes (contract §5.1).
const HOST_POOL_LIMIT: u64 = 20 << 30;

/// The units in which a text may give `memory_size`, and their bytes.
const SIZE_UNITS: [(&str, u64); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

/// Reads the options of `init` (contract §5.1, §5.2). Unknown keys are ignored. `Err(InvalidArgument)` for an
/// invalid value.
pub fn config(role: Role, cluster: ClusterId, options: &BTreeMap<String, String>) -> Result<Config> {
    let text = |key: &str| options.get(key).map(String::as_str);
    let mut config = Config::new(role, cluster);

    config.device_pool = pool("mem_pool_cfg", text("llm.MemPoolConfig"), u64::MAX)?;
    config.host_pool = pool("host_mem_pool_cfg", text("llm.HostMemPoolConfig"), HOST_POOL_LIMIT)?;
    let cache_manager = flag("llm.EnableCacheManager", text("llm.EnableCacheManager"))?;
    config.remote_accessible =
        flag("llm.EnableRemoteCacheAccessible", text("llm.EnableRemoteCacheAccessible"))? && cache_manager;
    if !cache_manager {
        kv_cache_manager(&mut config, &text)?;
    }

    if let Some(limit) = number(&text, "llm.SyncKvCacheWaitTime", "sync_kv_timeout")? {
        config.sync_timeout = Duration::from_millis(limit);
    }
    if let Some(devices) = text("ge.exec.deviceId").filter(|given| given.contains(';')) {
        let allowed = "one device number: an engine has one device, so set device_id to one number";
        return Err(Error::argument("ge.exec.deviceId", format_args!("{:?}", clipped(devices)), allowed));
    }
    if let Some(device) = number(&text, "ge.exec.deviceId", "device_id")? {
        config.device_id = u32::try_from(device).unwrap_or_default();
    }
    for key in ["llm.RdmaTrafficClass", "llm.RdmaServiceLevel"] {
        if let Some(value) = text(key) {
            let _: u32 = parsed(key, value, "a whole number of 32 bits")?;
        }
    }
    config.links = links(&text)?;
    own_options(&mut config, &text)?;
    Ok(config)
}

/// Applies the options of `KvCacheManager` mode, in which there is a device pool even if no option asks for
/// one.
fn kv_cache_manager<'a>(config: &mut Config, text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    config.mode = Mode::KvCacheManager;
    let mut share = Share::DEFAULT;
    if let Some(given) = text("llm.MemoryUtilization") {
        let part: f64 = given.parse().unwrap_or(f64::NAN);
        values::mem_utilization(part)
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

/// Reads the options that this engine adds to those of the original.
fn own_options<'a>(config: &mut Config, text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    if let Some(count) = number(text, "llm.CopyWorkers", "copy_workers")? {
        config.copy_workers = usize::try_from(count).ok();
    }
    if let Some(count) = number(text, "llm.MaxTransfers", "max_transfers")? {
        config.max_transfers = usize::try_from(count).unwrap_or(Config::DEFAULT_TRANSFERS);
    }
    if let Some(limit) = number(text, "llm.TransferPollUs", "transfer_poll_us")? {
        config.transfer_poll = Duration::from_micros(limit);
    }
    if let Some(path) = text("llm.SwapInPath") {
        config.swap_in = one_of("swap_in_path", path, &values::SWAP_IN_PATHS)?;
    }
    if let Some(kernel) = text("llm.CopyKernel") {
        config.kernel = one_of("copy_kernel", kernel, &values::COPY_KERNELS)?;
    }
    if let Some(how) = text("llm.Verify") {
        config.verify = values::verify(how)?;
    }
    if let Some(choice) = text("llm.HugePages") {
        config.huge_pages = one_of("huge_pages", choice, &values::HUGE_PAGES)?;
    }
    Ok(())
}

/// Reads the options of links: those of the original first, then those that this engine adds.
fn links<'a>(text: &impl Fn(&str) -> Option<&'a str>) -> Result<LinkConfig> {
    let mut links = LinkConfig { listen: listen(text)?, ..LinkConfig::default() };
    if let Some(seconds) = total_time(text)? {
        links.total = Duration::from_secs(seconds);
    }
    if let Some(count) = number(text, "llm.LinkRetryCount", "link_retry_count")? {
        links.retries = u32::try_from(count).unwrap_or(1);
    }
    if let Some(backend) = text("llm.TransferBackend") {
        links.fabric.backend = values::transfer_backend(backend)?;
        links.both_ways = backend == "hixl";
    }
    if let Some(path) = text("llm.UcxLibrary") {
        links.fabric.ucx_library = Some(values::path("ucx_library", path)?);
    }
    token(&mut links, text)?;
    links.accept_remote = flag("llm.LinkAcceptRemote", text("llm.LinkAcceptRemote"))?;
    silence(&mut links, text)?;
    if let Some(limit) = number(text, "llm.LinkPinLimit", "link_pin_limit")? {
        links.pin_limit = Duration::from_millis(limit);
    }
    if let Some(transport) = text("llm.LinkTransport") {
        links.transport = one_of("link_transport", transport, &values::LINK_TRANSPORTS)?;
    }
    if let Some(streams) = number(text, "llm.LinkStreams", "link_streams")? {
        links.streams = usize::try_from(streams).unwrap_or(0);
    }
    if let Some(addresses) = text("llm.LinkAddresses") {
        links.addresses = values::link_addresses(addresses)?;
    }
    if let Some(bytes) = number(text, "llm.LinkRemoteMemory", "link_remote_memory")? {
        links.remote_memory = Some(bytes);
    }
    if let Some(port) = number(text, "llm.RankPort", "rank_port")? {
        links.rank_port = u16::try_from(port).unwrap_or(links.rank_port);
    }
    if let Some(hosts) = text("llm.RankHosts").filter(|hosts| !hosts.is_empty()) {
        links.rank_hosts = values::rank_hosts(hosts)?;
    }
    Ok(links)
}

/// Reads the token or the path of the file that holds it. Only one of the two may be given.
fn token<'a>(links: &mut LinkConfig, text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    let (token, file) = (text("llm.LinkToken"), text("llm.LinkTokenFile"));
    if token.is_some() && file.is_some() {
        return Err(Error::invalid("llm.LinkToken and llm.LinkTokenFile are both given; give one of them"));
    }
    links.token = token.map(values::link_token).transpose()?;
    links.token_file = file.map(values::link_token_file).transpose()?;
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
            whole.map(|(key, value)| values::socket_address(key, value)).transpose()
        }
        (Some(ip), Some(port)) => {
            let refused = |key: &str, value: &str, allowed: &str| {
                let (key, value) =
                    given("llm.listenIpInfo").map_or((key, value), |whole| ("llm.listenIpInfo", whole));
                Error::argument(key, format_args!("{:?}", clipped(value)), allowed)
            };
            let at = ip_address(ip).ok_or_else(|| {
                refused("llm.ListenIp", ip, &format!("an IP address{}", values::fault_of_ip(ip)))
            })?;
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

/// Returns the time limit of a rank-table link in seconds, if one is given. 0 means the value of the
/// environment variable (contract §5).
fn total_time<'a>(text: &impl Fn(&str) -> Option<&'a str>) -> Result<Option<u64>> {
    let seconds =
        |key: &str| number(text, key, "link_total_time").map(|time| time.filter(|&seconds| seconds > 0));
    match seconds("llm.LinkTotalTime")? {
        Some(given) => Ok(Some(given)),
        // An empty environment variable counts as not set.
        None if text("env.HCCL_CONNECT_TIMEOUT").is_some_and(str::is_empty) => Ok(None),
        None => seconds("env.HCCL_CONNECT_TIMEOUT"),
    }
}

/// Reads the heartbeat and the silence limit. A heartbeat without a silence limit raises the limit to at
/// least two heartbeats.
fn silence<'a>(links: &mut LinkConfig, text: &impl Fn(&str) -> Option<&'a str>) -> Result<()> {
    if let Some(heartbeat) = number(text, "llm.LinkHeartbeat", "link_heartbeat")? {
        links.heartbeat = Duration::from_millis(heartbeat);
        links.silence = links.silence.max(links.heartbeat * 2);
    }
    if let Some(silence) = number(text, "llm.LinkSilence", "link_silence")? {
        links.silence = Duration::from_millis(silence);
        values::link_silence(links.silence, links.heartbeat)?;
    }
    Ok(())
}

/// Reads one memory pool: a JSON object with `memory_size` and, optionally, `page_shift`.
fn pool(option: &str, text: Option<&str>, limit: u64) -> Result<Option<PoolConfig>> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    pool_config(text, limit)
        .map(Some)
        .map_err(|error| error.with("option", option).with("text", clipped(text)))
}

fn pool_config(text: &str, limit: u64) -> Result<PoolConfig> {
    let invalid = |reason: String| Error::invalid(reason);
    let value: Value =
        json(text).map_err(|error| invalid("the pool configuration is not JSON".into()).because(error))?;
    let Value::Object(fields) = value else {
        return Err(invalid("the pool configuration must be one JSON object".into()));
    };
    let memory_size = fields.get("memory_size").ok_or_else(|| invalid("memory_size is missing".into()))?;
    let memory_size = match memory_size.as_str().map_or_else(|| memory_size.as_u64(), size_with_unit) {
        Some(bytes @ 1..) if bytes <= limit => bytes,
        Some(1..) => {
            return Err(Error::argument("memory_size", memory_size, format_args!("at most {limit} bytes")));
        }
        _ => {
            let allowed =
                "a whole number of bytes above 0, or a text with a unit: \"64MiB\" (KiB, MiB, GiB, TiB)";
            return Err(refused("memory_size", memory_size, allowed));
        }
    };
    let page_shift = match fields.get("page_shift") {
        None => PoolConfig::DEFAULT_PAGE_SHIFT,
        Some(given) => match given.as_u64() {
            Some(shift) => values::page_shift(shift)?,
            None => return Err(refused("page_shift", given, "a whole number, 10 to 30")),
        },
    };
    if memory_size >> page_shift == 0 {
        return Err(Error::argument(
            "memory_size",
            memory_size,
            format_args!("at least one page, {} bytes", 1u64 << page_shift),
        ));
    }
    if memory_size >> page_shift >= u64::from(u32::MAX) {
        let allowed = format!("fewer than 2^32-1 pages of {} bytes", 1u64 << page_shift);
        return Err(Error::argument("memory_size", memory_size, allowed));
    }
    Ok(PoolConfig { memory_size, page_shift })
}

/// Returns the bytes that a text such as `64MiB` states: digits, then a unit without a space between.
fn size_with_unit(text: &str) -> Option<u64> {
    let (digits, unit) =
        SIZE_UNITS.iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, bytes)))?;
    decimal::<u64>(digits)?.checked_mul(*unit)
}

fn refused(name: &str, value: &Value, allowed: &str) -> Error {
    Error::argument(name, clipped(&value.to_string()), allowed)
}

fn flag(key: &str, text: Option<&str>) -> Result<bool> {
    text.map_or(Ok(false), |text| one_of(key, text, &[("0", false), ("1", true)]))
}

/// Reads the option `key`, which sets the property `name`, if it is given.
fn number<'a>(text: &impl Fn(&str) -> Option<&'a str>, key: &str, name: &str) -> Result<Option<u64>> {
    text(key).map(|given| values::number_from(key, name, given)).transpose()
}

fn parsed<T: FromStr>(key: &str, text: &str, allowed: &str) -> Result<T> {
    decimal(text).ok_or_else(|| Error::argument(key, format_args!("{:?}", clipped(text)), allowed))
}
