//! Which path the bytes of a transfer take for each pair of memory kinds, and the reason that `stats()` gives.

use std::collections::HashMap;
use std::time::Duration;

use llm_datadist_core::bindings::{DataDist, Layers, Rows};
use llm_datadist_core::{CacheKind, Deadline, ErrorKind, KvLayout, KvPlanes, LinkState, Placement};

use super::{
    Held, Memory, Pair, WAYS, Way, device, memories, of, pairs, pull_blocks, pull_slot, push_blocks,
    push_slot, row,
};
use crate::emulation::PROCESS_READS;
use crate::fixtures::{adopt, desc, pattern, pin_writes};
use crate::registered_pages::{Pages, SEED};

const BYTES: u64 = 2 * 96;

/// Bytes by path, and those that were staged.
fn counted(link: &LinkState) -> HashMap<&'static str, u64> {
    let paths = link.paths.iter().map(|(name, path)| (*name, path.bytes));
    paths.chain([("staged", link.staged_bytes)]).collect()
}

fn link(pair: &Pair) -> LinkState {
    pair.local.stats().links.remove(0)
}

/// Bytes that `call` moves by path, and those that it stages. Leaves out what is 0.
fn moved(pair: &Pair, call: &dyn Fn()) -> HashMap<&'static str, u64> {
    let before = counted(&link(pair));
    call();
    let mut after = counted(&link(pair));
    after.iter_mut().for_each(|(name, bytes)| *bytes -= before[name]);
    after.retain(|_, bytes| *bytes > 0);
    after
}

/// Pulls a slot, checks its bytes, and returns their paths.
fn pulled(pair: &Pair, local: &Held, remote: &Held, seed: u8) -> HashMap<&'static str, u64> {
    let source = remote.fill(seed);
    let moved = moved(pair, &|| pull_slot(&pair.local, of(2, row(remote, 0)), local).unwrap());
    assert!(local.read() == source, "pulled by {moved:?}");
    moved
}

/// The same for a push.
fn pushed(pair: &Pair, local: &Held, remote: &Held, seed: u8) -> HashMap<&'static str, u64> {
    let source = local.fill(seed);
    let moved = moved(pair, &|| push_slot(&pair.local, local, 0, of(2, row(remote, 0))).unwrap());
    assert!(remote.read() == source, "pushed by {moved:?}");
    moved
}

/// Returns whether reads by process id work here. Otherwise the owner sends the bytes.
fn reads_by_process() -> bool {
    PROCESS_READS.missing().is_none()
}

/// The path on which few bytes leave `memory`, in a transfer of a caller whose cache lies in `callers`.
fn path_from(way: Way, memory: Memory, callers: Memory) -> &'static str {
    if way.has_fabric() && !memory.registered {
        return "fabric";
    }
    match (way.shares(), memory.registered, on_device(way, memory)) {
        (true, true, _) if reads_by_process() && (way == Way::Local || on_device(way, callers)) => "process",
        (true, false, false) => "mapped",
        (true, ..) if way != Way::Local => "rings",
        _ => "sockets",
    }
}

fn on_device(way: Way, memory: Memory) -> bool {
    !way.addresses_devices() && !memory.registered && memory.placement == Placement::Device
}

#[test]
fn bytes_take_the_path_of_their_memory_and_stats_show_it() {
    for way in WAYS {
        let pair = Pair::with(way, |config| config.remote_accessible = true);
        assert_eq!(link(&pair).sockets_reason, None);
        for (here, there) in memories().flat_map(|here| memories().map(move |there| (here, there))) {
            let what = format!("{way:?}: {here:?}, {there:?}");
            let local = here.held(&pair.local, (2, 1, 96), CacheKind::Batch, &[]);
            let remote = there.held(&pair.remote, (2, 1, 96), CacheKind::Batch, &[]);
            let expected = |path, staged: bool| {
                let staged = staged.then_some(("staged", BYTES));
                [(path, BYTES)].into_iter().chain(staged).collect::<HashMap<_, _>>()
            };
            let pull = expected(path_from(way, there, here), on_device(way, here));
            assert_eq!(pulled(&pair, &local, &remote, 1), pull, "pull, {what}");
            let push = expected(path_from(way, here, here), on_device(way, here));
            assert_eq!(pushed(&pair, &local, &remote, 2), push, "push, {what}");
            if way.has_fabric() && there.registered {
                pull_slot(&pair.local, of(2, row(&remote, 0)), &local).unwrap();
                assert!(link(&pair).sockets_reason.unwrap().contains("only pools"), "{what}");
            }
            pair.free(&local, &remote);
        }
        for (path, state) in link(&pair).paths.iter().filter(|(_, state)| state.transfers > 0) {
            let (rules, transfers): (Vec<_>, Vec<_>) = state.rules.clone().into_iter().unzip();
            let expected: &[_] = match (*path, way) {
                ("mapped", _) => &["mapped_pool"],
                ("fabric", _) => &["fabric_pool"],
                ("process", _) => &["process_memory"],
                ("rings", Way::Shm) if reads_by_process() => &["short_transfer"],
                ("rings", Way::ShmDevice) if reads_by_process() => &["owner_sends", "short_transfer"],
                _ => &["owner_sends"],
            };
            assert_eq!(rules, expected, "{way:?}: {path}");
            assert_eq!(transfers.iter().sum::<u64>(), state.transfers, "{way:?}: {path}");
        }
        let reason = link(&pair).sockets_reason;
        match way {
            Way::Tcp | Way::TcpDevice => {
                let reason = reason.unwrap();
                assert!(
                    reason.contains("no memory is shared, and this side does not use UCX: "),
                    "{way:?}: {reason}"
                );
            }
            Way::Fabric => assert!(reason.unwrap().contains("only pools"), "{way:?}"),
            _ if !reads_by_process() => {
                assert!(reason.unwrap().contains("the peer's memory cannot be read"), "{way:?}");
            }
            Way::ShmDevice => assert!(reason.unwrap().contains("belongs to a device"), "{way:?}"),
            Way::Local | Way::Shm => assert_eq!(reason, None),
        }
    }
}

/// The owner sends registered memory through rings, up to 2 MiB. Longer transfers are reads by process id, if these are possible.
#[test]
fn rings_carry_short_transfers_of_registered_memory() {
    const MAX_OVER_RINGS: usize = 2 << 20;
    let long = if reads_by_process() { "process" } else { "rings" };
    for way in [Way::Shm, Way::ShmDevice] {
        let pair = Pair::new(way);
        for (bytes, path) in [(64, "rings"), (MAX_OVER_RINGS, "rings"), (MAX_OVER_RINGS + 1, long)] {
            let [local, remote] = pair.registered(&device(1, 1, bytes), CacheKind::Batch);
            let expected = HashMap::from([(path, bytes as u64)]);
            for seed in 0..4 {
                let what = format!("{way:?}, {bytes} bytes");
                assert_eq!(pulled(&pair, &local, &remote, seed), expected, "pull, {what}");
                assert_eq!(pushed(&pair, &local, &remote, seed + 4), expected, "push, {what}");
            }
            pair.free(&local, &remote);
        }
        assert_eq!(link(&pair).sockets_reason.is_none(), reads_by_process(), "{way:?}");
    }
}

/// The size of a call decides, and not that of each of its plans: between these layouts there is one for the keys and one for the
/// values.
#[test]
fn rings_carry_no_part_of_a_long_transfer() {
    let pair = Pair::new(Way::Shm);
    let long = if reads_by_process() { "process" } else { "rings" };
    for (plane_bytes, path) in [(600 << 10, "rings"), (1200 << 10, long)] {
        let described = |engine, kv| {
            let layout = KvLayout {
                heads: 0..1,
                total_heads: 1,
                head_dim: plane_bytes,
                tokens_per_block: 1,
                layers: 0..1,
                kv,
                ..super::kv_layouts::good()
            };
            Held::new(engine, true, &super::kv_layouts::described(&layout, 1, 0), CacheKind::Blocks, &[])
        };
        let local = described(&pair.local, KvPlanes::KThenV);
        let remote = described(&pair.remote, KvPlanes::Separate);
        let name = of(2, row(&remote, 0));
        let pull = || pull_blocks(&pair.local, name, &local, &[0], &[0]).unwrap();
        let push = || push_blocks(&pair.local, &local, &[0], name, &[0]).unwrap();
        let expected = HashMap::from([(path, 2 * u64::from(plane_bytes))]);
        // The first call opens a stream with rings.
        pull();
        let source = remote.fill(1);
        assert_eq!(moved(&pair, &pull), expected, "pull");
        assert!(local.read() == [source.concat()]);
        let source = local.fill(2);
        assert_eq!(moved(&pair, &push), expected, "push");
        assert!(remote.read().concat() == source[0]);
        pair.free(&local, &remote);
    }
}

/// A short pull waits until its deadline for rows that a call of the owner uses, because the owner pins what it sends. A longer
/// pull is a read by process id, and does not wait, if these are possible.
#[test]
fn only_short_pulls_wait_for_rows_that_the_owner_uses() {
    let pair = Pair::new(Way::Shm);
    for (bytes, waits) in [(512 << 10, true), (3 << 20, !reads_by_process())] {
        let [local, remote] = pair.registered(&device(1, 1, bytes), CacheKind::Batch);
        let from = of(2, row(&remote, 0));
        pull_slot(&pair.local, from, &local).unwrap();
        let source = remote.fill(3);
        // The owner sends the last byte before it lets go of the row.
        let used = pin_writes(&remote.cache, vec![0], Deadline::after(super::LONG)).unwrap();
        if waits {
            let limit = Duration::from_millis(200);
            let pull = pair.local.pull(from, &local.end(), Rows::slot(0, -1), Layers::ALL);
            assert_eq!(pull.within(limit).run().unwrap_err().kind(), ErrorKind::Timeout);
            drop(used);
            pull_slot(&pair.local, from, &local).unwrap();
        } else {
            pull_slot(&pair.local, from, &local).unwrap();
            drop(used);
        }
        assert!(local.read() == source, "{bytes}");
    }
}

/// The kernel can read mapped rows of a cache whose other rows are not mapped, and the owner cannot. So the owner refuses to send a
/// short pull through rings, and has the peer read a push by process id. The pull is then read by process id too.
#[test]
fn rows_beside_unmapped_ones_are_only_read_by_process_id() {
    if PROCESS_READS.skips() {
        return;
    }
    const BYTES: usize = 1 << 20;
    let pair = Pair::new(Way::Shm);
    // The memory after the pages is not mapped, so the fifth row cannot be read.
    let pages = [Pages::new(2), Pages::new(2)];
    pages.iter().for_each(|pages| pages.write(0, 4 * BYTES));
    let shape = desc(Placement::Host, 1, 5, BYTES);
    let registered = |engine: &DataDist, pages: &Pages| {
        let adopted = adopt(&shape, CacheKind::Blocks, &[pages.at() as u64]);
        Held { cache: engine.register(adopted, &[], Some(true)).unwrap(), own: None }
    };
    let remote = registered(&pair.remote, &pages[0]);
    let local = Held::pool(&pair.local, &shape, CacheKind::Blocks);
    let from = of(2, row(&remote, 0));
    let expected = (0..BYTES).map(|at| pattern(SEED, 0, 2 * BYTES + at)).collect::<Vec<_>>();
    for _ in 0..2 {
        for (src, dst) in [(&[0, 2, 3][..], &[0, 1, 2][..]), (&[2], &[1])] {
            local.fill(1);
            let bytes = (src.len() * BYTES) as u64;
            let pulled = moved(&pair, &|| pull_blocks(&pair.local, from, &local, src, dst).unwrap());
            assert_eq!(pulled, HashMap::from([("process", bytes)]));
            assert!(local.read()[0][BYTES..2 * BYTES] == expected);
        }
        pull_blocks(&pair.local, from, &local, &[4], &[1]).unwrap_err();
    }
    let source = registered(&pair.local, &pages[1]);
    let target = Held::pool(&pair.remote, &shape, CacheKind::Blocks);
    push_blocks(&pair.local, &source, &[2], of(2, row(&target, 0)), &[1]).unwrap();
    assert!(target.read()[0][BYTES..2 * BYTES] == expected);
    pair.remote.unregister(remote.cache.id()).unwrap();
    pair.local.unregister(source.cache.id()).unwrap();
}

/// What fails is not counted.
#[test]
fn a_transfer_that_fails_is_on_no_path() {
    for pair in pairs() {
        let local = Held::pool(&pair.local, &device(2, 1, 96), CacheKind::Batch);
        let remote = Held::pool(&pair.remote, &device(1, 1, 96), CacheKind::Batch);
        pull_slot(&pair.local, of(2, row(&remote, 0)), &local).unwrap_err();
        assert!(counted(&link(&pair)).values().all(|&bytes| bytes == 0));
    }
}
