//! Checks single values of calls and of descriptors, and reads numbers, words and addresses.
//!
//! Each rule is written once. The checks return `Err(InvalidArgument)` for a value that breaks their rule.

use std::net::{IpAddr, SocketAddr};

use crate::error::{Error, Result, ensure};
use crate::model::Verify;

/// Reads `verify`, of the engine or of one call: `off`, `sample` or `full`.
pub fn verify(text: &str) -> Result<Verify> {
    one_of("verify", text, &[("off", Verify::Off), ("sample", Verify::Sample), ("full", Verify::Full)])
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
pub(crate) fn fault_of_ip(ip: &str) -> &'static str {
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

/// Checks that a link names exactly one address of its local or remote `side`.
pub fn one_address(name: &str, count: usize, side: &str) -> Result<()> {
    ensure(count == 1, || Error::argument(name, count, format_args!("exactly one {side} address")))
}

/// Reads an IPv4 address in dotted form or an IPv6 address, with or without brackets. No abbreviations: "1"
/// is not 0.0.0.1.
pub(crate) fn ip_address(text: &str) -> Option<IpAddr> {
    match text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(six) => six.parse().ok().map(IpAddr::V6),
        None => text.parse().ok(),
    }
}

/// Reads a number of digits only: no sign, spaces, underscores or exponent.
pub(crate) fn decimal<T: std::str::FromStr>(text: &str) -> Option<T> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
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

/// Checks that a number is from `low` to `high`.
pub(crate) fn within(name: &str, value: i64, low: i64, high: i64, unit: &str) -> Result<()> {
    ensure((low..=high).contains(&value), || Error::out_of_range(name, value, shown_range(low, high, unit)))
}

/// Returns the text of a range. `i64::MAX` stands for no upper limit.
pub(crate) fn shown_range(low: i64, high: i64, unit: &str) -> String {
    if high == i64::MAX { format!("{low} or more{unit}") } else { format!("{low} to {high}{unit}") }
}

/// Returns the value of the allowed text that equals `text`.
pub(crate) fn one_of<T: Copy>(name: &str, text: &str, allowed: &[(&str, T)]) -> Result<T> {
    let refused = || {
        let words: Vec<_> = allowed.iter().map(|&(word, _)| word).collect();
        Error::argument(name, format_args!("{:?}", clipped(text)), words.join(" or "))
    };
    allowed.iter().find(|(word, _)| *word == text).map(|&(_, value)| value).ok_or_else(refused)
}

/// Returns the first 120 characters of a text, enough to recognise it in a message.
pub(crate) fn clipped(text: &str) -> String {
    let mut short: String = text.chars().take(120).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}
