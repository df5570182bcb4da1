//! Measures reads of another process's memory: `cargo bench -p llm-datadist-core --bench reads`.
//!
//! Prints the median, the 99th percentile and the minimum in microseconds of calls without a pause, and of
//! calls with a pause in which threads fall asleep. The other process runs this program too. `transfer`
//! measures links and whole transfers.
#![allow(unsafe_code, reason = "memory that the engine is promised")]
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark")]

use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{Config, Role};
use llm_datadist_core::testing::copy::{CopyEngine, DataPath, PathJob, PeerTensors, Progress};
use llm_datadist_core::testing::device::DeviceSet;
use llm_datadist_core::testing::memory::{Adopted, PeerProcess, Probe, Tensors, allow_readers, own_probe};
use llm_datadist_core::testing::plan::{CopyPlan, Moves, Pieces};
use llm_datadist_core::{CacheDesc, CacheKind, ClusterId, DataType, Deadline, Placement};

const BYTES: usize = 64 << 20;

fn child() {
    allow_readers();
    let memory = vec![7_u8; BYTES];
    let probe = own_probe().unwrap();
    let (at, secret) = (memory.as_ptr() as u64, u128::from_le_bytes(probe.secret));
    println!("{at} {} {secret}", probe.address);
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
    black_box(memory);
}

fn main() {
    if std::env::var_os("READS_CHILD").is_some() {
        return child();
    }
    let mut other = Command::new(std::env::current_exe().unwrap())
        .env("READS_CHILD", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(other.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let words: Vec<u128> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
    let [at, address, secret] = words[..] else { unreachable!("three numbers") };
    let number = |word: u128| u64::try_from(word).unwrap();
    let probe = Probe { address: number(address), secret: secret.to_le_bytes() };
    let process = PeerProcess::open(i32::try_from(other.id()).unwrap(), probe).unwrap();
    let tensors = Tensors::of_process(process.clone(), [number(at)].into(), BYTES as u64).unwrap();
    let src = PeerTensors::Process(Arc::new(tensors), process);
    let mut memory = vec![1_u8; BYTES];
    let shape = vec![i64::try_from(BYTES).unwrap(), 1];
    let desc = CacheDesc {
        num_tensors: 1,
        shape,
        data_type: DataType::Uint8,
        placement: Placement::Host,
        row_stride: None,
        kv_layout: None,
    };
    // SAFETY: `memory` outlives every copy, and nothing else touches it.
    let adopted = unsafe { Adopted::new(&desc, CacheKind::Blocks, &[memory.as_mut_ptr() as u64]) };
    let dst = Arc::new(Tensors::adopted(adopted.unwrap()));
    let config = Config::new(Role::Prompt, ClusterId(1));
    let engine = CopyEngine::new(&config, DeviceSet::host_only());
    for (blocks, block, calls, pauses) in [
        (1, 4 << 10, 4000, true),
        (1, 16 << 10, 4000, true),
        (16, 16 << 10, 2000, true),
        (1, 256 << 10, 2000, true),
        (64, 64 << 10, 200, false),
        (1, 64 << 20, 12, false),
    ] {
        let pairs: Vec<(u64, u64)> = (0..blocks).map(|at| (at, at)).collect();
        let pieces = Pieces::blocks(block, pairs.iter().copied()).unwrap();
        let mut moves = Moves { pieces, num_tensors: 1, ..Moves::default() };
        let plan = CopyPlan::moves(&mut moves).unwrap();
        for pause in [false, true].into_iter().filter(|pause| pauses || !pause) {
            let calls = if pause { 300 } else { calls };
            let mut times: Vec<Duration> = (0..calls + calls / 10)
                .map(|_| {
                    if pause {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    let started = Instant::now();
                    let deadline = Deadline::after(Duration::from_secs(60));
                    let (job, to) =
                        (PathJob { copy_engine: &engine, plan: &plan, deadline }, (&dst, Placement::Host));
                    (&src).read(job, to, &Arc::new(Progress::default()), Arc::new(())).unwrap();
                    started.elapsed()
                })
                .skip(calls / 10)
                .collect();
            times.sort_unstable();
            let micros = |at: usize| times[at.min(times.len() - 1)].as_secs_f64() * 1e6;
            let name = format!("{blocks} x {} KiB{}", block >> 10, if pause { ", 1 ms between" } else { "" });
            let (half, last) = (micros(times.len() / 2), micros(times.len() * 99 / 100));
            println!("{name:32} {half:10.2} {last:10.2} {:10.2}", micros(0));
        }
    }
    black_box(&memory);
    let _ = other.kill();
    let _ = other.wait();
}
