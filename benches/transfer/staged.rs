//! Transfers to and from memory that the CPU cannot address, beside the direct ones and beside two hops by hand.
//!
//! The device is simulated: its copies are those of the CPU, so both hops compete for the cores and for the memory.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use llm_datadist_core::ClusterId;
use llm_datadist_core::bindings::{DataDist, Layers, Name, PeerAddress, RemoteName, Rows};
use llm_datadist_core::testing::device::{DeviceSet, HostReach};
use llm_datadist_core::testing::session::Transports;
use llm_datadist_testing::{SimDevice, host_address};

use crate::Options;
use crate::hand::Shuffle;
use crate::memory::{Blocks, KEY, config};
use crate::prefill::{LIMIT, Prefill};
use crate::speed::{Way, compare, heading};

const SEED: u64 = 0x5EED_0003;
/// Buffers of the hops by hand, and their size in bytes.
const BUFFERS: usize = 4;
const BUFFER: usize = 512 << 10;

/// An engine that is linked to the other process, and a cache of it.
struct Side {
    engine: DataDist,
    cache: Blocks,
    /// The memory that holds the bytes of the cache.
    bytes: Blocks,
}

impl Side {
    fn new(
        peer: &PeerAddress,
        options: &Options,
        cluster: u64,
        transport: &str,
        (rows, len): (u64, u64),
    ) -> Side {
        let mut config = config(cluster, transport, true, 2 * options.mib + 1, options.streams);
        config.copy_workers = options.workers;
        let devices = match cluster {
            1 => DeviceSet::host_only(),
            _ => DeviceSet::with_device(Arc::new(SimDevice::new(HostReach::Staged))),
        };
        let engine = DataDist::open_over(config, devices, Transports::default()).unwrap();
        engine.link_clusters(std::slice::from_ref(peer), LIMIT).remove(0).unwrap();
        let cache = Blocks::pool(&engine, rows, len, false);
        let bytes = Blocks { base: host_address(cache.base).unwrap_or(cache.base), ..cache.clone() };
        Side { engine, cache, bytes }
    }
}

pub fn staged(options: &Options) {
    for transport in ["shm", "tcp"] {
        heading(&format!("memory of a simulated device, {transport}"), options);
        for &kib in &options.blocks {
            measure(options, transport, kib << 10);
        }
    }
}

/// The blocks that are moved, and the other process.
struct Moves {
    from: Vec<i64>,
    to: Vec<i64>,
    prefill: RefCell<Prefill>,
}

impl Moves {
    const REMOTE: RemoteName = RemoteName { cluster: ClusterId(2), name: Name::Key(KEY) };

    fn pull(&self, side: &Side) {
        let rows = Rows::Blocks { remote: self.from.clone(), local: self.to.clone() };
        side.engine.pull(Self::REMOTE, &side.cache.end, rows, Layers::ALL).run().unwrap();
    }

    fn push(&self, side: &Side) {
        let rows = Rows::Blocks { local: self.from.clone(), remote: self.to.clone() };
        side.engine.push(&side.cache.end, Self::REMOTE, rows, Layers::ALL).run().unwrap();
    }

    fn pulled<'a>(&'a self, name: &str, side: &'a Side) -> Way<'a> {
        Way::new(name, move || self.pull(side))
            .before(move || {
                self.pull(side);
                side.bytes.poison();
            })
            .after(move || side.bytes.verify(1, &self.from, &self.to))
    }

    fn pushed<'a>(&'a self, name: &str, side: &'a Side) -> Way<'a> {
        Way::new(name, move || self.push(side))
            .before(move || {
                side.bytes.fill(2);
                self.push(side);
                self.tell("poison");
            })
            .after(move || {
                self.tell(&format!("verify 2 {SEED}"));
                self.tell("fill 1");
            })
    }

    fn tell(&self, order: &str) {
        self.prefill.borrow_mut().ask(order);
    }
}

fn measure(options: &Options, transport: &str, len: u64) {
    let rows = (options.mib << 20) / len;
    let mut prefill = Prefill::start();
    let peer = prefill.open(transport, true, options.mib + 1, options.streams);
    prefill.ask(&format!("blocks pool {rows} {len}"));
    let [direct, staged] = [1, 3].map(|cluster| Side::new(&peer, options, cluster, transport, (rows, len)));
    let source = Blocks::pool(&direct.engine, rows, len, false);
    source.fill(1);
    let mut shuffle = Shuffle(SEED);
    let (from, to) = (shuffle.order(rows), shuffle.order(rows));
    let moves = Moves { from, to, prefill: RefCell::new(prefill) };
    let print = |limit, ours| compare("device", len, source.bytes(), options, vec![limit], vec![ours]);
    print(moves.pulled("direct", &direct), moves.pulled("pull", &staged));
    if transport == "shm" {
        let (target, base) = (&staged.bytes, source.base);
        let (from, to) = (&moves.from, &moves.to);
        let hand = Way::new("two hops", move || two_hops(base, target.base, len as usize, from, to))
            .before(|| target.poison())
            .after(|| target.verify(1, from, to));
        print(hand, moves.pulled("pull", &staged));
    }
    print(moves.pushed("direct", &direct), moves.pushed("push", &staged));
}

/// Copies blocks through buffers: this thread fills them, and another one empties them.
fn two_hops(source: u64, target: u64, len: usize, from: &[i64], to: &[i64]) {
    let part = len.min(BUFFER);
    let each = BUFFER / part;
    let pieces: Vec<(u64, u64)> = from
        .iter()
        .zip(to)
        .flat_map(|(&from, &to)| {
            let at = move |row: i64, piece: usize| row as u64 * len as u64 + (piece * part) as u64;
            (0..len / part).map(move |piece| (source + at(from, piece), target + at(to, piece)))
        })
        .collect();
    let (to_empty, full) = sync_channel::<Vec<u8>>(BUFFERS);
    let (to_fill, free) = sync_channel::<Vec<u8>>(BUFFERS);
    for _ in 0..BUFFERS {
        to_fill.send(vec![0; BUFFER]).unwrap();
    }
    std::thread::scope(|scope| {
        let pieces = &pieces;
        scope.spawn(move || {
            for group in pieces.chunks(each) {
                let buffer = full.recv().unwrap();
                for (at, &(_, dst)) in group.iter().enumerate() {
                    // SAFETY: a block of a live cache, and a part of the buffer.
                    unsafe {
                        std::ptr::copy_nonoverlapping(buffer[at * part..].as_ptr(), dst as *mut u8, part);
                    };
                }
                let _ = to_fill.send(buffer);
            }
        });
        for group in pieces.chunks(each) {
            let mut buffer = free.recv().unwrap();
            for (at, &(src, _)) in group.iter().enumerate() {
                // SAFETY: as above.
                unsafe {
                    std::ptr::copy_nonoverlapping(src as *const u8, buffer[at * part..].as_mut_ptr(), part);
                };
            }
            to_empty.send(buffer).unwrap();
        }
    });
}
