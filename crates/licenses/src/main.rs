//! `licenses write FILE` writes the texts of what is linked; `licenses check MANIFEST...` checks lock files.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program whose output is its result")]

use std::env;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use llm_datadist_licenses::{Linked, allowed, host, locked, third_party};

const PRODUCT: [&str; 2] = ["llm-datadist-py", "llm-datadist-capi"];

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["write", file] => write(file),
        ["check", manifests @ ..] if !manifests.is_empty() => {
            manifests.iter().try_for_each(|path| check(path))
        }
        _ => Err("usage: licenses write FILE | licenses check MANIFEST...".into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("licenses: {error}");
            ExitCode::FAILURE
        }
    }
}

fn write(file: &str) -> Result<(), String> {
    let packages = locked(Path::new("Cargo.toml"), &PRODUCT, Some(&host()?))?;
    fs::write(file, third_party(&packages)?).map_err(|error| format!("{file}: {error}"))
}

/// Every package of the lock file, for every target.
fn check(manifest: &str) -> Result<(), String> {
    let packages = locked(Path::new(manifest), &PRODUCT, None)?;
    if packages.is_empty() {
        return Err(format!("{manifest}: no packages, so nothing was checked"));
    }
    let mut refused = Vec::new();
    for package in &packages {
        if !allowed(&package.license, package.linked)? {
            refused.push(format!("{} {} ({})", package.name, package.version, package.license));
        }
    }
    let linked = packages.iter().filter(|package| package.linked == Linked::Yes).count();
    println!("licenses: {manifest}: {} packages, {linked} of them linked into the product", packages.len());
    if refused.is_empty() {
        Ok(())
    } else {
        Err(format!("not on the list of allowed licences: {}", refused.join(", ")))
    }
}
