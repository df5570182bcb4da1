//! The throughput of transfers, compared with loops written by hand.
//!
//! Not for: single calls (`latency`).

use std::cell::RefCell;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use llm_datadist_core::ClusterId;
use llm_datadist_core::bindings::{DataDist, End, Layers, Name, PeerAddress, RemoteName, Rows};

use crate::Options;
use crate::hand::{Flat, LOOPS, Shuffle, loop_over, median, quiet, timed};
use crate::memory::{Blocks, KEY, config, mapped};
use crate::prefill::{LIMIT, Prefill, order_bare, receive_bare, send_bare};

/// Seed of the shuffled lists.
const SEED: u64 = 0x5EED_0003;

/// A call that is timed, and what runs before and after it outside the timed part.
pub struct Way<'a> {
    name: String,
    before: Box<dyn Fn() + 'a>,
    call: Box<dyn Fn() + 'a>,
    after: Box<dyn Fn() + 'a>,
}

impl<'a> Way<'a> {
    pub fn new(name: impl Into<String>, call: impl Fn() + 'a) -> Way<'a> {
        Way { name: name.into(), before: Box::new(|| ()), call: Box::new(call), after: Box::new(|| ()) }
    }

    pub fn before(self, before: impl Fn() + 'a) -> Way<'a> {
        Way { before: Box::new(before), ..self }
    }

    pub fn after(self, after: impl Fn() + 'a) -> Way<'a> {
        Way { after: Box::new(after), ..self }
    }
}

/// Runs all in turn, each round beginning with another one. Prints a line for each of `ours`: the ratio of
/// its median to that of the fastest of `limits`.
pub fn compare(
    what: &str,
    len: u64,
    bytes: u64,
    options: &Options,
    limits: Vec<Way<'_>>,
    ours: Vec<Way<'_>>,
) {
    let (count, rounds) = (limits.len(), options.rounds);
    let all: Vec<Way<'_>> = limits.into_iter().chain(ours).collect();
    let mut times = vec![Vec::new(); all.len()];
    let (mut left, mut busy) = (MAX_WAIT, 0);
    for round in 0..=rounds {
        for step in 0..all.len() {
            let who = (step + round) % all.len();
            (all[who].before)();
            busy += usize::from(!quiet(&mut left));
            let took = timed(&all[who].call);
            (all[who].after)();
            if round > 0 {
                times[who].push(took);
            }
        }
    }
    let medians: Vec<f64> = times.iter().map(|all| median(&mut all.clone())).collect();
    let best = (0..count).min_by(|&a, &b| medians[a].total_cmp(&medians[b])).unwrap();
    let first = if options.all { 0 } else { count };
    for who in first..all.len() {
        let mut ratios: Vec<f64> = (0..rounds).map(|round| times[best][round] / times[who][round]).collect();
        let ratio = median(&mut ratios);
        println!(
            "{what:10} {:18} {:6} KiB {:7.2} {:7.2}  {:18} {ratio:6.2}  ({:.2}-{:.2})",
            all[who].name,
            len >> 10,
            bytes as f64 / medians[who] / 1e9,
            bytes as f64 / medians[best] / 1e9,
            all[best].name,
            ratios[0],
            ratios[ratios.len() - 1],
        );
    }
    if busy > 0 {
        println!("  (others used the machine before {busy} of {} turns)", (rounds + 1) * all.len());
    }
}

/// Total time for which one comparison waits until other processes leave the machine idle.
const MAX_WAIT: Duration = Duration::from_secs(60);

pub fn heading(title: &str, options: &Options) {
    let workers = options.workers.map_or("default".into(), |count| count.to_string());
    println!(
        "\n{title}: {} MiB a round, {} rounds, {workers} workers; GB/s = 10^9 bytes, each counted once",
        options.mib, options.rounds
    );
    println!(
        "{:10} {:18} {:>10} {:>7} {:>7}  {:18} {:>6}  (range)",
        "memory", "operation", "block", "ours", "limit", "limit by", "ratio"
    );
}

/// Two linked engines in two processes.
struct Bed {
    engine: DataDist,
    prefill: RefCell<Prefill>,
    peer: PeerAddress,
    remote: RemoteName,
}

impl Bed {
    fn new(options: &Options, transport: &str, local_mib: u64, remote_mib: u64) -> Bed {
        let mut prefill = Prefill::start();
        let peer = prefill.open(transport, true, remote_mib, options.streams);
        let mut config = config(1, transport, true, local_mib, options.streams);
        config.copy_workers = options.workers;
        let engine = DataDist::open(config).unwrap();
        let remote = RemoteName { cluster: ClusterId(2), name: Name::Key(KEY) };
        let bed = Bed { engine, prefill: RefCell::new(prefill), peer, remote };
        bed.link();
        let state = &bed.engine.stats().links[0];
        assert!(transport == "tcp" || state.registered == "process", "{:?}", state.refusal);
        bed
    }

    fn link(&self) {
        self.engine.link_clusters(std::slice::from_ref(&self.peer), LIMIT).remove(0).unwrap();
    }

    /// Links again, so that both sides have new mappings of the other's memory.
    fn link_again(&self) {
        self.engine.unlink_clusters(std::slice::from_ref(&self.peer), LIMIT, false).remove(0).unwrap();
        self.link();
    }

    fn tell(&self, order: &str) -> String {
        self.prefill.borrow_mut().ask(order)
    }

    fn pull(&self, target: &Blocks, from: &[i64], to: &[i64]) {
        let rows = Rows::Blocks { remote: from.to_vec(), local: to.to_vec() };
        self.engine.pull(self.remote, &target.end, rows, Layers::ALL).run().unwrap();
    }

    fn push(&self, target: &Blocks, from: &[i64], to: &[i64]) {
        let rows = Rows::Blocks { local: from.to_vec(), remote: to.to_vec() };
        self.engine.push(&target.end, self.remote, rows, Layers::ALL).run().unwrap();
    }

    fn drop_blocks(&self, blocks: &Blocks) {
        if let End::Managed(id) = blocks.end {
            self.engine.deallocate(id).unwrap();
            self.engine.unregister(id).unwrap();
        }
    }
}

/// Pulls and pushes everything: with existing mappings and, if mappings matter, over a link that was made
/// just before.
fn ours<'a>(
    bed: &'a Bed,
    target: &'a Blocks,
    local: &'a Blocks,
    from: &'a [i64],
    to: &'a [i64],
    cold: bool,
) -> Vec<Way<'a>> {
    let pull = || bed.pull(target, from, to);
    let push = || bed.push(local, from, to);
    let pulled = || target.verify(1, from, to);
    let pushed = || {
        bed.tell(&format!("verify 2 {SEED}"));
        bed.tell("fill 1");
    };
    let poison_remote = || drop(bed.tell("poison"));
    let mut ways = vec![
        Way::new("pull", pull)
            .before(move || {
                pull();
                target.poison();
            })
            .after(pulled),
        Way::new("push", push)
            .before(move || {
                push();
                poison_remote();
            })
            .after(pushed),
    ];
    if cold {
        ways.push(
            Way::new("pull, cold", pull)
                .before(move || {
                    target.poison();
                    bed.link_again();
                })
                .after(pulled),
        );
        ways.push(
            Way::new("push, cold", push)
                .before(move || {
                    poison_remote();
                    bed.link_again();
                })
                .after(pushed),
        );
    }
    ways
}

/// The memory of pools, mapped, beside the copy loops inside this process.
pub fn pools(options: &Options) {
    heading("pools of one host", options);
    let bed = Bed::new(options, "shm", options.mib * 2 + 1, options.mib + 1);
    for &kib in &options.blocks {
        let len = kib << 10;
        let rows = (options.mib << 20) / len;
        bed.tell(&format!("blocks pool {rows} {len}"));
        let (target, local) =
            (Blocks::pool(&bed.engine, rows, len, false), Blocks::pool(&bed.engine, rows, len, false));
        target.poison();
        local.fill(2);
        let mut shuffle = Shuffle(SEED);
        let (from, to) = (shuffle.order(rows), shuffle.order(rows));
        let moves = from.iter().zip(&to).map(|(&from, &to)| (local.at(from), target.at(to))).collect();
        let flat = Flat { moves, len: len as usize };
        let sorted = flat.sorted();
        let limits = LOOPS.iter().map(|&(name, copy, threads, in_order)| {
            let flat = if in_order { &sorted } else { &flat };
            Way::new(name, move || loop_over(flat, threads, copy)).before(|| target.poison())
        });
        compare(
            "pool",
            len,
            target.bytes(),
            options,
            limits.collect(),
            ours(&bed, &target, &local, &from, &to, true),
        );
        bed.drop_blocks(&target);
        bed.drop_blocks(&local);
    }
}

/// Registered memory, read by process id, beside the bare system call.
pub fn registered(options: &Options) {
    heading("registered memory of one host", options);
    let bed = Bed::new(options, "shm", 0, 0);
    let (one, other) = (mapped(options.mib << 20), mapped(options.mib << 20));
    let pid = bed.prefill.borrow().pid();
    let workers = options.workers.unwrap_or(4);
    for &kib in &options.blocks {
        let len = kib << 10;
        let rows = (options.mib << 20) / len;
        let remote: u64 = bed.tell(&format!("blocks own {rows} {len}")).parse().unwrap();
        let target = Blocks::own(&bed.engine, one, rows, len, false);
        let local = Blocks::own(&bed.engine, other, rows, len, false);
        local.fill(2);
        let mut shuffle = Shuffle(SEED);
        let (from, to) = (shuffle.order(rows), shuffle.order(rows));
        let moves =
            from.iter().zip(&to).map(|(&from, &to)| (remote + from as u64 * len, target.at(to))).collect();
        let flat = &Flat { moves, len: len as usize };
        let limits = [8, 32, 128, 1024].into_iter().flat_map(|batch| {
            [2, workers].map(|threads| {
                Way::new(format!("readv {batch} x{threads}"), move || bare_reads(pid, flat, batch, threads))
                    .before(|| target.poison())
            })
        });
        let ours = ours(&bed, &target, &local, &from, &to, false);
        compare("registered", len, target.bytes(), options, limits.collect(), ours);
        bed.drop_blocks(&target);
        bed.drop_blocks(&local);
    }
}

/// Reads `batch` blocks per system call. `threads` threads take batches in turn.
fn bare_reads(pid: i32, flat: &Flat, batch: usize, threads: usize) {
    let batch = batch.min(flat.moves.len().div_ceil(threads));
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let at = next.fetch_add(batch, Ordering::Relaxed);
            if at >= flat.moves.len() {
                return;
            }
            let moves = &flat.moves[at..flat.moves.len().min(at + batch)];
            let vector = |at: u64| libc::iovec { iov_base: at as *mut libc::c_void, iov_len: flat.len };
            let remote: Vec<_> = moves.iter().map(|&(src, _)| vector(src)).collect();
            let target: Vec<_> = moves.iter().map(|&(_, dst)| vector(dst)).collect();
            let count = moves.len() as libc::c_ulong;
            // SAFETY: the local blocks are live memory of this process.
            let got =
                unsafe { libc::process_vm_readv(pid, target.as_ptr(), count, remote.as_ptr(), count, 0) };
            assert_eq!(got, (moves.len() * flat.len) as isize);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
}

/// Sockets, compared with a bare stream of the same bytes between the same processes.
pub fn tcp(options: &Options) {
    heading(&format!("TCP over the loopback, {} streams", options.streams), options);
    let bed = Bed::new(options, "tcp", options.mib * 2 + 1, options.mib + 1);
    for &kib in &options.blocks {
        let len = kib << 10;
        let rows = (options.mib << 20) / len;
        bed.tell(&format!("blocks pool {rows} {len}"));
        let (target, local) =
            (Blocks::pool(&bed.engine, rows, len, false), Blocks::pool(&bed.engine, rows, len, false));
        target.poison();
        local.fill(2);
        let mut shuffle = Shuffle(SEED);
        let (from, to) = (shuffle.order(rows), shuffle.order(rows));
        let port: u16 = bed.tell("bare").parse().unwrap();
        let streams: &Vec<TcpStream> = &(0..options.streams.max(2))
            .map(|_| {
                let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                stream.set_nodelay(true).unwrap();
                stream
            })
            .collect();
        let (target, local) = (&target, &local);
        let mut counts = vec![1, options.streams];
        counts.dedup();
        let bare = |out: bool| {
            let ways = [64, 256, 1024, 4096]
                .into_iter()
                .flat_map(|kib| counts.iter().map(move |&count| (kib, count)));
            let way = |(kib, count): (u64, usize)| {
                let memory = if out { target } else { local };
                let way = Way::new(format!("{kib} KiB x{count}"), move || {
                    bare_streams(&streams[..count], memory, out, kib << 10);
                });
                if out {
                    way.before(|| target.poison())
                } else {
                    way.before(|| drop(bed.tell("poison"))).after(|| drop(bed.tell("fill 1")))
                }
            };
            ways.map(way).collect::<Vec<_>>()
        };
        let mut ours = ours(&bed, target, local, &from, &to, false);
        let push = ours.pop().into_iter().collect();
        compare("tcp", len, target.bytes(), options, bare(true), ours);
        compare("tcp", len, target.bytes(), options, bare(false), push);
        bed.drop_blocks(target);
        bed.drop_blocks(local);
    }
}

/// Moves everything through `streams`, in equal parts: from the other process if `out` is set, otherwise to
/// it.
fn bare_streams(streams: &[TcpStream], memory: &Blocks, out: bool, chunk: u64) {
    let part = memory.bytes() / streams.len() as u64;
    std::thread::scope(|scope| {
        for (index, stream) in streams.iter().enumerate() {
            let (from, to) = (index as u64 * part, (index as u64 + 1) * part);
            let base = memory.base;
            let work = move || {
                order_bare(stream, out, chunk, from, to);
                if out {
                    receive_bare(stream, base, chunk, from, to);
                } else {
                    send_bare(stream, base, chunk, from, to);
                    std::io::Read::read_exact(&mut &*stream, &mut [0]).unwrap();
                }
            };
            if index + 1 == streams.len() { work() } else { drop(scope.spawn(work)) }
        }
    });
}

/// Very many blocks in one call, and very many callers.
pub fn many(options: &Options) {
    const LEN: u64 = 16 << 10;
    const ROWS: u64 = 60_000;
    heading("60,000 blocks in one call, and 32 callers", options);
    for transport in ["shm", "tcp"] {
        let mib = ((ROWS * LEN) >> 20) + 1;
        let bed = Bed::new(options, transport, mib, mib);
        bed.tell(&format!("blocks pool {ROWS} {LEN}"));
        let target = Blocks::pool(&bed.engine, ROWS, LEN, false);
        let mut shuffle = Shuffle(SEED);
        let (from, to) = (shuffle.order(ROWS), shuffle.order(ROWS));
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..=options.rounds {
            for (threads, times) in [1, 32].into_iter().zip(&mut times) {
                target.poison();
                let share = from.len().div_ceil(threads);
                let took = timed(|| {
                    std::thread::scope(|scope| {
                        for (from, to) in from.chunks(share).zip(to.chunks(share)) {
                            let (bed, target) = (Calls(&bed), &target);
                            scope.spawn(move || bed.pull(target, from, to));
                        }
                    });
                });
                target.verify(1, &from, &to);
                if round > 0 {
                    times.push(took);
                }
            }
        }
        for (threads, mut times) in [1, 32].into_iter().zip(times) {
            let took = median(&mut times);
            println!(
                "{transport:10} pull of {ROWS} blocks of 16 KiB, {threads:2} threads: {:.1} ms, {:.2} GB/s ({:.2}-{:.2})",
                took * 1e3,
                (ROWS * LEN) as f64 / took / 1e9,
                (ROWS * LEN) as f64 / times[times.len() - 1] / 1e9,
                (ROWS * LEN) as f64 / times[0] / 1e9,
            );
        }
    }
}

/// The part of a bed that several threads use.
#[derive(Clone, Copy)]
struct Calls<'a>(&'a Bed);

// SAFETY: the threads use only the engine, which is made to be shared.
unsafe impl Send for Calls<'_> {}

impl Calls<'_> {
    fn pull(self, target: &Blocks, from: &[i64], to: &[i64]) {
        self.0.pull(target, from, to);
    }
}
