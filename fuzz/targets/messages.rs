//! Every message of the protocol from any bytes: no panic, bounded memory, and a stable encoding.
#![no_main]

use libfuzzer_sys::fuzz_target;
use llm_datadist_fuzz::any_message;

fuzz_target!(|input: &[u8]| {
    if let Some((&which, body)) = input.split_first() {
        any_message(which, body);
    }
});
