//! The same copies on one core and on two: the affinity of every thread of both processes is set before they start.
//!
//! Not for: the best number of workers (`copy --workers`).

use llm_datadist_core::Placement;
use llm_datadist_core::bindings::{DataDist, Layers, Rows};

use crate::Options;
use crate::curve::{Curve, Report};
use crate::remote::RemoteCache;
use crate::setup::{Blocks, LIMIT, Shuffle, config, nanos, shared};

/// Bytes of a round.
const ROUND: u64 = 256 << 20;

pub fn cores(options: &Options, report: &mut Report) {
    let all = affinity();
    let counts: Vec<usize> = (1..=all.len()).collect();
    for kib in [16, 64, 256] {
        let new = |what: &str| {
            let name = format!("{what} of blocks of {kib} KiB");
            Curve::new(name, "GB/s", "cores", "affinity of both processes, as many copy workers as cores")
        };
        let (mut swapping, mut pulling) = (new("swap_blocks"), new("pull, shm"));
        for &count in &counts {
            stay_on(&all[..count]);
            let (swapped, pulled) = speeds(kib << 10, count, options);
            swapping.add(count as u64, swapped);
            pulling.add(count as u64, pulled);
        }
        stay_on(&all);
        report.curve(&swapping);
        report.curve(&pulling);
    }
}

/// Returns the GB/s of swaps and of pulls, with newly opened engines.
fn speeds(bytes: u64, workers: usize, options: &Options) -> (Vec<f64>, Vec<f64>) {
    let rows = if options.quick { 64 } else { ROUND / bytes };
    let mut remote = RemoteCache::start();
    let peer = remote.owner("shm", true, rows, bytes, 0);
    let mut config = config(1, "shm", ((rows * bytes) >> 20) + 1, 12);
    config.host_pool = config.device_pool;
    config.copy_workers = Some(workers);
    let engine = DataDist::open(config).unwrap();
    engine.link_clusters(&[peer], LIMIT).remove(0).unwrap();
    let local = Blocks::new(&engine, rows, bytes, Placement::Device, None);
    let host = Blocks::new(&engine, rows, bytes, Placement::Host, None);
    local.fill();
    let mut shuffle = Shuffle(48);
    let (mut swapped, mut pulled) = (vec![], vec![]);
    for _ in 0..=options.rounds() {
        let (from, to) = (shuffle.order(rows), shuffle.order(rows));
        let pairs: Vec<_> = from.iter().copied().zip(to.iter().copied()).collect();
        host.poison();
        let speed = |nanos: f64| (rows * bytes) as f64 / nanos;
        swapped.push(speed(nanos(|| engine.swap_blocks(&local.end, &host.end, &pairs).run().unwrap())));
        host.verify(&from, &to);
        local.poison();
        let rows = Rows::Blocks { remote: from.clone(), local: to.clone() };
        pulled.push(speed(nanos(|| engine.pull(shared(), &local.end, rows, Layers::ALL).run().unwrap())));
        local.verify(&from, &to);
        local.fill();
    }
    (swapped.split_off(1), pulled.split_off(1))
}

/// The CPUs this thread may use.
fn affinity() -> Vec<usize> {
    // SAFETY: a set of CPUs is plain numbers.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the size is that of the set.
    let told = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    assert_eq!(told, 0);
    // SAFETY: below the size of a set.
    (0..libc::CPU_SETSIZE as usize).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect()
}

/// Keeps this thread, and those and the processes it starts from now on, on `cpus`.
fn stay_on(cpus: &[usize]) {
    // SAFETY: as in `affinity`.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus {
        // SAFETY: the CPU is one of a set.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: the size is that of the set.
    assert_eq!(unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) }, 0);
}
