//! Shared regions: lazily committed, aligned for huge pages; and checks of adopted memory.

use std::fs::File;
use std::sync::Arc;

use llm_datadist_core::testing::memory::kernels::{Kernel, copy};
use llm_datadist_core::testing::memory::{
    Access, Generations, Region, Tensors, remember_process, this_process,
};
use llm_datadist_core::{CacheKind, Placement};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_get_seals, fstat, memfd_create};
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::arguments::refused;
use crate::child_process::{self, report};
use crate::emulation;
use crate::fixtures::{Buffer, adopt, desc, skipped};

fn carved(region: &Arc<Region>, offset: u64, bytes: u64) -> Tensors {
    Tensors::carved(region.clone(), [offset], bytes, ()).unwrap()
}

#[test]
fn a_region_costs_nothing_until_it_is_touched() {
    let region = Arc::new(Region::shared("test", 1 << 40).unwrap());
    assert_eq!(region.len(), 1 << 40);
    assert_eq!(region.base() % (2 << 20), 0, "aligned, or the kernel can never give huge pages");
    assert_eq!(region.committed_bytes(), 0);
    let buffer = Buffer::new(4096, |_| 7);
    let source = Tensors::adopted(buffer.adopt(0, 4096));
    let last = carved(&region, (1 << 40) - 4096, 4096);
    copy(source.window(0, 0, 4096).unwrap(), last.window(0, 0, 4096).unwrap(), Kernel::PLAIN).unwrap();
    let committed = region.committed_bytes();
    assert!((4096..=2 << 20).contains(&committed), "{committed}");
}

#[test]
fn adopted_memory_must_be_mapped_with_the_right_to_access() {
    let tensors = |addr, rows| adopt(&desc(Placement::Host, 1, rows, 64), CacheKind::Blocks, &[addr]);
    let buffer = Buffer::new(4096, |_| 0);
    // The text of this program is mapped readable, not writable.
    let code = adopted_memory_must_be_mapped_with_the_right_to_access as fn() as usize as u64 & !63;
    for (addr, rows, access, refusal) in [
        (4096, 64, Access::Read, Some("0x1000")),
        (4096, 64, Access::Write, Some("0x1000")),
        (buffer.addr(), 64, Access::Write, None),
        (code, 1, Access::Read, None),
        (code, 1, Access::Write, Some("not mapped writable")),
    ] {
        let checked = Tensors::adopted(tensors(addr, rows)).check_present(access);
        match refusal {
            Some(text) => drop(refused(checked, &[text])),
            None => checked.unwrap(),
        }
    }
}

#[test]
fn the_number_of_this_process_is_the_kernels() {
    for _ in 0..2 {
        assert_eq!(this_process(), std::process::id());
        remember_process();
    }
}

/// Reports what a process under a limit gets: one line for each kind of shared memory.
#[test]
#[ignore = "started by the tests below"]
fn limited() {
    let Some(limit) = child_process::role() else { return };
    let mut open = Vec::new();
    let set =
        |resource, value| setrlimit(resource, Rlimit { current: Some(value), maximum: Some(value) }).unwrap();
    match limit.as_str() {
        "files" => {
            set(Resource::Nofile, 64);
            while let Ok(file) = File::open("/dev/null") {
                open.push(file);
            }
        }
        "size" => set(Resource::Fsize, 1 << 20),
        "addresses" => set(Resource::As, 4 << 30),
        other => panic!("{other}"),
    }
    let region = Region::shared("test pool", 1 << 40).map(drop);
    let small = Region::shared("test pool", 1 << 20).map(drop);
    let generations = Generations::new().map(drop);
    drop(open);
    for (name, made) in [("large", region), ("small", small), ("generations", generations)] {
        let text = made.map_or_else(
            |error| format!("{:?} {} {error}", error.kind(), error.fact("errno").unwrap_or("none")),
            |()| "made".into(),
        );
        report(format_args!("{name} {text}"));
    }
}

/// Returns what a process under `limit` reports of a large region, a small one, and generations.
fn under(limit: &str) -> [String; 3] {
    let reports = child_process::run("region::limited", limit);
    ["large ", "small ", "generations "].map(|name| {
        let report = reports.iter().find_map(|report| report.strip_prefix(name));
        report.unwrap_or_else(|| panic!("{limit}, {name}: {reports:?}")).to_owned()
    })
}

#[test]
#[cfg_attr(sanitized, ignore = "the sanitizer has its own allocator and needs address space")]
fn only_missing_memory_is_out_of_memory() {
    for (limit, error, advice, fact) in [
        ("files", "System 24 ", "ulimit -n", "limit_open_files=64"),
        // The least is 2 MiB, because a region is made of whole huge pages.
        ("size", "System 27 ", "ulimit -f", "limit_file_bytes=1048576"),
    ] {
        for report in under(limit) {
            assert!(report.starts_with(error), "{report}");
            assert!(report.contains(advice) && report.contains(fact), "{report}");
        }
    }
    if emulation::ADDRESS_SPACE_LIMITS.skips() {
        return;
    }
    let [large, small, generations] = under("addresses");
    assert!(large.starts_with("OutOfMemory 12 no memory for the test pool"), "{large}");
    assert_eq!((small.as_str(), generations.as_str()), ("made", "made"));
}

#[test]
fn shared_memory_is_never_executable() {
    let kind = MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
    if let Err(error) = memfd_create("test", kind) {
        skipped(&format!("this kernel does not know MFD_NOEXEC_SEAL: {error}"));
        return;
    }
    let (region, generations) = (Region::shared("test", 1 << 20).unwrap(), Generations::new().unwrap());
    for descriptor in [region.descriptor().unwrap(), generations.descriptor().unwrap()] {
        assert!(fcntl_get_seals(descriptor).unwrap().contains(SealFlags::EXEC));
        assert_eq!(fstat(descriptor).unwrap().st_mode & 0o111, 0);
    }
}
