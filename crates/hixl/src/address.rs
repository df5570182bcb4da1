//! The address of an engine, whose text is also its identity.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Stands for a text that is no Unicode. No address and no key of an option equals it.
pub const NO_TEXT: &str = "\0";

/// Maximum number of bytes of a text: an address, or a key or value of an option. Longer ones are refused, so bindings need not copy them.
pub const MAX_TEXT: usize = 1 << 20;
/// Maximum number of bytes of an address.
const MAX_ADDRESS: usize = 64;

/// The address of an engine: `ip:port`, `ip`, `[ip6]:port` or `[ip6]`. Other engines can connect only to a port above 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EngineAddress {
    ip: IpAddr,
    port: u16,
}

impl EngineAddress {
    /// Reads an address. `None` for any other text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        if text.len() > MAX_ADDRESS {
            return None;
        }
        let (ip, port) = if let Some(rest) = text.strip_prefix('[') {
            let (ip, port) = rest.split_once(']')?;
            let port = if port.is_empty() { None } else { Some(port.strip_prefix(':')?) };
            (IpAddr::V6(ip.parse::<Ipv6Addr>().ok()?), port)
        } else {
            let (ip, port) = text.split_once(':').map_or((text, None), |(ip, port)| (ip, Some(port)));
            (IpAddr::V4(ip.parse::<Ipv4Addr>().ok()?), port)
        };
        Some(EngineAddress { ip, port: port.map_or(Some(0), read_port)? })
    }

    /// Returns where the engine listens, if it does.
    pub(crate) fn listener(self) -> Option<SocketAddr> {
        (self.port > 0).then(|| SocketAddr::new(self.ip, self.port))
    }
}

/// Reads a port. A number below 0 counts as 0.
fn read_port(text: &str) -> Option<u16> {
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    if negative { Some(0) } else { digits.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::EngineAddress;

    #[test]
    fn documented_forms_are_read() {
        let listener =
            |text: &str| EngineAddress::parse(text).map(|at| at.listener().map(|at| at.to_string()));
        for (text, at) in [
            ("127.0.0.1:26000", "127.0.0.1:26000"),
            ("[::1]:1", "[::1]:1"),
            ("0.0.0.0:65535", "0.0.0.0:65535"),
            (&format!("1.2.3.4:{}1", "0".repeat(55)), "1.2.3.4:1"),
        ] {
            assert_eq!(listener(text), Some(Some(at.into())), "{text}");
        }
        for client in ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:-1", "[::1]", "[::1]:0"] {
            assert_eq!(listener(client), Some(None), "{client}");
        }
        for wrong in [
            "",
            "localhost:1",
            "1.2.3",
            "1.2.3.4:",
            "1.2.3.4:65536",
            "1.2.3.4:x",
            "ad.0.0.1:26200",
            "::1",
            "[::1",
            "[::1]1",
            "[::1]:",
            "[1.2.3.4]:1",
            "1.2.3.4:1 ",
            "1.2.3.4:+1",
            "1.2.3.4:--1",
            "127.0.0.1\0:1",
            "[fe80::1%eth0]:1",
            "1.2.3.4:1:1",
            &format!("1.2.3.4:{}1", "0".repeat(56)),
        ] {
            assert_eq!(listener(wrong), None, "{wrong:?}");
        }
    }
}
