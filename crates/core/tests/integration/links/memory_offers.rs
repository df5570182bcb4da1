//! What a peer offers to be mapped: bounded for each link and for all, and no reason to refuse a link.
//!
//! Not for: whose memory is read (`peer_memory`), or memory that does not answer (`reader_threads`).

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use llm_datadist_core::testing::memory::{Generations, MapBudget};
use llm_datadist_core::testing::net::Address;
use llm_datadist_core::testing::protocol::{self, Attach, Attached, Control, HANDSHAKE_LIMIT};
use llm_datadist_core::testing::stats::LinkState;
use llm_datadist_core::{
    CacheKind, Config, DataDist, Deadline, ErrorKind, Layers, Placement, PoolConfig, PullRows, PushRows,
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::fake_peer::{Fake, hear, say, soon};
use super::{Held, LONG, Pair, Ports, Way, config, eventually, link, of, open, row, unlink};
use crate::child_process::{self, report};
use crate::fixtures::desc;

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// Memory of `len` bytes of which nothing exists.
fn sparse(len: u64, seals: SealFlags) -> OwnedFd {
    let kind = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let descriptor = memfd_create("sparse", kind).unwrap();
    ftruncate(&descriptor, len).unwrap();
    fcntl_add_seals(&descriptor, seals).unwrap();
    descriptor
}

/// An engine that links to a peer which offers `offer` and sends `descriptors`: what it says of the offer, and its link.
fn offered(engine: &DataDist, offer: &Attach, descriptors: &[OwnedFd]) -> (Attached, LinkState) {
    let fake = Fake::at(&Ports, &Address::Tcp("127.0.0.1:0".parse().unwrap()), 9, 1);
    let address = fake.address();
    let (said, control) = std::thread::scope(|scope| {
        let peer = scope.spawn(move || {
            let (stream, _) = fake.greet();
            stream.receive_with(HANDSHAKE_LIMIT, soon()).unwrap().unwrap();
            let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            stream.send_with(&protocol::encode(offer).unwrap(), &descriptors, soon()).unwrap();
            let said: Attached = hear(&stream).unwrap();
            say(&stream, &Attached { mapped: Ok(()), registered: Ok(()) });
            say(&stream, &Control::Pong);
            (said, stream)
        });
        engine.link_clusters(&[address], LONG).remove(0).unwrap();
        peer.join().unwrap()
    });
    let state = engine.stats().links.remove(0);
    drop(control);
    eventually("the end of the link", || engine.stats().links.is_empty());
    (said, state)
}

fn engine(change: impl Fn(&mut Config)) -> DataDist {
    let mut config = config(1, Way::Local);
    change(&mut config);
    open(config, Way::Local)
}

/// Generations as a peer would send them.
fn generations() -> OwnedFd {
    Generations::new().unwrap().descriptor().unwrap().try_clone_to_owned().unwrap()
}

#[test]
fn offers_that_are_too_large_or_unsound_leave_the_link_to_sockets() {
    let engine = engine(|_| ());
    let good = |len| sparse(len, SEALS);
    type Case = (&'static str, [Option<u64>; 2], Vec<OwnedFd>, &'static str);
    let cases: [Case; 9] = [
        ("fits", [Some(64 * MIB), Some(MIB)], vec![generations(), good(64 * MIB), good(2 * MIB)], ""),
        ("one", [Some(30 * TIB), None], vec![generations(), good(30 * TIB)], "link_remote_memory"),
        (
            "two",
            [Some(30 * TIB); 2],
            vec![generations(), good(30 * TIB), good(30 * TIB)],
            "offered_bytes=65970697666560",
        ),
        ("overflow", [Some(u64::MAX); 2], vec![generations(), good(MIB), good(MIB)], "more than 2^64"),
        ("shorter", [Some(64 * MIB), None], vec![generations(), good(MIB)], "shorter than it said"),
        (
            "unsealed",
            [Some(MIB), None],
            vec![generations(), sparse(2 * MIB, SealFlags::empty())],
            "could shrink",
        ),
        (
            "holes",
            [Some(MIB), None],
            vec![generations(), sparse(2 * MIB, SealFlags::SHRINK)],
            "could lose pages",
        ),
        (
            "missing",
            [Some(MIB), Some(MIB)],
            vec![generations(), good(2 * MIB)],
            "more memory than it sent descriptors",
        ),
        (
            "too many",
            [Some(MIB), None],
            (0..8).map(|_| good(2 * MIB)).collect(),
            "more memory than it sent descriptors",
        ),
    ];
    for (name, regions, descriptors, reason) in cases {
        let offer = Attach { generations: true, regions, probe: None };
        let (said, link) = offered(&engine, &offer, &descriptors);
        eprintln!("{name}: {said:?}, {link:?}");
        if reason.is_empty() {
            assert_eq!((said.mapped, link.pools), (Ok(()), "mapped"), "{name}");
            continue;
        }
        let why = said.mapped.unwrap_err();
        assert!(why.contains(reason), "{name}: {why}");
        assert_eq!((link.pools, link.refusal.as_deref()), ("stream", Some(why.as_str())), "{name}");
    }
    // Nothing says when what is read changes: nothing is read in place.
    let offer = Attach { generations: false, regions: [None, None], probe: Some((4096, [0; 16])) };
    let (said, link) = offered(&engine, &offer, &[]);
    assert!(said.mapped.is_err() && said.registered.is_err());
    assert_eq!((link.pools, link.registered), ("stream", "stream"));
}

/// A process with few addresses left links with a peer that offers three quarters of them, and goes on.
#[test]
#[ignore = "started by the test below"]
fn narrow() {
    if child_process::role().is_none() {
        return;
    }
    let engine = engine(|config| config.links.remote_memory = Some(i64::MAX as u64));
    let room = 2 << 30;
    let taken = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = taken.split_whitespace().next().unwrap().parse().unwrap();
    let limit = pages * rustix::param::page_size() as u64 + room;
    setrlimit(Resource::As, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    let len = room / 4 * 3;
    let offer = Attach { generations: true, regions: [Some(len), None], probe: None };
    let (said, link) = offered(&engine, &offer, &[generations(), sparse(len, SEALS)]);
    assert!(said.mapped.unwrap_err().contains("too little address space left"));
    assert_eq!(link.pools, "stream");
    let own = vec![1_u8; 512 << 20];
    assert_eq!(std::hint::black_box(own).len(), 512 << 20);
    report("done");
}

#[test]
#[cfg_attr(sanitized, ignore = "the sanitizer has its own allocator and needs address space")]
fn limited_address_space_is_not_filled_by_a_peer() {
    assert_eq!(child_process::run("links::memory_offers::narrow", ""), ["done"]);
}

#[test]
fn memory_of_all_peers_together_is_bounded_and_returns_with_its_link() {
    let small = |cluster| {
        let mut config = config(cluster, Way::Shm);
        config.device_pool = Some(PoolConfig { memory_size: 64 * MIB, page_shift: 12 });
        config.host_pool = None;
        config
    };
    // Generations and pools of two peers, not of three; of none is it more than a half.
    let each = Generations::BYTES + 64 * MIB;
    let mut limited = small(1);
    limited.links.remote_memory = Some(2 * each);
    let local = open(limited, Way::Shm);
    let peers: Vec<_> = (2..5).map(|cluster| open(small(cluster), Way::Shm)).collect();
    let pools = |cluster: u64| {
        let link = local.stats().links.into_iter().find(|link| link.cluster.0 == cluster).unwrap();
        (link.pools, link.refusal)
    };
    for peer in &peers {
        link(&local, peer).unwrap();
    }
    assert_eq!((pools(2).0, pools(3).0), ("mapped", "mapped"));
    let (way, refusal) = pools(4);
    let refusal = refusal.unwrap();
    assert_eq!(way, "stream");
    for fact in [
        format!("limit_bytes={}", 2 * each),
        format!("mapped_bytes={}", 2 * each),
        "link_remote_memory".into(),
    ] {
        assert!(refusal.contains(&fact), "{refusal}");
    }
    unlink(&local, &peers[0]).unwrap();
    // The memory of a link that has just ended may still be being unmapped: the next link waits for that.
    for _ in 0..8 {
        unlink(&local, &peers[2]).unwrap();
        link(&local, &peers[2]).unwrap();
        let (way, refusal) = pools(4);
        assert_eq!(way, "mapped", "{refusal:?}");
        // So that only one of both fits.
        unlink(&local, &peers[2]).unwrap();
        link(&local, &peers[0]).unwrap();
        let (way, refusal) = pools(2);
        assert_eq!(way, "mapped", "{refusal:?}");
        unlink(&local, &peers[0]).unwrap();
        link(&local, &peers[2]).unwrap();
    }
}

#[test]
fn pools_that_are_not_mapped_travel_through_sockets() {
    for limit in [0, Generations::BYTES / 2 * 3] {
        let pair = Pair::with(Way::Shm, |config| {
            config.remote_accessible = true;
            if config.cluster.0 == 1 {
                config.links.remote_memory = Some(limit);
            }
        });
        let held = |engine, registered| {
            Held::new(engine, registered, &desc(Placement::Host, 2, 4, 4096), CacheKind::Blocks, &[])
        };
        let per_layer = Layers { tensors_per_layer: 1, ..Layers::ALL };
        for registered in [false, true] {
            let (local, remote) = (held(&pair.local, registered), held(&pair.remote, registered));
            let (ours, theirs) = (local.fill(1), remote.fill(2));
            let rows = PullRows::Blocks { remote: vec![0], local: vec![3] };
            pair.local.pull(of(2, row(&remote, 0)), &local.end(), &rows, Layers::ALL).unwrap();
            let rows = PushRows::Blocks { local: vec![1], remote: vec![2] };
            pair.local.push(&local.end(), of(2, row(&remote, 0)), &rows, per_layer).unwrap();
            // The other way round: the side that may map pushes to, and pulls from, the one that may not.
            let rows = PushRows::Blocks { local: vec![1], remote: vec![2] };
            pair.remote.push(&remote.end(), of(1, row(&local, 0)), &rows, per_layer).unwrap();
            let rows = PullRows::Blocks { remote: vec![1], local: vec![3] };
            pair.remote.pull(of(1, row(&local, 0)), &remote.end(), &rows, Layers::ALL).unwrap();
            let (local, remote) = (local.read(), remote.read());
            for tensor in 0..2 {
                let block = |bytes: &[Vec<u8>], at: usize| bytes[tensor][at * 4096..][..4096].to_vec();
                assert!(block(&local, 3) == block(&theirs, 0) && block(&remote, 2) == block(&ours, 1));
                assert!(block(&local, 2) == block(&theirs, 1) && block(&remote, 3) == block(&ours, 1));
            }
        }
        let (local, remote) = (pair.local.stats().links.remove(0), pair.remote.stats().links.remove(0));
        assert_eq!((local.pools, remote.pools), ("stream", "mapped"));
        // Without its generations nothing of the peer is read in place.
        assert_eq!(local.registered, if limit == 0 { "stream" } else { "process" });
        assert!(local.refusal.unwrap().contains("link_remote_memory"));
    }
}

#[test]
fn budget_counts_what_is_mapped() {
    let budget = MapBudget::new(Some(100));
    // Nothing is being unmapped, so no refusal waits.
    let hour = Deadline::after(Duration::from_secs(3600));
    let (one, two) = (budget.reserve(60, hour).unwrap(), budget.reserve(40, hour).unwrap());
    let error = budget.reserve(1, hour).unwrap_err();
    assert_eq!((error.kind(), error.fact("mapped_bytes")), (ErrorKind::System, Some("100")), "{error}");
    drop(one);
    assert_eq!(budget.used(), 40);
    assert!(budget.reserve(61, hour).is_err() && budget.reserve(u64::MAX, hour).is_err());
    drop(budget.reserve(60, hour).unwrap());
    drop(two);
    assert_eq!(budget.used(), 0);
    assert!(MapBudget::new(None).limit() > 4 << 20, "four times the memory of this machine");
}
