//! Reads tokens from files that only their owner can read.
//!
//! A file is safer than an environment variable, which leaks from containers into child processes, crash
//! reports and the description of the container. The path may be a symbolic link, as for secrets mounted by
//! Kubernetes; the rules apply to the file that was opened.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, fstat};
use rustix::process::geteuid;

use crate::config::{LinkConfig, Token};
use crate::error::{Error, Result};
use crate::options::link_token;

/// Maximum size of the file in bytes.
const MAX_BYTES: u64 = 4096;

/// Returns the token of `links`, which is given directly or in a file. `Err(InvalidArgument)` if both are
/// given, or if the file breaks the rules of [`read`]. `option` is the name of the option that gives the file.
pub fn token(links: &LinkConfig, option: &'static str) -> Result<Option<Token>> {
    match (&links.token, &links.token_file) {
        (Some(_), Some(_)) => {
            Err(Error::invalid("link_token and link_token_file are both given; give one of them"))
        }
        (token, None) => Ok(token.clone()),
        (None, Some(path)) => read(path, option).map(Some),
    }
}

/// Returns the token in the file at `path`. `Err(InvalidArgument)` unless it is a regular file of this user
/// or of root, which no other user may access, with at most 4096 bytes and a valid token. One line break at
/// its end is ignored.
pub fn read(path: &Path, option: &'static str) -> Result<Token> {
    let text = secret_text(path, option, MAX_BYTES)?;
    let text = text.strip_suffix('\n').map_or(&*text, |line| line.strip_suffix('\r').unwrap_or(line));
    let name = if option == "link_token_file" { "link_token" } else { option };
    link_token(name, text).map_err(|error| error.with(option, path.display()))
}

/// Returns the text of the file at `path`, which has secrets. `Err(InvalidArgument)` unless it is a regular file of this user
/// or of root, which no other user may access, with at most `most` bytes of UTF-8. An error shows a path only if it
/// begins as one, or the file exists: otherwise it may be the token itself, given to the wrong argument.
pub fn secret_text(path: &Path, option: &'static str, most: u64) -> Result<String> {
    let refused = |path: &Path, why: &str| refused((option, path), why);
    // Opened without blocking, because opening a pipe would wait for its writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let file = File::from(opened.map_err(|errno| not_opened((option, path)).because(errno))?);
    private((option, path), &file)?;
    let mut bytes = Vec::new();
    let read = file.take(most + 1).read_to_end(&mut bytes);
    read.map_err(|error| refused(path, "cannot be read").because(error))?;
    if bytes.len() as u64 > most {
        return Err(refused(path, &format!("is longer than {most} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| refused(path, "is not UTF-8 text"))
}

/// Refuses a file that other users can read or could have written.
fn private(path: (&str, &Path), file: &File) -> Result<()> {
    let found = fstat(file).map_err(|errno| refused(path, "cannot be examined (fstat)").because(errno))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
        return Err(refused(path, "is not a regular file"));
    }
    let (owner, user) = (found.st_uid, geteuid().as_raw());
    if owner != user && owner != 0 {
        let why = format!(
            "belongs to uid {owner}; it must belong to uid {user}, which runs this process, or to root: use chown"
        );
        return Err(refused(path, &why));
    }
    let mode = found.st_mode & 0o7777;
    if mode & 0o077 != 0 {
        let why = format!("has mode {mode:04o}; only its owner may read it: use chmod 600");
        return Err(refused(path, &why));
    }
    Ok(())
}

fn not_opened((option, path): (&str, &Path)) -> Error {
    let text = path.to_string_lossy();
    if ["/", "./", "../"].iter().any(|begin| text.starts_with(begin)) {
        return refused((option, path), "cannot be opened");
    }
    let count = text.chars().count();
    let why = "cannot be opened; only a path that begins with / or ./ is shown";
    Error::invalid(format!("{option}=({count} characters, not shown) {why}")).of_argument(option)
}

fn refused((option, path): (&str, &Path), why: &str) -> Error {
    Error::invalid(format!("{option}={:?} {why}", path.display().to_string())).of_argument(option)
}
