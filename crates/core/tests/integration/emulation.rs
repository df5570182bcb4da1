//! Calls that emulators of another processor lack. A test that needs one is skipped under emulation, and on kernels that are too old.
//! Otherwise it fails.
#![allow(unsafe_code, reason = "the tests' own questions to the kernel")]

use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::LazyLock;

use rustix::param::page_size;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::fixtures::skipped;
use crate::registered_pages::{PAGE, Pages, UNIT};

/// Maximum number of cases of a property test under emulation, which is many times slower than the machine.
pub const MAX_CASES: u32 = 10_000;

/// A call or an option of the kernel that an emulator may lack.
pub struct Feature {
    name: &'static str,
    /// The first version of Linux that has it.
    since: (u32, u32),
    /// Whether the engine uses it only if the pages of the machine have 4 KiB.
    of_small_pages: bool,
    works: fn() -> bool,
}

pub const PROCESS_READS: Feature =
    Feature { name: "process_vm_readv", since: (3, 2), of_small_pages: false, works: reads_by_process_id };
pub const ADDRESS_SPACE_LIMITS: Feature =
    Feature { name: "RLIMIT_AS", since: (1, 0), of_small_pages: false, works: limits_address_space };
pub const MERGED_PAGES: Feature =
    Feature { name: "MADV_COLLAPSE", since: (6, 1), of_small_pages: true, works: merges_pages };
pub const PAGE_SIZES: Feature =
    Feature { name: "PAGEMAP_SCAN", since: (6, 7), of_small_pages: true, works: reports_page_sizes };
pub const REFUSED_DESCRIPTORS: Feature =
    Feature { name: "SO_PASSRIGHTS", since: (6, 16), of_small_pages: false, works: refuses_descriptors };

impl Feature {
    /// Returns why it is missing: the kernel is older or has other pages, or an emulator lacks it. Panics if it is missing for another reason.
    pub fn missing(&self) -> Option<String> {
        let (major, minor) = self.since;
        if kernel() < self.since {
            return Some(format!("the kernel is older than {major}.{minor}"));
        }
        if self.of_small_pages && page_size() != 4096 {
            return Some(format!("pages have {} bytes", page_size()));
        }
        if (self.works)() {
            return None;
        }
        assert!(emulated(), "{} does not work, although no emulator runs this test", self.name);
        Some(format!("emulation has no {}", self.name))
    }

    /// Returns whether it is missing, and reports that the test skips what needs it. Panics as [`Feature::missing`] does.
    pub fn skips(&self) -> bool {
        self.missing().inspect(|why| skipped(why)).is_some()
    }
}

/// The version of the kernel.
fn kernel() -> (u32, u32) {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// Returns whether an emulator runs this process. If so, the kernel runs an executable for another processor than that of this test.
pub fn emulated() -> bool {
    // An emulator replaces `/proc/self/exe` by its guest, but not this file.
    let mut header = [0; 20];
    File::open("/proc/thread-self/exe").unwrap().read_exact(&mut header).unwrap();
    let own = if cfg!(target_arch = "aarch64") { libc::EM_AARCH64 } else { libc::EM_X86_64 };
    assert_eq!(header[..4], *b"\x7fELF");
    u16::from_le_bytes([header[18], header[19]]) != own
}

fn reads_by_process_id() -> bool {
    let (from, mut to) = ([7_u8; 16], [0_u8; 16]);
    let range = |base: *mut u8| libc::iovec { iov_base: base.cast(), iov_len: 16 };
    let (remote, local) = (range(from.as_ptr().cast_mut()), range(to.as_mut_ptr()));
    // SAFETY: 16 bytes of this thread's stack, read into 16 others.
    let read = unsafe {
        libc::process_vm_readv(std::process::id() as i32, &raw const local, 1, &raw const remote, 1, 0)
    };
    read == 16 && to == from
}

/// Sets a limit far above the memory that a test reserves, so that other threads do not fail.
fn limits_address_space() -> bool {
    // Once, because the limit is that of all threads.
    static LIMITED: LazyLock<bool> = LazyLock::new(|| {
        let before = getrlimit(Resource::As);
        let far = before.maximum.unwrap_or(u64::MAX).min(1 << 46);
        let tried = Rlimit { current: Some(far), ..before };
        setrlimit(Resource::As, tried).unwrap();
        let limited = getrlimit(Resource::As) == tried;
        setrlimit(Resource::As, before).unwrap();
        limited
    });
    *LIMITED
}

fn merges_pages() -> bool {
    /// Of Linux 6.1.
    const MADV_COLLAPSE: libc::c_int = 25;
    let pages = Pages::new(1);
    let small = pages.takes_advice(libc::MADV_NOHUGEPAGE);
    pages.write(0, 1);
    let merged = [libc::MADV_HUGEPAGE, MADV_COLLAPSE].map(|advice| pages.takes_advice(advice));
    small && merged == [true; 2] && pages.huge() == UNIT
}

/// Scans one page that is present, without asking for any property of it.
fn reports_page_sizes() -> bool {
    const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
    let pages = Pages::new(1);
    pages.write(0, 1);
    let (at, map) = (pages.at() as u64, File::open("/proc/self/pagemap").unwrap());
    // The size of this structure, flags, and the start and the end of the addresses.
    let mut scan: [u64; 12] = [96, 0, at, at + PAGE as u64, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: the call reads and writes this structure, which outlives it.
    unsafe { libc::ioctl(map.as_raw_fd(), PAGEMAP_SCAN, scan.as_mut_ptr()) >= 0 }
}

fn refuses_descriptors() -> bool {
    const SO_PASSRIGHTS: libc::c_int = 83;
    let (socket, _other) = UnixStream::pair().unwrap();
    let no: libc::c_int = 0;
    let (at, len) = ((&raw const no).cast(), size_of_val(&no) as u32);
    // SAFETY: the call reads an integer that outlives it.
    unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, at, len) == 0 }
}

#[test]
fn only_emulation_and_older_kernels_excuse_what_is_missing() {
    let absent = Feature { name: "call", since: (0, 0), of_small_pages: false, works: || false };
    match std::panic::catch_unwind(|| absent.missing()) {
        Ok(why) => assert_eq!((why.as_deref(), emulated()), (Some("emulation has no call"), true)),
        Err(_) => assert!(!emulated()),
    }
    let later = Feature { since: (1000, 1), ..absent };
    assert_eq!(later.missing().as_deref(), Some("the kernel is older than 1000.1"));
    assert_eq!(Feature { since: (0, 0), works: || true, ..later }.missing(), None);
}
