//! Sets the SONAME of the shared library, so that the dynamic linker never loads an incompatible version.
//!
//! The SONAME ends in the first version number that promises compatibility: the major version from 1.0 on, `0.MINOR` before,
//! because CHANGELOG.md allows a minor version before 1.0 to break. `test_soname_follows_the_changelog` checks it.

use std::env::var;

fn main() {
    let major = var("CARGO_PKG_VERSION_MAJOR").unwrap_or_default();
    let minor = var("CARGO_PKG_VERSION_MINOR").unwrap_or_default();
    let compatible = if major == "0" { format!("0.{minor}") } else { major };
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libllm_datadist.so.{compatible}");
    println!("cargo::rerun-if-changed=build.rs");
}
