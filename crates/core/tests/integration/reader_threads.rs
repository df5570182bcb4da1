//! Memory of a process that does not respond to the kernel. A read ends at its deadline, keeps the memory to
//! which the kernel may still write, and costs a bounded number of threads.
//!
//! Most tests stall reads of addresses of this process (`llm_datadist_testing::Stall`); one has a peer with userfaultfd memory.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::Config;
use llm_datadist_core::testing::copy::{CopyEngine, DataPath, PathJob, PeerTensors, STILL_READING, Staging};
use llm_datadist_core::testing::device::DeviceSet;
use llm_datadist_core::testing::memory::{PeerProcess, Probe, Tensors, own_probe};
use llm_datadist_core::testing::plan::CopyPlan;
use llm_datadist_core::{CacheKind, Deadline, ErrorKind, Placement, Result};

use llm_datadist_testing::Stall;

use crate::emulation::PROCESS_READS;
use crate::fixtures::{
    Buffer, EventLog, LONG, adopt, block_plan, config, desc, eventually, pattern, skipped, tensors_over,
};
use crate::peer_memory::{Peer, ROW, ROWS};

/// Number of threads that one process can block, by default.
const THREADS_OF_A_PROCESS: usize = 8;
const SHORT: Duration = Duration::from_millis(60);

/// An engine, unless this machine reads no other process, which is reported as skipped.
fn engine() -> Option<CopyEngine> {
    let config = Config { copy_workers: Some(4), ..config(1 << 20) };
    (!PROCESS_READS.skips()).then(|| CopyEngine::new(&config, DeviceSet::host_only()))
}

fn own_pid() -> i32 {
    std::process::id() as i32
}

/// A copy of one tensor of `rows` rows, from a process into this one.
struct Read {
    src: Arc<Buffer>,
    dst: Arc<Buffer>,
    from: PeerTensors,
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
        Read::from(own, src.addr(), src, rows, row)
    }

    /// Reads memory at `at` in `process`, which should hold what `src` holds.
    fn from(process: Arc<PeerProcess>, at: u64, src: Arc<Buffer>, rows: usize, row: usize) -> Read {
        let tensors = Tensors::of_process(process.clone(), vec![at], (rows * row) as u64).unwrap();
        let from = PeerTensors::Process(Arc::new(tensors), process);
        let (dst, to) = tensors_over(1, rows, row, |_, _| 0xEE);
        let pairs: Vec<_> = (0..rows as u64).map(|at| (at, at)).collect();
        let plan = block_plan(&pairs, row as u64, 1);
        Read { src, dst, from, to, plan, pins: Arc::default() }
    }

    fn stall(&self) -> Stall {
        Stall::new(self.src.addr()..self.src.addr() + self.plan.bytes())
    }

    fn run(&self, engine: &CopyEngine, limit: Duration) -> Result<()> {
        let (progress, mut from) = (Arc::default(), &self.from);
        let job = PathJob { copy_engine: engine, plan: &self.plan, deadline: Deadline::after(limit) };
        from.read(job, (&self.to, Placement::Host), &progress, self.pins.clone())?;
        assert_eq!(progress.bytes(), self.plan.bytes());
        assert!(self.dst.read(0, self.len()) == self.src.read(0, self.len()));
        Ok(())
    }

    fn len(&self) -> usize {
        self.plan.bytes() as usize
    }

    /// Blocks a thread in a read.
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

/// A copy of the first tensor of a peer, at `at` in its memory.
fn of_peer(peer: &Peer, at: u64) -> Read {
    let process = PeerProcess::open(peer.process.pid(), peer.probe).unwrap();
    Read::from(process, at, Buffer::new(ROWS * ROW, |at| pattern(9, 0, at)), ROWS, ROW)
}

/// Makes calls until one runs out of time with a thread inside the kernel, which may not be the first.
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
        let Some(engine) = engine() else { return };
        let read = Read::new(rows, row);
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
    let Some(engine) = engine() else { return };
    let silent = Read::new(4, 4096);
    let stall = silent.stall();
    for lost in 1..=THREADS_OF_A_PROCESS {
        silent.lose(&engine);
        eventually("the read", || stall.waiting() == lost);
    }
    // The limit is far longer than this test may take.
    let error = silent.run(&engine, Duration::from_secs(3600)).unwrap_err();
    assert_eq!((error.kind(), error.fact("threads")), (ErrorKind::Timeout, Some("8")), "{error}");
    assert_eq!(error.fact(STILL_READING), None, "nothing of this call is under way");
    assert_eq!(error.fact("pid"), Some(own_pid().to_string().as_str()));
    // Neither copies inside this process nor reads of another one wait for those threads.
    let peer = Peer::start_as("peer");
    of_peer(&peer, peer.addr()).run(&engine, LONG).unwrap();
    let local = Read::new(4, 256 << 10);
    let adopted = adopt(&desc(Placement::Host, 1, 4, 256 << 10), CacheKind::Blocks, &[local.src.addr()]);
    let (src, to) = (Arc::new(Tensors::adopted(adopted)), &local.to);
    let [from, to] = [&src, to].map(|tensors| (tensors, Placement::Host));
    let (deadline, progress) = (Deadline::after(LONG), Arc::default());
    engine.run(local.plan.clone(), from, to, Staging::DEFAULT, deadline, &progress).unwrap();
    assert!(local.dst.read(0, local.len()) == local.src.read(0, local.len()));
    drop(stall);
    silent.eventually_released();
    silent.run(&engine, LONG).unwrap();
}

#[test]
fn many_threads_read_one_process_at_the_same_time() {
    let Some(engine) = engine() else { return };
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
    let Some(engine) = engine() else { return };
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
    let Some(engine) = engine() else { return };
    let read = Read::new(4, 4096);
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

#[test]
fn memory_behind_userfaultfd_costs_a_timeout_until_the_peer_ends() {
    let Some(engine) = engine() else { return };
    let peer = Peer::start_as("silent");
    let at = match &peer.silent {
        Ok(at) => *at,
        Err(why) => {
            return skipped(&format!("userfaultfd needs root or vm.unprivileged_userfaultfd=1: {why}"));
        }
    };
    let (read, pid) = (of_peer(&peer, at), peer.process.pid());
    lose(pid, || read.run(&engine, SHORT));
    assert!(read.is_held());
    // Its secret may lie in such memory as well. Linking does not hang either.
    let hidden = Probe { address: at + 4096, secret: [1; 16] };
    lose(pid, || engine.open_process(pid, hidden, Deadline::after(SHORT)).map(drop));
    // An engine may end before the peer does.
    drop(engine);
    assert!(read.is_held());
    drop(peer);
    read.eventually_released();
}
