//! Rules for options that are texts.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use crate::config::{Backend, Config, HugeChoice, LinkConfig, SwapInPath, Token, TransportChoice};
use crate::error::{Error, Result, ensure};
use crate::validate::{clipped, ip_address, json, one_of, peer_address};

/// Minimum number of characters of a token. A shorter token could be guessed.
const TOKEN_CHARACTERS: usize = 16;

/// Maximum length of a path in bytes: the limit of the kernel, without the null byte.
const PATH_BYTES: usize = 4095;

/// The words of options, and what they choose.
pub(super) const SWAP_IN_PATHS: [(&str, SwapInPath); 3] =
    [("auto", SwapInPath::Auto), ("direct", SwapInPath::Direct), ("ring", SwapInPath::Ring)];
pub(super) const HUGE_PAGES: [(&str, HugeChoice); 3] =
    [("auto", HugeChoice::Auto), ("off", HugeChoice::Off), ("eager", HugeChoice::Eager)];
pub(super) const LINK_TRANSPORTS: [(&str, TransportChoice); 3] =
    [("auto", TransportChoice::Auto), ("shm", TransportChoice::Shm), ("tcp", TransportChoice::Tcp)];
/// `hixl`, which stands first, is a word of the original.
pub(super) const BACKENDS: [(&str, Backend); 4] =
    [("hixl", Backend::Auto), ("auto", Backend::Auto), ("sockets", Backend::Sockets), ("ucx", Backend::Ucx)];

/// Reads `transfer_backend`. The refusal of NIXL, which earlier versions used, says what to use instead.
pub(super) fn transfer_backend(config: &mut Config, text: &str) -> Result<()> {
    if text == "nixl" {
        let allowed = "hixl or auto or sockets or ucx. Use ucx: the engine used NIXL only over UCX, and giving up a NIXL \
            read can end the process of the peer";
        return Err(Error::argument("llm.TransferBackend", "\"nixl\"", allowed));
    }
    config.links.fabric.backend = one_of("llm.TransferBackend", text, &BACKENDS)?;
    config.links.both_ways = text == "hixl";
    Ok(())
}

/// Sets the time limit of a rank-table link. 0 stands for the default.
pub(super) fn total_time(config: &mut Config, time: Duration) {
    if !time.is_zero() {
        config.links.total = time;
    }
}

/// Sets the heartbeat, and raises the silence limit to at least two heartbeats.
pub(super) fn heartbeat(config: &mut Config, time: Duration) {
    config.links.heartbeat = time;
    config.links.silence = config.links.silence.max(time * 2);
}

/// Sets the limit of memory of peers. Every number is allowed.
pub(super) fn remote_memory(config: &mut Config, bytes: u64) -> bool {
    config.links.remote_memory = Some(bytes);
    true
}

/// Sets the port of device 0.
pub(super) fn rank_port(config: &mut Config, port: u32) {
    config.links.rank_port = u16::try_from(port).unwrap_or(config.links.rank_port);
}

/// Checks `mem_utilization`: a share from 0.0 to 1.0.
pub fn mem_utilization(value: f64) -> Result<()> {
    ensure((0.0..=1.0).contains(&value), || Error::out_of_range("mem_utilization", value, "0.0 to 1.0"))
}

/// Reads a token: at least 16 characters. Error messages never contain the value.
pub fn link_token(name: &str, text: &str) -> Result<Token> {
    match text.chars().count() {
        TOKEN_CHARACTERS.. => Ok(Token::new(text)),
        count => {
            let value = format!("({count} characters, not shown)");
            let allowed = format!("a text of at least {TOKEN_CHARACTERS} characters");
            Err(Error::argument(name, value, allowed))
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

/// Reads the path of the file of a token. Error messages do not contain the value, because it may be the token itself,
/// given to the wrong option.
pub(super) fn token_file(name: &str, text: &str) -> Result<PathBuf> {
    path(name, text).map_err(|_| {
        let count = text.chars().count();
        Error::invalid(format!(
            "{name}=({count} characters, not shown) is not an absolute path of at most {PATH_BYTES} bytes"
        ))
        .of_argument(name)
    })
}

/// Reads a JSON object that maps a `device_ip` or cluster id to `ip:port`. Port 0 is invalid.
pub(super) fn rank_hosts(name: &str, text: &str) -> Result<BTreeMap<String, SocketAddr>> {
    let invalid = |reason: &str| {
        let value = format!("{:?}", clipped(text));
        Error::argument(name, value, format_args!("a JSON object of name: \"ip:port\" ({reason})"))
    };
    let hosts: Value = json(text).map_err(|error| invalid("not JSON").because(error))?;
    let Value::Object(hosts) = hosts else { return Err(invalid("not an object")) };
    let host = |(of, host): (String, Value)| {
        let reason = || format!("{:?} is {}", clipped(&of), clipped(&host.to_string()));
        let at = host.as_str().ok_or_else(|| invalid(&reason()))?;
        let at = peer_address(name, at).map_err(|error| invalid(&reason()).because(error))?;
        Ok((of.clone(), at))
    };
    hosts.into_iter().map(host).collect()
}

/// Reads a list of IP addresses, separated by commas.
pub(super) fn addresses(name: &str, text: &str) -> Result<Vec<IpAddr>> {
    let refused = |allowed: String| Err(Error::argument(name, format_args!("{:?}", clipped(text)), allowed));
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
