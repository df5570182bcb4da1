//! The file `THIRD-PARTY-LICENSES`: a list of what is linked, then each distinct text once.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::library::notices;
use crate::packages::{Linked, Package};

/// Name of the file.
pub const FILE: &str = "THIRD-PARTY-LICENSES";

const LINE: &str = "================================================================================";

/// The content of the file. `Err` if a linked package ships no licence text.
pub fn third_party(packages: &[Package]) -> Result<String, String> {
    let mut list = String::new();
    let mut texts: BTreeMap<String, (usize, Vec<String>)> = BTreeMap::new();
    let mut add = |content: &str, owner: String| {
        let next = texts.len();
        texts.entry(content.trim().to_owned()).or_insert_with(|| (next, Vec::new())).1.push(owner);
    };
    for package in packages.iter().filter(|package| package.linked == Linked::Yes) {
        let Package { name, version, license, repository, .. } = package;
        // Writing to a text cannot fail.
        let _ = writeln!(list, "{name} {version} ({license}) {repository}");
        let files = package.license_files()?;
        if files.is_empty() {
            return Err(format!("{name} {version} ships no licence text"));
        }
        for (file, content) in files {
            add(&content, format!("{name} {version}: {file}"));
        }
    }
    let library = notices();
    for (owner, content) in &library.texts {
        add(content, format!("Rust standard library: {owner}"));
    }
    let mut sorted: Vec<_> = texts.into_iter().collect();
    sorted.sort_by_key(|(_, (order, _))| *order);
    let mut all = format!(
        "The binaries of llm_datadist contain code of the projects below, under the licences whose texts follow.\n\n\
         {list}\n{LINE}\nThe Rust standard library\n{LINE}\n\n{}\n",
        library.statement
    );
    for (text, (_, owners)) in sorted {
        let _ = write!(all, "\n{LINE}\n{}\n{LINE}\n\n{text}\n", owners.join("\n"));
    }
    Ok(all)
}
