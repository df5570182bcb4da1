//! Memory of a process that does not answer the kernel. A read leaves at its deadline, keeps what the kernel may still write
//! to, and costs a bounded number of threads.
//!
//! Most tests stall reads of addresses of this process (`memory::stalled`); one has a peer with userfaultfd memory.
#![allow(unsafe_code, reason = "memory behind userfaultfd")]

use std::io;
use std::ptr::null_mut;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::testing::copy::{CopyEngine, STILL_READING, Staging};
use llm_datadist_core::testing::device::DeviceSet;
use llm_datadist_core::testing::memory::stalled::Stall;
use llm_datadist_core::testing::memory::{PeerProcess, Probe, Tensors, allow_readers, own_probe};
use llm_datadist_core::testing::plan::{BlockPairs, CopyPlan, Ends};
use llm_datadist_core::{CacheKind, Config, Deadline, ErrorKind, Placement, Result, SwapInPath};

use crate::child_process::{self, Process, report};
use crate::fixtures::{Buffer, EventLog, adopt, config, desc, pattern, skipped};

const STRAIGHT: Staging = Staging { path: SwapInPath::Auto, buffer_bytes: 1 << 20 };
/// Threads that one process can cost, by default.
const THREADS_OF_A_PROCESS: usize = 8;
const SHORT: Duration = Duration::from_millis(60);
/// A limit that no test runs into unless it hangs.
const LONG: Duration = Duration::from_secs(60);

fn engine() -> CopyEngine {
    CopyEngine::new(&Config { copy_workers: Some(4), ..config(1 << 20) }, DeviceSet::host_only()).unwrap()
}

fn own_pid() -> i32 {
    std::process::id() as i32
}

/// A copy of one tensor of `rows` rows, from a process into this one.
struct Read {
    src: Arc<Buffer>,
    dst: Arc<Buffer>,
    from: Arc<Tensors>,
    to: Arc<Tensors>,
    plan: CopyPlan,
    /// Stands for the pins of a call.
    pins: Arc<()>,
}

impl Read {
    /// From memory of this process, read through the kernel.
    fn new(rows: usize, row: usize) -> Read {
        let src = Buffer::new(rows * row, |at| pattern(5, 0, at));
        let own = PeerProcess::open(own_pid(), own_probe().unwrap()).unwrap();
        let from = Tensors::of_process(own, vec![src.addr()], (rows * row) as u64).unwrap();
        Read::from(from, src, rows, row)
    }

    fn from(from: Tensors, src: Arc<Buffer>, rows: usize, row: usize) -> Read {
        let dst = Buffer::new(rows * row, |_| 0xEE);
        let to = adopt(&desc(Placement::Host, 1, rows, row), CacheKind::Blocks, &[dst.addr()]);
        let pairs = (0..rows as u64).map(|at| (at, at)).collect();
        let request = BlockPairs { pairs, block_bytes: row as u64, num_tensors: 1 };
        let plan = CopyPlan::blocks(&request, Ends::TwoCaches).unwrap();
        Read {
            src,
            dst,
            from: Arc::new(from),
            to: Arc::new(Tensors::adopted(to)),
            plan,
            pins: Arc::default(),
        }
    }

    fn stall(&self) -> Stall {
        Stall::new(self.src.addr()..self.src.addr() + self.plan.bytes())
    }

    fn run(&self, engine: &CopyEngine, limit: Duration) -> Result<()> {
        let (from, to) = ((&self.from, Placement::Host), (&self.to, Placement::Host));
        let (deadline, progress, pins) = (Deadline::after(limit), Arc::default(), self.pins.clone());
        let outcome = engine.run_holding(self.plan.clone(), from, to, STRAIGHT, deadline, &progress, pins)?;
        assert_eq!(outcome.bytes, self.plan.bytes());
        assert!(self.dst.read(0, self.len()) == self.src.read(0, self.len()));
        Ok(())
    }

    fn len(&self) -> usize {
        self.plan.bytes() as usize
    }

    /// Loses a thread in a read.
    fn lose(&self, engine: &CopyEngine) {
        lose(own_pid(), || self.run(engine, SHORT));
    }

    /// Whether the kernel may still write to the destination.
    fn is_held(&self) -> bool {
        Arc::strong_count(&self.pins) > 1 && Arc::strong_count(&self.to) > 1
    }

    fn eventually_released(&self) {
        eventually("the end of the kernel's calls", || Arc::strong_count(&self.pins) == 1);
        assert_eq!(Arc::strong_count(&self.to), 1);
    }
}

fn eventually(what: &str, mut there: impl FnMut() -> bool) {
    let started = Instant::now();
    while !there() {
        assert!(started.elapsed() < LONG, "{what} did not come about");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Makes calls until one runs out of time with a thread inside the kernel. On a busy machine a call may run out of time
/// before its thread has started.
fn lose(pid: i32, mut call: impl FnMut() -> Result<()>) {
    let error = loop {
        let error = call().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        if error.fact(STILL_READING).is_some() {
            break error;
        }
    };
    assert_eq!(error.fact(STILL_READING), Some(pid.to_string().as_str()), "{error}");
    assert!(error.to_string().contains("may still write to the destination rows"), "{error}");
}

#[test]
fn a_read_leaves_at_its_deadline_and_keeps_what_the_kernel_writes_to() {
    // One unit, and several.
    for (rows, row) in [(4, 4096), (64, 256 << 10)] {
        let (engine, read) = (engine(), Read::new(rows, row));
        let stall = read.stall();
        read.lose(&engine);
        assert!(read.is_held());
        assert!(read.dst.read(0, read.len()).iter().all(|&byte| byte == 0xEE));
        drop(stall);
        read.eventually_released();
        // The first unit came late, as the error warned.
        assert!(read.dst.read(0, 4096) == read.src.read(0, 4096));
        read.run(&engine, LONG).unwrap();
        assert_eq!(Arc::strong_count(&read.pins), 1, "a call that has ended keeps nothing");
    }
}

#[test]
fn one_process_costs_a_bounded_number_of_threads_and_then_fails_fast() {
    let (engine, silent) = (engine(), Read::new(4, 4096));
    let stall = silent.stall();
    for lost in 1..=THREADS_OF_A_PROCESS {
        silent.lose(&engine);
        eventually("the read", || stall.waiting() == lost);
    }
    // This test would not wait for the limit.
    let error = silent.run(&engine, Duration::from_secs(3600)).unwrap_err();
    assert_eq!((error.kind(), error.fact("threads")), (ErrorKind::Timeout, Some("8")), "{error}");
    assert_eq!(error.fact(STILL_READING), None, "nothing of this call is under way");
    assert_eq!(error.fact("pid"), Some(own_pid().to_string().as_str()));
    // Neither copies inside this process nor reads of another one wait for those threads.
    Peer::start("answers").read().run(&engine, LONG).unwrap();
    let mut local = Read::new(4, 256 << 10);
    let adopted = adopt(&desc(Placement::Host, 1, 4, 256 << 10), CacheKind::Blocks, &[local.src.addr()]);
    local.from = Arc::new(Tensors::adopted(adopted));
    local.run(&engine, LONG).unwrap();
    drop(stall);
    silent.eventually_released();
    silent.run(&engine, LONG).unwrap();
}

#[test]
fn many_threads_read_one_process_at_the_same_time() {
    let engine = engine();
    thread::scope(|scope| {
        for caller in 0..3 * THREADS_OF_A_PROCESS {
            let engine = &engine;
            scope.spawn(move || {
                let read = Read::new(8, if caller % 3 == 0 { 256 << 10 } else { 4096 });
                for _ in 0..20 {
                    read.dst.write(0, &vec![0; read.len()]);
                    read.run(engine, LONG).unwrap();
                    assert_eq!(Arc::strong_count(&read.pins), 1);
                }
            });
        }
    });
}

#[test]
fn opening_a_silent_process_gives_up_at_its_limit() {
    let engine = engine();
    let secret = Buffer::new(16, |at| pattern(3, 0, at));
    let probe = Probe { address: secret.addr(), secret: secret.read(0, 16).try_into().unwrap() };
    let open = |limit| engine.open_process(own_pid(), probe, Deadline::after(limit));
    let stall = Stall::new(secret.addr()..secret.addr() + 16);
    lose(own_pid(), || open(SHORT).map(drop));
    drop(stall);
    assert_eq!(open(LONG).unwrap().pid(), own_pid());
}

#[test]
fn an_engine_that_ends_meanwhile_logs_it_and_unmaps_nothing() {
    let (engine, read) = (engine(), Read::new(4, 4096));
    let stall = read.stall();
    read.lose(&engine);
    let log = EventLog::new("llm_datadist::memory");
    tracing::subscriber::with_default(log.clone(), || drop(engine));
    let lines = log.lines();
    let [(tracing::Level::ERROR, line)] = lines.as_slice() else { panic!("{lines:?}") };
    assert!(line.contains(&own_pid().to_string()) && line.contains("stays mapped"), "{line}");
    assert!(read.is_held());
    drop(stall);
    read.eventually_released();
}

/// Returns memory that this process never fills in: a thread that touches it waits until this process ends.
fn behind_userfaultfd(len: usize) -> io::Result<u64> {
    const API: libc::c_ulong = 0xC018_AA3F;
    const REGISTER: libc::c_ulong = 0xC020_AA00;
    let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: no address is asked for.
    let at = unsafe { libc::mmap(null_mut(), len, rights, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    // SAFETY: the call takes flags alone.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut api = [0xAA_u64, 0, 0];
    let mut register = [at as u64, len as u64, 1, 0];
    for (order, given) in [(API, api.as_mut_ptr()), (REGISTER, register.as_mut_ptr())] {
        // SAFETY: each order reads and writes the struct of integers it is given, which outlives the call.
        let done = unsafe { libc::ioctl(fd as i32, order, given) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(at as u64)
}

const BYTES: usize = 64 << 10;

/// A peer with memory that answers, or does not, until its input ends.
#[test]
#[ignore = "started by the tests of this file"]
fn peer() {
    let Some(role) = child_process::role() else { return };
    allow_readers();
    let answers = Buffer::new(BYTES, |at| pattern(9, 0, at));
    let memory = if role == "silent" { behind_userfaultfd(BYTES) } else { Ok(answers.addr()) };
    let probe = own_probe().unwrap();
    match memory {
        Ok(at) => report(format_args!("{at} {} {}", probe.address, u128::from_le_bytes(probe.secret))),
        Err(error) => report(format_args!("refused: {error}")),
    }
    let _ = io::stdin().read_line(&mut String::new());
}

struct Peer {
    process: Process,
    /// The address of its memory, the address of its secret, and the secret.
    words: Vec<String>,
}

impl Peer {
    fn start(role: &str) -> Peer {
        let mut process = Process::start("reader_threads::peer", role);
        let words = process.report();
        Peer { process, words }
    }

    fn at(&self) -> u64 {
        self.words[0].parse().unwrap()
    }

    fn read(&self) -> Read {
        let secret = self.words[2].parse::<u128>().unwrap().to_le_bytes();
        let probe = Probe { address: self.words[1].parse().unwrap(), secret };
        let process = PeerProcess::open(self.process.pid(), probe).unwrap();
        let from = Tensors::of_process(process, vec![self.at()], BYTES as u64).unwrap();
        Read::from(from, Buffer::new(BYTES, |at| pattern(9, 0, at)), 4, BYTES / 4)
    }
}

#[test]
fn memory_behind_userfaultfd_costs_a_timeout_until_the_peer_ends() {
    let peer = Peer::start("silent");
    if peer.words[0] == "refused:" {
        return skipped(&format!(
            "userfaultfd needs root or vm.unprivileged_userfaultfd=1: {:?}",
            peer.words
        ));
    }
    let (engine, read, pid) = (engine(), peer.read(), peer.process.pid());
    lose(pid, || read.run(&engine, SHORT));
    assert!(read.is_held());
    // Its secret may lie there as well: linking does not hang either.
    let hidden = Probe { address: peer.at() + 4096, secret: [1; 16] };
    lose(pid, || engine.open_process(pid, hidden, Deadline::after(SHORT)).map(drop));
    // An engine may end before the peer does.
    drop(engine);
    assert!(read.is_held());
    drop(peer);
    read.eventually_released();
}
