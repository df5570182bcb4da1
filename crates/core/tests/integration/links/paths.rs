//! Which path the bytes of a transfer take for each pair of memory kinds, and the reason that `stats()` gives.

use std::collections::HashMap;

use llm_datadist_core::{CacheKind, DataDist, Deadline, LinkState, Placement};

use super::{Held, Memory, Pair, WAYS, Way, device, of, pull_blocks, pull_slot, push_blocks, push_slot, row};
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

/// The path on which bytes leave this memory.
fn path_from(way: Way, memory: Memory) -> &'static str {
    if way.has_fabric() && !memory.registered {
        return "fabric";
    }
    match (way.shares(), memory.registered, on_device(way, memory)) {
        (true, true, _) => "process",
        (true, false, false) => "mapped",
        (true, false, true) => "rings",
        _ => "sockets",
    }
}

fn on_device(way: Way, memory: Memory) -> bool {
    !way.addresses_devices() && !memory.registered && memory.placement == Placement::Device
}

#[test]
fn bytes_take_the_fastest_path_and_stats_show_it() {
    let kinds = || {
        [false, true]
            .into_iter()
            .flat_map(|registered| Placement::ALL.map(|placement| Memory { registered, placement }))
    };
    for way in WAYS {
        let pair = Pair::with(way, |config| config.remote_accessible = true);
        assert_eq!(link(&pair).sockets_reason, None);
        for (here, there) in kinds().flat_map(|here| kinds().map(move |there| (here, there))) {
            let what = format!("{way:?}: {here:?}, {there:?}");
            let local = here.held(&pair.local, (2, 1, 96), CacheKind::Batch, &[]);
            let remote = there.held(&pair.remote, (2, 1, 96), CacheKind::Batch, &[]);
            let expected = |path, staged: bool| {
                let mut expected = HashMap::from([(path, BYTES)]);
                if staged {
                    expected.insert("staged", BYTES);
                }
                expected
            };
            let source = remote.fill(1);
            let pulled = moved(&pair, &|| pull_slot(&pair.local, of(2, row(&remote, 0)), &local).unwrap());
            assert_eq!(pulled, expected(path_from(way, there), on_device(way, here)), "pull, {what}");
            assert!(local.read() == source, "{what}");
            let source = local.fill(2);
            let pushed = moved(&pair, &|| push_slot(&pair.local, &local, 0, of(2, row(&remote, 0))).unwrap());
            let by_rings = way.shares() && here.registered && way != Way::Local;
            let path = if by_rings { "rings" } else { path_from(way, here) };
            assert_eq!(pushed, expected(path, on_device(way, here)), "push, {what}");
            assert!(remote.read() == source, "{what}");
            if way.has_fabric() && there.registered {
                pull_slot(&pair.local, of(2, row(&remote, 0)), &local).unwrap();
                assert!(link(&pair).sockets_reason.unwrap().contains("only pools"), "{what}");
            }
            local.free(&pair.local);
            remote.free(&pair.remote);
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
            Way::ShmDevice => assert!(reason.unwrap().contains("belongs to a device"), "{way:?}"),
            Way::Fabric => assert!(reason.unwrap().contains("only pools"), "{way:?}"),
            Way::Local | Way::Shm => assert_eq!(reason, None),
        }
    }
}

/// Pulls of 256 KiB to 2 MiB of registered memory, and pushes of at most 2 MiB, take rings or are reads by process id. Which of the
/// two depends on their recent speeds and on how busy the owner is. Others are reads by process id.
#[test]
fn rings_carry_registered_memory_of_some_sizes_only() {
    const FROM: usize = 256 << 10;
    const TO: usize = 2 << 20;
    const EITHER: &[&str] = &["process", "rings"];
    const PROCESS: &[&str] = &["process"];
    for way in [Way::Shm, Way::ShmDevice] {
        let pair = Pair::new(way);
        for (bytes, pulled, pushed) in [
            (64, PROCESS, EITHER),
            (FROM - 1, PROCESS, EITHER),
            (FROM, EITHER, EITHER),
            (TO, EITHER, EITHER),
            (TO + 1, PROCESS, PROCESS),
        ] {
            let shape = device(1, 1, bytes);
            let [local, remote] = [&pair.local, &pair.remote]
                .map(|engine| Held::new(engine, true, &shape, CacheKind::Batch, &[]));
            let takes = |allowed: &[&str], call: &dyn Fn()| {
                let paths = moved(&pair, call);
                assert!(paths.keys().all(|path| allowed.contains(path)), "{way:?}, {bytes}: {paths:?}");
                assert_eq!(paths.values().sum::<u64>(), bytes as u64, "{way:?}: {paths:?}");
            };
            for seed in 0..4 {
                let source = remote.fill(seed);
                takes(pulled, &|| pull_slot(&pair.local, of(2, row(&remote, 0)), &local).unwrap());
                assert!(local.read() == source, "{way:?}, {bytes}");
                let source = local.fill(seed + 4);
                takes(pushed, &|| push_slot(&pair.local, &local, 0, of(2, row(&remote, 0))).unwrap());
                assert!(remote.read() == source, "{way:?}, {bytes}");
            }
            local.free(&pair.local);
            remote.free(&pair.remote);
        }
        assert_eq!(link(&pair).sockets_reason, None, "{way:?}");
    }
}

/// If a call of the owner uses the rows, a pull that prefers rings reads by process id after at most 20 ms.
#[test]
fn rows_that_the_owner_uses_are_read_by_process_id() {
    const BYTES: usize = 512 << 10;
    let pair = Pair::new(Way::Shm);
    let shape = device(1, 1, BYTES);
    let [local, remote] =
        [&pair.local, &pair.remote].map(|engine| Held::new(engine, true, &shape, CacheKind::Batch, &[]));
    let pull = || pull_slot(&pair.local, of(2, row(&remote, 0)), &local);
    pull().unwrap();
    let source = remote.fill(3);
    let before = counted(&link(&pair));
    // The owner sends the last byte before it lets go of the row.
    let used = pin_writes(&remote.cache, vec![0], Deadline::after(super::LONG)).unwrap();
    pull().unwrap();
    drop(used);
    assert!(local.read() == source);
    let after = counted(&link(&pair));
    assert_eq!(after["process"] - before["process"], BYTES as u64);
    assert_eq!(after["rings"], before["rings"]);
}

/// The kernel can read mapped rows of a cache whose other rows are not mapped. A pull that prefers rings falls back to it, and a
/// push uses it at once.
#[test]
fn rows_beside_unmapped_ones_are_read_by_process_id() {
    const BYTES: usize = 512 << 10;
    let pair = Pair::new(Way::Shm);
    // The memory after the pages is not mapped, so the fifth row cannot be read.
    let pages = [Pages::new(1), Pages::new(1)];
    pages.iter().for_each(|pages| pages.write(0, 4 * BYTES));
    let shape = desc(Placement::Host, 1, 5, BYTES);
    let registered = |engine: &DataDist, pages: &Pages| {
        let adopted = adopt(&shape, CacheKind::Blocks, &[pages.at() as u64]);
        Held { cache: engine.register(adopted, &[], Some(true)).unwrap(), own: None }
    };
    let remote = registered(&pair.remote, &pages[0]);
    let local = Held::pool(&pair.local, &shape, CacheKind::Blocks);
    let expected = (0..BYTES).map(|at| pattern(SEED, 0, 2 * BYTES + at)).collect::<Vec<_>>();
    for _ in 0..2 {
        pull_blocks(&pair.local, of(2, row(&remote, 0)), &local, &[2], &[1]).unwrap();
        assert!(local.read()[0][BYTES..2 * BYTES] == expected);
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
    for way in WAYS {
        let pair = Pair::new(way);
        let local = Held::pool(&pair.local, &device(2, 1, 96), CacheKind::Batch);
        let remote = Held::pool(&pair.remote, &device(1, 1, 96), CacheKind::Batch);
        pull_slot(&pair.local, of(2, row(&remote, 0)), &local).unwrap_err();
        assert!(counted(&link(&pair)).values().all(|&bytes| bytes == 0), "{way:?}");
    }
}
