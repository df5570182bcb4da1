//! Measures the overhead of a call of the C++ class over the call of the core beneath it. Both run in one
//! process, in turn, with the same small request. The goal is 200 ns.
//!
//! `make capi && cargo bench -p llm-datadist-capi --bench capi`: the benchmark does not build the library. It
//! compiles `capi.cpp` with `$CXX` (`c++`). `copy` measures the cost of moving bytes.

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark stops at the first surprise")]
#![allow(clippy::cast_precision_loss, reason = "counts of calls")]
#![allow(unsafe_code, missing_docs, reason = "functions of a library that was compiled here")]

use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

use llm_datadist_core::bindings::{Config, CopyArgs, DataDist, End, PoolConfig, Role};
use llm_datadist_core::{CacheDesc, CacheId, CacheKind, ClusterId, DataType, Placement};

const CALLS: u64 = 100_000;
const ROUNDS: usize = 15;
const TENSORS: u32 = 1;
const ROWS: i64 = 4;
const ROW_BYTES: i64 = 64;

/// A name, the function of `capi.cpp`, and the same call of the core.
type Case<'a> = (&'static str, &'static str, &'a dyn Fn(u32));
type Measured = extern "C" fn(u64) -> f64;

/// The compiled calls; never unloaded.
struct Library(*mut c_void);

impl Library {
    fn open() -> Library {
        let exe = std::env::current_exe().unwrap();
        let release = exe.ancestors().find(|path| path.join("libllm_datadist.so").is_file());
        let release = release.expect("libllm_datadist.so beside this program").to_path_buf();
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let out: PathBuf = release.join("llm_datadist_bench_calls.so");
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let status = Command::new(compiler)
            .args(["-std=c++14", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I"])
            .arg(root.join("crates/capi/include"))
            .arg(root.join("benches/capi.cpp"))
            .arg("-o")
            .arg(&out)
            .arg(format!("-L{}", release.display()))
            .args(["-lllm_datadist", &format!("-Wl,-rpath,{}", release.display())])
            .status();
        assert!(status.expect("a C++ compiler").success());
        let path = CString::new(out.to_str().unwrap()).unwrap();
        // SAFETY: the library was compiled above; its initializers and those of libllm_datadist are our own.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "the library does not load");
        Library(handle)
    }

    fn symbol(&self, name: &str) -> *mut c_void {
        let name = CString::new(name).unwrap();
        // SAFETY: the library is open forever, the name ends in a null byte.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?}");
        symbol
    }

    fn measured(&self, name: &str) -> Measured {
        // SAFETY: `capi.cpp` defines every measured function with this signature.
        unsafe { std::mem::transmute::<*mut c_void, Measured>(self.symbol(name)) }
    }
}

/// Returns the CPU time of this thread in nanoseconds, which excludes other work on a shared machine.
fn now() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` outlives the call.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut now) }, 0);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

fn nanoseconds(call: impl Fn(u32)) -> f64 {
    let started = now();
    for number in 0..CALLS {
        call(u32::try_from(number).unwrap_or_default());
    }
    (now() - started) / CALLS as f64
}

fn quartiles(values: &mut [f64]) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [values.len() / 4, values.len() / 2, values.len() * 3 / 4].map(|at| values[at])
}

fn main() {
    let library = Library::open();
    // SAFETY: `capi.cpp` defines it with this signature.
    let prepare: extern "C" fn(u32, i64, i64) -> bool =
        unsafe { std::mem::transmute(library.symbol("Prepare")) };
    assert!(prepare(TENSORS, ROWS, ROW_BYTES));
    let mut config = Config::new(Role::Prompt, ClusterId(2));
    config.device_pool = Some(PoolConfig::about(1 << 24));
    config.remote_accessible = true;
    let engine = DataDist::open(config).unwrap();
    let desc = CacheDesc {
        num_tensors: TENSORS,
        shape: vec![ROWS, ROW_BYTES],
        data_type: DataType::Uint8,
        placement: Placement::Device,
        row_stride: None,
        kv_layout: None,
    };
    let cache = engine.allocate(&desc, CacheKind::Batch, &[]).unwrap();
    let end = End::Managed(cache.id());
    let copied = |number: u32| {
        let (src_batch_index, dst_batch_index) = (number % 2, 2 + number % 2);
        let args = CopyArgs { dst_batch_index, src_batch_index, offset: 0, size: -1 };
        engine.copy_kv_cache(&end, &end, args).run().unwrap();
    };
    let calls: [Case<'_>; 3] = [
        ("DeallocateCache of nothing", "Deallocate", &|_| engine.deallocate(CacheId(99)).unwrap()),
        ("CopyKvCache of 64 bytes", "CopyCache", &copied),
        ("CopyKvBlocks of one block", "CopyBlocks", &|_| {
            engine.copy_kv_blocks(&end, &end, &[0], &[&[3]]).run().unwrap();
        }),
    ];
    println!(
        "nanoseconds a call, {ROUNDS} rounds of {CALLS} each, in turn; median and quartiles of the difference"
    );
    for (name, symbol, core) in calls {
        let class = library.measured(symbol);
        let (mut below, mut above, mut over) = (vec![], vec![], vec![]);
        for _ in 0..ROUNDS {
            let (core, class) = (nanoseconds(core), class(CALLS));
            assert!(class > 0.0, "a call failed");
            below.push(core);
            above.push(class);
            over.push(class - core);
        }
        let [first, median, third] = quartiles(&mut over);
        let ([_, core, _], [_, class, _]) = (quartiles(&mut below), quartiles(&mut above));
        println!(
            "{name:28} core {core:7.1}   C++ {class:7.1}   over {median:6.1} ({first:.1} to {third:.1})"
        );
    }
}
