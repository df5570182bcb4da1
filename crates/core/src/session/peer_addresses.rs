//! The addresses of a peer that has several networks. The streams of large transfers are spread over them.
//!
//! The link itself uses the address that the program named, the main one. The peer announces others
//! (`link_addresses`). If one cannot be reached, its streams use the main address for a while.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::net::Address;
use crate::sync::Mutex;

/// How long a further address that could not be reached is not tried again.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// The main address of a peer, and the further ones.
#[derive(Debug, Default)]
pub(super) struct PeerAddresses {
    main: Option<IpAddr>,
    others: Vec<FurtherAddress>,
}

/// A further address of a peer.
#[derive(Debug)]
pub(super) struct FurtherAddress {
    at: SocketAddr,
    failed: Mutex<Option<Instant>>,
}

impl PeerAddresses {
    /// Takes the addresses that the peer at `main` has announced, without those at which no peer can listen. `None` stands
    /// for a local socket, which is never left.
    pub(super) fn new(main: Option<IpAddr>, announced: Vec<SocketAddr>) -> PeerAddresses {
        let Some(main) = main else { return PeerAddresses::default() };
        let mut addresses = PeerAddresses { main: Some(main), others: Vec::new() };
        for mut at in announced {
            at.set_ip(at.ip().to_canonical());
            let known = at.ip() == main || addresses.others.iter().any(|other| other.at.ip() == at.ip());
            let remote = !at.ip().is_unspecified() && !at.ip().is_multicast() && at.port() != 0;
            // An address of this host is not that of a peer on another one.
            if !known && remote && at.ip().is_loopback() == main.is_loopback() {
                addresses.others.push(FurtherAddress { at, failed: Mutex::default() });
            }
        }
        addresses
    }

    /// Returns the IP address of a further address, or the main one.
    pub(super) fn ip_of(&self, at: Option<&FurtherAddress>) -> Option<IpAddr> {
        at.map(|at| at.at.ip()).or(self.main)
    }

    /// Returns the address with the fewest streams for another one, given their numbers. `None` stands for the main
    /// address.
    pub(super) fn choose(&self, streams_at: impl Fn(IpAddr) -> usize) -> Option<&FurtherAddress> {
        let least = self.usable().min_by_key(|other| streams_at(other.at.ip()))?;
        let main = streams_at(self.main?);
        (streams_at(least.at.ip()) < main).then_some(least)
    }

    /// Returns the number of addresses.
    pub(super) fn count(&self) -> usize {
        1 + self.others.len()
    }

    /// Returns an address without streams, given their numbers.
    pub(super) fn unused(&self, streams_at: impl Fn(IpAddr) -> usize) -> Option<&FurtherAddress> {
        self.usable().find(|other| streams_at(other.at.ip()) == 0)
    }

    fn usable(&self) -> impl Iterator<Item = &FurtherAddress> {
        self.others.iter().filter(|other| other.failed.lock().is_none_or(|at| at.elapsed() > RETRY_AFTER))
    }
}

impl FurtherAddress {
    pub(super) fn address(&self) -> Address {
        Address::Tcp(self.at)
    }

    /// Notes that the address could not be reached, and logs the reason.
    pub(super) fn note_failure(&self, peer: &dyn std::fmt::Display, error: &Error) {
        *self.failed.lock() = Some(Instant::now());
        tracing::warn!(
            target: "llm_datadist::links",
            "{peer} cannot be reached at {}, one of its further addresses; the next try is in {} s: {error}",
            self.at,
            RETRY_AFTER.as_secs()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn peer(announced: &[&str]) -> PeerAddresses {
        PeerAddresses::new(Some(ip(1)), announced.iter().map(|at| at.parse().unwrap()).collect())
    }

    /// Returns the address that is chosen for each of several streams, one after the other.
    fn chosen(peer: &PeerAddresses, streams: usize) -> Vec<IpAddr> {
        let mut opened = Vec::new();
        for _ in 0..streams {
            let count = |ip| opened.iter().filter(|other| **other == ip).count();
            let next = peer.ip_of(peer.choose(count)).unwrap();
            opened.push(next);
        }
        opened
    }

    #[test]
    fn streams_are_spread_evenly_and_begin_at_the_main_address() {
        let peer = peer(&["10.0.0.2:5", "10.0.0.3:5"]);
        assert_eq!(peer.count(), 3);
        let mut chosen = chosen(&peer, 6);
        assert_eq!(chosen[0], ip(1));
        chosen.sort();
        assert_eq!(chosen, [1, 1, 2, 2, 3, 3].map(ip));
    }

    #[test]
    fn addresses_at_which_no_other_host_listens_are_left_out() {
        let peer = peer(&[
            "10.0.0.1:6",
            "10.0.0.2:5",
            "10.0.0.2:6",
            "[::ffff:10.0.0.2]:5",
            "0.0.0.0:5",
            "[::ffff:0.0.0.0]:5",
            "[::]:5",
            "127.0.0.1:5",
            "[::ffff:127.0.0.1]:5",
            "[::1]:5",
            "224.0.0.1:5",
            "10.0.0.3:0",
        ]);
        assert_eq!(peer.others.iter().map(|other| other.at.to_string()).collect::<Vec<_>>(), ["10.0.0.2:5"]);
        // A local socket is never left.
        assert_eq!(PeerAddresses::new(None, vec!["10.0.0.2:5".parse().unwrap()]).count(), 1);
    }

    #[test]
    fn an_address_that_failed_is_not_used_for_a_while() {
        let peer = peer(&["10.0.0.2:5", "10.0.0.3:5"]);
        peer.others[0].note_failure(&"a peer", &Error::invalid("a test"));
        assert!(!chosen(&peer, 6).contains(&ip(2)));
        assert_eq!(peer.ip_of(peer.unused(|_| 0)), Some(ip(3)));
        let before = Instant::now().checked_sub(RETRY_AFTER + Duration::from_secs(1)).unwrap();
        *peer.others[0].failed.lock() = Some(before);
        assert!(chosen(&peer, 6).contains(&ip(2)));
    }
}
