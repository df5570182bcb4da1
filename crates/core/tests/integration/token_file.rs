//! Token files: owner, mode and content, and that no error shows the token.
//!
//! The options that name the file are tested in `tests/test_token_file.py` and `options`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use llm_datadist_core::ErrorKind;
use llm_datadist_core::bindings::{DataDist, LinkConfig, Token};
use llm_datadist_core::testing::token_file::{read, token};

use crate::arguments;
use crate::fixtures::{config, skipped};

const TOKEN: &str = "sixteen letters and more";

/// A folder that is removed after the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("llm-datadist-token-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn file(&self, name: &str, content: impl AsRef<[u8]>, mode: u32) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Asserts the words of the refusal, and that it shows nothing of the content.
fn refused(path: &Path, words: &[&str]) {
    let error = read(path, "link_token_file").unwrap_err();
    let text = format!("{error} {error:?}");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{text}");
    for word in words {
        assert!(text.contains(word), "{text}: no {word}");
    }
    assert!(text.contains("link_token_file"), "{text}");
    assert!(text.contains(path.file_name().unwrap().to_str().unwrap()), "{text}");
    assert!(!text.contains("sixteen"), "{text}");
}

#[test]
fn content_is_the_token_without_one_line_break() {
    let folder = Folder::new("content");
    for (content, expected) in [
        (TOKEN.to_owned(), TOKEN.to_owned()),
        (format!("{TOKEN}\n"), TOKEN.into()),
        (format!("{TOKEN}\r\n"), TOKEN.into()),
        (format!("{TOKEN}\n\n"), format!("{TOKEN}\n")),
        (format!("{TOKEN}\r"), format!("{TOKEN}\r")),
        (format!(" {TOKEN} \n"), format!(" {TOKEN} ")),
        ("ключключключключ\n".into(), "ключключключключ".into()),
        ("x".repeat(4096), "x".repeat(4096)),
    ] {
        assert!(
            read(&folder.file("token", &content, 0o600), "link_token_file").unwrap() == Token::new(&expected),
            "{content:?}"
        );
    }
    for mode in [0o600, 0o400, 0o700, 0o500] {
        read(&folder.file(&format!("token-{mode:o}"), TOKEN, mode), "link_token_file").unwrap();
    }
}

#[test]
fn invalid_content_is_refused() {
    let folder = Folder::new("no-token");
    refused(&folder.file("empty", "", 0o600), &["(0 characters, not shown)", "at least 16"]);
    refused(&folder.file("short", "sixteen letters\n", 0o600), &["(15 characters, not shown)"]);
    refused(&folder.file("long", "sixteen".repeat(1000), 0o600), &["is longer than 4096 bytes"]);
    refused(&folder.file("text", b"sixteen letters \xFF\xFE", 0o600), &["is not UTF-8 text"]);
    refused(&folder.0.join("none"), &["cannot be opened"]);
}

#[test]
fn file_open_to_others_is_refused() {
    let folder = Folder::new("modes");
    for mode in [0o644, 0o640, 0o604, 0o620, 0o602, 0o660, 0o610, 0o601, 0o777, 0o4644] {
        let path = folder.file("open", TOKEN, mode);
        refused(&path, &[&format!("has mode {mode:04o}"), "chmod 600"]);
        fs::remove_file(path).unwrap();
    }
}

#[test]
fn symbolic_link_is_followed_and_its_target_checked() {
    // As Kubernetes mounts a secret: the name is a link into a folder that is a link itself.
    let folder = Folder::new("links");
    fs::create_dir(folder.0.join("..data-1")).unwrap();
    let file = folder.file("..data-1/token", TOKEN, 0o400);
    symlink("..data-1", folder.0.join("..data")).unwrap();
    let path = folder.0.join("token");
    symlink("..data/token", &path).unwrap();
    assert!(read(&path, "link_token_file").unwrap() == Token::new(TOKEN));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o440)).unwrap();
    refused(&path, &["has mode 0440"]);
    let circle = folder.0.join("circle");
    symlink("circle", &circle).unwrap();
    refused(&circle, &["cannot be opened"]);
}

#[test]
fn other_file_types_are_refused_without_waiting() {
    let folder = Folder::new("kinds");
    let pipe = folder.0.join("pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o700)).unwrap();
    // Nobody writes to the pipe, so that a read would never return: `read` runs in a thread.
    let (sender, receiver) = mpsc::channel();
    let paths = [pipe, folder.0.clone(), "/dev/null".into()];
    let reader = std::thread::spawn(move || {
        for path in paths {
            refused(&path, &["is not a regular file"]);
        }
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(Duration::from_secs(20)).expect("read returns at once");
    reader.join().unwrap();
}

#[test]
fn owner_must_be_this_user_or_root() {
    let folder = Folder::new("owner");
    let path = folder.file("token", TOKEN, 0o600);
    // In a user namespace without other users, root cannot give a file away.
    let users = fs::read_to_string("/proc/self/uid_map").unwrap();
    let alone = users.split_whitespace().last() == Some("1");
    if !rustix::process::geteuid().is_root() || alone {
        return skipped("needs root, to give a file to another user");
    }
    chown(&path, Some(65_534), None).unwrap();
    refused(&path, &["belongs to uid 65534", "uid 0", "root", "chown"]);
}

#[test]
fn token_and_file_are_not_both_given_and_open_reads_the_file() {
    let folder = Folder::new("open");
    let path = folder.file("token", TOKEN, 0o600);
    let both = LinkConfig {
        token: Some(Token::new(TOKEN)),
        token_file: Some(path.clone()),
        ..LinkConfig::default()
    };
    arguments::refused(token(&both, "link_token_file"), &["both given"]);
    let mut with_file = config(1 << 20);
    with_file.links.token_file = Some(path.clone());
    let engine = DataDist::open(with_file.clone()).unwrap();
    let links = &engine.config().links;
    assert!(links.token == Some(Token::new(TOKEN)) && links.token_file.is_none());
    assert!(!format!("{:?}", engine.config()).contains(TOKEN));
    fs::remove_file(&path).unwrap();
    arguments::refused(DataDist::open(with_file).map(drop), &["cannot be opened"]);
}
