//! Memory of another process: sealed, mapped or read through the kernel, identified, and never written.
#![allow(unsafe_code, reason = "mappings")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr::null_mut;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{Config, SwapInPath};
use llm_datadist_core::testing::copy::{CopyEngine, DataPath, Hops, PathJob, PeerTensors, Progress, Staging};
use llm_datadist_core::testing::device::DeviceSet;
use llm_datadist_core::testing::memory::kernels::{Kernel, copy};
use llm_datadist_core::testing::memory::{
    Generations, MapBudget, PeerGenerations, PeerMapping, PeerProcess, Probe, Reach, Region, Tensors,
    allow_readers, own_probe, socket_io,
};
use llm_datadist_core::testing::plan::CopyPlan;
use llm_datadist_core::{ArrivedRows, ErrorKind, Placement};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect};

use crate::child_process::{self, Process, report};
use crate::emulation::PROCESS_READS;
use crate::fixtures::{Buffer, block_plan, config, pattern, skipped, soon, tensors_over};

pub(crate) const TENSORS: usize = 3;
pub(crate) const ROWS: usize = 40;
pub(crate) const ROW: usize = 16 << 10;
pub(crate) const TENSOR: usize = ROWS * ROW;
const STRAIGHT: Staging = Staging { path: SwapInPath::Auto, buffer_bytes: 1 << 20 };

/// Where tensor `tensor` starts in the region of the peer.
fn offset(tensor: usize) -> usize {
    4096 + tensor * (TENSOR + 4096)
}

/// Bytes of tensor `tensor` of the peer.
pub(crate) fn source(tensor: usize, at: usize, len: usize) -> Vec<u8> {
    (at..at + len).map(|at| pattern(9, tensor, at)).collect()
}

/// The peer process: it has a region with patterns, and raises the generations of the entries that it reads.
/// A silent peer also has memory behind userfaultfd.
#[test]
#[ignore = "started by the tests below and those of reader_threads.rs"]
fn peer() {
    let Some(role) = child_process::role() else { return };
    let silent = if role == "silent" { behind_userfaultfd(TENSOR) } else { Ok(0) };
    let silent = silent.map_or_else(|error| format!("refused: {error}"), |at| at.to_string());
    allow_readers();
    let region = Arc::new(Region::shared("peer", offset(TENSORS) as u64).unwrap());
    let offsets = (0..TENSORS).map(|tensor| offset(tensor) as u64);
    let tensors = Tensors::carved(region.clone(), offsets, TENSOR as u64, ()).unwrap();
    for tensor in 0..TENSORS {
        let bytes = Buffer::new(TENSOR, |at| pattern(9, tensor, at));
        let from = Tensors::adopted(bytes.adopt(0, TENSOR));
        let [src, dst] = [(&from, 0), (&tensors, tensor)]
            .map(|(tensors, tensor)| tensors.window(tensor, 0, TENSOR as u64).unwrap());
        copy(src, dst, Kernel::PLAIN).unwrap();
    }
    let generations = Generations::new().unwrap();
    generations.bump(7);
    let probe = own_probe().unwrap();
    let fds = [region.descriptor(), generations.descriptor()].map(|fd| fd.unwrap().as_raw_fd());
    let secret = u128::from_le_bytes(probe.secret);
    report(format_args!("{} {} {} {} {secret} {silent}", fds[0], fds[1], region.base(), probe.address));
    for line in io::stdin().lines() {
        generations.bump(line.unwrap().parse().unwrap());
        report("bumped");
    }
}

/// The peer, as this process sees it.
pub(crate) struct Peer {
    pub process: Process,
    fds: [String; 2],
    base: u64,
    pub probe: Probe,
    /// The address of silent memory, or why there is none.
    pub silent: Result<u64, String>,
}

impl Peer {
    pub fn start() -> Peer {
        Peer::start_as("peer")
    }

    pub fn start_as(role: &str) -> Peer {
        let mut process = Process::start("peer_memory::peer", role);
        let words = process.report();
        let fds = [0, 1].map(|word| format!("/proc/{}/fd/{}", process.pid(), words[word]));
        let secret = words[4].parse::<u128>().unwrap().to_le_bytes();
        let probe = Probe { address: words[3].parse().unwrap(), secret };
        let silent = words[5].parse().map_err(|_| words[5..].join(" "));
        Peer { process, fds, base: words[2].parse().unwrap(), probe, silent }
    }

    /// The descriptor of its region (0) or of its generations (1), as if it had passed it over a socket.
    fn descriptor(&self, which: usize) -> OwnedFd {
        OpenOptions::new().read(true).write(true).open(&self.fds[which]).unwrap().into()
    }

    fn bump(&mut self, entry: u32) {
        self.process.send(entry);
        assert_eq!(self.process.report(), ["bumped"]);
    }

    fn mapping(&self) -> Arc<PeerMapping> {
        PeerMapping::map(self.descriptor(0), offset(TENSORS) as u64, &budget(), soon()).unwrap()
    }

    pub fn mapped(&self) -> Arc<Tensors> {
        let offsets = (0..TENSORS).map(|tensor| offset(tensor) as u64);
        Arc::new(Tensors::mapped(self.mapping(), offsets, TENSOR as u64).unwrap())
    }

    fn memory(&self) -> Arc<PeerProcess> {
        PeerProcess::open(self.process.pid(), self.probe).unwrap()
    }

    pub fn read(&self) -> Arc<Tensors> {
        self.read_at((0..TENSORS).map(|tensor| self.base + offset(tensor) as u64).collect())
    }

    /// Tensors of the peer, with what reads them.
    pub fn source(&self, tensors: &Arc<Tensors>) -> PeerTensors {
        match tensors.reach() {
            Reach::HostRead => PeerTensors::Mapped(tensors.clone()),
            _ => PeerTensors::Process(tensors.clone(), self.memory()),
        }
    }

    /// All tensors of the peer: mapped, and as they are read by process id.
    pub fn tensors(&self) -> Vec<Arc<Tensors>> {
        let read = if PROCESS_READS.skips() { None } else { Some(self.read()) };
        std::iter::once(self.mapped()).chain(read).collect()
    }

    /// All tensors of the peer, by each path.
    pub fn sources(&self) -> Vec<PeerTensors> {
        self.tensors().iter().map(|tensors| self.source(tensors)).collect()
    }

    /// The address of the first tensor in the peer.
    pub fn addr(&self) -> u64 {
        self.base + offset(0) as u64
    }

    fn read_at(&self, addrs: Vec<u64>) -> Arc<Tensors> {
        Arc::new(Tensors::of_process(self.memory(), addrs, TENSOR as u64).unwrap())
    }
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

/// Tensors of this process over one buffer.
fn local() -> (Arc<Buffer>, Arc<Tensors>) {
    tensors_over(TENSORS, ROWS, ROW, |_, _| 0xEE)
}

/// Returns a budget that is large enough for every mapping of these tests.
fn budget() -> Arc<MapBudget> {
    MapBudget::new(None)
}

fn engine(workers: usize) -> CopyEngine {
    let config = Config { copy_workers: Some(workers), ..config(1 << 20) };
    CopyEngine::new(&config, DeviceSet::host_only())
}

/// Reads memory of a peer in place.
fn read(
    engine: &CopyEngine,
    pairs: &[(u64, u64)],
    mut src: &PeerTensors,
    dst: (&Arc<Tensors>, Placement),
    progress: &Arc<Progress>,
) -> llm_datadist_core::Result<Hops> {
    let plan = &plan(pairs);
    let job = PathJob { copy_engine: engine, plan, deadline: soon() };
    src.read(job, dst, progress, Arc::new(()))
}

fn plan(pairs: &[(u64, u64)]) -> CopyPlan {
    block_plan(pairs, ROW as u64, TENSORS as u32)
}

/// Pairs of blocks, some of them written twice.
fn pairs() -> Vec<(u64, u64)> {
    let rows = ROWS as u64;
    (0..rows - 3)
        .map(|row| (row * 7 % rows, (row * 11 + 3) % rows))
        .chain([(5, 3), (6, 3), (0, 14)])
        .collect()
}

#[test]
fn both_ways_of_reading_bring_the_bytes_of_the_peer() {
    let peer = Peer::start();
    let plan = plan(&pairs());
    for remote in peer.sources() {
        for workers in [1, 2, 4] {
            let (buffer, tensors) = local();
            let progress = Arc::new(Progress::default());
            let hops =
                read(&engine(workers), &pairs(), &remote, (&tensors, Placement::Host), &progress).unwrap();
            assert_eq!((hops, progress.bytes()), (Hops::One, plan.bytes()));
            let mut expected = vec![0xEE; TENSORS * TENSOR];
            for (src, dst) in pairs() {
                for tensor in 0..TENSORS {
                    let block = source(tensor, src as usize * ROW, ROW);
                    expected[tensor * TENSOR + dst as usize * ROW..][..ROW].copy_from_slice(&block);
                }
            }
            assert!(buffer.read(0, TENSORS * TENSOR) == expected, "{remote:?} with {workers} workers");
        }
    }
}

#[test]
fn only_the_owner_maps_a_region_for_writing() {
    let peer = Peer::start();
    for descriptor in [peer.descriptor(0), peer.descriptor(1)] {
        // SAFETY: no address is asked for.
        let map = |rights| unsafe { mmap(null_mut(), 4096, rights, MapFlags::SHARED, &descriptor, 0) };
        assert_eq!(map(ProtFlags::READ | ProtFlags::WRITE), Err(Errno::PERM));
        let at = map(ProtFlags::READ).unwrap();
        // The right to write cannot be had later either.
        // SAFETY: the mapping just made, which nothing points into.
        let more = unsafe { mprotect(at, 4096, MprotectFlags::READ | MprotectFlags::WRITE) };
        assert_eq!(more, Err(Errno::ACCESS));
    }
}

#[test]
fn descriptors_that_could_kill_the_reader_are_refused() {
    let (mib, two) = (1 << 20, 2 << 20);
    let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, mib).unwrap();
    let file = File::open(std::env::current_exe().unwrap()).unwrap();
    let region = Region::shared("test", mib).unwrap();
    let shared = || region.descriptor().unwrap().try_clone_to_owned().unwrap();
    let no_memory = ["/dev/zero", "/", "/proc/self/mem"].map(|path| File::open(path).unwrap().into());
    let (pipe, socket) = (io::pipe().unwrap(), UnixStream::pair().unwrap());
    for descriptor in no_memory.into_iter().chain([pipe.0.into(), pipe.1.into(), socket.0.into()]) {
        PeerMapping::map(descriptor, 4096, &budget(), soon()).unwrap_err();
    }
    // Pools are made of whole huge pages.
    for (descriptor, len, text) in [
        (unsealed, mib, "not sealed"),
        (file.into(), 4096, "not memory that can be sealed"),
        (shared(), two + 1, "has_bytes=2097152"),
        (shared(), 0, ""),
        (shared(), u64::MAX, ""),
    ] {
        let error = PeerMapping::map(descriptor, len, &budget(), soon()).unwrap_err();
        assert!(error.to_string().contains(text), "{len}: {error}");
    }
    assert_eq!(PeerMapping::map(shared(), mib, &budget(), soon()).unwrap().len(), mib);
    assert!(PeerGenerations::map(shared(), &budget(), soon()).is_err());
}

#[test]
fn tensors_of_a_peer_are_inside_its_memory_and_never_a_destination() {
    if PROCESS_READS.skips() {
        return;
    }
    let peer = Peer::start();
    let region = peer.mapping();
    for (offset, bytes) in [(region.len() - 4095, 4096), (u64::MAX, 2), (0, region.len() + 1)] {
        assert!(Tensors::mapped(region.clone(), [0, offset], bytes).is_err(), "{offset} + {bytes}");
    }
    let error = Tensors::of_process(peer.memory(), vec![4096, u64::MAX - 100], 4096).unwrap_err();
    assert_eq!(error.fact("pid"), Some(peer.process.pid().to_string().as_str()));
    let (buffer, own) = local();
    let (socket, _other) = UnixStream::pair().unwrap();
    for remote in [peer.mapped(), peer.read()] {
        assert!(!remote.reach().writable());
        // Neither a copy nor a data path writes to memory of a peer, and a copy does not read it.
        let (progress, to) = (Arc::default(), (&remote, Placement::Host));
        let copied = |src, dst| {
            let (from, to) = ((src, Placement::Device), (dst, Placement::Host));
            engine(2).run(plan(&pairs()), from, to, STRAIGHT, soon(), &progress)
        };
        for error in [
            copied(&own, &remote).unwrap_err(),
            copied(&remote, &own).unwrap_err(),
            read(&engine(2), &pairs(), &peer.source(&remote), to, &progress).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::System);
        }
        assert_eq!(progress.bytes(), 0);
        let (from, to) = (own.window(0, 0, 64).unwrap(), remote.window(0, 0, 64).unwrap());
        assert!(copy(from, to, Kernel::PLAIN).is_err());
        let error = socket_io::receive(socket.as_fd(), &[to], 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        assert!(peer.memory().read(&[(remote.window(0, 0, 64).unwrap(), to)]).is_err());
    }
    assert!(buffer.read(0, TENSORS * TENSOR).iter().all(|&byte| byte == 0xEE));
}

#[test]
fn only_the_process_with_the_secret_is_read() {
    if PROCESS_READS.skips() {
        return;
    }
    let (peer, other) = (Peer::start(), Peer::start());
    let (pid, probe) = (peer.process.pid(), peer.probe);
    let own = std::process::id() as i32;
    let mut wrong = probe;
    wrong.secret[15] ^= 1;
    for (pid, probe) in [
        (pid, wrong),
        (own, probe),
        // Two runs of one program may have the same addresses, but never the same secret.
        (other.process.pid(), Probe { secret: probe.secret, ..other.probe }),
        (pid, Probe { address: 16, ..probe }),
        (0, probe),
        (-1, probe),
        (i32::MIN, probe),
        (i32::MAX, probe),
    ] {
        let error = PeerProcess::open(pid, probe).unwrap_err();
        assert_eq!(error.fact("pid"), Some(pid.to_string().as_str()), "{error}");
    }
    assert_eq!(PeerProcess::open(pid, wrong).unwrap_err().kind(), ErrorKind::System);
    assert_eq!(format!("{probe:?}"), format!("Probe({:#x}, …)", probe.address), "it shows no secret");
    assert!(PeerProcess::open(own, own_probe().unwrap()).unwrap().alive());
}

/// A process of another user, which tries to read its parent and reports the refusal.
#[test]
#[ignore = "started by the test below"]
fn stranger() {
    let Some(parent) = child_process::role() else { return };
    let error = PeerProcess::open(parent.parse().unwrap(), own_probe().unwrap()).unwrap_err();
    report(format_args!("{:?} {:?}", error.kind(), error.fact("errno")));
}

#[test]
fn a_refused_permission_is_distinguished() {
    use std::os::unix::process::CommandExt;
    if PROCESS_READS.skips() {
        let error = PeerProcess::open(std::process::id() as i32, own_probe().unwrap()).unwrap_err();
        assert_eq!((error.kind(), error.fact("errno")), (ErrorKind::NotEnabled, Some("38")), "{error}");
        return;
    }
    // Root starts a process of the user nobody. For other users, process 1 belongs to another user.
    let mut stranger = child_process::command("peer_memory::stranger", &std::process::id().to_string());
    if let Ok(output) = stranger.current_dir("/").uid(65_534).gid(65_534).output() {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("NotEnabled Some(\"1\")"), "{text}");
    } else if rustix::process::geteuid().is_root() {
        skipped("nobody may not start this test binary, and root is refused nothing");
    } else {
        let error = PeerProcess::open(1, own_probe().unwrap()).unwrap_err();
        assert_eq!((error.kind(), error.fact("errno")), (ErrorKind::NotEnabled, Some("1")), "{error}");
    }
}

#[test]
fn a_peer_that_is_killed_while_it_is_read_is_an_error_with_its_reason() {
    if PROCESS_READS.skips() {
        return;
    }
    let mut peer = Peer::start();
    let (memory, remote) = (peer.memory(), peer.source(&peer.read()));
    assert!(memory.alive());
    let reader = thread::spawn(move || {
        let (_buffer, own) = local();
        let engine = engine(2);
        loop {
            let progress = Arc::default();
            if let Err(error) = read(&engine, &pairs(), &remote, (&own, Placement::Host), &progress) {
                return (error, progress.bytes());
            }
        }
    });
    thread::sleep(Duration::from_millis(20));
    peer.process.kill();
    let (error, bytes) = reader.join().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
    let facts = ["alive", "errno", "copied_bytes"].map(|name| error.fact(name));
    assert_eq!(facts, [Some("false"), Some("3"), Some(bytes.to_string().as_str())], "{error}");
    peer.process.wait();
    assert!(!memory.alive());
    assert!(PeerProcess::open(peer.process.pid(), peer.probe).is_err());
}

#[test]
fn an_address_that_is_not_mapped_is_named_and_what_came_before_it_counts() {
    if PROCESS_READS.skips() {
        return;
    }
    let peer = Peer::start();
    let remote = peer.source(&peer.read_at(vec![peer.addr(), 4096, peer.base + offset(2) as u64]));
    let (buffer, own) = local();
    let progress = Arc::new(Progress::default());
    let reversed: Vec<_> = (0..ROWS as u64).map(|row| (row, ROWS as u64 - 1 - row)).collect();
    // One worker copies in the order of the plan.
    let error = read(&engine(1), &reversed, &remote, (&own, Placement::Host), &progress).unwrap_err();
    assert_eq!(["errno", "alive"].map(|name| error.fact(name)), [Some("14"), Some("true")], "{error}");
    assert!(error.fact("address").is_some(), "{error}");
    let arrived = progress.arrived(&plan(&reversed), ROW as u64).unwrap();
    // Only whole units are reported: perhaps not all rows of the first tensor, and none of the others.
    let [ArrivedRows { tensor: 0, rows }] = arrived.as_slice() else { panic!("{arrived:?}") };
    let rows: Vec<usize> = rows.iter().cloned().flatten().map(|row| row as usize).collect();
    assert!(!rows.is_empty());
    for row in rows {
        assert!(buffer.read(row * ROW, ROW) == source(0, (ROWS - 1 - row) * ROW, ROW), "row {row}");
    }
}

#[test]
fn odd_pieces_beyond_one_system_call_arrive() {
    const LENS: [u64; 4] = [0, 1, 77, 199];
    if PROCESS_READS.skips() {
        return;
    }
    let peer = Peer::start();
    let (remote, (buffer, own)) = (peer.read(), local());
    let pair = |at: u64, len| (remote.window(1, at + 13, len).unwrap(), own.window(2, at, len).unwrap());
    // Some pieces are empty, also at the end.
    let mut pairs: Vec<_> = (0..3000).map(|piece| pair(piece * 200, LENS[piece as usize % 4])).collect();
    pairs.push(pair(0, 0));
    peer.memory().read(&pairs).unwrap();
    let mut expected = vec![0xEE; TENSOR];
    for piece in 0..3000 {
        let (at, len) = (piece * 200, LENS[piece % 4] as usize);
        expected[at..at + len].copy_from_slice(&source(1, at + 13, len));
    }
    assert!(buffer.read(2 * TENSOR, TENSOR) == expected);
    let unequal = (remote.window(0, 0, 8).unwrap(), own.window(0, 0, 9).unwrap());
    assert!(peer.memory().read(&[unequal]).is_err());
}

#[test]
fn generations_of_a_peer_are_seen_as_they_rise() {
    let mut peer = Peer::start();
    let seen = PeerGenerations::map(peer.descriptor(1), &budget(), soon()).unwrap();
    assert!(seen.still(7, 1) && !seen.still(7, 0) && seen.still(8, 0));
    peer.bump(7);
    assert!(!seen.still(7, 1) && seen.still(7, 2) && seen.still(8, 0));
    let last = (1 << 24) - Generations::GRANTS - 1;
    peer.bump(last);
    assert!(seen.still(last, 1));
    // Indices beyond the last entry are never trusted, and do no harm. The first of them are those of grants.
    for entry in [last + 1, (1 << 24) - 1, 1 << 24, u32::MAX] {
        peer.bump(entry);
        assert!(!seen.still(entry, u64::MAX));
    }
    let own = Generations::new().unwrap();
    own.bump(3);
    assert_eq!((own.of(3), own.of(4), own.of(u32::MAX)), (1, 0, u64::MAX));
    let of_own = own.descriptor().unwrap().try_clone_to_owned().unwrap();
    let mapped = PeerGenerations::map(of_own, &budget(), soon()).unwrap();
    let last = Generations::GRANTS - 1;
    own.bump_grant(last);
    assert_eq!((own.of_grant(0), own.of_grant(last), own.of_grant(last + 1)), (0, 1, u64::MAX));
    assert!(mapped.grant_still(0, 0) && mapped.grant_still(last, 1) && !mapped.grant_still(last, 0));
    assert!(!mapped.grant_still(last + 1, u64::MAX) && !mapped.grant_still(u32::MAX, 0));
}

/// `progress.rs` sends plans in ranges that cut windows.
#[test]
fn windows_that_a_socket_cannot_move_are_errors() {
    let (one, two) = UnixStream::pair().unwrap();
    let peer = Peer::start();
    let (mapped, (buffer, own)) = (peer.mapped(), local());
    let (from, to) = (mapped.window(1, 0, 310).unwrap(), own.window(0, 0, 310).unwrap());
    let receive = |skip| socket_io::receive(two.as_fd(), &[to], skip);
    assert_eq!(receive(0).unwrap_err().kind(), io::ErrorKind::WouldBlock, "nothing has arrived yet");
    assert_eq!(socket_io::send(one.as_fd(), &[from], 0).unwrap(), 310);
    assert_eq!(socket_io::send(one.as_fd(), &[from], 310).unwrap(), 0);
    assert_eq!(receive(0).unwrap(), 310);
    assert!(buffer.read(0, 310) == source(1, 0, 310));
    // If nothing is left to receive, this is an error, because 0 means the end of the stream.
    assert!(receive(310).is_err());
    // A process that another test is starting may hold the socket too, so dropping it would not close the stream.
    one.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(receive(0).unwrap(), 0);
    let broken = socket_io::send(two.as_fd(), &[from], 0).unwrap_err();
    assert_eq!(broken.kind(), io::ErrorKind::BrokenPipe);
    // Memory that only the kernel reads cannot be sent.
    if !PROCESS_READS.skips() {
        assert!(socket_io::send(two.as_fd(), &[peer.read().window(0, 0, 8).unwrap()], 0).is_err());
    }
}
