//! The stand-in for NIXL, and two fabrics that use it.

use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use llm_datadist_fabric::{Error, Fabric as _, Mapping, Peer, Piece};
use llm_datadist_nixl::{Fabric, Library, Options};

pub(crate) const LONG: Duration = Duration::from_secs(20);
pub(crate) const PIECE: usize = 1000;

// The tests need the file, and no symbol of it.
use fake_nixl as _;

/// The file beside the program of these tests.
pub(crate) fn fake() -> PathBuf {
    let file = std::env::current_exe().unwrap().with_file_name("libfake_nixl.so");
    assert!(file.exists(), "{} was not built", file.display());
    file
}

/// Writes a copy of the file that has another version.
pub(crate) fn fake_of_version(version: &str) -> PathBuf {
    let (mut bytes, mark) = (std::fs::read(fake()).unwrap(), b"NIXL version: \0");
    let at = bytes.windows(mark.len()).position(|window| window == mark).unwrap() + mark.len();
    bytes[at..at + 5].fill(0);
    bytes[at..at + version.len()].copy_from_slice(version.as_bytes());
    let file = std::env::temp_dir().join(format!("libfake_nixl-{}-{version}.so", std::process::id()));
    std::fs::write(&file, bytes).unwrap();
    file
}

pub(crate) fn library() -> Library {
    // SAFETY: the stand-in, and no test uses the environment by functions of C.
    unsafe { Library::open(&fake()) }.unwrap()
}

/// Calls a function of the stand-in with which a test controls it.
fn control<F: Copy, T>(name: &str, call: impl FnOnce(F) -> T) -> T {
    // SAFETY: the stand-in, loaded already or by this.
    let library = unsafe { libloading::Library::new(fake()) }.unwrap();
    // SAFETY: the caller names the type of the function.
    let function = unsafe { library.get::<F>(name) }.unwrap();
    call(*function)
}

/// Has a function refuse the calls of this thread; 0 ends that.
pub(crate) fn refuse(function: &str, status: i32) {
    let function = CString::new(function).unwrap();
    control("fake_nixl_refuse", |refuse: unsafe extern "C" fn(*const c_char, i32)| {
        // SAFETY: a text that ends with a zero byte.
        unsafe { refuse(function.as_ptr(), status) };
    });
}

/// Returns the number of agents, or of handles of all kinds, that are open in this process.
pub(crate) fn open_handles(agents_only: bool) -> usize {
    control("fake_nixl_open_handles", |open: extern "C" fn(bool) -> usize| open(agents_only))
}

/// Runs the test `name` in a process of its own, because other tests have handles too. Returns `false` in that process.
pub(crate) fn runs_alone(name: &str) -> bool {
    if std::env::var_os("ALONE").is_some() {
        return false;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    assert!(child.args([name, "--exact", "--nocapture"]).env("ALONE", "1").status().unwrap().success());
    true
}

/// Two fabrics in this process, and memory that one maps and the other reads.
pub(crate) struct Pair {
    name: String,
    pub(crate) options: Options,
    pub(crate) reader: Fabric,
    pub(crate) owner: Fabric,
    pub(crate) source: Vec<u8>,
    pub(crate) target: Vec<u8>,
    mappings: [Option<Box<dyn Mapping>>; 2],
}

impl Pair {
    pub(crate) fn new(pieces: usize, settings: &[(&str, &str)]) -> Pair {
        Self::with(pieces, settings, &Options::default())
    }

    pub(crate) fn with(pieces: usize, settings: &[(&str, &str)], options: &Options) -> Pair {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!("group {}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let library = library();
        let all = settings.iter().copied().chain([("FAKE_NAME", name.as_str())]);
        let settings = all.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let options = Options { settings, ..options.clone() };
        let reader = Fabric::open(&library, &options).unwrap();
        let owner = Fabric::open(&library, &Options::default()).unwrap();
        let source: Vec<u8> = (0..pieces * PIECE).map(|at| (at * 7 + at / 251) as u8).collect();
        let target = vec![0; source.len()];
        // SAFETY: the memory lives as long as the pair, which drops the mapping first.
        let mapping = unsafe { owner.map(source.as_ptr() as u64, source.len() as u64) }.unwrap();
        Pair { name, options, reader, owner, source, target, mappings: [Some(mapping), None] }
    }

    /// Maps the destinations, or unmaps them.
    pub(crate) fn map_target(&mut self, mapped: bool) {
        let (start, len) = (self.target.as_ptr() as u64, self.target.len() as u64);
        // SAFETY: as above.
        let map = || unsafe { self.reader.map(start, len) }.unwrap();
        self.mappings[1] = mapped.then(map);
    }

    pub(crate) fn peer(&self) -> Box<dyn Peer> {
        self.reader.peer(self.owner.address().unwrap())
    }

    pub(crate) fn key(&self) -> Arc<Vec<u8>> {
        self.mappings[0].as_ref().unwrap().key().clone()
    }

    /// Every piece, the last one first.
    pub(crate) fn pieces(&self) -> Vec<Piece> {
        let count = self.source.len() / PIECE;
        let piece = |at: usize| Piece {
            local: self.target.as_ptr() as u64 + (at * PIECE) as u64,
            remote: self.source.as_ptr() as u64 + (at * PIECE) as u64,
            len: PIECE as u64,
        };
        (0..count).rev().map(piece).collect()
    }

    pub(crate) fn read(&self, peer: &dyn Peer, limit: Duration) -> Result<(), Error> {
        // SAFETY: the destinations are the target, which lives longer.
        unsafe { peer.read(&self.key(), self.pieces(), Some(Instant::now() + limit), &|| false) }
    }

    /// Changes a setting of the stand-in for the side that reads.
    pub(crate) fn set(&self, setting: &str, value: i64) {
        type Set = unsafe extern "C" fn(*const c_char, *const c_char, i64) -> bool;
        let [name, setting] = [self.name.as_str(), setting].map(|text| CString::new(text).unwrap());
        control("fake_nixl_set", |set: Set| {
            // SAFETY: two texts that end with a zero byte.
            assert!(unsafe { set(name.as_ptr(), setting.as_ptr(), value) }, "no group has this name");
        });
    }

    /// Whether all bytes are in place.
    pub(crate) fn arrived(&self) -> bool {
        self.target == self.source
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.mappings = [None, None];
    }
}
