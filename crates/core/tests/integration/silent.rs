//! Memory of another process that does not answer the kernel: a read by process id leaves at its deadline, keeps what the
//! kernel may still write to, and costs a bounded number of threads.
//!
//! Most tests stall reads of addresses of this process (`memory::stalled`); one has a peer with real userfaultfd memory. Not for:
//! links (`links/silent`).
#![allow(unsafe_code, reason = "memory behind userfaultfd")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use llm_datadist_core::testing::copy::{CopyEngine, Progress, STILL_READING, Staging};
use llm_datadist_core::testing::device::DeviceSet;
use llm_datadist_core::testing::memory::stalled::Stall;
use llm_datadist_core::testing::memory::{PeerProcess, Probe, Tensors, allow_readers, own_probe};
use llm_datadist_core::testing::plan::{BlockPairs, CopyPlan, Ends};
use llm_datadist_core::{CacheKind, Config, Deadline, Error, ErrorKind, Placement, SwapInPath};

use crate::bed::{Buffer, adopt, config, desc, pattern, skipped};

const STRAIGHT: Staging = Staging { path: SwapInPath::Auto, buffer_bytes: 1 << 20 };
/// Threads that one process can cost, by default.
const OF_A_PROCESS: usize = 8;

fn engine() -> CopyEngine {
    CopyEngine::new(&Config { copy_workers: Some(4), ..config(1 << 20) }, DeviceSet::host_only()).unwrap()
}

fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap()
}

fn own_process() -> Arc<PeerProcess> {
    PeerProcess::open(own_pid(), own_probe().unwrap()).unwrap()
}

/// One tensor of `rows` rows to read through the kernel, and one to write.
struct Ends2 {
    src: Arc<Buffer>,
    dst: Arc<Buffer>,
    from: Arc<Tensors>,
    to: Arc<Tensors>,
    plan: CopyPlan,
    len: usize,
}

impl Ends2 {
    fn new(rows: usize, row: usize) -> Ends2 {
        let len = rows * row;
        let (src, dst) = (Buffer::new(len, |at| pattern(5, 0, at)), Buffer::new(len, |_| 0xEE));
        let from = Tensors::of_process(own_process(), [src.addr()].into(), len as u64).unwrap();
        let to = adopt(&desc(Placement::Host, 1, rows, row), CacheKind::Blocks, &[dst.addr()]);
        let pairs = (0..rows as u64).map(|at| (at, at)).collect();
        let request = BlockPairs { pairs, block_bytes: row as u64, num_tensors: 1 };
        let plan = CopyPlan::blocks(&request, Ends::TwoCaches).unwrap();
        Ends2 { src, dst, from: Arc::new(from), to: Arc::new(Tensors::adopted(to)), plan, len }
    }

    fn stall(&self) -> Stall {
        Stall::new(self.src.addr()..self.src.addr() + self.len as u64)
    }

    fn run(&self, engine: &CopyEngine, limit: Duration, held: &Arc<()>) -> Result<u64, Error> {
        let (from, to) = ((&self.from, Placement::Host), (&self.to, Placement::Host));
        let progress = Arc::new(Progress::default());
        let (deadline, held) = (Deadline::after(limit), held.clone());
        let run = engine.run_holding(self.plan.clone(), from, to, STRAIGHT, deadline, &progress, held);
        run.map(|outcome| outcome.bytes)
    }

    /// Has a thread be lost in a read. On a busy machine the time may be up before a thread has come: then again.
    fn lose(&self, engine: &CopyEngine, held: &Arc<()>) {
        lose(own_pid(), || self.run(engine, SHORT, held).map(drop));
    }

    fn arrived(&self) -> bool {
        self.dst.read(0, self.len) == self.src.read(0, self.len)
    }
}

const SHORT: Duration = Duration::from_millis(60);
/// A limit that no test runs into unless it hangs.
const LONG: Duration = Duration::from_secs(60);

fn eventually(what: &str, mut there: impl FnMut() -> bool) {
    let started = Instant::now();
    while !there() {
        assert!(started.elapsed() < LONG, "{what} did not come about");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Calls until a thread is inside the kernel when the time is up.
fn lose(pid: i32, mut call: impl FnMut() -> Result<(), Error>) {
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
fn read_of_silent_memory_leaves_at_its_deadline_and_keeps_what_the_kernel_writes_to() {
    // One unit, and several.
    for (rows, row) in [(4, 4096), (64, 256 << 10)] {
        let (engine, ends, held) = (engine(), Ends2::new(rows, row), Arc::new(()));
        let stall = ends.stall();
        ends.lose(&engine, &held);
        assert!(Arc::strong_count(&held) > 1, "the pins went while the kernel may write");
        assert!(Arc::strong_count(&ends.to) > 1, "the memory went while the kernel may write");
        assert!(ends.dst.read(0, ends.len).iter().all(|&byte| byte == 0xEE));
        drop(stall);
        eventually("the end of the kernel's call", || Arc::strong_count(&held) == 1);
        assert_eq!(Arc::strong_count(&ends.to), 1);
        // What the error warned of: the first unit came late.
        assert!(ends.dst.read(0, 4096) == ends.src.read(0, 4096));
        assert_eq!(ends.run(&engine, LONG, &held).unwrap(), ends.len as u64);
        assert!(ends.arrived());
        assert_eq!(Arc::strong_count(&held), 1, "a call that has ended keeps nothing");
    }
}

#[test]
fn one_process_costs_a_bounded_number_of_threads_and_then_fails_fast() {
    let (engine, silent, held) = (engine(), Ends2::new(4, 4096), Arc::new(()));
    let stall = silent.stall();
    for lost in 1..=OF_A_PROCESS {
        silent.lose(&engine, &held);
        eventually("the read", || stall.waiting() == lost);
    }
    // A limit that would not be waited for here.
    let error = silent.run(&engine, Duration::from_secs(3600), &held).unwrap_err();
    assert_eq!((error.kind(), error.fact("threads")), (ErrorKind::Timeout, Some("8")), "{error}");
    assert_eq!(error.fact(STILL_READING), None, "nothing of this call is under way");
    assert_eq!(error.fact("pid"), Some(own_pid().to_string().as_str()));
    // Neither copies inside this process nor reads of another one wait for those threads.
    let other = Peer::start(None);
    other.read(&engine).unwrap();
    let local = Ends2::new(4, 256 << 10);
    let from = adopt(&desc(Placement::Host, 1, 4, 256 << 10), CacheKind::Blocks, &[local.src.addr()]);
    let (from, to) = (Arc::new(Tensors::adopted(from)), (&local.to, Placement::Host));
    let from = (&from, Placement::Host);
    engine.run(local.plan.clone(), from, to, STRAIGHT, Deadline::after(LONG), &Arc::default()).unwrap();
    assert!(local.arrived());
    drop(stall);
    eventually("the end of the kernel's calls", || Arc::strong_count(&held) == 1);
    assert_eq!(silent.run(&engine, LONG, &held).unwrap(), silent.len as u64);
}

#[test]
fn many_threads_read_one_process_at_the_same_time() {
    let engine = Arc::new(engine());
    std::thread::scope(|scope| {
        for caller in 0..3 * OF_A_PROCESS {
            let engine = engine.clone();
            scope.spawn(move || {
                let ends = Ends2::new(8, if caller % 3 == 0 { 256 << 10 } else { 4096 });
                let held = Arc::new(());
                for _ in 0..20 {
                    ends.dst.write(0, &vec![0; ends.len]);
                    ends.run(&engine, LONG, &held).unwrap();
                    assert!(ends.arrived());
                    assert_eq!(Arc::strong_count(&held), 1);
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
    let stall = Stall::new(secret.addr()..secret.addr() + 16);
    lose(own_pid(), || engine.open_process(own_pid(), probe, Deadline::after(SHORT)).map(drop));
    drop(stall);
    assert_eq!(engine.open_process(own_pid(), probe, Deadline::after(LONG)).unwrap().pid(), own_pid());
}

/// Keeps the texts of events.
struct Log(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Log {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "llm_datadist::memory"
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        use std::fmt::Write as _;
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                write!(self.0, "{value:?}").unwrap();
            }
        }
        let mut text = Text(event.metadata().level().to_string() + " ");
        event.record(&mut text);
        self.0.lock().unwrap().push(text.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn engine_that_ends_meanwhile_says_so_and_unmaps_nothing() {
    let (engine, ends, held) = (engine(), Ends2::new(4, 4096), Arc::new(()));
    let stall = ends.stall();
    ends.lose(&engine, &held);
    let said = Arc::default();
    tracing::subscriber::with_default(Log(Arc::clone(&said)), || drop(engine));
    let said: Vec<String> = said.lock().unwrap().drain(..).collect();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].starts_with("ERROR ") && said[0].contains(&own_pid().to_string()), "{said:?}");
    assert!(said[0].contains("stays mapped"), "{said:?}");
    assert!(Arc::strong_count(&held) > 1 && Arc::strong_count(&ends.to) > 1);
    drop(stall);
    eventually("the end of the kernel's call", || Arc::strong_count(&held) == 1);
    assert_eq!(Arc::strong_count(&ends.to), 1);
}

/// Memory that this process never fills in: who touches it waits until this process ends. `None` where that is forbidden.
fn behind_userfaultfd(len: usize) -> Result<(u64, i32), std::io::Error> {
    const API: libc::c_ulong = 0xC018_AA3F;
    const REGISTER: libc::c_ulong = 0xC020_AA00;
    // SAFETY: no address is asked for.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(at, libc::MAP_FAILED);
    // SAFETY: the call takes flags alone.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    let fd = i32::try_from(fd).unwrap();
    let mut api = [0xAA_u64, 0, 0];
    let mut register = [at as u64, len as u64, 1, 0];
    for (order, given) in [(API, api.as_mut_ptr()), (REGISTER, register.as_mut_ptr())] {
        // SAFETY: each order reads and writes the struct of integers it is given, which outlives the call.
        let done = unsafe { libc::ioctl(fd, order, given) };
        if done != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok((at as u64, fd))
}

const BYTES: usize = 64 << 10;

/// The other process: memory that answers, or does not, until its input ends.
#[test]
#[ignore = "started by the tests beside it"]
fn child() {
    let Ok(kind) = std::env::var("SILENT_CHILD") else { return };
    allow_readers();
    let answers = Buffer::new(BYTES, |at| pattern(9, 0, at));
    let told = if kind == "silent" { behind_userfaultfd(BYTES) } else { Ok((answers.addr(), -1)) };
    let probe = own_probe().unwrap();
    let secret = u128::from_le_bytes(probe.secret);
    let line = match told {
        Ok((at, _)) => format!("CHILD {at} {} {secret}", probe.address),
        Err(error) => format!("REFUSED {error}"),
    };
    let mut out = std::io::stdout();
    writeln!(out, "\n{line}").unwrap();
    out.flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

struct Peer {
    child: std::process::Child,
    words: Vec<String>,
}

impl Peer {
    /// With memory that does not answer, if `silent`.
    fn start(silent: Option<()>) -> Peer {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "silent::child", "--ignored", "--nocapture"])
            .env("SILENT_CHILD", if silent.is_some() { "silent" } else { "answers" })
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("CHILD ") && !line.starts_with("REFUSED ") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "the child ended before it was ready");
        }
        Peer { child, words: line.split_whitespace().map(str::to_owned).collect() }
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    fn at(&self) -> u64 {
        self.words[1].parse().unwrap()
    }

    fn probe(&self) -> Probe {
        let secret = self.words[3].parse::<u128>().unwrap().to_le_bytes();
        Probe { address: self.words[2].parse().unwrap(), secret }
    }

    /// Its memory, read within a limit nobody runs into.
    fn read(&self, engine: &CopyEngine) -> Result<(), Error> {
        let ends = Ends2::new(4, BYTES / 4);
        self.read_into(&ends, engine, LONG, &Arc::new(()))?;
        let expected: Vec<u8> = (0..BYTES).map(|at| pattern(9, 0, at)).collect();
        assert!(ends.dst.read(0, BYTES) == expected);
        Ok(())
    }

    fn read_into(
        &self,
        ends: &Ends2,
        engine: &CopyEngine,
        limit: Duration,
        held: &Arc<()>,
    ) -> Result<(), Error> {
        let process = engine.open_process(self.pid(), self.probe(), Deadline::after(LONG))?;
        let from = Arc::new(Tensors::of_process(process, [self.at()].into(), BYTES as u64)?);
        let (from, to) = ((&from, Placement::Host), (&ends.to, Placement::Host));
        let (deadline, held) = (Deadline::after(limit), held.clone());
        let run = engine.run_holding(ends.plan.clone(), from, to, STRAIGHT, deadline, &Arc::default(), held);
        run.map(drop)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn peer_with_memory_behind_userfaultfd_costs_a_timeout_until_it_ends() {
    let peer = Peer::start(Some(()));
    if peer.words[0] == "REFUSED" {
        skipped(&format!("userfaultfd needs root or vm.unprivileged_userfaultfd=1: {:?}", &peer.words[1..]));
        return;
    }
    let (engine, ends, held) = (engine(), Ends2::new(4, BYTES / 4), Arc::new(()));
    lose(peer.pid(), || peer.read_into(&ends, &engine, SHORT, &held));
    assert!(Arc::strong_count(&held) > 1 && Arc::strong_count(&ends.to) > 1);
    // Its secret may lie there as well: nor does linking hang.
    let hidden = Probe { address: peer.at() + 4096, secret: [1; 16] };
    lose(peer.pid(), || engine.open_process(peer.pid(), hidden, Deadline::after(SHORT)).map(drop));
    // An engine may end before the peer does.
    drop(engine);
    assert!(Arc::strong_count(&held) > 1 && Arc::strong_count(&ends.to) > 1);
    drop(peer);
    eventually("the end of the kernel's calls", || Arc::strong_count(&held) == 1);
    assert_eq!(Arc::strong_count(&ends.to), 1);
}
