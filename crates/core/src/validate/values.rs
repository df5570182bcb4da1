//! Checks single values of the configuration and of descriptors, for the Python setters and for option texts.
//!
//! Each rule is written once. The checks return `Err(InvalidArgument)` for a value that breaks their rule.
//! `options` reads the option texts.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::json::json;
use crate::config::{Backend, HugeChoice, KernelChoice, LinkConfig, SwapInPath, Token, TransportChoice};
use crate::error::{Error, Result, ensure};
use crate::model::Verify;

/// Minimum number of characters of a token. A shorter token could be guessed.
const TOKEN_CHARACTERS: usize = 16;

/// Maximum length of a path in bytes: the limit of the kernel, without the null byte.
const PATH_BYTES: usize = 4095;

/// The texts of `swap_in_path`, `copy_kernel`, `huge_pages`, `verify` and `link_transport`, and what they choose.
pub(super) const SWAP_IN_PATHS: [(&str, SwapInPath); 3] =
    [("auto", SwapInPath::Auto), ("direct", SwapInPath::Direct), ("ring", SwapInPath::Ring)];
pub(super) const COPY_KERNELS: [(&str, KernelChoice); 3] =
    [("auto", KernelChoice::Auto), ("plain", KernelChoice::Plain), ("streaming", KernelChoice::Streaming)];
pub(super) const HUGE_PAGES: [(&str, HugeChoice); 3] =
    [("auto", HugeChoice::Auto), ("off", HugeChoice::Off), ("eager", HugeChoice::Eager)];
pub(super) const VERIFY: [(&str, Verify); 3] =
    [("off", Verify::Off), ("sample", Verify::Sample), ("full", Verify::Full)];
const TRANSFER_BACKENDS: [(&str, Backend); 4] =
    [("hixl", Backend::Auto), ("auto", Backend::Auto), ("sockets", Backend::Sockets), ("ucx", Backend::Ucx)];
pub(super) const LINK_TRANSPORTS: [(&str, TransportChoice); 3] =
    [("auto", TransportChoice::Auto), ("shm", TransportChoice::Shm), ("tcp", TransportChoice::Tcp)];

/// Returns the lowest and the highest value of a property of `LlmConfig` that is a whole number, and its unit.
/// `i64::MAX` stands for no upper limit.
fn range(name: &str) -> Result<(i64, i64, &'static str)> {
    const HOUR_MS: i64 = 3_600_000;
    Ok(match name {
        "copy_workers" => (1, 256, ""),
        "device_id" => (0, i64::from(i32::MAX), ""),
        "link_heartbeat" => (1, HOUR_MS, " milliseconds"),
        "link_pin_limit" => (1, 24 * HOUR_MS, " milliseconds"),
        "link_remote_memory" => (0, i64::MAX, " bytes"),
        "link_retry_count" => (1, 100, ""),
        // At least two of the shortest heartbeats.
        "link_silence" => (2, 24 * HOUR_MS, " milliseconds"),
        "link_streams" => (0, 16, ""),
        "link_total_time" => (0, i64::from(u32::MAX), " seconds"),
        "max_transfers" => (1, 1 << 20, ""),
        "rank_port" => (1, i64::from(u16::MAX), ""),
        "sync_kv_timeout" => (1, i64::MAX, " milliseconds"),
        "transfer_poll_us" => (0, 10_000, " microseconds"),
        _ => return Err(Error::invalid(format!("{name} is not an integer option"))),
    })
}

/// Checks the property `name` of `LlmConfig`, which is a whole number.
pub fn number(name: &str, value: i64) -> Result<()> {
    let (low, high, unit) = range(name)?;
    within(name, value, low, high, unit)
}

/// Reads the text of the option `key`, which sets the property `name`.
pub(super) fn number_from(key: &str, name: &str, text: &str) -> Result<u64> {
    let (low, high, unit) = range(name)?;
    let allowed = || format!("a whole number, {}", shown_range(low, high, unit));
    let value: i64 =
        decimal(text).ok_or_else(|| Error::argument(key, format_args!("{:?}", clipped(text)), allowed()))?;
    number(name, value).map(|()| value.unsigned_abs())
}

/// Checks the property `name` of `LlmConfig`, which is a text with a rule of its own.
pub fn text(name: &str, text: &str) -> Result<()> {
    match name {
        "copy_kernel" => one_of(name, text, &COPY_KERNELS).map(drop),
        "huge_pages" => one_of(name, text, &HUGE_PAGES).map(drop),
        "link_addresses" => link_addresses(text).map(drop),
        "link_token" => link_token(text).map(drop),
        "link_token_file" => link_token_file(text).map(drop),
        "link_transport" => one_of(name, text, &LINK_TRANSPORTS).map(drop),
        "ucx_library" => path(name, text).map(drop),
        "rank_hosts" => rank_hosts(text).map(drop),
        "swap_in_path" => one_of(name, text, &SWAP_IN_PATHS).map(drop),
        "transfer_backend" => transfer_backend(text).map(drop),
        "verify" => verify(text).map(drop),
        _ => Err(Error::invalid(format!("{name} is not a text option"))),
    }
}

/// Reads `verify`, of the engine or of one call: `off`, `sample` or `full`.
pub fn verify(text: &str) -> Result<Verify> {
    one_of("verify", text, &VERIFY)
}

/// Reads `transfer_backend`. The refusal of NIXL, which earlier versions used, says what to use instead.
pub(super) fn transfer_backend(text: &str) -> Result<Backend> {
    if text == "nixl" {
        let allowed = "hixl or auto or sockets or ucx. Use ucx: the engine used NIXL only over UCX, and giving up a NIXL \
            read can end the process of the peer";
        return Err(Error::argument("llm.TransferBackend", "\"nixl\"", allowed));
    }
    one_of("llm.TransferBackend", text, &TRANSFER_BACKENDS)
}

/// Checks `mem_utilization`: a share from 0.0 to 1.0.
pub fn mem_utilization(value: f64) -> Result<()> {
    ensure((0.0..=1.0).contains(&value), || Error::out_of_range("mem_utilization", value, "0.0 to 1.0"))
}

/// Reads `link_token`: at least 16 characters. Error messages never contain the value.
pub fn link_token(text: &str) -> Result<Token> {
    match text.chars().count() {
        TOKEN_CHARACTERS.. => Ok(Token::new(text)),
        count => {
            let value = format!("({count} characters, not shown)");
            let allowed = format!("a text of at least {TOKEN_CHARACTERS} characters");
            Err(Error::argument("link_token", value, allowed))
        }
    }
}

/// Reads an option that is an absolute path.
pub(super) fn path(name: &str, text: &str) -> Result<PathBuf> {
    if text.starts_with('/') && !text.contains('\0') && text.len() <= PATH_BYTES {
        return Ok(PathBuf::from(text));
    }
    let allowed = format!("an absolute path of at most {PATH_BYTES} bytes");
    Err(Error::argument(name, format_args!("{:?}", clipped(text)), allowed))
}

/// Reads `link_token_file`: an absolute path. Error messages do not contain the value, because it may be the
/// token itself, given to the wrong option.
pub fn link_token_file(text: &str) -> Result<PathBuf> {
    if text.starts_with('/') && !text.contains('\0') && text.len() <= PATH_BYTES {
        return Ok(PathBuf::from(text));
    }
    let count = text.chars().count();
    Err(Error::invalid(format!(
        "link_token_file=({count} characters, not shown) is not an absolute path of at most {PATH_BYTES} bytes"
    )))
}

/// Checks that `silence` is at least two heartbeats.
pub(super) fn link_silence(silence: Duration, heartbeat: Duration) -> Result<()> {
    ensure(silence >= 2 * heartbeat, || {
        let allowed = format!("at least two heartbeats, {}", 2 * heartbeat.as_millis());
        Error::argument("link_silence", silence.as_millis(), allowed)
    })
}

/// Reads `rank_hosts`: a JSON object that maps a `device_ip` or cluster id to `ip:port`. Port 0 is invalid.
pub fn rank_hosts(text: &str) -> Result<BTreeMap<String, SocketAddr>> {
    let invalid = |reason: &str| {
        let value = format!("{:?}", clipped(text));
        Error::argument("rank_hosts", value, format_args!("a JSON object of name: \"ip:port\" ({reason})"))
    };
    let hosts: Value = json(text).map_err(|error| invalid("not JSON").because(error))?;
    let Value::Object(hosts) = hosts else { return Err(invalid("not an object")) };
    let host = |(name, host): (String, Value)| {
        let reason = || format!("{:?} is {}", clipped(&name), clipped(&host.to_string()));
        let at = host.as_str().ok_or_else(|| invalid(&reason()))?;
        let at = peer_address("rank_hosts", at).map_err(|error| invalid(&reason()).because(error))?;
        Ok((name.clone(), at))
    };
    hosts.into_iter().map(host).collect()
}

/// Reads the address of a listener: `ip:port` or `[ipv6]:port`. Host names are not resolved.
pub fn socket_address(name: &str, text: &str) -> Result<SocketAddr> {
    address(name, text, 0)
}

/// Reads the address of a peer as [`socket_address`] does. Port 0 is invalid, because nobody listens there.
pub fn peer_address(name: &str, text: &str) -> Result<SocketAddr> {
    address(name, text, 1)
}

fn address(name: &str, text: &str, least_port: u16) -> Result<SocketAddr> {
    let parts = text.rsplit_once(':').filter(|(ip, _)| !ip.contains(':') || ip.starts_with('['));
    let read = parts.and_then(|(ip, port)| Some(SocketAddr::new(ip_address(ip)?, decimal(port)?)));
    read.filter(|at| at.port() >= least_port).ok_or_else(|| {
        let ip = text.rsplit_once(':').map_or(text, |(ip, _)| ip);
        let allowed =
            format!("ip:port or [ipv6]:port with a port of {least_port} to 65535{}", fault_of_ip(ip));
        Error::argument(name, format_args!("{:?}", clipped(text)), allowed)
    })
}

/// Returns what is wrong with the text of an IP address and what to write, or nothing if it looks right.
pub(super) fn fault_of_ip(ip: &str) -> &'static str {
    if ip.contains('%') {
        "; zones such as %eth0 are not supported, so give an address that is not link-local"
    } else if ip.starts_with('[') || ip_address(ip).is_some_and(|ip| ip.is_ipv4()) {
        ""
    } else if ip.contains(':') {
        let six = ip.chars().all(|part| part.is_ascii_hexdigit() || part == ':' || part == '.');
        if six { "; write an IPv6 address in brackets, such as [::1]:26000" } else { "" }
    } else {
        ", not a host name; names are not resolved, so give the IP address"
    }
}

/// Checks the port of a peer to which a link is made.
pub fn peer_port(at: SocketAddr) -> Result<()> {
    ensure(at.port() > 0, || Error::out_of_range("port", 0, "1 to 65535").with("address", at))
}

/// Reads a list of IP addresses, separated by commas.
pub fn link_addresses(text: &str) -> Result<Vec<IpAddr>> {
    let refused = |allowed: String| {
        Err(Error::argument("link_addresses", format_args!("{:?}", clipped(text)), allowed))
    };
    let mut addresses = Vec::new();
    for part in text.split(',') {
        let Some(ip) = ip_address(part.trim())
            .map(|ip| ip.to_canonical())
            .filter(|ip| !ip.is_unspecified() && !ip.is_multicast())
        else {
            return refused("IP addresses of this host, separated by commas".into());
        };
        if addresses.contains(&ip) {
            return refused(format!("a list without repetitions ({ip} occurs twice)"));
        }
        addresses.push(ip);
    }
    if addresses.len() > LinkConfig::MAX_ADDRESSES {
        return refused(format!("a list of at most {} addresses", LinkConfig::MAX_ADDRESSES));
    }
    Ok(addresses)
}

/// Checks the time limit of an asynchronous call in milliseconds, and returns it.
pub fn timeout_ms(millis: u32) -> Result<Duration> {
    ensure(millis > 0, || Error::out_of_range("timeout_ms", millis, "1 to 4294967295"))?;
    Ok(Duration::from_millis(millis.into()))
}

/// Checks that a link names exactly one address of its local or remote `side`.
pub fn one_address(name: &str, count: usize, side: &str) -> Result<()> {
    ensure(count == 1, || Error::argument(name, count, format_args!("exactly one {side} address")))
}

/// Reads an IPv4 address in dotted form or an IPv6 address, with or without brackets. No abbreviations: "1"
/// is not 0.0.0.1.
pub(super) fn ip_address(text: &str) -> Option<IpAddr> {
    match text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(six) => six.parse().ok().map(IpAddr::V6),
        None => text.parse().ok(),
    }
}

/// Reads a number of digits only: no sign, spaces, underscores or exponent.
pub(super) fn decimal<T: std::str::FromStr>(text: &str) -> Option<T> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

/// Checks `page_shift` of a pool: 10 to 30.
pub fn page_shift(value: u64) -> Result<u32> {
    match u32::try_from(value) {
        Ok(shift @ 10..31) => Ok(shift),
        _ => Err(Error::out_of_range("page_shift", value, "10 to 30")),
    }
}

/// Checks the dimension indices of a descriptor with `rank` dimensions (contract §4.2, rows 8 and 9).
pub fn dimensions(rank: usize, batch_dim_index: i64, seq_len_dim_index: i64) -> Result<()> {
    let rank = i64::try_from(rank).unwrap_or(i64::MAX);
    if rank == 0 {
        return Err(Error::argument("shape", "[]", "a list of at least one dimension"));
    }
    within("batch_dim_index", batch_dim_index, 0, rank - 1, "")?;
    if seq_len_dim_index == -1 {
        Ok(())
    } else {
        within("seq_len_dim_index", seq_len_dim_index, 0, rank - 1, "")
    }
}

fn within(name: &str, value: i64, low: i64, high: i64, unit: &str) -> Result<()> {
    ensure((low..=high).contains(&value), || Error::out_of_range(name, value, shown_range(low, high, unit)))
}

fn shown_range(low: i64, high: i64, unit: &str) -> String {
    if high == i64::MAX { format!("{low} or more{unit}") } else { format!("{low} to {high}{unit}") }
}

/// Returns the value of the allowed text that equals `text`.
pub(super) fn one_of<T: Copy>(name: &str, text: &str, allowed: &[(&str, T)]) -> Result<T> {
    let refused = || {
        let words: Vec<_> = allowed.iter().map(|&(word, _)| word).collect();
        Error::argument(name, format_args!("{:?}", clipped(text)), words.join(" or "))
    };
    allowed.iter().find(|(word, _)| *word == text).map(|&(_, value)| value).ok_or_else(refused)
}

/// Returns the first 120 characters of a text, enough to recognise it in a message.
pub(super) fn clipped(text: &str) -> String {
    let mut short: String = text.chars().take(120).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}
