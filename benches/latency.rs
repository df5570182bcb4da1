//! Measures the duration of single calls with default settings: p50, p99 and p99.99 of copies, swaps and
//! pulls, compared with a bare copy loop.
//!
//! `cargo bench -p llm-datadist-core --bench latency [-- --only copy,pull --sizes 262144 --seconds 1 --plain]`
//!
//! Each call moves one block to a random place. Calls and bare copies of the same size take turns in batches, so both see
//! the same disturbances of the machine. `pull_by_kernel` and `pull_by_thread` are the calls of `pull_registered`, beside
//! two other loops: one of the system call that reads another process's memory, and one that has a second thread make that
//! call. `--plain` prints one line of numbers for each row, for `benches/latency.py`, which
//! compares two commits. Both engines live in this process. Not for: throughput (`copy`, `transfer`).

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark stops at the first surprise")]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "sizes of a few GiB"
)]
#![allow(missing_docs, reason = "a benchmark is read from its source")]
#![allow(unsafe_code, reason = "the bare copy loop and the memory it works on")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{
    Cache, Config, DataDist, End, Layers, Name, PeerAddress, PoolConfig, RemoteName, Role, Rows,
};
use llm_datadist_core::testing::memory::Region;
use llm_datadist_core::{Adopted, CacheDesc, CacheKind, ClusterId, DataType, Placement};
use llm_datadist_embed::KeptLists;

/// As in the libraries for Python and C.
#[global_allocator]
static LISTS: KeptLists = KeptLists::new();

/// Bytes of each pool, and of the memory on either side of the bare copies.
const POOL: u64 = 128 << 20;
/// Number of calls of one size before the turn of the bare loop.
const BATCH: usize = 32;
/// Minimum and maximum number of calls of one row.
const CALLS: (usize, usize) = (48, 40_000);
const SIZES: [u64; 6] = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// The size to which the p99.99 bound applies; it gets more time.
const JUDGED: u64 = 256 << 10;
const KINDS: [&str; 9] = [
    "copy",
    "swap_out",
    "swap_in",
    "pull",
    "pull_registered",
    "pull_by_kernel",
    "pull_by_thread",
    "swap_list",
    "pull_list",
];
/// Length of work between two rests, and of a rest: the kernel stops a real-time thread that uses 95 % of a
/// second.
const REST: (Duration, Duration) = (Duration::from_millis(200), Duration::from_millis(20));
/// Blocks of one call of `swap_list` and `pull_list`, and bytes of each.
const LISTS_OF: [(u64, u64); 3] = [(1 << 10, 4 << 10), (4 << 10, 4 << 10), (32 << 10, 1 << 10)];

struct Options {
    only: Vec<String>,
    sizes: Vec<u64>,
    seconds: f64,
    plain: bool,
}

fn options() -> Options {
    let mut options = Options { only: vec![], sizes: SIZES.to_vec(), seconds: 0.5, plain: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("a value after the option");
        match word.as_str() {
            "--only" => options.only = value().split(',').map(str::to_owned).collect(),
            "--sizes" => options.sizes = value().split(',').map(|size| size.parse().unwrap()).collect(),
            "--seconds" => options.seconds = value().parse().unwrap(),
            "--plain" => options.plain = true,
            _ => {} // what cargo itself passes
        }
    }
    options
}

/// A small generator, so that the places are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// An engine with the default settings and two pools.
fn engine(cluster: u64) -> DataDist {
    let mut config = Config::new(Role::Mix, ClusterId(cluster));
    config.device_pool = Some(PoolConfig { memory_size: POOL, page_shift: 16 });
    config.host_pool = config.device_pool;
    config.sync_timeout = Duration::from_secs(60);
    config.remote_accessible = true;
    config.links.listen = Some(([127, 0, 0, 1], 0).into());
    DataDist::open(config).unwrap()
}

fn desc(placement: Placement, block: u64) -> CacheDesc {
    let shape = vec![(POOL / block) as i64, block as i64];
    CacheDesc {
        num_tensors: 1,
        shape,
        data_type: DataType::Uint8,
        placement,
        row_stride: None,
        kv_layout: None,
    }
}

/// Writes to every page from `at` on.
fn touch(at: u64, bytes: u64) {
    // SAFETY: memory of a live cache, vector or region of that many bytes, which nothing else uses yet.
    unsafe { std::ptr::write_bytes(at as *mut u8, 7, bytes as usize) };
}

fn allocate(engine: &DataDist, placement: Placement, block: u64) -> Arc<Cache> {
    let cache = engine.allocate(&desc(placement, block), CacheKind::Blocks, &[]).unwrap();
    touch(cache.addrs()[0], cache.geometry().tensor_bytes());
    cache
}

/// Both ends of the bare copies: memory like that of a pool, but of no engine.
struct Bare {
    memory: [Region; 2],
    how: How,
}

/// How a bare copy is made.
enum How {
    /// By a plain copy.
    Plain,
    /// By the system call that reads another process's memory, here that of this process.
    Kernel,
    /// By the same system call, made by another thread.
    Thread(Helper),
}

impl Bare {
    fn new(how: How) -> Bare {
        let memory = [(); 2].map(|()| Region::shared("bare", POOL).unwrap());
        for region in &memory {
            touch(region.base(), POOL);
        }
        Bare { memory, how }
    }

    fn copy(&self, (src, dst): (u64, u64), block: u64) {
        let (from, to) = (self.memory[0].base() + src * block, self.memory[1].base() + dst * block);
        match &self.how {
            // SAFETY: both blocks lie inside the two live regions, which do not overlap.
            How::Plain => unsafe {
                std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, block as usize);
            },
            How::Kernel => read_by_kernel([from, to, block]),
            How::Thread(helper) => helper.read([from, to, block]),
        }
    }
}

/// Copies `block` bytes from the first region of a [`Bare`] to the second one.
fn read_by_kernel([from, to, block]: [u64; 3]) {
    let [from, to] =
        [from, to].map(|at| libc::iovec { iov_base: at as *mut libc::c_void, iov_len: block as usize });
    let pid = std::process::id() as libc::pid_t;
    // SAFETY: one part each, inside two live regions, of which nobody else uses the second.
    let read = unsafe { libc::process_vm_readv(pid, &raw const to, 1, &raw const from, 1, 0) };
    assert_eq!(read, block as isize);
}

/// A thread that reads for others. Both sides poll for 50 µs before they sleep, as the engine does.
struct Helper(Arc<Errand>, thread::Thread);

#[derive(Default)]
struct Errand {
    what: Mutex<[u64; 3]>,
    asked: AtomicU64,
    done: AtomicU64,
    caller: Mutex<Option<thread::Thread>>,
}

impl Helper {
    fn new() -> Helper {
        let errand = Arc::new(Errand::default());
        let theirs = errand.clone();
        let helper = thread::spawn(move || {
            for number in 1.. {
                until(&theirs.asked, number);
                read_by_kernel(*theirs.what.lock().unwrap());
                theirs.done.store(number, Ordering::Release);
                theirs.caller.lock().unwrap().as_ref().unwrap().unpark();
            }
        });
        Helper(errand, helper.thread().clone())
    }

    fn read(&self, what: [u64; 3]) {
        let Helper(errand, helper) = self;
        *errand.what.lock().unwrap() = what;
        errand.caller.lock().unwrap().get_or_insert_with(thread::current);
        let number = errand.asked.fetch_add(1, Ordering::AcqRel) + 1;
        helper.unpark();
        until(&errand.done, number);
    }
}

/// Waits until `counter` has reached `number`.
fn until(counter: &AtomicU64, number: u64) {
    let started = Instant::now();
    while counter.load(Ordering::Acquire) < number {
        if started.elapsed() < Duration::from_micros(50) {
            thread::yield_now();
        } else {
            thread::park();
        }
    }
}

/// Microseconds of calls and of bare copies.
#[derive(Default)]
struct Taken {
    calls: Vec<f64>,
    bare: Vec<f64>,
}

impl Taken {
    fn report(mut self, kind: &str, size: u64, plain: bool) {
        let all = [&mut self.calls, &mut self.bare].map(|taken| {
            taken.sort_by(f64::total_cmp);
            [0.5, 0.99, 0.9999].map(|share| taken[((taken.len() - 1) as f64 * share) as usize])
        });
        let [[p50, p99, p9999], [bare50, bare99, bare9999]] = all;
        let count = self.calls.len();
        if plain {
            println!("row,{kind},{size},{count},{p50},{p99},{p9999},{bare50},{bare99},{bare9999}");
        } else {
            println!(
                "| {kind} | {} KiB | {count} | {p50:.1} | {p99:.1} | {p9999:.1} | {bare50:.1} | {bare99:.1} | {bare9999:.1} | {:.2} | {:.2} |",
                size >> 10,
                p50 / bare50,
                p9999 / bare9999
            );
        }
    }
}

fn micros(call: impl FnOnce()) -> f64 {
    let started = Instant::now();
    call();
    started.elapsed().as_secs_f64() * 1e6
}

/// Measures calls and bare copies of `block` bytes in turn, for about `seconds`. `call` moves block `.0` to
/// block `.1`.
fn measured(block: u64, seconds: f64, bare: &Bare, mut call: impl FnMut((u64, u64))) -> Taken {
    let blocks = POOL / block;
    let (mut random, mut taken) = (Random(0x1357_9BDF_0246_8ACE), Taken::default());
    let batch = BATCH.min((64 << 20) / block as usize);
    let (started, mut rested) = (Instant::now(), Instant::now());
    while taken.calls.len() < CALLS.0
        || (started.elapsed().as_secs_f64() < seconds && taken.calls.len() < CALLS.1)
    {
        let pairs_of_blocks: Vec<_> =
            (0..batch).map(|_| (random.below(blocks), random.below(blocks))).collect();
        taken.calls.extend(pairs_of_blocks.iter().map(|&at| micros(|| call(at))));
        taken.bare.extend(pairs_of_blocks.iter().map(|&at| micros(|| bare.copy(at, block))));
        if rested.elapsed() > REST.0 {
            thread::sleep(REST.1);
            rested = Instant::now();
        }
    }
    taken
}

fn link(local: &DataDist, remote: &DataDist) {
    let peer =
        PeerAddress { cluster: ClusterId(2), remote: vec![remote.listening().unwrap()], local: vec![] };
    for outcome in local.link_clusters(&[peer], Duration::from_secs(5)) {
        outcome.unwrap();
    }
}

/// Two linked engines, a cache of the second and one of the first.
struct Pair {
    local: DataDist,
    source: Arc<Cache>,
    to: Arc<Cache>,
    // Declared after everything that uses it, and its memory last, because fields drop in order.
    remote: DataDist,
    memory: Vec<u8>,
}

impl Pair {
    fn new(block: u64, registered: bool) -> Pair {
        let (local, remote) = (engine(1), engine(2));
        let memory = vec![0_u8; if registered { POOL as usize + (2 << 20) } else { 0 }];
        let at = (memory.as_ptr() as u64).next_multiple_of(2 << 20);
        let source = if registered {
            touch(at, POOL);
            // SAFETY: the memory lives as long as the pair, and nothing else touches it.
            let adopted = unsafe { Adopted::new(&desc(Placement::Device, block), CacheKind::Blocks, &[at]) };
            remote.register(adopted.unwrap(), &[], Some(true)).unwrap()
        } else {
            allocate(&remote, Placement::Device, block)
        };
        let to = allocate(&local, Placement::Device, block);
        link(&local, &remote);
        Pair { local, source, to, remote, memory }
    }

    fn pull(&self, remote: Vec<i64>, local: Vec<i64>) {
        let name = RemoteName { cluster: ClusterId(2), name: Name::Row { cache: self.source.id(), row: 0 } };
        let rows = Rows::Blocks { remote, local };
        self.local.pull(name, &End::Managed(self.to.id()), rows, Layers::ALL).run().unwrap();
    }
}

/// Pulls of one block a call.
fn pulls(block: u64, seconds: f64, bare: &Bare, registered: bool) -> Taken {
    let pair = Pair::new(block, registered);
    let taken = measured(block, seconds, bare, |(src, dst)| pair.pull(vec![src as i64], vec![dst as i64]));
    let Pair { local, source, to, remote, memory } = pair;
    drop((local, source, to, remote, memory));
    taken
}

/// Copies and swaps of one block a call.
fn local(kind: &str, block: u64, seconds: f64, bare: &Bare) -> Taken {
    let engine = engine(1);
    let [device, host] = [Placement::Device, Placement::Host]
        .map(|placement| End::Managed(allocate(&engine, placement, block).id()));
    measured(block, seconds, bare, |(src, dst)| {
        let pair = [(src as i64, dst as i64)];
        match kind {
            "copy" => engine.copy_blocks(&device, &pair).run(),
            "swap_out" => engine.swap_blocks(&device, &host, &pair).run(),
            _ => engine.swap_blocks(&host, &device, &pair).run(),
        }
        .unwrap();
    })
}

/// Calls with a long list of small blocks in random order. The lists are built inside the timed part of each
/// call.
fn lists(
    (count, block): (u64, u64),
    seconds: f64,
    bare: &Bare,
    mut call: impl FnMut(&[(u64, u64)]),
) -> Taken {
    let (mut random, mut taken) = (Random(0x1357_9BDF_0246_8ACE), Taken::default());
    let mut order: Vec<u64> = (0..POOL / block).collect();
    let started = Instant::now();
    while taken.calls.len() < CALLS.0 || started.elapsed().as_secs_f64() < seconds {
        for at in 0..count as usize {
            let other = at as u64 + random.below(POOL / block - at as u64);
            order.swap(at, other as usize);
        }
        let pairs_of_blocks: Vec<_> =
            order.iter().take(count as usize).map(|&at| (at, POOL / block - 1 - at)).collect();
        taken.calls.push(micros(|| call(&pairs_of_blocks)));
        taken.bare.push(micros(|| pairs_of_blocks.iter().for_each(|&at| bare.copy(at, block))));
    }
    taken
}

fn swap_lists(list: (u64, u64), seconds: f64, bare: &Bare) -> Taken {
    let engine = engine(1);
    let [device, host] = [Placement::Device, Placement::Host]
        .map(|placement| End::Managed(allocate(&engine, placement, list.1).id()));
    lists(list, seconds, bare, |pairs_of_blocks| {
        let pairs: Vec<_> = pairs_of_blocks.iter().map(|&(src, dst)| (src as i64, dst as i64)).collect();
        engine.swap_blocks(&device, &host, &pairs).run().unwrap();
    })
}

fn pull_lists(list: (u64, u64), seconds: f64, bare: &Bare) -> Taken {
    let pair = Pair::new(list.1, false);
    lists(list, seconds, bare, |pairs_of_blocks| {
        pair.pull(
            pairs_of_blocks.iter().map(|&(src, _)| src as i64).collect(),
            pairs_of_blocks.iter().map(|&(_, dst)| dst as i64).collect(),
        );
    })
}

fn main() {
    let options = options();
    let [bare, by_kernel, by_thread] = [How::Plain, How::Kernel, How::Thread(Helper::new())].map(Bare::new);
    if !options.plain {
        println!(
            "| call | size | calls | p50 µs | p99 | p99.99 | bare p50 | p99 | p99.99 | p50 / bare | p99.99 / bare |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    }
    for kind in KINDS {
        if !options.only.is_empty() && !options.only.iter().any(|only| only == kind) {
            continue;
        }
        if kind.ends_with("_list") {
            for list in LISTS_OF {
                let run = if kind == "swap_list" { swap_lists } else { pull_lists };
                let kind = format!("{kind} of {}", list.0);
                run(list, options.seconds, &bare).report(&kind, list.0 * list.1, options.plain);
            }
            continue;
        }
        for &size in &options.sizes {
            let seconds = options.seconds * if size == JUDGED { 6.0 } else { 1.0 };
            let taken = match kind {
                "pull_by_kernel" => pulls(size, seconds, &by_kernel, true),
                "pull_by_thread" => pulls(size, seconds, &by_thread, true),
                "pull" | "pull_registered" => pulls(size, seconds, &bare, kind == "pull_registered"),
                _ => local(kind, size, seconds, &bare),
            };
            taken.report(kind, size, options.plain);
        }
    }
}
