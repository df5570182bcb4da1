//! What long lists cost a process: measured in processes of their own, because the allocator remembers what went before.
//!
//! Not for: how much memory a message may take (`heap`).

use std::process::Command;

use llm_datadist_core::mem::{keep_lists, page_faults};

/// Set in a child: whether it does what an engine does when it is opened.
const CHILD: &str = "LLM_DATADIST_TEST_LISTS";
/// Set in a child that has no address space left.
const FULL: &str = "LLM_DATADIST_TEST_FULL";

/// Lists of a call with 32,768 blocks, again and again: once an engine was opened, their pages are not new each time.
#[test]
#[cfg_attr(sanitized, ignore = "the sanitizer has its own allocator and needs address space")]
fn lists_are_made_of_memory_that_was_used_before() {
    let faults = |word| child("lists::lists_are_made_of_memory_that_was_used_before", word, &[]);
    let Some((without, with)) = faults("alone").zip(faults("opened")) else { return };
    // Elsewhere than in glibc there may be nothing to gain.
    assert!(with <= 8 || with <= without, "{with} pages a call, {without} without");
    if cfg!(target_env = "gnu") {
        assert!(with <= 8 && without > 100, "{with} pages a call, {without} without");
    }
}

/// Who has told the allocator when to give memory back is not overruled, by either of its two ways.
#[test]
#[cfg_attr(sanitized, ignore = "the sanitizer has its own allocator and needs address space")]
fn limits_that_were_set_stay() {
    let name = "lists::limits_that_were_set_stay";
    for limits in [
        [("MALLOC_MMAP_THRESHOLD_", "131072"), ("MALLOC_TRIM_THRESHOLD_", "131072")].as_slice(),
        &[("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072")],
    ] {
        let Some((alone, opened)) = child(name, "alone", limits).zip(child(name, "opened", limits)) else {
            return;
        };
        if cfg!(target_env = "gnu") {
            assert!(alone > 100 && opened > 100, "{limits:?}: {opened} pages a call, {alone} alone");
        }
    }
}

/// A process whose address space has no room for the list that is asked for goes on without.
#[test]
#[cfg_attr(sanitized, ignore = "the sanitizer has its own allocator and needs address space")]
fn a_process_without_room_goes_on() {
    // 0: nothing more fits.
    let none = [(FULL, "1")];
    let Some(faults) = child("lists::a_process_without_room_goes_on", "opened", &none) else { return };
    assert_eq!(faults, 0);
}

/// What test `name` says of itself in a process of its own, to which the allocator's `limits` alone are known; `None` in
/// that process, which has said it.
#[expect(clippy::print_stdout, reason = "how the child tells its parent")]
fn child(name: &str, word: &str, limits: &[(&str, &str)]) -> Option<u64> {
    if let Ok(word) = std::env::var(CHILD) {
        let full = std::env::var_os(FULL).is_some();
        if full {
            fill_up();
        }
        if word == "opened" {
            keep_lists();
        }
        println!("faults {}", if full { 0 } else { faults_of_a_call() });
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]);
    for (limit, _) in std::env::vars_os() {
        if limit == "GLIBC_TUNABLES" || limit.to_string_lossy().starts_with("MALLOC_") {
            command.env_remove(limit);
        }
    }
    let child = command.env(CHILD, word).envs(limits.iter().copied()).output().unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned();
    let count = said.split_once("faults ").and_then(|(_, rest)| rest.split_whitespace().next());
    Some(count.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("{child:?}")))
}

/// Limits the address space to what is in use, and half a megabyte.
fn fill_up() {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = status.split_whitespace().next().unwrap().parse().unwrap();
    let most = pages * rustix::param::page_size() as u64 + (512 << 10);
    let limit = rustix::process::Rlimit { current: Some(most), maximum: None };
    rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
    // The heap still has room at its end, which other lists take.
    let mut others = Vec::with_capacity(1000);
    loop {
        let mut list = Vec::<u8>::new();
        if list.try_reserve_exact(1 << 20).is_err() {
            break std::mem::forget(others);
        }
        others.push(list);
    }
}

/// Pages that the fifth of five equal calls had to wait for.
fn faults_of_a_call() -> u64 {
    let lists = || (0..6).map(|fill: u8| std::hint::black_box(vec![fill + 1; 256 << 10])).collect::<Vec<_>>();
    (0..4).for_each(|_| drop(lists()));
    let before = page_faults();
    drop(lists());
    page_faults() - before
}
