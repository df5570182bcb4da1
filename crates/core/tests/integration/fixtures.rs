//! Memory, devices and engines for the tests.
//!
//! Expectations are in the tests or in the naive twin.
#![allow(unsafe_code, reason = "the caller's side of the promise of Adopted")]

use std::cell::{RefCell, UnsafeCell};
use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{Cache, Config, DataDist, End, Geometry, PoolConfig, Role};
use llm_datadist_core::testing::cache::{CallRows, Pin, RowUse};
use llm_datadist_core::testing::copy::CopyEngine;
use llm_datadist_core::testing::device::{Copier, Copy, Device, DeviceSet, HostReach};
use llm_datadist_core::testing::memory::kernels::Kernel;
use llm_datadist_core::testing::memory::{OwnRings, Region, Tensors};
use llm_datadist_core::testing::net::{Accepted, Address, Listener, Stream, Transport, Unix};
use llm_datadist_core::testing::plan::{CopyPlan, Moves, Pieces, Span, Template, Templates, TensorSteps};
use llm_datadist_core::testing::session::Transports;
use llm_datadist_core::{
    Adopted, CacheDesc, CacheKind, ClusterId, DataType, Deadline, Error, ErrorKind, KvLayout, KvPlanes,
    Placement, Result, TokenOrder, Transfer,
};
use llm_datadist_testing::{SimDevice, host_address};
use proptest::strategy::Strategy;
use proptest::test_runner::{TestCaseError, TestRunner};
use tracing::{Level, Subscriber, span};

use crate::emulation::{self, emulated};

/// Time limit of a test: long enough for a busy machine, short enough to report a call that hangs.
pub const LONG: Duration = Duration::from_secs(60);

/// Returns the deadline [`LONG`] from now.
pub fn soon() -> Deadline {
    Deadline::after(LONG)
}

/// Reports that a test skipped something, and why. Writes to standard error directly, because the test
/// harness hides what a passing test prints.
pub fn skipped(why: &str) {
    let thread = std::thread::current();
    let shown = format!("skipped: {}: {why}\n", thread.name().unwrap_or("a test"));
    std::io::stderr().write_all(shown.as_bytes()).unwrap();
}

/// Waits until `there` returns `true`, or fails after a minute.
pub fn eventually(what: &str, mut there: impl FnMut() -> bool) {
    let started = Instant::now();
    while !there() {
        let limit = Duration::from_secs(60);
        assert!(
            started.elapsed() < limit,
            "{what} did not come about; logged: {:#?}",
            crate::log::texts(&[])
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A small random number generator, so that a failure can be reproduced.
pub struct Chance(pub u64);

impl Chance {
    pub fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }

    pub fn index(&mut self, most: usize) -> usize {
        self.below(most as u64) as usize
    }

    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        (1..all.len()).rev().for_each(|at| all.swap(at, self.below(at as u64 + 1) as usize));
    }

    /// `count` of `rows` rows, in any order.
    pub fn shuffled(&mut self, count: usize, rows: u64) -> Vec<i64> {
        let mut all: Vec<i64> = (0..rows.cast_signed()).collect();
        self.shuffle(&mut all);
        all.truncate(count);
        all
    }
}

/// How often each kind of case came up in a property test.
#[derive(Default)]
pub struct Tally(RefCell<BTreeMap<&'static str, usize>>);

impl Tally {
    pub fn count(&self, kind: &'static str) {
        self.add(kind, 1);
    }

    pub fn add(&self, kind: &'static str, times: usize) {
        *self.0.borrow_mut().entry(kind).or_default() += times;
    }

    /// Fails unless this number of kinds came up, each at least `least` times.
    pub fn check(&self, kinds: usize, least: usize) {
        let seen = self.0.borrow();
        assert!(seen.len() == kinds && seen.values().all(|&times| times >= least), "rare: {seen:?}");
    }
}

/// Bytes that raw addresses may write. Read only while no copy runs.
pub struct Buffer(Box<[UnsafeCell<u8>]>);

// SAFETY: every test reads and writes it only between the calls of the engine that were given its address.
unsafe impl Sync for Buffer {}
// SAFETY: bytes.
unsafe impl Send for Buffer {}

impl Buffer {
    pub fn new(len: usize, fill: impl Fn(usize) -> u8) -> Arc<Buffer> {
        Arc::new(Buffer((0..len).map(|at| UnsafeCell::new(fill(at))).collect()))
    }

    pub fn addr(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let cells = &self.0[at..at + len];
        // SAFETY: the cells are bytes, and nothing writes them now, see `Sync`.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast::<u8>(), len) }.to_vec()
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        let cells = &self.0[at..at + bytes.len()];
        // SAFETY: as in `read`; cells may be written through a shared reference.
        unsafe { bytes.as_ptr().copy_to_nonoverlapping(cells.as_ptr().cast::<u8>().cast_mut(), bytes.len()) };
    }

    /// A description of `len` bytes of it from `at` on, as adopted memory of one tensor.
    pub fn adopt(&self, at: usize, len: usize) -> Adopted {
        assert!(at + len <= self.0.len());
        adopt(&desc(Placement::Host, 1, len, 1), CacheKind::Batch, &[self.addr() + at as u64])
    }
}

/// Adopts addresses that a [`Buffer`] keeps alive, or that nothing ever accesses.
pub fn adopt(desc: &CacheDesc, kind: CacheKind, addrs: &[u64]) -> Adopted {
    try_adopt(desc, kind, addrs).unwrap()
}

pub fn try_adopt(desc: &CacheDesc, kind: CacheKind, addrs: &[u64]) -> Result<Adopted> {
    // SAFETY: see `adopt`.
    unsafe { Adopted::new(desc, kind, addrs) }
}

/// Bytes that differ from their neighbours, from other tensors and from other seeds.
pub fn pattern(seed: u8, tensor: usize, at: usize) -> u8 {
    let mixed = (u64::from(seed) << 56) ^ ((tensor as u64) << 40) ^ at as u64;
    (mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 53) as u8
}

pub fn patterned(seed: u8, tensors: usize, bytes: usize) -> Vec<Vec<u8>> {
    (0..tensors).map(|tensor| (0..bytes).map(|at| pattern(seed, tensor, at)).collect()).collect()
}

pub fn desc(placement: Placement, num_tensors: u32, rows: usize, row_bytes: usize) -> CacheDesc {
    let shape = vec![rows as i64, row_bytes as i64];
    CacheDesc { num_tensors, shape, data_type: DataType::Uint8, placement, row_stride: None, kv_layout: None }
}

/// Returns a layout with all heads of a model, in layers 0 to `layers`.
pub fn kv_layout(tokens_per_block: u32, total_heads: u32, head_dim: u32, layers: u32) -> KvLayout {
    KvLayout {
        tokens_per_block,
        heads: 0..total_heads,
        total_heads,
        head_dim,
        order: TokenOrder::Nhd,
        kv: KvPlanes::Separate,
        layers: 0..layers,
        model: String::new(),
    }
}

/// The rows of a whole cache, each paired with the same row of another one.
pub fn same_rows(rows: i64) -> Vec<(i64, i64)> {
    (0..rows).map(|row| (row, row)).collect()
}

/// A cache of an engine, as one end of a copy.
pub fn end(cache: &Arc<Cache>) -> End {
    End::Managed(cache.id())
}

/// The number of bytes of a transfer that ends, or its failure.
pub fn outcome(transfer: &Transfer) -> Result<u64> {
    assert!(transfer.wait(soon()).unwrap(), "the transfer did not end");
    transfer.outcome().expect("it has ended")
}

/// Reads the bytes that `error` reports as copied, and those of the whole call.
pub fn copied_bytes(error: &Error) -> (u64, u64) {
    let fact =
        |name| error.fact(name).unwrap_or_else(|| panic!("{error} has no {name}")).parse::<u64>().unwrap();
    let (copied, of) = (fact("copied_bytes"), fact("of_bytes"));
    assert!(copied <= of, "{error}");
    (copied, of)
}

/// A cache over memory of the test. Each tensor is unaligned and lies between guard bytes.
pub struct Own {
    pub cache: Arc<Cache>,
    buffer: Arc<Buffer>,
    starts: Vec<usize>,
    tensor_bytes: usize,
}

/// Waits until no call uses the cache: the caller of a pull returns when the last byte has arrived, and its owner
/// may still be in the system call that sent it.
impl Drop for Own {
    fn drop(&mut self) {
        // Also of a cache that was freed, which admits no other call.
        let rows = llm_datadist_core::testing::cache::all_rows(&self.cache);
        let unused = rows.and_then(|rows| rows.pin(soon()));
        assert!(unused.is_ok() || std::thread::panicking(), "the cache is in use: {:?}", unused.err());
    }
}

const GUARD: u8 = 0xA5;

impl Own {
    /// A loose cache.
    pub fn loose(desc: &CacheDesc, kind: CacheKind) -> Own {
        Self::new(desc, kind, Cache::loose)
    }

    pub fn new(desc: &CacheDesc, kind: CacheKind, enter: impl FnOnce(Adopted) -> Arc<Cache>) -> Own {
        let tensor_bytes = Geometry::new(desc).unwrap().tensor_bytes() as usize;
        let starts: Vec<usize> =
            (0..desc.num_tensors as usize).map(|tensor| 67 + tensor * (tensor_bytes + 67)).collect();
        let buffer = Buffer::new(67 + starts.len() * (tensor_bytes + 67), |_| GUARD);
        let addrs: Vec<u64> = starts.iter().map(|&at| buffer.addr() + at as u64).collect();
        Own { cache: enter(adopt(desc, kind, &addrs)), buffer, starts, tensor_bytes }
    }

    /// The cache, as one end of a copy.
    pub fn end(&self) -> End {
        End::Loose(self.cache.clone())
    }

    pub fn write(&self, tensors: &[Vec<u8>]) {
        assert_eq!(tensors.len(), self.starts.len());
        for (start, bytes) in self.starts.iter().zip(tensors) {
            assert_eq!(bytes.len(), self.tensor_bytes);
            self.buffer.write(*start, bytes);
        }
    }

    pub fn read(&self) -> Vec<Vec<u8>> {
        self.starts.iter().map(|&start| self.buffer.read(start, self.tensor_bytes)).collect()
    }

    /// Fails if a byte outside the tensors changed. Returns the number of bytes that it checked.
    pub fn outside_untouched(&self) -> usize {
        let ends: Vec<usize> =
            std::iter::once(0).chain(self.starts.iter().map(|start| start + self.tensor_bytes)).collect();
        let mut seen = 0;
        for end in ends {
            let guard = self.buffer.read(end, 67);
            assert!(
                guard.iter().all(|&byte| byte == GUARD),
                "bytes outside the cache were written, near {end}"
            );
            seen += guard.len();
        }
        assert!(seen >= 2 * 67);
        seen
    }
}

/// A device like [`SimDevice`] whose copies can be held at a gate, counted, made to fail and to panic.
#[derive(Debug)]
pub struct Gated {
    sim: SimDevice,
    state: Mutex<Gate>,
    changed: Condvar,
    /// Batches that are inside `copy` now.
    pub inside: AtomicU64,
    /// Name of the thread that panics in `copy`, once.
    pub panics: Mutex<Option<String>>,
    /// Whether allocations fail.
    pub no_memory: AtomicBool,
}

#[derive(Debug, Default)]
struct Gate {
    closed: bool,
    arrived: u64,
}

impl Gated {
    pub fn new(reach: HostReach) -> Arc<Gated> {
        Arc::new(Gated {
            sim: SimDevice::new(reach),
            state: Mutex::default(),
            changed: Condvar::new(),
            inside: AtomicU64::new(0),
            panics: Mutex::new(None),
            no_memory: AtomicBool::new(false),
        })
    }

    /// From now on copies wait inside.
    pub fn shut(&self) {
        *self.state.lock().unwrap() = Gate { closed: true, arrived: 0 };
    }

    /// Makes every copy after the next `copies` ones fail.
    pub fn fail_after(&self, copies: u64) {
        self.sim.fail_after(copies);
    }

    pub fn open(&self) {
        self.state.lock().unwrap().closed = false;
        self.changed.notify_all();
    }

    /// Waits until `count` batches have arrived since the gate was shut.
    pub fn wait_for(&self, count: u64) {
        let state = self.state.lock().unwrap();
        let waited =
            self.changed.wait_timeout_while(state, Duration::from_secs(20), |gate| gate.arrived < count);
        assert!(!waited.unwrap().1.timed_out(), "fewer than {count} batches arrived");
    }
}

impl Device for Gated {
    fn allocate(&self, name: &str, len: u64) -> Result<Region> {
        if self.no_memory.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::OutOfMemory, "the gated device has no memory, as requested"));
        }
        self.sim.allocate(name, len)
    }

    fn host_reach(&self) -> HostReach {
        self.sim.host_reach()
    }
}

impl Copier for Gated {
    fn copy(&self, batch: &[Copy<'_>], kernel: Kernel) -> Result<()> {
        struct Leave<'a>(&'a Gated);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                self.0.inside.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.inside.fetch_add(1, Ordering::SeqCst);
        let _leave = Leave(self);
        let here = std::thread::current().name().unwrap_or("").to_owned();
        let panics = self.panics.lock().unwrap().take_if(|name| here.contains(name.as_str())).is_some();
        if panics {
            // Wait until another batch is inside too.
            self.wait_for(1);
            std::panic::panic_any("the gated device panics, as requested");
        }
        let mut gate = self.state.lock().unwrap();
        gate.arrived += 1;
        self.changed.notify_all();
        drop(self.changed.wait_timeout_while(gate, Duration::from_secs(20), |gate| gate.closed).unwrap());
        self.sim.copy(batch, kernel)
    }
}

/// Returns a configuration with both pools of `bytes`, 64 KiB pages, and a limit that no test reaches by accident.
pub fn config(bytes: u64) -> Config {
    pools(bytes, 16)
}

/// As [`config`], with pages of 2^`page_shift` bytes.
pub fn pools(memory_size: u64, page_shift: u32) -> Config {
    let mut config = Config::new(Role::Prompt, ClusterId(1));
    config.device_pool = Some(PoolConfig { memory_size, page_shift });
    config.host_pool = config.device_pool;
    config.sync_timeout = Duration::from_secs(60);
    config
}

pub fn engine_on(config: Config, device: Arc<dyn Device>) -> DataDist {
    DataDist::open_over(config, DeviceSet::with_device(device), Transports::default()).unwrap()
}

/// Runs `default` cases, but at most `emulation::MAX_CASES` under emulation. `PROPTEST_CASES` sets another number.
pub fn proptest_cases(default: u32) -> proptest::test_runner::Config {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok());
    let affordable = || default.min(if emulated() { emulation::MAX_CASES } else { default });
    proptest::test_runner::Config {
        cases: asked.unwrap_or_else(affordable),
        failure_persistence: None,
        ..proptest::test_runner::Config::default()
    }
}

/// Runs `test` for values of the strategy, like `proptest!`, but where the test can count them.
pub fn for_all<S: Strategy>(cases: u32, values: &S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    if let Err(error) = TestRunner::new(proptest_cases(cases)).run(values, test) {
        panic!("{error}");
    }
}

/// Writes the tensors of a pool cache. Only while no copy runs.
pub fn fill(cache: &Cache, tensors: &[Vec<u8>]) {
    assert_eq!(tensors.len(), cache.addrs().len());
    for (&addr, bytes) in cache.addrs().iter().zip(tensors) {
        assert_eq!(bytes.len() as u64, cache.geometry().tensor_bytes());
        let addr = host_address(addr).unwrap_or(addr);
        // SAFETY: the tensor is `len` bytes of a pool, alive as long as the cache, and used by nobody else now. If the
        // pool belongs to a simulated device, these are the bytes behind it.
        unsafe { (addr as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

/// The tensors of a cache. Only while no copy runs.
pub fn contents(cache: &Cache) -> Vec<Vec<u8>> {
    let len = cache.geometry().tensor_bytes() as usize;
    let tensor = |&addr: &u64| {
        let addr = host_address(addr).unwrap_or(addr);
        // SAFETY: as in `fill`.
        unsafe { std::slice::from_raw_parts(addr as *const u8, len) }.to_vec()
    };
    cache.addrs().iter().map(tensor).collect()
}

/// Sets a flag when dropped, so that threads that check the flag also end if the test fails.
pub struct StopOnDrop<'a>(pub &'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A subscriber that keeps the level, the message and the fields of every event of one target.
#[derive(Clone)]
pub struct EventLog {
    target: &'static str,
    /// Called at every event.
    call: Arc<dyn Fn() + Send + Sync>,
    lines: Arc<Mutex<Vec<(Level, String)>>>,
}

impl EventLog {
    pub fn new(target: &'static str) -> EventLog {
        Self::calling(target, || ())
    }

    pub fn calling(target: &'static str, call: impl Fn() + Send + Sync + 'static) -> EventLog {
        EventLog { target, call: Arc::new(call), lines: Arc::default() }
    }

    pub fn lines(&self) -> Vec<(Level, String)> {
        self.lines.lock().unwrap().clone()
    }
}

impl Subscriber for EventLog {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == self.target
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        use std::fmt::Write as _;
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                write!(self.0, " {}={value:?}", field.name()).unwrap();
            }
        }
        (self.call)();
        let mut text = Text(String::new());
        event.record(&mut text);
        self.lines.lock().unwrap().push((*event.metadata().level(), text.0));
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Both ends of a stream in this process.
pub fn local_streams(name: &str) -> (Stream, Stream) {
    let at = Address::Unix(format!("llm_datadist-{name}-{}-{:?}", std::process::id(), Instant::now()));
    let listener = Unix.listen(&at).unwrap();
    let dialled = Unix.dial(&at, soon()).unwrap();
    (dialled, accepted(&*listener).unwrap())
}

/// As [`local_streams`], with rings.
pub fn ringed_streams(name: &str) -> (Stream, Stream) {
    let (dialled, accepted) = local_streams(name);
    share_rings(&dialled, &accepted);
    (dialled, accepted)
}

/// Switches both ends of a stream to rings.
pub fn share_rings(local: &Stream, remote: &Stream) {
    let ((of_local, local_file), (of_remote, remote_file)) =
        (OwnRings::create().unwrap(), OwnRings::create().unwrap());
    local.use_rings(of_local.join(&remote_file).unwrap());
    remote.use_rings(of_remote.join(&local_file).unwrap());
    assert!(local.has_rings() && remote.has_rings());
}

/// A copy engine with its defaults, and counters of its own.
pub fn copy_engine() -> CopyEngine {
    CopyEngine::new(&Config::new(Role::Mix, ClusterId(1)), DeviceSet::host_only())
}

/// A copy engine whose workers all tests share that count nothing.
pub fn shared_copy_engine() -> &'static CopyEngine {
    static SHARED: LazyLock<CopyEngine> = LazyLock::new(copy_engine);
    &SHARED
}

/// Tensors of rows over one buffer, which `fill` fills by tensor and offset.
pub fn tensors_over(
    tensors: usize,
    rows: usize,
    row: usize,
    fill: impl Fn(usize, usize) -> u8,
) -> (Arc<Buffer>, Arc<Tensors>) {
    let tensor = rows * row;
    let buffer = Buffer::new(tensors * tensor, |at| fill(at / tensor, at % tensor));
    let addrs: Vec<u64> = (0..tensors).map(|index| buffer.addr() + (index * tensor) as u64).collect();
    let adopted = adopt(&desc(Placement::Host, tensors as u32, rows, row), CacheKind::Blocks, &addrs);
    (buffer, Arc::new(Tensors::adopted(adopted)))
}

/// Pairs of blocks to move.
pub fn block_moves(pairs: &[(u64, u64)], block_bytes: u64, num_tensors: u32) -> Moves {
    let pieces = Pieces::blocks(block_bytes, pairs.iter().copied()).unwrap();
    Moves { pieces, num_tensors, ..Moves::default() }
}

/// The plan of pairs of blocks between two caches.
pub fn block_plan(pairs: &[(u64, u64)], block_bytes: u64, num_tensors: u32) -> CopyPlan {
    CopyPlan::moves(&mut block_moves(pairs, block_bytes, num_tensors)).unwrap()
}

/// The plan of a peer that sends a list of spans.
pub fn plan_of_peer(num_tensors: u32, src: u32, dst: u32, spans: Vec<Span>) -> Result<CopyPlan, Error> {
    let [src, dst] = [src, dst].map(TensorSteps::consecutive);
    let templates = if spans.is_empty() { vec![] } else { vec![Template::new((0, 0), vec![(0, 0)], spans)] };
    CopyPlan::from_templates(num_tensors, src, dst, listed(templates))
}

/// The templates of a plan or of its message.
pub fn listed(templates: Vec<Template>) -> Templates {
    Arc::new(templates.into())
}

/// Returns the next stream at `listener`, which a peer has dialled or is about to dial; `None` once it is closed.
pub fn accepted(listener: &dyn Listener) -> Option<Stream> {
    loop {
        match listener.accept().unwrap() {
            Accepted::Stream(stream) => return Some(*stream),
            Accepted::Closed => return None,
            Accepted::NoRoom(errno) => panic!("no room for a connection: {errno}"),
            Accepted::Nobody => {
                let ready = listener.readiness();
                let limit = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
                let mut watched = [rustix::event::PollFd::new(&ready, rustix::event::PollFlags::IN)];
                let found = rustix::event::poll(&mut watched, Some(&limit)).unwrap();
                assert!(found > 0, "nobody came to {} within a minute", listener.address());
            }
        }
    }
}

/// Takes rows that a call reads.
pub fn pin_reads(cache: &Arc<Cache>, reads: Vec<u64>, deadline: Deadline) -> Result<Pin, Error> {
    CallRows::of(cache.clone(), RowUse { reads: reads.into(), ..RowUse::default() }).pin(deadline)
}

/// Takes rows that a call writes.
pub fn pin_writes(cache: &Arc<Cache>, writes: Vec<u64>, deadline: Deadline) -> Result<Pin, Error> {
    CallRows::of(cache.clone(), RowUse { writes: writes.into(), ..RowUse::default() }).pin(deadline)
}
