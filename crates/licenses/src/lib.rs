//! Licences of third-party crates: the file `THIRD-PARTY-LICENSES`, and the check of a lock file.
//!
//! The build script of the Python binding writes the file into the wheel, `make install` writes it beside the libraries.
//! The texts are the ones that the crates ship; nothing is downloaded for them. `cargo-about` and `cargo-deny` do more,
//! and take longer to compile than this whole project. Not for: security advisories.

mod library;
mod packages;
mod texts;

pub use packages::{Linked, Package, host, locked};
pub use texts::{FILE, third_party};

/// Licences that may be linked into the product.
pub const ALLOWED: [&str; 8] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];
/// Licences that are also allowed for packages that only build, test or fuzz, and are not shipped.
pub const ALLOWED_FOR_TOOLS: [&str; 2] = ["MPL-2.0", "NCSA"];

/// Whether one of the allowed licences, or an allowed combination, is enough for `expression`.
pub fn allowed(expression: &str, linked: Linked) -> Result<bool, String> {
    let parsed = spdx::Expression::parse_mode(expression, spdx::ParseMode::LAX)
        .map_err(|error| format!("{expression:?} is not a licence expression: {}", error.reason))?;
    Ok(parsed.evaluate(|wanted| {
        let name = wanted.to_string();
        let tools: &[&str] = if linked == Linked::No { &ALLOWED_FOR_TOOLS } else { &[] };
        ALLOWED.iter().chain(tools).any(|&allowed| allowed == name)
    }))
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test that finds nothing fails")]
mod tests {
    use super::*;

    #[test]
    fn one_allowed_alternative_is_enough_and_all_parts_are_needed() {
        for (expression, linked, expected) in [
            ("MIT", Linked::Yes, true),
            ("MIT/Apache-2.0", Linked::Yes, true),
            ("GPL-3.0-only OR MIT", Linked::Yes, true),
            ("GPL-3.0-only", Linked::Yes, false),
            ("MIT AND GPL-2.0-only", Linked::Yes, false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", Linked::Yes, true),
            ("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT", Linked::Yes, true),
            ("NCSA", Linked::Yes, false),
            ("(MIT OR Apache-2.0) AND NCSA", Linked::No, true),
        ] {
            assert_eq!(allowed(expression, linked), Ok(expected), "{expression} {linked:?}");
        }
        assert!(allowed("my own", Linked::Yes).is_err());
    }

    #[test]
    fn every_crate_of_the_lock_file_has_an_allowed_license() {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml");
        let packages = locked(manifest.as_ref(), &["llm-datadist-py", "llm-datadist-capi"], None).unwrap();
        let linked: Vec<_> = packages.iter().filter(|package| package.linked == Linked::Yes).collect();
        let named = |name: &str| linked.iter().any(|package| package.name == name);
        // What is linked is there, and what only builds or tests is not among it.
        assert!(named("pyo3") && named("rustix") && named("postcard"), "{linked:?}");
        assert!(!named("serde_derive") && !named("criterion") && !named("spdx"), "{linked:?}");
        for package in &packages {
            assert_eq!(allowed(&package.license, package.linked), Ok(true), "{package:?}");
        }
    }

    #[test]
    fn every_linked_crate_is_named_and_its_texts_are_there() {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml");
        let packages = locked(manifest.as_ref(), &["llm-datadist-py"], Some(&host().unwrap())).unwrap();
        let text = third_party(&packages).unwrap();
        let mut looked = 0;
        for package in packages.iter().filter(|package| package.linked == Linked::Yes) {
            assert!(text.contains(&format!("{} {} ", package.name, package.version)), "{package:?}");
            let files = package.license_files().unwrap();
            assert!(!files.is_empty(), "{package:?} ships no licence text");
            for (name, content) in files {
                looked += 1;
                assert!(text.contains(content.trim()), "{} {name}", package.name);
            }
        }
        assert!(looked > 20, "only {looked} texts");
        assert!(text.contains("The Rust standard library"));
    }
}
