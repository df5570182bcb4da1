//! What long lists cost a process: measured in processes of their own, because the allocator remembers what went before.
//!
//! Not for: how much memory a message may take (`heap`).

use std::process::Command;

use llm_datadist_core::mem::{keep_lists, page_faults};

/// Set in a child: whether it does what an engine does when it is opened.
const CHILD: &str = "LLM_DATADIST_TEST_LISTS";

/// Lists of a call with 32,768 blocks, again and again: once an engine was opened, their pages are not new each time.
#[test]
#[expect(clippy::print_stdout, reason = "how the child tells its parent")]
fn lists_are_made_of_memory_that_was_used_before() {
    if let Ok(word) = std::env::var(CHILD) {
        if word == "opened" {
            keep_lists();
        }
        println!("faults {}", faults_of_a_call());
        return;
    }
    let faults = |word: &str| -> u64 {
        let name = "lists::lists_are_made_of_memory_that_was_used_before";
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture", "--test-threads=1"])
            .env(CHILD, word)
            .env_remove("GLIBC_TUNABLES")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout).into_owned();
        let count = said.split_once("faults ").and_then(|(_, rest)| rest.split_whitespace().next());
        count.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("{child:?}"))
    };
    let (without, with) = (faults("alone"), faults("opened"));
    // Elsewhere than in glibc there may be nothing to gain.
    assert!(with <= 8 || with <= without, "{with} pages a call, {without} without");
    if cfg!(target_env = "gnu") {
        assert!(with <= 8 && without > 100, "{with} pages a call, {without} without");
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
