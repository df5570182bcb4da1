//! Shared regions: lazily committed, visible through their descriptor, aligned for huge pages, checked for adopted memory.
//!
//! Not for: splitting them (`pool`).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use llm_datadist_core::mem::kernel::{Kernel, copy};
use llm_datadist_core::mem::{Access, Region, Tensors, remember_process, this_process};
use llm_datadist_core::{CacheKind, ErrorKind, Placement};

use crate::bed::{Buffer, adopt, desc, pattern};

fn carved(region: &Arc<Region>, offset: u64, bytes: u64) -> Tensors {
    Tensors::carved(region.clone(), [offset], bytes, Box::new(())).unwrap()
}

#[test]
fn what_is_written_is_seen_through_the_descriptor() {
    let region = Arc::new(Region::shared("test", 1 << 20).unwrap());
    let source = Buffer::new(5000, |at| pattern(1, 0, at));
    let from = Tensors::adopted(source.adopt(0, 5000));
    let to = carved(&region, 70_000, 5000);
    copy(from.window(0, 0, 5000).unwrap(), to.window(0, 0, 5000).unwrap(), Kernel::PLAIN).unwrap();
    // What another process does with the descriptor it was passed.
    let file = File::from(region.descriptor().unwrap().try_clone_to_owned().unwrap());
    let mut seen = vec![0; 5000];
    file.read_exact_at(&mut seen, 70_000).unwrap();
    assert_eq!(seen, source.read(0, 5000));
    // Not back: that process cannot write, nor make it shorter or longer (`foreign` maps it).
    assert!(file.write_all_at(&[0xA5; 100], 70_000).is_err());
    assert!(file.set_len(1 << 10).is_err());
    assert!(file.set_len(1 << 30).is_err());
    let back = Buffer::new(100, |_| 0);
    let target = Tensors::adopted(back.adopt(0, 100));
    copy(to.window(0, 0, 100).unwrap(), target.window(0, 0, 100).unwrap(), Kernel::PLAIN).unwrap();
    assert_eq!(back.read(0, 100), source.read(0, 100));
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
    assert_eq!(region.huge_bytes() % (2 << 20), 0);
}

#[test]
fn a_tensor_outside_its_region_is_refused() {
    let region = Arc::new(Region::shared("test", 1 << 20).unwrap());
    for (offset, bytes) in [((1 << 20) - 4095, 4096), (u64::MAX, 1), (0, (1 << 20) + 1)] {
        assert!(
            Tensors::carved(region.clone(), [offset], bytes, Box::new(())).is_err(),
            "{offset} + {bytes}"
        );
    }
}

#[test]
fn unmapped_adopted_memory_is_named_before_a_copy_touches_it() {
    let wild = Tensors::adopted(adopt(&desc(Placement::Host, 1, 4, 1024), CacheKind::Blocks, &[4096]));
    for access in [Access::Read, Access::Write] {
        let error = wild.check_mapped(access).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains("0x1000"), "{error}");
    }
    let buffer = Buffer::new(4096, |_| 0);
    let fine = Tensors::adopted(buffer.adopt(0, 4096));
    fine.check_mapped(Access::Write).unwrap();
}

#[test]
fn read_only_memory_may_be_read_and_not_written() {
    // The text of this very program: mapped readable, not writable.
    let code = read_only_memory_may_be_read_and_not_written as fn() as usize as u64 & !63;
    let tensors = Tensors::adopted(adopt(&desc(Placement::Host, 1, 1, 64), CacheKind::Blocks, &[code]));
    tensors.check_mapped(Access::Read).unwrap();
    let error = tensors.check_mapped(Access::Write).unwrap_err();
    assert!(error.to_string().contains("not mapped writable"), "{error}");
}

#[test]
fn the_number_of_this_process_is_the_kernels() {
    for _ in 0..2 {
        assert_eq!(this_process(), std::process::id());
        remember_process();
    }
}
