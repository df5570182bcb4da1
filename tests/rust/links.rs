//! Two engines of one process, linked: links, pull and push over every transport, against a copy made by hand.
//!
//! Not for: real processes that die (`tests/test_peer_faults.py`).

use std::net::SocketAddr;
use std::time::Duration;

use llm_datadist_core::{
    CacheIndex, CacheKey, CacheKind, ClusterId, CommStatus, Config, DataDist, End, ErrorKind, ExtParam,
    FarName, LayerRange, Layers, Name, PeerAddress, Placement, PoolConfig, PullRows, PushRows, Role,
    TransportChoice,
};

use crate::bed::{desc, patterned};

fn config(cluster: u64, transport: TransportChoice, one_sided: bool) -> Config {
    let mut config = Config::new(Role::Prompt, ClusterId(cluster));
    config.device_pool = Some(PoolConfig { memory_size: 64 << 20, page_shift: 12 });
    config.host_pool = Some(PoolConfig { memory_size: 64 << 20, page_shift: 12 });
    config.remote_accessible = one_sided;
    config.sync_timeout = Duration::from_secs(5);
    config.links.transport = transport;
    config.links.listen = Some("127.0.0.1:0".parse().unwrap());
    config
}

fn address(of: &DataDist, cluster: u64) -> PeerAddress {
    let remote: Vec<SocketAddr> = of.listening().into_iter().collect();
    PeerAddress { cluster: ClusterId(cluster), remote, local: vec![] }
}

struct Pair {
    near: DataDist,
    far: DataDist,
}

impl Pair {
    fn new(transport: TransportChoice, one_sided: bool) -> Pair {
        let near = DataDist::open(config(1, transport, one_sided)).unwrap();
        let far = DataDist::open(config(2, transport, one_sided)).unwrap();
        near.link_clusters(&[address(&far, 2)], Duration::from_secs(3)).remove(0).unwrap();
        Pair { near, far }
    }
}

const WAYS: [(TransportChoice, &str); 2] = [(TransportChoice::Auto, "shm"), (TransportChoice::Tcp, "tcp")];

#[test]
fn blocks_arrive_over_every_transport_in_both_modes() {
    for (transport, name) in WAYS {
        for one_sided in [false, true] {
            let pair = Pair::new(transport, one_sided);
            let links = pair.near.stats().links;
            assert_eq!((links.len(), links[0].transport), (1, name), "{:?}", pair.near.notes());
            let shape = desc(Placement::Device, 3, 8, 4096);
            let key = CacheKey::Blocks { model: 7 };
            let src = pair.far.allocate(&shape, CacheKind::Blocks, &[Some(key)]).unwrap();
            let dst = pair.near.allocate(&shape, CacheKind::Blocks, &[]).unwrap();
            let bytes = patterned(3, 3, 8 * 4096);
            crate::bed::fill(&src, &bytes);
            let rows = PullRows::Blocks { far: vec![0, 7, 3], near: vec![5, 0, 1] };
            let from = FarName { cluster: ClusterId(2), name: Name::Key(key) };
            pair.near.pull(from, &End::Managed(dst.id()), &rows, Layers::ALL).unwrap();
            let mut expected = vec![vec![0u8; 8 * 4096]; 3];
            for (tensor, out) in expected.iter_mut().enumerate() {
                for (from, to) in [(0, 5), (7, 0), (3, 1)] {
                    out[to * 4096..][..4096].copy_from_slice(&bytes[tensor][from * 4096..][..4096]);
                }
            }
            assert_eq!(crate::bed::contents(&dst), expected);
            // And back, by a push from the side that did not make the link.
            let other = pair.near.allocate(&shape, CacheKind::Blocks, &[Some(key)]).unwrap();
            let rows = PushRows::Blocks { near: vec![2, 4], far: vec![6, 1] };
            let to = FarName { cluster: ClusterId(1), name: Name::Key(key) };
            pair.far.push(&End::Managed(src.id()), to, &rows, Layers::ALL).unwrap();
            let got = crate::bed::contents(&other);
            for tensor in 0..3 {
                assert_eq!(got[tensor][6 * 4096..7 * 4096], bytes[tensor][2 * 4096..3 * 4096]);
                assert_eq!(got[tensor][4096..2 * 4096], bytes[tensor][4 * 4096..5 * 4096]);
            }
            pair.near
                .unlink_clusters(&[address(&pair.far, 2)], Duration::from_secs(1), false)
                .remove(0)
                .unwrap();
            assert!(pair.near.stats().links.is_empty());
            assert!(pair.far.stats().links.is_empty());
        }
    }
}
