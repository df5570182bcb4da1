//! The page size, which is not the same on all machines: 4, 16 or 64 KiB on aarch64.

/// Returns the page size in bytes.
///
/// With `LLM_DATADIST_TEST_PAGE_SIZE`, tests set a size above that of this machine. Then the engine commits and touches memory as if
/// pages had this size, and merges none. Values that the kernel reports in pages (`limits`) still use the page size of the machine.
/// Nothing else depends on the size: mappings begin at units of 2 MiB, or at the page that the kernel chooses.
pub fn page_size() -> usize {
    #[cfg(feature = "testing")]
    if let Some(size) = simulated() {
        return size;
    }
    rustix::param::page_size()
}

#[cfg(feature = "testing")]
fn simulated() -> Option<usize> {
    static SIZE: std::sync::OnceLock<Option<usize>> = std::sync::OnceLock::new();
    *SIZE.get_or_init(|| {
        let size = std::env::var("LLM_DATADIST_TEST_PAGE_SIZE").ok()?.parse().ok()?;
        let possible = |size: &usize| size.is_power_of_two() && *size >= rustix::param::page_size();
        Some(size).filter(possible)
    })
}

#[cfg(all(test, feature = "testing", not(loom)))]
mod tests {
    use std::process::Command;

    /// The variable that sets the size.
    const SIZE: &str = "LLM_DATADIST_TEST_PAGE_SIZE";

    /// Without this check, tests of large pages would also pass if the engine ignored the variable.
    #[test]
    fn pages_have_the_size_that_is_set() {
        let set = std::env::var(SIZE).ok();
        let wanted = set.map_or(rustix::param::page_size(), |size| size.parse().unwrap());
        assert_eq!(super::page_size(), wanted);
    }

    /// Runs the tests of memory again in processes with other sizes.
    #[test]
    fn tests_of_memory_pass_with_larger_pages() {
        if std::env::var_os(SIZE).is_some() {
            return;
        }
        for size in [16 << 10, 64 << 10].into_iter().filter(|&size| size > super::page_size()) {
            let mut tests = Command::new(std::env::current_exe().unwrap());
            tests.args(["memory::", "pool::", "huge_pages::"]).env(SIZE, size.to_string());
            let ended = tests.output().unwrap();
            let text = String::from_utf8_lossy(&ended.stdout);
            assert!(ended.status.success(), "with pages of {size} bytes: {text}");
            assert!(text.contains("pages_have_the_size_that_is_set ... ok"), "{text}");
        }
    }
}
