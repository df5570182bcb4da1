//! How large the default pool is.

use crate::memory::usable;

#[test]
fn the_default_pool_is_no_larger_than_the_machine() {
    // What the kernel says by another way than the file that is read.
    // SAFETY: two numbers are asked for.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    // SAFETY: as above.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let machine = u64::try_from(pages).unwrap() * u64::try_from(page).unwrap();
    let found = usable();
    assert!(found > 0 && found <= machine + (1 << 20), "{found} of {machine}");
}
