//! Names the shared library after its major version, so that a program never starts with one it was not linked for.
//!
//! Not for: anything that is built.

fn main() {
    let major = std::env::var("CARGO_PKG_VERSION_MAJOR").unwrap_or_default();
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libllm_datadist.so.{major}");
    println!("cargo::rerun-if-changed=build.rs");
}
