//! Limits of memory: how they are read, and refusals in a control group, where allocations do not fail.
//!
//! One test makes a group of its own, which takes root and a control group file system.

use std::path::{Path, PathBuf};

use llm_datadist_core::bindings::{Config, DataDist, End, HugeChoice, PoolConfig};
use llm_datadist_core::testing::memory::{
    refuse_beyond_room, refuse_beyond_room_under, usable_bytes, usable_under,
};
use llm_datadist_core::{CacheKind, ErrorKind, Placement, Result};

use crate::child_process::{self, report};
use crate::counting_allocator;
use crate::fixtures::{config, desc, skipped};

const MIB: u64 = 1 << 20;
const LIMIT: u64 = 256 * MIB;
/// Pairs of one call: 96 MiB as the caller has them, and several times as much while the call runs.
const PAIRS: i64 = 6 << 20;

/// A control group with a limit of its own; removed on drop.
struct Group(PathBuf);

impl Group {
    /// Creates the group. `Err` says why that is not possible.
    fn new() -> std::result::Result<Group, String> {
        let two = Path::new("/sys/fs/cgroup");
        let controlled = std::fs::read_to_string(two.join("cgroup.subtree_control")).unwrap_or_default();
        let (top, limit) = if controlled.split_whitespace().any(|name| name == "memory") {
            (two.to_path_buf(), "memory.max")
        } else {
            (two.join("memory"), "memory.limit_in_bytes")
        };
        let group = top.join(format!("llm-datadist-test-{}", std::process::id()));
        let no_group = |error: std::io::Error| format!("no control group in {}: {error}", top.display());
        std::fs::create_dir(&group).map_err(no_group)?;
        let made = Group(group);
        std::fs::write(made.0.join(limit), LIMIT.to_string()).map_err(no_group)?;
        Ok(made)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Runs inside the group: reports what is refused, and that the process continues.
#[test]
#[ignore = "started by the test below"]
fn inside() {
    let Some(group) = child_process::role() else { return };
    std::fs::write(Path::new(&group).join("cgroup.procs"), std::process::id().to_string()).unwrap();
    assert!(usable_bytes() <= LIMIT, "the group counts: {}", usable_bytes());
    let say = |name: &str, result: Result<()>| {
        let text = result.map_or_else(|error| format!("{:?} {error}", error.kind()), |()| "done".into());
        report(format_args!("{name} {text}"));
    };
    let mut large = config(1 << 20);
    large.device_pool = Some(PoolConfig { memory_size: 2 * LIMIT, page_shift: 16 });
    large.huge_pages = HugeChoice::Eager;
    say("eager", DataDist::open(large.clone()).map(drop));
    // A pool that is not committed may be larger, because it takes only address space.
    large.huge_pages = HugeChoice::Off;
    say("lazy", DataDist::open(large).map(drop));
    say("lists", many_pairs());
    say("destinations", many_destinations());
    say("small", refuse_beyond_room("test", MIB));
}

/// An engine and its cache of 1024 blocks.
fn blocks(placement: Placement) -> Result<(DataDist, End)> {
    let engine = DataDist::open(Config { huge_pages: HugeChoice::Off, ..config(64 * MIB) })?;
    let cache = engine.allocate(&desc(placement, 1, 1024, 16), CacheKind::Blocks, &[])?;
    Ok((engine, End::Managed(cache.id())))
}

/// `count` pairs of blocks, which do not overlap.
fn pairs(count: i64) -> Vec<(i64, i64)> {
    (0..count).map(|at| (at % 512, 512 + at % 512)).collect()
}

/// A call with more pairs than the group has room for.
fn many_pairs() -> Result<()> {
    let (engine, end) = blocks(Placement::Host)?;
    let refused = engine.copy_blocks(&end, &pairs(PAIRS)).run();
    // Nothing has changed, and the engine works on.
    engine.copy_blocks(&end, &pairs(512)).run()?;
    refused
}

/// The same with block lists of the C++ class, which take no memory before they are paired.
fn many_destinations() -> Result<()> {
    let (engine, end) = blocks(Placement::Device)?;
    let (from, to): (Vec<u64>, Vec<u64>) = (0..512).map(|block| (block, 512 + block)).unzip();
    let lists = vec![to.as_slice(); usize::try_from(PAIRS).unwrap() / from.len()];
    let refused = engine.copy_kv_blocks(&end, &end, &from, &lists).run();
    engine.copy_kv_blocks(&end, &end, &from, &lists[..1]).run()?;
    refused
}

#[test]
fn group_without_room_refuses_before_memory_is_touched() {
    let group = match Group::new() {
        Ok(group) => group,
        Err(why) => return skipped(&why),
    };
    let reports = child_process::run("memory_limits::inside", group.0.to_str().unwrap());
    for (name, start, fact) in [
        ("eager", "OutOfMemory ", "pool_bytes="),
        ("lazy", "done", ""),
        ("lists", "OutOfMemory ", "usable_bytes="),
        ("destinations", "OutOfMemory ", "usable_bytes="),
        ("small", "done", ""),
    ] {
        let head = format!("{name} ");
        let text = reports.iter().find_map(|report| report.strip_prefix(&head)).unwrap_or("nothing");
        assert!(text.starts_with(start) && text.contains(fact), "{name}: {text}");
    }
}

#[test]
fn lists_of_a_call_take_what_is_asked_for() {
    let ((engine, end), pairs) = (blocks(Placement::Host).unwrap(), pairs(100_000));
    let copy = || engine.copy_blocks(&end, &pairs).run().unwrap();
    copy();
    let ((), peak) = counting_allocator::peak(copy);
    let each = peak / pairs.len();
    assert!((8..=112).contains(&each), "{each} bytes for each block");
}

/// Runs `ask` with a folder that stands for the root of a machine with these files.
fn with_files<T>(files: &[(&str, &str)], ask: impl FnOnce(&Path) -> T) -> T {
    let (thread, process) = (std::thread::current().id(), std::process::id());
    let root = std::env::temp_dir().join(format!("llm-limits-{thread:?}-{process}"));
    for (path, text) in files {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let answer = ask(&root);
    if root.exists() {
        std::fs::remove_dir_all(&root).unwrap();
    }
    answer
}

#[test]
fn the_memory_a_process_may_use() {
    let meminfo = ("proc/meminfo", "MemTotal:  9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n");
    let available = 4000 << 10;
    // Version 2: the enclosing group with the least room counts. Memory that can be dropped counts as free.
    let job = ("proc/self/cgroup", "0::/slice/job\n");
    let unlimited = ("sys/fs/cgroup/slice/job/memory.max", "max\n");
    let limit = ("sys/fs/cgroup/slice/memory.max", "1000000\n");
    let used = ("sys/fs/cgroup/slice/memory.current", "700000\n");
    let over = ("sys/fs/cgroup/slice/memory.current", "1100000");
    let stat = "anon 1\ninactive_file 100000\nactive_file 50000\nshmem 9\n";
    let stat = ("sys/fs/cgroup/slice/memory.stat", stat);
    // In a container the path is the host's, and the top folder is the container's own group.
    let container = ("proc/self/cgroup", "0::/docker/abc\n");
    let container_limit = ("sys/fs/cgroup/memory.max", "3000");
    // Version 1, among other controllers.
    let job_1 = ("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/job\n0::/\n");
    let limit_1 = ("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "2000000");
    let unlimited_1 = (limit_1.0, "9223372036854771712");
    let used_1 = ("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "900000");
    let stat_1 = "inactive_file 1\nactive_file 1\ntotal_inactive_file 100000\n";
    let stat_1 = ("sys/fs/cgroup/memory/job/memory.stat", stat_1);
    // Strict overcommit: what the whole system may commit counts.
    let commits = ("proc/meminfo", "MemAvailable: 4000 kB\nCommitLimit: 3000 kB\nCommitted_AS: 2900 kB\n");
    let full = (commits.0, "MemAvailable: 4000 kB\nCommitLimit: 3000 kB\nCommitted_AS: 3100 kB\n");
    let [heuristic, strict] = ["0\n", "2\n"].map(|mode| ("proc/sys/vm/overcommit_memory", mode));
    let cases: [(&[(&str, &str)], u64); 14] = [
        (&[], u64::MAX),
        (&[meminfo], available),
        (&[meminfo, job, unlimited], available),
        (&[meminfo, job, unlimited, limit, used, stat], 1_000_000 - (700_000 - 150_000)),
        (&[meminfo, job, unlimited, limit], 1_000_000),
        (&[meminfo, job, unlimited, limit, over], 0),
        (&[meminfo, container, container_limit], 3000),
        (&[meminfo, job_1, limit_1, used_1, stat_1], 2_000_000 - (900_000 - 100_001)),
        (&[meminfo, job_1, unlimited_1], available),
        (&[commits, strict], 100 << 10),
        (&[full, strict], 0),
        (&[commits, heuristic], available),
        (&[meminfo, strict], available),
        (&[commits, strict, container, container_limit], 3000),
    ];
    for (files, bytes) in cases {
        assert_eq!(with_files(files, usable_under), bytes, "{files:?}");
    }
    let here = usable_bytes();
    assert!((1 << 20..1 << 50).contains(&here), "{here}");
}

#[test]
fn room_is_what_the_group_has_left() {
    let files = [
        ("proc/meminfo", "MemAvailable: 4096 kB\n"),
        ("proc/self/cgroup", "0::/job\n"),
        ("sys/fs/cgroup/job/memory.max", "1000000\n"),
        ("sys/fs/cgroup/job/memory.current", "400000\n"),
    ];
    with_files(&files, |root| {
        refuse_beyond_room_under(root, "lists", 600_000).unwrap();
        let error = refuse_beyond_room_under(root, "lists", 600_001).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        let facts = ["bytes", "usable_bytes"].map(|name| error.fact(name));
        assert_eq!(facts, [Some("600001"), Some("600000")], "{error}");
        assert!(error.to_string().starts_with("lists need more memory"), "{error}");
    });
}
