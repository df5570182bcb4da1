//! Keeps the stand-in loaded. If a program unloaded it, the memory of its static model would be lost, which counts as a leak.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
