//! A byte stream cut into frames, as an unauthenticated peer could send it: headers against a model, bodies
//! decoded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use llm_datadist_core::testing::protocol::{
    self, CHECKSUM, HANDSHAKE_LIMIT, HEADER, Header, MESSAGE, MESSAGE_LIMIT, REFUSAL,
    REFUSAL_OF_ANOTHER_VERSION, VERSION,
};
use llm_datadist_core::{Error, ErrorKind};
use llm_datadist_fuzz::any_message;

/// What a header means: kind and length, or the kind of the error.
fn model(header: &[u8; HEADER], limit: usize) -> Result<(u8, usize), ErrorKind> {
    let length = header[4..].iter().rev().fold(0usize, |sum, &byte| sum << 8 | usize::from(byte));
    match header {
        [b'L', b'D', version, kind, ..] if *version == VERSION || *kind == REFUSAL => {
            if [MESSAGE, REFUSAL].contains(kind) && length <= limit {
                let other = *version != VERSION;
                Ok((if other { REFUSAL_OF_ANOTHER_VERSION } else { *kind }, length))
            } else {
                Err(ErrorKind::NotLinked)
            }
        }
        _ => Err(ErrorKind::LinkFailed),
    }
}

fuzz_target!(|input: &[u8]| {
    let Some((&which, mut stream)) = input.split_first() else { return };
    let limit = if which & 0x80 == 0 { MESSAGE_LIMIT } else { HANDSHAKE_LIMIT };
    while let Some((header, rest)) = stream.split_first_chunk::<HEADER>() {
        let parsed = Header::parse(*header, limit);
        assert_eq!(
            parsed.as_ref().map(|header| (header.kind, header.length)).map_err(Error::kind),
            model(header, limit)
        );
        let Ok(Header { kind, length }) = parsed else { return };
        // A closed connection leaves a body that is cut short. It must not be accepted as complete by
        // accident.
        let (body, after) = rest.split_at(length.min(rest.len()));
        if protocol::is_refusal(kind) {
            refusal(body);
        } else {
            // The checksum would hide every other change of the fuzzer.
            any_message(which & 0x7f, &body[..body.len().saturating_sub(CHECKSUM)]);
        }
        stream = after;
    }
});

/// The text of a refusal is bounded and harmless. A refusal made from it has the same kind after another
/// round trip.
fn refusal(body: &[u8]) {
    let error = protocol::refused(body);
    let text = error.to_string();
    assert!(!text.chars().any(char::is_control), "{text:?}");
    let frame = protocol::refusal(&error);
    let (header, body) = frame.split_first_chunk().expect("a frame has a header");
    let header = Header::parse(*header, HANDSHAKE_LIMIT).expect("a refusal fits a greeting");
    assert_eq!((header.kind, header.length), (REFUSAL, body.len()));
    assert_eq!(protocol::refused(body).kind(), error.kind());
}
