//! Memory of another process: sealed, mapped for reading, read through the kernel, told apart, and never written.
//!
//! The other process is this test binary, started again with the one ignored test `child`. Not for: links, which pass
//! the descriptors on.
#![allow(unsafe_code, reason = "mappings and memory that the engine is promised")]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::testing::copy::{Arrived, CopyEngine, Progress, Staging};
use llm_datadist_core::testing::device::sim::SimDevice;
use llm_datadist_core::testing::device::{DeviceSet, HostReach};
use llm_datadist_core::testing::memory::kernels::{Kernel, copy};
use llm_datadist_core::testing::memory::{
    Generations, MapBudget, PeerGenerations, PeerMapping, PeerProcess, Probe, Reach, Region, Tensors,
    allow_readers, own_probe, socket_io,
};
use llm_datadist_core::testing::plan::{BlockPairs, CopyPlan, Ends};
use llm_datadist_core::{CacheKind, Config, Deadline, ErrorKind, Placement, SwapInPath};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::bed::{Buffer, adopt, config, desc, pattern, skipped};

const TENSORS: usize = 3;
const ROWS: usize = 40;
const ROW: usize = 16 << 10;
const TENSOR: usize = ROWS * ROW;

/// Where tensor `tensor` starts in the region of the child.
fn offset(tensor: usize) -> usize {
    4096 + tensor * (TENSOR + 4096)
}

/// The other process: a region with patterns, generations, and its own addresses, until its input ends.
#[test]
#[ignore = "started by the tests beside it"]
fn child() {
    if std::env::var_os("FOREIGN_CHILD").is_none() {
        return;
    }
    allow_readers();
    let region = Arc::new(Region::shared("child", offset(TENSORS) as u64).unwrap());
    let tensors =
        Tensors::carved(region.clone(), (0..TENSORS).map(|t| offset(t) as u64), TENSOR as u64, Box::new(()))
            .unwrap();
    for tensor in 0..TENSORS {
        let source = Buffer::new(TENSOR, |at| pattern(9, tensor, at));
        let from = Tensors::adopted(source.adopt(0, TENSOR));
        let whole = |tensors: &Tensors, tensor| tensors.window(tensor, 0, TENSOR as u64).unwrap().addr();
        assert_ne!(whole(&from, 0), whole(&tensors, tensor));
        let (src, dst) = (from.window(0, 0, TENSOR as u64), tensors.window(tensor, 0, TENSOR as u64));
        copy(src.unwrap(), dst.unwrap(), Kernel::PLAIN).unwrap();
    }
    let generations = Generations::new().unwrap();
    generations.bump(7);
    let probe = own_probe().unwrap();
    let fds = [region.descriptor().unwrap().as_raw_fd(), generations.descriptor().unwrap().as_raw_fd()];
    let secret = u128::from_le_bytes(probe.secret);
    let base = region.base();
    let mut out = std::io::stdout();
    writeln!(out, "\nCHILD {} {} {base} {} {secret}", fds[0], fds[1], probe.address).unwrap();
    out.flush().unwrap();
    for line in std::io::stdin().lines() {
        generations.bump(line.unwrap().parse().unwrap());
        writeln!(out, "bumped").unwrap();
        out.flush().unwrap();
    }
}

/// The other process, as its parent sees it. Killed on drop.
struct Peer {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
    input: ChildStdin,
    fds: [String; 2],
    base: u64,
    probe: Probe,
}

impl Peer {
    fn start() -> Peer {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "foreign::child", "--ignored", "--nocapture"])
            .env("FOREIGN_CHILD", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let input = child.stdin.take().unwrap();
        let mut line = String::new();
        while !line.starts_with("CHILD ") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "the child ended before it was ready");
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let fds = [1, 2].map(|word| format!("/proc/{}/fd/{}", child.id(), words[word]));
        let probe = Probe {
            address: words[4].parse().unwrap(),
            secret: words[5].parse::<u128>().unwrap().to_le_bytes(),
        };
        Peer { base: words[3].parse().unwrap(), child, out, input, fds, probe }
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// What the child would have passed over a socket.
    fn descriptor(&self, which: usize) -> OwnedFd {
        OpenOptions::new().read(true).write(true).open(&self.fds[which]).unwrap().into()
    }

    fn bump(&mut self, place: u32) {
        writeln!(self.input, "{place}").unwrap();
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        assert_eq!(line, "bumped\n");
    }

    fn mapped(&self) -> Arc<Tensors> {
        let region = PeerMapping::map(self.descriptor(0), offset(TENSORS) as u64, &room(), soon()).unwrap();
        let offsets = (0..TENSORS).map(|tensor| offset(tensor) as u64);
        Arc::new(Tensors::mapped(region, offsets, TENSOR as u64).unwrap())
    }

    fn process(&self) -> Arc<PeerProcess> {
        PeerProcess::open(self.pid(), self.probe).unwrap()
    }

    fn read(&self) -> Arc<Tensors> {
        let addrs = (0..TENSORS).map(|tensor| self.base + offset(tensor) as u64).collect();
        Arc::new(Tensors::of_process(self.process(), addrs, TENSOR as u64).unwrap())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Tensors of this process over one buffer.
fn local(tensors: usize) -> (Arc<Buffer>, Arc<Tensors>) {
    let buffer = Buffer::new(tensors * TENSOR, |_| 0xEE);
    let addrs: Vec<u64> = (0..tensors).map(|tensor| buffer.addr() + (tensor * TENSOR) as u64).collect();
    let adopted = adopt(&desc(Placement::Host, tensors as u32, ROWS, ROW), CacheKind::Blocks, &addrs);
    (buffer, Arc::new(Tensors::adopted(adopted)))
}

/// What every mapping of these tests fits.
fn room() -> Arc<MapBudget> {
    MapBudget::new(None)
}

fn engine(workers: usize) -> CopyEngine {
    CopyEngine::new(&Config { copy_workers: Some(workers), ..config(1 << 20) }, DeviceSet::host_only())
        .unwrap()
}

const STRAIGHT: Staging = Staging { path: SwapInPath::Auto, buffer_bytes: 1 << 20 };

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn blocks(pairs: &[(u64, u64)]) -> CopyPlan {
    let request = BlockPairs { pairs: pairs.to_vec(), block_bytes: ROW as u64, num_tensors: TENSORS as u32 };
    CopyPlan::blocks(&request, Ends::TwoCaches).unwrap()
}

/// Copies blocks of the peer to local ones, some written twice, so that there are waves.
fn pairs() -> Vec<(u64, u64)> {
    let mut pairs: Vec<(u64, u64)> =
        (0..ROWS as u64 - 3).map(|row| (row * 7 % ROWS as u64, (row * 11 + 3) % ROWS as u64)).collect();
    pairs.extend([(5, 3), (6, 3), (0, 14)]);
    pairs
}

#[test]
fn both_ways_of_reading_bring_what_the_other_process_wrote() {
    let peer = Peer::start();
    for remote in [peer.mapped(), peer.read()] {
        for workers in [1, 2, 4] {
            let (buffer, tensors) = local(TENSORS);
            let progress = Arc::new(Progress::default());
            let engine = engine(workers);
            // What the peer calls device memory is reached all the same.
            let (src, dst) = ((&remote, Placement::Device), (&tensors, Placement::Host));
            let plan = blocks(&pairs());
            assert!(plan.waves().len() > 1);
            let outcome = engine.run(plan.clone(), src, dst, STRAIGHT, soon(), &progress).unwrap();
            assert_eq!((outcome.bytes, progress.bytes()), (plan.bytes(), plan.bytes()));
            let mut expected: Vec<u8> = vec![0xEE; TENSORS * TENSOR];
            for (src, dst) in pairs() {
                for tensor in 0..TENSORS {
                    for at in 0..ROW {
                        expected[tensor * TENSOR + dst as usize * ROW + at] =
                            pattern(9, tensor, src as usize * ROW + at);
                    }
                }
            }
            assert!(buffer.read(0, TENSORS * TENSOR) == expected, "{remote:?} with {workers} workers");
        }
    }
}

#[test]
fn nobody_maps_a_region_for_writing_after_its_owner() {
    let peer = Peer::start();
    for which in [0, 1] {
        let descriptor = peer.descriptor(which);
        for (rights, allowed) in [(ProtFlags::READ, true), (ProtFlags::READ | ProtFlags::WRITE, false)] {
            // SAFETY: no address is asked for.
            let mapped =
                unsafe { mmap(std::ptr::null_mut(), 4096, rights, MapFlags::SHARED, &descriptor, 0) };
            assert_eq!(mapped.is_ok(), allowed, "{rights:?}");
            if let Err(error) = mapped {
                assert_eq!(error, rustix::io::Errno::PERM);
            }
        }
        // The right to write cannot be had later either.
        // SAFETY: no address is asked for.
        let at =
            unsafe { mmap(std::ptr::null_mut(), 4096, ProtFlags::READ, MapFlags::SHARED, &descriptor, 0) }
                .unwrap();
        // SAFETY: the mapping just made, which nothing points into.
        let more = unsafe {
            rustix::mm::mprotect(at, 4096, rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE)
        };
        assert_eq!(more, Err(rustix::io::Errno::ACCESS));
    }
}

#[test]
fn descriptors_that_could_kill_the_reader_are_refused() {
    let (mib, two) = (1 << 20, 2 << 20);
    let unsealed = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, mib).unwrap();
    let error = PeerMapping::map(unsealed, mib, &room(), soon()).unwrap_err();
    assert!(error.to_string().contains("not sealed"), "{error}");
    let file = File::open(std::env::current_exe().unwrap()).unwrap();
    let error = PeerMapping::map(file.into(), 4096, &room(), soon()).unwrap_err();
    assert!(error.to_string().contains("not memory that can be sealed"), "{error}");
    let region = Region::shared("test", mib).unwrap();
    let shared = || region.descriptor().unwrap().try_clone_to_owned().unwrap();
    // Pools are made of whole huge pages.
    let error = PeerMapping::map(shared(), two + 1, &room(), soon()).unwrap_err();
    assert_eq!(error.fact("has_bytes"), Some("2097152"), "{error}");
    for len in [0, u64::MAX] {
        assert!(PeerMapping::map(shared(), len, &room(), soon()).is_err(), "{len}");
    }
    assert_eq!(PeerMapping::map(shared(), mib, &room(), soon()).unwrap().len(), mib);
    assert!(PeerGenerations::map(shared(), &room(), soon()).is_err());
}

#[test]
fn far_tensors_stay_inside_what_is_there() {
    let peer = Peer::start();
    let region = PeerMapping::map(peer.descriptor(0), offset(TENSORS) as u64, &room(), soon()).unwrap();
    for (offset, bytes) in [(region.len() - 4095, 4096), (u64::MAX, 2), (0, region.len() + 1)] {
        assert!(Tensors::mapped(region.clone(), [0, offset], bytes).is_err(), "{offset} + {bytes}");
    }
    let process = peer.process();
    let error = Tensors::of_process(process, [4096, u64::MAX - 100].into(), 4096).unwrap_err();
    assert_eq!(error.fact("pid"), Some(peer.pid().to_string().as_str()));
}

#[test]
fn memory_of_another_process_is_never_a_destination() {
    let peer = Peer::start();
    let (buffer, own) = local(TENSORS);
    let engine = engine(2);
    let (one, _two) = UnixStream::pair().unwrap();
    for remote in [peer.mapped(), peer.read()] {
        assert!(!remote.reach().writable());
        let (src, dst) = ((&own, Placement::Host), (&remote, Placement::Host));
        let error = engine.run(blocks(&pairs()), src, dst, STRAIGHT, soon(), &Arc::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System);
        let (from, to) = (own.window(0, 0, 64).unwrap(), remote.window(0, 0, 64).unwrap());
        assert!(copy(from, to, Kernel::PLAIN).is_err());
        let error = socket_io::receive(one.as_fd(), &[to], 0).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        // Nor does the kernel read another process into it.
        assert!(peer.process().read(&[(remote.window(0, 0, 64).unwrap(), to)]).is_err());
    }
    assert!(buffer.read(0, TENSORS * TENSOR).iter().all(|&byte| byte == 0xEE));
}

#[test]
fn only_the_process_that_told_the_secret_is_read() {
    let (peer, other) = (Peer::start(), Peer::start());
    let mut wrong = peer.probe;
    wrong.secret[15] ^= 1;
    for (pid, probe) in [(peer.pid(), wrong), (std::process::id() as i32, peer.probe)] {
        let error = PeerProcess::open(pid, probe).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System, "{error}");
        assert_eq!(error.fact("pid"), Some(pid.to_string().as_str()));
    }
    // Two runs of one program: the same addresses perhaps, never the same secret.
    assert_ne!(peer.probe.secret, other.probe.secret);
    assert!(PeerProcess::open(other.pid(), Probe { secret: peer.probe.secret, ..other.probe }).is_err());
    assert!(PeerProcess::open(peer.pid(), Probe { address: 16, ..peer.probe }).is_err());
    for pid in [0, -1, i32::MIN, i32::MAX] {
        assert!(PeerProcess::open(pid, peer.probe).is_err(), "{pid}");
    }
    assert_eq!(format!("{:?}", peer.probe), format!("Probe({:#x}, …)", peer.probe.address), "never shown");
    assert!(PeerProcess::open(std::process::id() as i32, own_probe().unwrap()).unwrap().alive());
}

/// A process of another user: says how it was refused to read its parent.
#[test]
#[ignore = "started by the test below"]
fn stranger() {
    let Ok(told) = std::env::var("FOREIGN_STRANGER") else { return };
    let error = PeerProcess::open(told.parse().unwrap(), own_probe().unwrap()).unwrap_err();
    writeln!(std::io::stdout(), "\nSTRANGER {:?} {:?}", error.kind(), error.fact("errno")).unwrap();
}

#[test]
fn refused_permission_is_told_apart() {
    use std::os::unix::process::CommandExt;
    // Whoever may become nobody starts a process of that user; for others process 1 is somebody else's.
    let started = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "foreign::stranger", "--ignored", "--nocapture"])
        .env("FOREIGN_STRANGER", std::process::id().to_string())
        .current_dir("/")
        .uid(65_534)
        .gid(65_534)
        .output();
    if let Ok(output) = started {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("STRANGER NotEnabled Some(\"1\")"), "{text}");
    } else if rustix::process::geteuid().is_root() {
        skipped("nobody may not start this test binary, and root is refused nothing");
    } else {
        let error = PeerProcess::open(1, own_probe().unwrap()).unwrap_err();
        assert_eq!((error.kind(), error.fact("errno")), (ErrorKind::NotEnabled, Some("1")), "{error}");
    }
}

#[test]
fn a_peer_that_is_killed_while_it_is_read_is_an_error_with_its_reason() {
    let mut peer = Peer::start();
    let process = peer.process();
    assert!(process.alive());
    let remote = peer.read();
    let reader = std::thread::spawn(move || {
        let (_buffer, own) = local(TENSORS);
        let engine = engine(2);
        loop {
            let (src, dst) = ((&remote, Placement::Host), (&own, Placement::Host));
            let progress = Arc::default();
            if let Err(error) = engine.run(blocks(&pairs()), src, dst, STRAIGHT, soon(), &progress) {
                return (error, progress.bytes());
            }
        }
    });
    std::thread::sleep(Duration::from_millis(20));
    peer.child.kill().unwrap();
    let (error, bytes) = reader.join().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
    assert_eq!(error.fact("alive"), Some("false"), "{error}");
    assert_eq!(error.fact("errno"), Some("3"), "{error}");
    assert_eq!(error.fact("copied_bytes"), Some(bytes.to_string().as_str()));
    peer.child.wait().unwrap();
    assert!(!process.alive());
    let pid = peer.pid();
    assert!(PeerProcess::open(pid, peer.probe).is_err());
}

#[test]
fn an_address_that_is_not_there_is_named_and_what_came_before_it_counts() {
    let peer = Peer::start();
    let addrs = [peer.base + offset(0) as u64, 4096, peer.base + offset(2) as u64];
    let remote = Arc::new(Tensors::of_process(peer.process(), addrs.into(), TENSOR as u64).unwrap());
    let (buffer, own) = local(TENSORS);
    let progress = Arc::new(Progress::default());
    let plan = blocks(&(0..ROWS as u64).map(|row| (row, ROWS as u64 - 1 - row)).collect::<Vec<_>>());
    // One worker: in the order of the plan.
    let (src, dst) = ((&remote, Placement::Host), (&own, Placement::Host));
    let error = engine(1).run(plan.clone(), src, dst, STRAIGHT, soon(), &progress).unwrap_err();
    assert_eq!(error.fact("errno"), Some("14"), "{error}");
    assert_eq!(error.fact("alive"), Some("true"), "{error}");
    assert!(error.fact("address").is_some(), "{error}");
    let arrived = progress.arrived(&plan, ROW as u64).unwrap();
    // Whole units only: perhaps not all rows of the first tensor, and nothing of the others.
    let [Arrived { tensor: 0, rows }] = arrived.as_slice() else { panic!("{arrived:?}") };
    let rows: Vec<u64> = rows.iter().cloned().flatten().collect();
    assert!(!rows.is_empty());
    for row in rows {
        let from = (ROWS - 1 - row as usize) * ROW;
        let expected: Vec<u8> = (from..from + ROW).map(|at| pattern(9, 0, at)).collect();
        assert!(buffer.read(row as usize * ROW, ROW) == expected, "row {row}");
    }
}

#[test]
fn more_pieces_than_one_call_takes_arrive_also_when_they_are_odd() {
    let peer = Peer::start();
    let remote = peer.read();
    let (buffer, own) = local(TENSORS);
    let mut pairs = Vec::new();
    // Empty ones among them, at the end as well.
    for piece in 0..3000 {
        let (at, len) = (piece * 200, [0, 1, 77, 199][piece % 4]);
        pairs.push((remote.window(1, at as u64 + 13, len).unwrap(), own.window(2, at as u64, len).unwrap()));
    }
    pairs.push((remote.window(1, 0, 0).unwrap(), own.window(2, 0, 0).unwrap()));
    peer.process().read(&pairs).unwrap();
    let got = buffer.read(2 * TENSOR, TENSOR);
    for (at, &byte) in got.iter().enumerate().take(3000 * 200) {
        let inside = at % 200 < [0, 1, 77, 199][at / 200 % 4];
        assert_eq!(byte, if inside { pattern(9, 1, at + 13) } else { 0xEE }, "{at}");
    }
    // Unequal windows are refused before anything moves.
    assert!(peer.process().read(&[(remote.window(0, 0, 8).unwrap(), own.window(0, 0, 9).unwrap())]).is_err());
}

#[test]
fn generations_of_another_process_are_seen_as_they_rise() {
    let mut peer = Peer::start();
    let seen = PeerGenerations::map(peer.descriptor(1), &room(), soon()).unwrap();
    assert!(seen.still(7, 1) && !seen.still(7, 0) && seen.still(8, 0));
    peer.bump(7);
    assert!(!seen.still(7, 1) && seen.still(7, 2) && seen.still(8, 0));
    let last = (1 << 24) - 1;
    peer.bump(last);
    assert!(seen.still(last, 1));
    // Beyond the numbers nothing is ever trusted, and nothing breaks.
    for place in [1 << 24, u32::MAX] {
        peer.bump(place);
        assert!(!seen.still(place, u64::MAX));
    }
    let own = Generations::new().unwrap();
    own.bump(3);
    assert_eq!((own.of(3), own.of(4), own.of(u32::MAX)), (1, 0, u64::MAX));
}

#[test]
fn what_a_device_cannot_reach_is_refused_and_the_ring_is_never_used() {
    let peer = Peer::start();
    let (mapped, read) = (peer.mapped(), peer.read());
    for reach in [HostReach::Direct, HostReach::Staged] {
        let devices = DeviceSet::with_device(Arc::new(SimDevice::new(reach)));
        let region = Arc::new(devices.at(Placement::Device).allocate("test", 1 << 21).unwrap());
        let offsets = (0..TENSORS as u64).map(|tensor| tensor * TENSOR as u64);
        let device = Arc::new(Tensors::carved(region, offsets, TENSOR as u64, Box::new(())).unwrap());
        assert_eq!(device.reach(), Reach::Device);
        let engine = CopyEngine::new(&config(1 << 20), devices).unwrap();
        let forced = Staging { path: SwapInPath::Ring, ..STRAIGHT };
        for (remote, fine) in [(&mapped, reach == HostReach::Direct), (&read, false)] {
            let (src, dst) = ((remote, Placement::Host), (&device, Placement::Device));
            let ran = engine.run(blocks(&pairs()), src, dst, forced, soon(), &Arc::default());
            match ran {
                Ok(_) => assert!(fine),
                Err(error) => {
                    assert!(!fine, "{error}");
                    assert_eq!(error.kind(), ErrorKind::NotEnabled);
                }
            }
            assert_eq!(engine.ring_bytes(), 0);
        }
        if reach == HostReach::Direct {
            let (buffer, own) = local(TENSORS);
            let (src, dst) = ((&device, Placement::Device), (&own, Placement::Host));
            engine.run(blocks(&[(14, 0)]), src, dst, STRAIGHT, soon(), &Arc::default()).unwrap();
            let expected: Vec<u8> = (0..ROW).map(|at| pattern(9, 0, at)).collect();
            assert!(buffer.read(0, ROW) == expected);
        }
    }
}

#[test]
fn windows_go_through_a_socket_in_order_and_in_parts() {
    let (one, two) = UnixStream::pair().unwrap();
    let peer = Peer::start();
    let mapped = peer.mapped();
    let (buffer, own) = local(TENSORS);
    // More windows than one call takes, empty ones and one larger than the socket's buffer among them.
    let mut lens: Vec<u64> = (0..1500).map(|piece| piece % 7 * 31).collect();
    lens[700] = 300_000;
    let mut at = 0;
    let (mut from, mut to) = (Vec::new(), Vec::new());
    for &len in &lens {
        from.push(mapped.window(1, at, len).unwrap());
        to.push(own.window(0, at, len).unwrap());
        at += len;
    }
    let total = at;
    assert_eq!(
        socket_io::receive(two.as_fd(), &to, 0).unwrap_err().kind(),
        std::io::ErrorKind::WouldBlock,
        "nothing is there yet"
    );
    let (mut sent, mut received, mut full) = (0, 0, 0);
    while received < total {
        match socket_io::send(one.as_fd(), &from, sent) {
            Ok(bytes) => sent += bytes as u64,
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                full += 1;
            }
        }
        // An odd amount at once, so that windows are cut.
        received += socket_io::receive(two.as_fd(), &to, received).unwrap() as u64;
    }
    assert_eq!((sent, received), (total, total));
    assert_eq!(socket_io::send(one.as_fd(), &from, total).unwrap(), 0);
    assert_eq!(full, 0, "the receiver kept up");
    let expected: Vec<u8> = (0..total as usize).map(|at| pattern(9, 1, at)).collect();
    assert!(buffer.read(0, total as usize) == expected);
    // With nothing left to ask for there is an error, because 0 is the end of the stream.
    assert!(socket_io::receive(two.as_fd(), &to, total).is_err());
    // Not by dropping it: a process that another test is starting may have it for a moment.
    one.shutdown(std::net::Shutdown::Both).unwrap();
    assert_eq!(socket_io::receive(two.as_fd(), &to, 0).unwrap(), 0);
    assert_eq!(socket_io::send(two.as_fd(), &from, 0).unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
    // Memory that only the kernel reads cannot be sent.
    assert!(socket_io::send(two.as_fd(), &[peer.read().window(0, 0, 8).unwrap()], 0).is_err());
}
