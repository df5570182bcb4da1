//! The stand-in for NIXL, and two fabrics that use it.

use std::ffi::{CString, c_char};
use std::path::PathBuf;

use llm_datadist_nixl::{Fabric, Library, Options};

use crate::pair::{Pair, control, named, stand_in};

const FILE: &str = "libfake_nixl.so";

// The tests need the file, and no symbol of it.
use fake_nixl as _;

/// The file beside the program of these tests.
pub(crate) fn fake() -> PathBuf {
    stand_in(FILE)
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

/// Has a function refuse the calls of this thread; 0 ends that.
pub(crate) fn refuse(function: &str, status: i32) {
    let function = CString::new(function).unwrap();
    control(FILE, "fake_nixl_refuse", |refuse: unsafe extern "C" fn(*const c_char, i32)| {
        // SAFETY: a text that ends with a zero byte.
        unsafe { refuse(function.as_ptr(), status) };
    });
}

/// Returns the number of agents, or of handles of all kinds, that are open in this process.
pub(crate) fn open_handles(agents_only: bool) -> usize {
    control(FILE, "fake_nixl_open_handles", |open: extern "C" fn(bool) -> usize| open(agents_only))
}

pub(crate) fn new_pair(pieces: usize, settings: &[(&str, &str)]) -> Pair {
    pair_with(pieces, settings, &Options::default())
}

pub(crate) fn pair_with(pieces: usize, settings: &[(&str, &str)], options: &Options) -> Pair {
    let (name, settings) = named(settings);
    let open = |options: &Options| Box::new(Fabric::open(&library(), options).unwrap()) as _;
    let fabrics = [open(&Options { settings, ..options.clone() }), open(&Options::default())];
    Pair::of((FILE, "fake_nixl_set"), name, fabrics, pieces)
}

/// Maps the destinations of a pair, or unmaps them.
pub(crate) fn map_target(pair: &mut Pair, mapped: bool) {
    let (start, len) = (pair.target.as_ptr() as u64, pair.target.len() as u64);
    // SAFETY: the memory lives as long as the pair, which drops the mapping first.
    let map = || unsafe { pair.reader.map(start, len) }.unwrap();
    pair.mappings[1] = mapped.then(map);
}
