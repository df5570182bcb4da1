//! The memory that a peer offers to be mapped is bounded, per link and in total, and never a reason to refuse a link.
//!
//! Not for: whose memory is read (`peer_memory`), or memory that does not answer (`reader_threads`).

use std::os::fd::{AsFd, OwnedFd};

use llm_datadist_core::bindings::{Config, DataDist, PoolConfig};
use llm_datadist_core::testing::memory::Generations;
use llm_datadist_core::testing::net::Address;
use llm_datadist_core::testing::protocol::{
    self, Attach, Attached, Confirm, EnteredLink, HANDSHAKE_LIMIT, LinkAnswer,
};
use llm_datadist_core::testing::stats::LinkState;
use llm_datadist_core::{CacheKind, Placement};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::fake_peer::{Fake, hear, say, soon};
use super::{Held, Pair, Ports, Way, eventually, link, of, open_with, pull_blocks, push_blocks, row, unlink};
use crate::child_process::{self, report};
use crate::emulation::{ADDRESS_SPACE_LIMITS, PROCESS_READS};
use crate::fixtures::desc;

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);

/// Creates memory of `len` bytes, none of which is committed.
fn sparse(len: u64, seals: SealFlags) -> OwnedFd {
    let kind = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let descriptor = memfd_create("sparse", kind).unwrap();
    ftruncate(&descriptor, len).unwrap();
    fcntl_add_seals(&descriptor, seals).unwrap();
    descriptor
}

/// Links `engine` to a peer that sends `offer` and `descriptors`. Returns the engine's report, and its link.
fn offered(engine: &DataDist, offer: &Attach, descriptors: &[OwnedFd]) -> (Attached, LinkState) {
    let fake = Fake::at(&Ports, &Address::Tcp("127.0.0.1:0".parse().unwrap()), 9, 1);
    let (linked, (said, control)) = fake.linked_by(engine, || {
        let (stream, _) = fake.greet();
        stream.receive_with(HANDSHAKE_LIMIT, soon()).unwrap().unwrap();
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        stream.send_with(&protocol::encode(offer).unwrap(), &descriptors, soon()).unwrap();
        let said: Attached = hear(&stream).unwrap();
        say(&stream, &Attached { pools: Ok(()), process: Ok(()) });
        let _: Confirm = hear(&stream).unwrap();
        say(&stream, &LinkAnswer::Entered(EnteredLink::default()));
        (said, stream)
    });
    linked.unwrap();
    let state = engine.stats().links.remove(0);
    drop(control);
    eventually("the end of the link", || engine.stats().links.is_empty());
    (said, state)
}

fn engine(change: impl Fn(&mut Config)) -> DataDist {
    open_with(1, Way::Local, change)
}

/// Generations as a peer would send them.
fn generations() -> OwnedFd {
    Generations::new().unwrap().descriptor().unwrap().try_clone_to_owned().unwrap()
}

#[test]
fn offers_that_are_too_large_or_unsound_leave_the_link_to_sockets() {
    let engine = engine(|_| ());
    let (none, shrink) = (SealFlags::empty(), SealFlags::SHRINK);
    // Bytes of the pools, bytes of the memory behind the generations, its seals, and the reason for a refusal.
    type Case = ([Option<u64>; 2], &'static [u64], SealFlags, &'static str);
    let cases: [Case; 9] = [
        ([Some(64 * MIB), Some(MIB)], &[64 * MIB, 2 * MIB], SEALS, ""),
        ([Some(30 * TIB), None], &[30 * TIB], SEALS, "option=remote_memory"),
        ([Some(30 * TIB); 2], &[30 * TIB; 2], SEALS, "offered_bytes=65970697666560"),
        ([Some(u64::MAX); 2], &[MIB; 2], SEALS, "more than 2^64"),
        ([Some(64 * MIB), None], &[MIB], SEALS, "shorter than announced"),
        ([Some(MIB), None], &[2 * MIB], none, "could shrink"),
        ([Some(MIB), None], &[2 * MIB], shrink, "could lose pages"),
        ([Some(MIB); 2], &[2 * MIB], SEALS, "memory without the matching descriptors"),
        ([Some(MIB), None], &[2 * MIB; 7], SEALS, "memory without the matching descriptors"),
    ];
    for (pools, memory, seals, reason) in cases {
        let offer = Attach { generations: true, pools, probe: None };
        let pools = memory.iter().map(|&len| sparse(len, seals));
        let descriptors: Vec<_> = std::iter::once(generations()).chain(pools).collect();
        let (said, link) = offered(&engine, &offer, &descriptors);
        eprintln!("{offer:?}: {said:?}, {link:?}");
        if reason.is_empty() {
            assert_eq!((said.pools, link.pools), (Ok(()), "mapped"));
            continue;
        }
        let why = said.pools.unwrap_err();
        assert!(why.contains(reason), "{offer:?}: {why}");
        assert_eq!((link.pools, link.refusal.as_deref()), ("stream", Some(why.as_str())), "{offer:?}");
    }
    // Without generations, nothing shows when the memory changes, so nothing is read in place.
    let offer = Attach { generations: false, pools: [None, None], probe: Some((4096, [0; 16])) };
    let (said, link) = offered(&engine, &offer, &[]);
    assert!(said.pools.is_err() && said.process.is_err());
    assert_eq!((link.pools, link.registered), ("stream", "stream"));
}

/// A process with little address space left links with a peer that offers three quarters of it, and continues to work.
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
    let offer = Attach { generations: true, pools: [Some(len), None], probe: None };
    let (said, link) = offered(&engine, &offer, &[generations(), sparse(len, SEALS)]);
    assert!(said.pools.unwrap_err().contains("too little address space left"));
    assert_eq!(link.pools, "stream");
    let own = vec![1_u8; 512 << 20];
    assert_eq!(std::hint::black_box(own).len(), 512 << 20);
    report("done");
}

#[test]
#[cfg_attr(sanitized, ignore = "the sanitizer has its own allocator and needs address space")]
fn limited_address_space_is_not_filled_by_a_peer() {
    if ADDRESS_SPACE_LIMITS.skips() {
        return;
    }
    assert_eq!(child_process::run("links::memory_offers::narrow", ""), ["done"]);
}

#[test]
fn memory_of_all_peers_together_is_bounded_and_returns_with_its_link() {
    let small = |cluster, limit| {
        open_with(cluster, Way::Shm, |config| {
            config.device_pool = Some(PoolConfig { memory_size: 64 * MIB, page_shift: 12 });
            config.host_pool = None;
            config.links.remote_memory = limit;
        })
    };
    // Room for the generations and pools of two peers, but not of three. None of them exceeds half of the limit.
    let each = Generations::BYTES + 64 * MIB;
    let local = small(1, Some(2 * each));
    let peers = [2, 3, 4].map(|cluster| small(cluster, None));
    // Returns how the pools of the latest link are read, and why not in place.
    let pools = |peer: &DataDist| {
        link(&local, peer).unwrap();
        let links = local.stats().links;
        let state = links.iter().find(|link| link.cluster == peer.config().cluster).unwrap();
        (state.pools, state.refusal.clone().unwrap_or_default())
    };
    assert_eq!((pools(&peers[0]).0, pools(&peers[1]).0), ("mapped", "mapped"));
    let (way, refusal) = pools(&peers[2]);
    assert_eq!(way, "stream");
    let bytes = 2 * each;
    for fact in [&format!("limit_bytes={bytes}"), &format!("mapped_bytes={bytes}"), "option=remote_memory"] {
        assert!(refusal.contains(fact), "{refusal}");
    }
    unlink(&local, &peers[0]).unwrap();
    unlink(&local, &peers[2]).unwrap();
    // The memory of a link that has just ended may still be mapped. Only one of both fits, so the next link waits.
    for peer in [&peers[2], &peers[0]].repeat(8) {
        let (way, refusal) = pools(peer);
        assert_eq!(way, "mapped", "{refusal}");
        unlink(&local, peer).unwrap();
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
        for registered in [false, true] {
            let (local, remote) = (held(&pair.local, registered), held(&pair.remote, registered));
            let (ours, theirs) = (local.fill(1), remote.fill(2));
            let (here, there) = (of(1, row(&local, 0)), of(2, row(&remote, 0)));
            pull_blocks(&pair.local, there, &local, &[0], &[3]).unwrap();
            push_blocks(&pair.local, &local, &[1], there, &[2]).unwrap();
            // In the other direction: the side that may map memory pushes to, and pulls from, the side that may not.
            push_blocks(&pair.remote, &remote, &[1], here, &[2]).unwrap();
            pull_blocks(&pair.remote, here, &remote, &[1], &[3]).unwrap();
            let (local, remote) = (local.read(), remote.read());
            for tensor in 0..2 {
                let block = |bytes: &[Vec<u8>], at: usize| bytes[tensor][at * 4096..][..4096].to_vec();
                assert!(block(&local, 3) == block(&theirs, 0) && block(&remote, 2) == block(&ours, 1));
                assert!(block(&local, 2) == block(&theirs, 1) && block(&remote, 3) == block(&ours, 1));
            }
        }
        let (local, remote) = (pair.local.stats().links.remove(0), pair.remote.stats().links.remove(0));
        assert_eq!((local.pools, remote.pools), ("stream", "mapped"));
        // Without the peer's generations, none of its memory is read in place.
        let in_place = limit > 0 && PROCESS_READS.missing().is_none();
        assert_eq!(local.registered, if in_place { "process" } else { "stream" });
        assert!(local.refusal.unwrap().contains("option=remote_memory"));
    }
}
