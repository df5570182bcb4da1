//! Copyright notices of the Rust standard library, from the file that the toolchain installs.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Statement where the toolchain has no file of notices.
const SHORT: &str = "The Rust standard library is dual-licensed under Apache-2.0 and MIT terms. Copyrights are retained by \
its contributors (https://thanks.rust-lang.org). The texts of both licences are below.";

/// What the binary contains of the standard library: a statement, and name and text of each notice.
pub(crate) struct Notices {
    pub(crate) statement: String,
    pub(crate) texts: Vec<(String, String)>,
}

/// Reads the notices.
pub(crate) fn notices() -> Notices {
    let found = sysroot()
        .and_then(|root| fs::read_to_string(root.join("share/doc/rust/COPYRIGHT-library.html")).ok());
    found.map_or_else(|| Notices { statement: SHORT.into(), texts: Vec::new() }, |page| parse(&page))
}

fn sysroot() -> Option<PathBuf> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let done = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?;
    let path = String::from_utf8(done.stdout).ok()?;
    Some(PathBuf::from(path.trim()))
}

/// Splits the page: a text is a `<pre>`, named by the package and the file above it.
fn parse(page: &str) -> Notices {
    let (mut texts, mut package, mut file) = (Vec::new(), "", "");
    let mut rest = page;
    let between = |text: &'static str, from: &'static str| (text, from);
    let marks = [between("<h3>", "</h3>"), between("<summary><code>", "</code>"), between("<pre>", "</pre>")];
    let next = |rest: &str| {
        let starts = marks.iter().filter_map(|&(open, close)| Some((rest.find(open)?, open, close)));
        starts.min_by_key(|&(at, ..)| at)
    };
    while let Some((at, open, close)) = next(rest) {
        let inside = &rest[at + open.len()..];
        let end = inside.find(close).unwrap_or(inside.len());
        match open {
            "<h3>" => package = inside[..end].trim_start_matches(|sign: char| !sign.is_ascii()).trim(),
            "<pre>" => texts.push((format!("{package} {file}"), plain(&inside[..end]))),
            _ => file = &inside[..end],
        }
        rest = &inside[end..];
    }
    // Between the table of contents and the first package.
    let head = page.split("<h3>").next().unwrap_or_default();
    let statement = plain(&untagged(head.split_once("</ul>").map_or(head, |(_, text)| text)));
    let lines: Vec<_> = statement.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    Notices { statement: lines.join("\n"), texts }
}

/// A text without entities.
fn plain(text: &str) -> String {
    let entities = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&#34;", "\""),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&#x27;", "'"),
        ("&amp;", "&"),
    ];
    entities.iter().fold(text.to_owned(), |text, (entity, sign)| text.replace(entity, sign))
}

/// A text without tags.
fn untagged(text: &str) -> String {
    let body = text.split_once("</head>").map_or(text, |(_, body)| body);
    body.split('<').map(|part| part.split_once('>').map_or(part, |(_, text)| text)).collect()
}
