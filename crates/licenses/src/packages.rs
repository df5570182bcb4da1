//! Packages of a workspace as `cargo metadata` lists them, and which of them are linked into a binary.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde_json::Value;

/// Starts of the names of files that hold licence texts, in capitals.
const NAMES: [&str; 6] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];

/// Whether the code of a package ends up in a binary that is shipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linked {
    /// It does.
    Yes,
    /// It only builds, tests or measures.
    No,
}

/// A third-party package.
#[derive(Clone, Debug)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
    /// Its licence, an SPDX expression.
    pub license: String,
    /// Where its source is, or an empty text.
    pub repository: String,
    /// Whether it is linked.
    pub linked: Linked,
    folder: PathBuf,
}

impl Package {
    /// Names and contents of the licence texts that it ships, sorted by name.
    pub fn license_files(&self) -> Result<Vec<(String, String)>, String> {
        let failed = |error: std::io::Error| format!("{}: {error}", self.folder.display());
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let upper = name.to_uppercase();
            if NAMES.iter().any(|start| upper.starts_with(start)) && entry.path().is_file() {
                let content = fs::read(entry.path()).map_err(failed)?;
                files.push((name, String::from_utf8_lossy(&content).into_owned()));
            }
        }
        files.sort();
        Ok(files)
    }
}

/// Every third-party package that the lock file of `manifest` names for the target, sorted by name. Those that the
/// packages `roots` link are marked.
pub fn locked(manifest: &Path, roots: &[&str], target: Option<&str>) -> Result<Vec<Package>, String> {
    let metadata = metadata(manifest, target)?;
    let packages: BTreeMap<&str, &Value> =
        list(&metadata["packages"]).map(|package| (text(&package["id"]), package)).collect();
    let nodes: BTreeMap<&str, &Value> =
        list(&metadata["resolve"]["nodes"]).map(|node| (text(&node["id"]), node)).collect();
    let starts = packages.iter().filter(|(_, package)| roots.contains(&text(&package["name"])));
    let linked = linked(&packages, &nodes, starts.map(|(&id, _)| id).collect());
    let mut found: Vec<Package> = (nodes.keys())
        .filter_map(|id| Some((*id, *packages.get(id)?)))
        // A package without a source is one of this workspace.
        .filter(|(_, package)| !package["source"].is_null())
        .map(|(id, package)| Package {
            name: text(&package["name"]).into(),
            version: text(&package["version"]).into(),
            license: text(&package["license"]).into(),
            repository: text(&package["repository"]).into(),
            linked: if linked.contains(id) { Linked::Yes } else { Linked::No },
            folder: Path::new(text(&package["manifest_path"])).parent().unwrap_or(Path::new("")).into(),
        })
        .collect();
    found.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    Ok(found)
}

/// Returns the packages that `starts` reach by normal dependencies. Procedural macros run in the compiler, so
/// they and the packages that only they use are left out.
fn linked<'a>(
    packages: &BTreeMap<&'a str, &'a Value>,
    nodes: &BTreeMap<&'a str, &'a Value>,
    starts: Vec<&'a str>,
) -> BTreeSet<&'a str> {
    let (mut open, mut seen) = (starts, BTreeSet::new());
    while let Some(id) = open.pop() {
        let Some(package) = packages.get(id) else { continue };
        let kinds = |target: &Value| list(&target["kind"]).any(|kind| kind == "proc-macro");
        if list(&package["targets"]).any(kinds) || !seen.insert(id) {
            continue;
        }
        let Some(node) = nodes.get(id) else { continue };
        let normal = |to: &&Value| list(&to["dep_kinds"]).any(|kind| kind["kind"].is_null());
        open.extend(list(&node["deps"]).filter(normal).map(|to| text(&to["pkg"])));
    }
    seen
}

/// Returns the output of `cargo metadata`, from local data if possible, otherwise with the network.
fn metadata(manifest: &Path, target: Option<&str>) -> Result<Value, String> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut said = String::new();
    for offline in [true, false] {
        let mut command = Command::new(&cargo);
        command.args(["metadata", "--format-version", "1", "--locked", "--manifest-path"]).arg(manifest);
        command.args(target.iter().flat_map(|target| ["--filter-platform", target]));
        command.args(offline.then_some("--offline"));
        let done = command.output().map_err(|error| format!("{}: {error}", cargo.display()))?;
        if done.status.success() {
            return serde_json::from_slice(&done.stdout).map_err(|error| format!("cargo metadata: {error}"));
        }
        said = String::from_utf8_lossy(&done.stderr).into_owned();
    }
    Err(format!("cargo metadata failed: {said}"))
}

/// Returns the default target of the installed compiler.
pub fn host() -> Result<String, String> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let done =
        Command::new(&rustc).arg("-vV").output().map_err(|error| format!("{}: {error}", rustc.display()))?;
    let said = String::from_utf8_lossy(&done.stdout);
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| format!("rustc -vV names no host: {said}"))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
