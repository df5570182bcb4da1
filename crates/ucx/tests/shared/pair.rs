//! Two fabrics of the stand-in for UCX, one of which reads the other.

use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use llm_datadist_ucx::{Error, Fabric, Mapping, Peer, Piece};

pub(crate) const LONG: Duration = Duration::from_secs(20);
pub(crate) const PIECE: usize = 1000;

/// Returns the path of a stand-in, which is beside the program of these tests.
pub(crate) fn stand_in(file: &str) -> PathBuf {
    let file = std::env::current_exe().unwrap().with_file_name(file);
    assert!(file.exists(), "{} was not built", file.display());
    file
}

/// Calls a function of a stand-in with which a test controls it.
pub(crate) fn control<F: Copy, T>(file: &str, name: &str, call: impl FnOnce(F) -> T) -> T {
    // SAFETY: the stand-in, loaded already, or by this call.
    let library = unsafe { libloading::Library::new(stand_in(file)) }.unwrap();
    // SAFETY: the caller names the type of the function.
    let function = unsafe { library.get::<F>(name) }.unwrap();
    call(*function)
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

pub(crate) fn resident_pages() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse().unwrap()
}

/// Returns a name that no other pair has, and these settings with it.
pub(crate) fn named(settings: &[(&str, &str)]) -> (String, Vec<(String, String)>) {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let name = format!("pair {}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let all = settings.iter().copied().chain([("FAKE_NAME", name.as_str())]);
    let settings = all.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    (name, settings)
}

/// Two fabrics in this process, and memory that one maps and the other reads.
pub(crate) struct Pair {
    name: String,
    /// The file of the stand-in, and its function that changes a setting.
    control: (&'static str, &'static str),
    pub(crate) reader: Fabric,
    pub(crate) owner: Fabric,
    pub(crate) source: Vec<u8>,
    pub(crate) target: Vec<u8>,
    /// The mappings of the source, and of the target if a test has mapped it.
    pub(crate) mappings: [Option<Mapping>; 2],
}

impl Pair {
    /// Creates a pair whose reader has the name `name`.
    pub(crate) fn of(
        control: (&'static str, &'static str),
        name: String,
        [reader, owner]: [Fabric; 2],
        pieces: usize,
    ) -> Pair {
        let source: Vec<u8> = (0..pieces * PIECE).map(|at| (at * 7 + at / 251) as u8).collect();
        let target = vec![0; source.len()];
        // SAFETY: the memory lives as long as the pair, which drops the mapping first.
        let mapping = unsafe { owner.map(source.as_ptr() as u64, source.len() as u64) }.unwrap();
        Pair { name, control, reader, owner, source, target, mappings: [Some(mapping), None] }
    }

    pub(crate) fn peer(&self) -> Peer {
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

    pub(crate) fn read(&self, peer: &Peer, limit: Duration) -> Result<(), Error> {
        // SAFETY: the destinations are the target, which lives longer.
        unsafe { peer.read(&self.key(), self.pieces(), Some(Instant::now() + limit), &|| false) }
    }

    /// Changes a setting of the stand-in for the side that reads.
    pub(crate) fn set(&self, setting: &str, value: i64) {
        type Set = unsafe extern "C" fn(*const c_char, *const c_char, i64) -> bool;
        let [name, setting] = [self.name.as_str(), setting].map(|text| CString::new(text).unwrap());
        control(self.control.0, self.control.1, |set: Set| {
            // SAFETY: two texts that end with a zero byte.
            assert!(unsafe { set(name.as_ptr(), setting.as_ptr(), value) }, "no reader has this name");
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
