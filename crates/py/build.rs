//! Writes the licence texts of the libraries that are linked into the extension. maturin packs them into the
//! wheel.
//!
//! Nothing here is compiled into the extension.

use std::path::Path;
use std::{env, fs};

use llm_datadist_licenses::{FILE, locked, third_party};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=../../Cargo.lock");
    let out = env::var_os("OUT_DIR").unwrap_or_default();
    let target = env::var("TARGET").ok();
    // The manifest of this package leads to the lock file of its workspace, also inside a source distribution.
    let texts = locked(Path::new("Cargo.toml"), &["llm-datadist-py"], target.as_deref())
        .and_then(|packages| third_party(&packages));
    let texts = texts.unwrap_or_else(|error| {
        // A build without a network may lack sources of tests that cargo requires. The tests of the wheel
        // prevent its release; a local build only gets a warning.
        println!("cargo::warning={FILE} is incomplete: {}", error.lines().collect::<Vec<_>>().join(" "));
        format!("The licence texts could not be collected when this was built: {error}\n")
    });
    if let Err(error) = fs::write(Path::new(&out).join(FILE), texts) {
        println!("cargo::error={FILE} cannot be written: {error}");
    }
}
